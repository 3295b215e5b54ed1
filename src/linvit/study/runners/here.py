"""One job after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from linvit.records import Record
from linvit.study.jobs import Hear, Job
from linvit.study.runners import RUNNERS, Runner
from linvit.train.loop import Rate


@RUNNERS.register("here")
class Here(Runner):
    def run(self, jobs: Sequence[Job], hear: Hear) -> Iterator[tuple[Job, list[Record]]]:
        for job in jobs:
            try:
                yield job, job.do(self.datasets[job.experiment.data.identity], [partial(hear, job)])
            except (RuntimeError, MemoryError) as error:  # out of memory, as a rule; a bug shows in its record too
                yield job, job.failed(str(error).strip().partition("\n")[0] or type(error).__name__)

    def rate(self, job: Job, seconds: float) -> Rate:
        return job.rate(self.datasets[job.experiment.data.identity], seconds)
