"""Runner: where jobs run. A new one is one file here (or in LINVIT_PLUGINS) with `@RUNNERS.register("name")`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from linvit.data import Dataset
from linvit.records import Record
from linvit.registry import Registry
from linvit.study.jobs import Hear, Job
from linvit.train.loop import Rate


class Runner(ABC):
    """Built for a number of jobs at a time and the data sets that are open already, by identity."""

    def __init__(self, jobs: int, datasets: Mapping[str, Dataset]):
        self.jobs, self.datasets = jobs, dict(datasets)

    @abstractmethod
    def run(self, jobs: Sequence[Job], hear: Hear) -> Iterator[tuple[Job, list[Record]]]:
        """Each job with its records, in the order of the jobs, as soon as that order allows. A job whose process dies
        yields its `failed` record, and the others go on. A user's error (ValueError, OSError) ends it all."""

    def rate(self, job: Job, seconds: float) -> Rate:
        """Of one job when so many like it run at a time, from about so long of real training."""
        raise NotImplementedError

    def check(self, jobs: Sequence[Job]) -> None:  # noqa: B027 (most can do whatever this process can)
        """A ValueError if one of them cannot be done there."""

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """End what was started; unfinished jobs save themselves first."""


RUNNERS: Registry[type[Runner]] = Registry("runner", "linvit.study.runners")
