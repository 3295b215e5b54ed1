"""Tiny studies: their data, their options, and what tests look at."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from linvit.records import Record
from linvit.report import page
from linvit.study import StudyJob, measuring

DATA = "synthetic:classes=3,images=96,size=8,channels=1"
SMALL = {"stem": "patch", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 32, "batch_size": 16}
QUICK: dict[str, Any] = {"controls": False, "threads": 1, "pad_crop": 0, **SMALL}
SETS = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]


@contextmanager
def shortened() -> Iterator[pytest.MonkeyPatch]:
    """Measurements take no time, pages have no figure files, and nothing waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "LENGTHS", (16,))
        patch.setattr(measuring, "ROUNDS", 1)
        patch.setattr(measuring, "peak_memory", lambda *_: Record("peak_memory", 7, "bytes", tags={"batch": 16}))
        patch.setattr(page, "draw_files", lambda specs, folder: None)
        patch.setattr("os.fsync", lambda file: None)
        yield patch


class Trained(list[tuple[str, int]]):
    """(variant, seed) of the full runs that were trained; pass it as `on_event`."""

    def __call__(self, job: StudyJob, event: object) -> None:
        if not job.half and (job.variant, job.experiment.seed) not in self:
            self.append((job.variant, job.experiment.seed))


def experiments(folder: Path) -> list[dict[str, Any]]:
    """Of the full runs."""
    found = [file for file in folder.glob("*/experiment.json") if "-half-" not in file.parent.name]
    return [json.loads(file.read_text()) | {"folder": file.parent} for file in found]


def planned(folder: Path) -> list[dict[str, Any]]:
    """The jobs that `jobs_file` wrote, in their order."""
    return [json.loads(line) for line in (folder / "jobs.jsonl").read_text().splitlines()]


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "results.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
