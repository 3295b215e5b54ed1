"""A search in a process that can be killed, which writes down every step it takes. A fork server imports this once."""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import alembic.command  # noqa: F401
import optuna
import optuna.importance
import optuna.samplers._tpe.sampler  # noqa: F401
import sklearn.metrics  # noqa: F401
import sqlalchemy.dialects.postgresql
import sqlalchemy.dialects.sqlite  # noqa: F401
import torch
import torch._dynamo

import linvit.tune
from linvit.attention import attention_names
from linvit.data import DATASETS, FORMATS
from linvit.records import commit
from linvit.report import tuning
from linvit.train.events import Stepped
from linvit.tune import leases, worker

torch.set_num_threads(1)
DATASETS.names(), FORMATS.names(), attention_names(), commit()

DATA = "synthetic:classes=3,images=96,size=8,channels=1"
LONG = "synthetic:classes=3,images=600,size=8,channels=1"  # 33 steps an epoch
SPACE = """
[options]
lr = { low = 1e-4, high = 1e-1, log = true }
depth = { low = 1, high = 2 }
optimizer = ["muon", "adamw"]
"""
TINY: dict[str, Any] = {
    "attentions": ["softmax", "performer-relu:m=4"], "stem": "patch", "patch_size": 4, "dim": 8, "heads": 2,
    "mlp_dim": 11, "batch_size": 16, "pad_crop": 0, "device": "cpu", "threads": 1, "jobs": 1,
}  # fmt: skip


def search(
    out: str, options: dict[str, Any], steps: str, data: str = DATA, other_machines: bool = False, beat: float = 0.5
) -> None:
    """`steps`: the file for what is done. `other_machines`: this process is of a machine of its own."""
    leases.BEAT, leases.STALE = beat, 4 * beat
    if other_machines:
        leases.machine = lambda: str(os.getpid())
    worker.Job = functools.partial(worker.Job, checkpoint_seconds=0.0)  # every step is saved
    tuning.build = lambda folder: None  # tested by itself
    heard = worker.Trial.listen

    def listen(self: worker.Trial, event: Any) -> None:
        heard(self, event)
        if isinstance(event, Stepped):
            row = {"trial": self.job.folder, "step": event.step, "time": time.monotonic(), "worker": os.getpid()}
            with open(steps, "ab") as file:
                file.write(json.dumps(row).encode() + b"\n")

    worker.Trial.listen = listen
    linvit.tune(data, out=out, **TINY | options)


def space(folder: Path) -> str:
    path = folder / "mine.toml"
    path.write_text(SPACE)
    return str(path)


def taken(steps: Path) -> list[dict[str, Any]]:
    """What was done; the last line of a killed process may be torn."""
    found = []
    for line in steps.read_bytes().splitlines() if steps.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
