"""A training in a process that can be killed. A fork server imports this once, so that a start costs milliseconds."""

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

import linvit.train
import linvit.train.files
from linvit.attention import attention_names
from linvit.data import DATASETS, FORMATS
from linvit.records import Records, commit

torch.set_num_threads(1)
DATASETS.names(), FORMATS.names(), attention_names(), commit()

TINY: dict[str, Any] = {
    "stem": "patch", "patch_size": 4, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 16, "batch_size": 16,
    "device": "cpu",
}  # fmt: skip
MEASURED = {"time", "commit"}  # the commit may change while tests run


def train(data: str, out: str, cache: str, kill_at: int | None, options: dict[str, Any]) -> None:
    """`kill_at`: die at so-manieth call that makes something durable, or takes it away."""
    os.environ["LINVIT_CACHE"] = cache
    die_at(kill_at)
    linvit.train(data, out=out, **TINY | options)


def make_folder(folder: Path, images: int = 120, side: int = 48) -> Path:
    """Two classes, dark and light, of noisy PNG files."""
    source = np.random.default_rng(7)
    for name, low in (("dark", 0), ("light", 90)):
        (folder / name).mkdir(parents=True)
        for i in range(images // 2):
            pixels = source.integers(low, low + 160, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:03d}.png")
    return folder


def left_by(folder: Path) -> dict[str, Any]:
    """All that a training leaves, but for times."""
    records = [json.loads(record.line()) for record in Records(folder / "records.jsonl")]
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {
        "records": [
            {key: value for key, value in row.items() if key not in MEASURED}
            for row in records
            if row["metric"] not in ("train_seconds", "test_seconds")
        ],
        "log": [{key: value for key, value in row.items() if key != "seconds"} for row in log],
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
