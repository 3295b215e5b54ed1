"""Trials on a cluster: each training is a job there; trials are taken, judged, pruned and recorded here.

So nodes need neither the storage nor the leases. What a cluster's runner does for a study's jobs it does for these:
events and files come back, and a job whose node is lost goes on elsewhere from its last checkpoint.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from linvit.records import Record
from linvit.study.jobs import Job
from linvit.study.runners.cluster import Cluster
from linvit.train import Event
from linvit.tune.leases import Leases, Lost
from linvit.tune.storage import needed
from linvit.tune.worker import POLL, Pruned, Trial, Worker


class Running(NamedTuple):
    trial: Trial
    course: Generator[Job, list[Record], tuple[str, str]]


@dataclass
class Dispatcher:
    """What a worker does with one trial after the other, for several at a time."""

    worker: Worker
    runner: Cluster
    most: int  # trials at a time
    free: list[Leases] = field(default_factory=list)  # each for one of them
    running: dict[int, Running] = field(default_factory=dict)  # by the number of the job under way
    numbers: Iterator[int] = field(default_factory=itertools.count)
    again: float = 0.0  # when to look for trials again, if there was none

    def run(self) -> None:
        """Until every trial is finished; what another worker leaves is waited for."""
        trials = self.worker.trials
        with ExitStack() as ending:
            self.free = [ending.enter_context(trials.leases(self.worker.folder)) for _ in range(self.most)]
            ending.callback(self.runner.close)  # first: what tasks save comes back while their trials are held
            while self.running or not trials.over():
                self._begin()
                if not self.running:
                    time.sleep(POLL)
                    continue
                for job, records in self.runner.answers(self._hear, POLL):
                    self._go_on(self.running.pop(job.number), records)

    def _begin(self) -> None:
        """As many trials as there is room for."""
        while self.free and time.monotonic() >= self.again:
            leases, trial = self.free.pop(), None
            try:
                trial = self.worker.taken(leases, wait=0.0)
            except Lost:
                leases.release()
            if trial is None:
                self.free.append(leases)
                self.again = time.monotonic() + POLL
            else:
                self.worker.far = self.worker.trials.progress()
                self._go_on(Running(trial, trial.course()), None)

    def _go_on(self, running: Running, records: list[Record] | None) -> None:
        """With the next job of its course, the first of which answers nothing."""
        trial, course = running
        try:
            job = next(course) if records is None else course.send(records)
        except StopIteration as end:
            self._end(trial, *end.value)
        except (Lost, needed().exceptions.UpdateFinishedTrialError):
            self._leave(trial)
        else:
            job = job.model_copy(update={"number": next(self.numbers)})
            self.running[job.number] = running
            self.runner.send(job)

    def _hear(self, job: Job, event: Event) -> None:
        trial = self.running[job.number].trial
        try:
            trial.listen(event)
        except Pruned:
            self._stop(job)
            self._end(trial, "pruned", "")
        except (Lost, needed().exceptions.UpdateFinishedTrialError):
            self._stop(job)
            self._leave(trial)

    def _stop(self, job: Job) -> None:
        del self.running[job.number]
        self.runner.cancel(job)

    def _end(self, trial: Trial, how: str, why: str) -> None:
        try:
            trial.finish(how, why)
        except Lost:
            self._leave(trial)
        else:
            self.free.append(trial.leases)

    def _leave(self, trial: Trial) -> None:
        trial.leases.release()
        self.free.append(trial.leases)
