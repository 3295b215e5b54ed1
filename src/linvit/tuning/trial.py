"""One trial: a training, or one for each fold; what it reports while it runs, and its records."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from linvit.execute import Job, StopWork
from linvit.files import read_lines
from linvit.records import Record
from linvit.schemas.search import Search
from linvit.training.events import Event, Validated
from linvit.training.experiment import record_of
from linvit.tuning.trials import Opened


class Score(NamedTuple):
    """Of images that were held out."""

    images: int
    accuracy: float
    loss: float


def pooled(scores: Sequence[Score]) -> Score:
    """Over all their images."""
    images = sum(score.images for score in scores)
    correct = sum(round(score.accuracy * score.images) for score in scores)
    return Score(images, correct / images, sum(score.loss * score.images for score in scores) / images)


@dataclass
class Trial:
    search: Search
    opened: Opened
    jobs: list[Job]  # one for each fold
    images: int  # by which a validation judges
    reported: dict[int, float] = field(default_factory=dict)  # epoch, or fold from 1 → accuracy
    current: int = 0  # the job under way
    scores: list[Score] = field(default_factory=list)  # of completed folds
    started: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return f"{self.opened.variant.label} trial {self.opened.number}"

    @property
    def job(self) -> Job:
        return self.jobs[self.current]

    def rows(self, job: Job) -> list[dict[str, Any]]:
        """A line for each validation of the training."""
        return [row for row in read_lines(Path(job.folder) / "log.jsonl") if row["step"]]

    def course(self) -> Generator[Job, list[Record], tuple[str, str]]:
        """Its jobs, each of which is answered with its records; in the end how the trial ended, and why."""
        for index, job in enumerate(self.jobs):
            self.current = index
            if not self.search.folds:
                self._report_rows()  # of a process that was killed
            if self.is_unpromising():
                return "pruned", ""
            records = job.finished() or (yield job)
            for how, tag in (("failed", "why"), ("diverged", "layer")):
                if found := [str(record.tags[tag]) for record in records if record.metric == how]:
                    return how, found[0]
            self._report_end(records)
        return "complete", ""

    def on_event(self, event: Event) -> None:
        """Report validations; StopWork if the trial is not worth more time. Folds are compared as a whole."""
        if isinstance(event, Validated) and not self.search.folds:
            self._report(math.ceil(event.row["epoch"]), event.row["validation_accuracy"])
            if self.is_unpromising():
                raise StopWork

    def _report_rows(self) -> None:
        for row in self.rows(self.job):
            self._report(math.ceil(row["epoch"]), row["validation_accuracy"])

    def _report_end(self, records: Sequence[Record]) -> None:
        """Of a job that is done, here or by a process that was killed."""
        if not self.search.folds:
            return self._report_rows()
        found = {record.metric: record for record in records if record.tags.get("selection") == "best"}
        accuracy, loss = (found[name].value or 0.0 for name in ("test_accuracy", "test_loss"))
        self.scores.append(Score(found["test_accuracy"].n, accuracy, loss))
        self._report(self.current + 1, pooled(self.scores).accuracy)

    def _report(self, number: int, accuracy: float) -> None:
        if number not in self.reported:
            self.opened.live.report(accuracy, number)
            self.reported[number] = accuracy

    def is_unpromising(self) -> bool:
        """What is over anyway is not pruned."""
        return 0 < max(self.reported, default=0) < self.search.reports and self.opened.live.should_prune()

    @property
    def accuracy(self) -> float | None:
        """The best validation's; with folds, over all images so far."""
        if self.search.folds:
            return self.reported[max(self.reported)] if self.reported else None
        return max(self.reported.values(), default=None)

    def records(self, how: str, why: str) -> list[Record]:
        """What is known of it: its accuracy, and for how long it was trained."""
        base = record_of(self.job.experiment, torch.device(self.job.device))
        base = base.tagged(variant=self.opened.variant.id, trial=self.opened.number)
        base = replace(base, threads=self.job.threads or base.threads)
        every = [self.rows(job) for job in self.jobs]
        if self.search.folds:
            base = replace(base, experiment="").tagged(folds=self.search.folds)
            images, _, loss = pooled(self.scores) if self.scores else (0, None, None)
        else:
            every = [[row for row in every[0] if math.ceil(row["epoch"]) in self.reported]]  # not what came too late
            top = max(every[0], key=lambda row: (row["validation_accuracy"], -row["validation_loss"]), default={})
            images, loss = self.images, top.get("validation_loss")
        lasts = [rows[-1] for rows in every if rows]
        # One that diverges at once has no validation, but costs time as well: else a budget would never be spent.
        seconds = sum(row["seconds"] for row in lasts) or time.monotonic() - self.started
        accuracy = replace(base, metric="trial_accuracy", value=self.accuracy, unit="fraction", n=images)
        return [
            accuracy.tagged(how=how, why=why or None, loss=loss, options=json.dumps(self.opened.point)),
            replace(base, metric="trial_seconds", value=seconds, unit="s"),
            replace(base, metric="trial_steps", value=sum(row["step"] for row in lasts), unit="count"),
        ]
