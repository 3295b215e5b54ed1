"""Tiny trainings, here or in a process that can be killed. A fork server imports this once, so that a process starts
within milliseconds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.metrics  # noqa: F401
import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes seconds
from PIL import Image
from safetensors.torch import load_file
from traces import die_at

from linvit.attention import attention_names
from linvit.data import DATASETS, FORMATS, Dataset
from linvit.pipeline import train as training
from linvit.pipeline.design import Designer
from linvit.records import Records, commit
from linvit.schemas.experiment import Experiment, Start
from linvit.schemas.study import Variant
from linvit.training.events import Event, Listener, Stepped

torch.set_num_threads(1)
DATASETS.names(), FORMATS.names(), attention_names(), commit()

DATA = "synthetic:images=72,size=8"
SHAPE: dict[str, Any] = {"stem": "patch", "patch_size": 4, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 16}
TINY: dict[str, Any] = SHAPE | {"batch_size": 16, "device": "cpu"}
MEASURED = {"time", "commit"}  # the commit may change while tests run


class Killed(BaseException):
    pass


def kill_after(step: int | None) -> Listener:
    """Ends a training after this step as abruptly as an exception can."""

    def on_event(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == step:
            raise Killed

    return on_event


def design(
    dataset: Dataset, attention: str = "softmax", seed: int = 0, start: Start | None = None, **options: Any
) -> Experiment:
    options.setdefault("batch_size", TINY["batch_size"])
    shape = {} if start else SHAPE
    designer = Designer(dataset, None, seed, shape | options, match=False, start=start)
    return designer.experiment(Variant(attention=attention, start=start))


def train(data: str, out: str, cache: str, kill_at: int | None, options: dict[str, Any]) -> None:
    """kill_at: the number of the call that changes the disk and at which this process dies."""
    os.environ["LINVIT_CACHE"] = cache
    die_at(kill_at)
    training.train(data, out=out, **TINY | options)


def make_folder(folder: Path, images: int = 120, side: int = 48) -> Path:
    """Two classes, dark and light, of noisy PNG files."""
    source = np.random.default_rng(7)
    for name, low in (("dark", 0), ("light", 90)):
        (folder / name).mkdir(parents=True)
        for i in range(images // 2):
            pixels = source.integers(low, low + 160, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:03d}.png")
    return folder


def read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def left_by(folder: Path) -> dict[str, Any]:
    """Everything that a training leaves, except times."""
    records = [json.loads(record.line()) for record in Records(folder / "records.jsonl")]
    return {
        "records": [
            {key: value for key, value in row.items() if key not in MEASURED}
            for row in records
            if row["metric"] not in ("train_seconds", "test_seconds")
        ],
        "log": [{key: value for key, value in row.items() if key != "seconds"} for row in read_log(folder)],
        "confusion": json.loads((folder / "confusion.json").read_text()),
        **{
            f"{name}/{file}": (folder / name / file).read_bytes()
            for name in ("best", "last")
            for file in ("model.safetensors", "config.json", "README.md")
        },
        "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if "step-" not in p.name),
    }


def same(one: Path, other: Path) -> None:
    a, b = left_by(one), left_by(other)
    for key in a:
        if key.endswith(".safetensors") and a[key] != b[key]:
            x, y = (load_file(folder / key) for folder in (one, other))
            wrong = [name for name in x if not torch.equal(x[name], y[name])]
            raise AssertionError(f"{key}: {wrong} differ")
        assert a[key] == b[key], key
