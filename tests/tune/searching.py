"""Small searches: real ones of tiny models, and ones whose trainings are made up."""

from __future__ import annotations

import json
import math
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import optuna

from linvit.execute import Executor, Job, StopWork, Work
from linvit.ledger import open_ledger
from linvit.records import Record
from linvit.training.events import Validated
from linvit.training.loop import Rate
from linvit.tuning.storage import open_storage, sqlite_url

DATA = "synthetic:classes=3,images=96,size=8,channels=1"
SPACE = """
[options]
lr = { low = 1e-4, high = 1e-1, log = true }
depth = { low = 1, high = 2 }
optimizer = ["muon", "adamw"]
"""
TINY: dict[str, Any] = {
    "attentions": ["softmax", "performer-relu:m=4"],
    "stem": "patch",
    "patch_size": 4,
    "dim": 8,
    "heads": 2,
    "mlp_dim": 11,
    "batch_size": 16,
    "pad_crop": 0,
    "device": "cpu",
    "threads": 1,
}


def write_space(folder: Path, text: str = SPACE) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def optuna_trials(folder: Path, storage: str | None = None) -> dict[str, list[optuna.trial.FrozenTrial]]:
    """Optuna's trials by variant."""
    opened = open_storage(storage or sqlite_url(folder))
    every = [name for name in optuna.get_all_study_names(opened) if name.startswith(f"{folder.name}: ")]
    return {
        name.removeprefix(f"{folder.name}: "): optuna.load_study(study_name=name, storage=opened).trials
        for name in every
    }


def rows(folder: Path) -> list[tuple[Any, ...]]:
    """What is recorded of trials, except times."""
    ledger = open_ledger(folder)
    steps = {(r.tags["variant"], r.tags["trial"]): r.value for r in ledger.find("trial_steps")}
    found = []
    for r in ledger.find("trial_accuracy"):
        tags = r.tags
        key = tags["variant"], tags["trial"]
        found.append((*key, tags["how"], r.value, tags["loss"], r.n, steps[key], tags["options"]))
    return sorted(found)


class Invented(Executor):
    """Trainings that take no time. `score(job, epoch)` is the accuracy of a validation."""

    score: ClassVar[Any] = staticmethod(lambda job, epoch: 0.5)
    seconds: ClassVar[float] = 1.0  # that an epoch is said to take
    jobs: ClassVar[list[Job]] = []

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.pool = ThreadPoolExecutor(self.slots)

    def submit(self, work: Work, on_event: Any = lambda event: None) -> Future[Any]:
        assert isinstance(work, Job)
        self.jobs.append(work)
        if self.slots > 1:
            return self.pool.submit(self._train, work, on_event)
        future: Future[Any] = Future()
        try:
            future.set_result(self._train(work, on_event))
        except StopWork as stop:
            future.set_exception(stop)
        return future

    def _train(self, job: Job, on_event: Any) -> list[Record]:
        folder, total = Path(job.folder), math.ceil(job.experiment.recipe.epochs)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for epoch in range(1, total + 1):
            accuracy = type(self).score(job, epoch)
            row = {"epoch": epoch, "step": 6 * epoch, "seconds": self.seconds * epoch}
            row |= {"validation_accuracy": accuracy, "validation_loss": 1 - accuracy}
            with open(folder / "log.jsonl", "a") as log:
                log.write(json.dumps(row) + "\n")
            on_event(Validated(6 * epoch, 6 * total, 1.0, 0.0, 1.0, 1.0, epoch, total, row))
        common: dict[str, Any] = {"experiment": job.experiment.id, "n": 24}
        found = [Record("learning_curve", None, **common), Record("test_seconds", 1.0, "s", **common)]
        for metric, value in (("test_accuracy", accuracy), ("test_loss", 1 - accuracy)):
            found.append(Record(metric, value, tags={"selection": "best"}, **common))
        open_ledger(folder).append(found)
        time.sleep(0.002 * (job.experiment.seed + len(self.jobs) % 3) if self.slots > 1 else 0)
        return found

    def rate(self, *arguments: Any) -> Rate:
        return Rate(10.0, 100.0)
