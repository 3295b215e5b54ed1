"""Runner: where jobs run. A new one is one file here (or in LINVIT_PLUGINS) with `@RUNNERS.register("name")`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from linvit.data import Dataset
from linvit.records import Record
from linvit.registry import Registry
from linvit.study.jobs import Hear, Job
from linvit.train.loop import Rate

if TYPE_CHECKING:
    from linvit.study.measuring import Measuring


class Runner(ABC):
    """Built for a number of jobs at a time (None: as it likes) and the data sets that are open, by identity; and, if it
    is somewhere else, with where that is."""

    opens = False  # whether its workers open the images themselves

    def __init__(self, jobs: int | None, datasets: Mapping[str, Dataset], where: str = ""):
        self.jobs, self.datasets = jobs or 1, datasets

    @classmethod
    def reach(cls, where: str, device: str, threads: int | None) -> tuple[torch.device, int] | None:
        """The device that jobs have there, and how many run at a time; None: it is here. A ValueError, within seconds,
        if there is nothing there."""
        return None

    def room(self, threads: int, device: torch.device) -> int:
        """How many jobs of so many threads run at a time."""
        return self.jobs

    @abstractmethod
    def run(self, jobs: Sequence[Job], hear: Hear) -> Iterator[tuple[Job, list[Record]]]:
        """Each job with its records, in the order of the jobs, as soon as that order allows. A job whose process dies
        yields its `failed` record, and the others go on. A user's error (ValueError, OSError) ends it all."""

    def rate(self, job: Job, seconds: float) -> Rate:
        """Of one job when so many like it run at a time, from about so long of real training."""
        raise NotImplementedError

    def check(self, jobs: Sequence[Job]) -> None:  # noqa: B027 (most can do whatever this process can)
        """A ValueError if one of them cannot be done there."""

    def measure(self, what: Measuring, threads: int | None) -> tuple[list[str], dict[str, Any]]:
        """All that is measured beside accuracy, where nothing else runs then: what could not be, in words, and the
        machine if that is another one."""
        self.close()
        return what.all(), {}

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """End what was started; unfinished jobs save themselves first."""


RUNNERS: Registry[type[Runner]] = Registry("runner", "linvit.study.runners")


def runner_of(where: str) -> type[Runner]:
    """By its name, which an address may follow: `ray`, `ray://head:10001`."""
    return RUNNERS[where.partition("://")[0]]
