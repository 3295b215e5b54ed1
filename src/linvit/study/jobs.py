"""Job: one experiment that any worker can rebuild from JSON and do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from linvit.data import Dataset, folded
from linvit.measure.threads import use_threads
from linvit.progress import Progress, ignore
from linvit.records import Record, Records
from linvit.train import Event, Experiment, Listener, Source, run
from linvit.train.loop import Rate, Training
from linvit.train.trackers import Tracker

WAIT = 30.0  # seconds for which the process of a killed study may still be saving


class Job(BaseModel):
    """One experiment and where it is done; `do` does it here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int  # of `jobs`, from 0
    jobs: int
    part: tuple[float, float] = (0.0, 1.0)  # of the study's steps: where it begins and where it ends
    variant: str  # its id
    half: bool = False  # of the steps, beside the variant's whole runs
    fold: int | None = None  # held out
    experiment: Experiment
    folder: str
    device: str = "cpu"
    threads: int = 1
    test: bool = True
    checkpoint_seconds: float = 30.0
    begin_by: float | None = None  # seconds since the epoch after which it is left for another call

    @property
    def name(self) -> str:
        """For a person."""
        held, half = "" if self.fold is None else f", fold {self.fold}", ", half of the steps" * self.half
        return f"{self.experiment.label}, seed {self.experiment.seed}{held}{half}"

    def do(self, dataset: Dataset, listeners: Sequence[Listener]) -> list[Record]:
        """Its records, of this run or of an earlier one; none if it is too late to begin."""
        if self.begin_by is not None and time.time() > self.begin_by:
            return self.finished()
        with use_threads(self.threads):
            return run(
                self.experiment, dataset, Path(self.folder), device=torch.device(self.device), listeners=listeners,
                test=self.test, wait=WAIT, checkpoint_seconds=self.checkpoint_seconds,
            )  # fmt: skip

    def rate(self, dataset: Dataset, seconds: float) -> Rate:
        """How fast it gets on, from about so long of real training that leaves nothing behind."""
        with use_threads(self.threads):
            return Training(self.experiment, dataset, torch.device(self.device), []).rate(seconds)

    def finished(self) -> list[Record]:
        """Its records, if an earlier call did it to the end."""
        return finished(Path(self.folder), self.experiment.id, self.test)

    def failed(self, why: str) -> list[Record]:
        """What is left of a job whose process ended before it did."""
        base = self.experiment.record(torch.device(self.device))
        return [Record("failed", None, experiment=base.experiment, device=base.device, tags=base.tags | {"why": why})]


class Shelf:
    """The images that a worker has opened, once for all folds of them."""

    def __init__(self) -> None:
        self.opened: dict[Source, Dataset] = {}

    def find(self, experiment: Experiment, progress: Progress = ignore) -> Dataset:
        assert experiment.source is not None  # whose images nobody else can find, no worker is sent
        fold, whole = experiment.source.fold, experiment.source.folded(None)
        if whole not in self.opened:
            self.opened[whole] = whole.open(progress)
        found = folded(self.opened[whole], fold) if fold else self.opened[whole]
        if found.identity != experiment.data.identity:
            raise ValueError(f"{whole.data} has changed since the study began")
        return found


def finished(folder: Path, experiment: str, test: bool) -> list[Record]:
    """The records of the experiment of this id, if it was done to the end in this folder."""
    found = list(Records(folder / "records.jsonl"))
    last = {"test_seconds", "diverged"} if test else {"learning_curve"}
    return found if any(r.metric in last and r.experiment == experiment for r in found) else []


Hear = Callable[[Job, Event], None]


def tracked(hear: Hear, kinds: Sequence[type[Tracker]], home: Path) -> Hear:
    """It, and trackers of each job, with one store for all at home."""
    each: dict[int, list[Tracker]] = {}

    def told(job: Job, event: Event) -> None:
        hear(job, event)
        if job.number not in each:
            each[job.number] = [kind(job.experiment, Path(job.folder), home) for kind in kinds]
        for tracker in each[job.number]:
            tracker(event)

    return told if kinds else hear
