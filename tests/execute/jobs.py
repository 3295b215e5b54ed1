"""Small jobs for the tests of executors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linvit.execute import DatasetCache, Job
from linvit.pipeline.design import Designer
from linvit.schemas.study import Variant
from linvit.training.source import open_source, source_of

DATA = "synthetic:classes=3,images=96,size=8,channels=1"
SMALL = {"stem": "patch", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 32, "batch_size": 16}
SOURCE = source_of(DATA)
DATASET = open_source(SOURCE)


def make_job(folder: Path, *, seed: int = 0, attention: str = "performer-relu:m=8", **options: Any) -> Job:
    fields = {name: options.pop(name) for name in ("test", "checkpoint_seconds", "begin_by") if name in options}
    designer = Designer(DATASET, SOURCE, seed, SMALL | {"epochs": 2} | options, match=False)
    experiment = designer.experiment(Variant(attention=attention))
    return Job(experiment=experiment, folder=str(folder), **fields)


def cache() -> DatasetCache:
    found = DatasetCache()
    found.add(DATASET)
    return found
