"""Executor: submit work, get a future. A new one is one file here (or in LINVIT_PLUGINS) with `@EXECUTORS.register`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, Self

import torch

from linvit.execute.work import DatasetCache, Job, OnEvent, Probe, StopWork, Work, WorkerDied, first_line
from linvit.progress import Progress
from linvit.records import Record
from linvit.registry import Registry
from linvit.schemas.experiment import Experiment
from linvit.training.events import Event, Progressed
from linvit.training.loop import Rate


class Executor(ABC):
    """Runs up to `slots` pieces of work in parallel. Use as a context manager.

    `submit` returns a `concurrent.futures.Future`: a user's error (ValueError, OSError) is its exception, a worker that
    died is WorkerDied. `on_event` is called in this process, never by two threads at once.
    """

    opens_data = False  # whether workers can only use images that they open themselves

    def __init__(self, slots: int, threads: int, datasets: DatasetCache, address: str = ""):
        self.slots, self.threads, self.datasets, self.address = slots, threads, datasets, address

    @classmethod
    def locate(cls, address: str, device: str, threads: int | None) -> tuple[torch.device, int] | None:
        """Device and number of slots of an executor on other machines; None for a local one. Raises a ValueError within
        seconds if the address does not answer."""
        return None

    @abstractmethod
    def submit(self, work: Work, on_event: OnEvent = lambda event: None) -> Future[Any]: ...

    def shutdown(self) -> None:  # noqa: B027 (most have nothing to end)
        """Cancel pending work, let running work save, and release all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def run_jobs(
        self,
        jobs: Sequence[Job],
        on_event: Callable[[Job, Event], None],
        admit: Callable[[Job], bool] | None = None,
        on_end: Callable[[Job], None] | None = None,
    ) -> Iterator[tuple[Job, list[Record]]]:
        """Yield each job with its records, in order. Finished jobs are not run again. A job that `admit` refuses when
        it could begin is left out and has no records. A job whose process died or ran out of memory yields a `failed`
        record; a user's error ends the iteration, and so does StopWork raised by `on_event`, once no job is running:
        `on_event` must raise it for all of them."""
        done = {number: records for number, job in enumerate(jobs) if (records := job.finished())}
        waiting = deque((number, job) for number, job in enumerate(jobs) if number not in done)
        running: dict[Future[Any], int] = {}
        for number, job in enumerate(jobs):
            while number not in done:
                while waiting and len(running) < self.slots:
                    at, next_job = waiting.popleft()
                    if admit is None or admit(next_job):
                        running[self.submit(next_job, partial(on_event, next_job))] = at
                    else:
                        done[at] = []
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    at = running.pop(future)
                    if isinstance(future.exception(), StopWork):
                        wait(running)
                    elif on_end is not None:
                        on_end(jobs[at])
                    done[at] = job_records(jobs[at], future)
            yield job, done.pop(number)

    def check(self, experiment: Experiment, device: torch.device) -> None:
        """Raise a ValueError if a worker cannot run the experiment, for example because of a local plugin. Starts all
        workers, which takes seconds."""
        probe = Probe(experiment=experiment, seconds=0.0, device=str(device), threads=self.threads)
        self._probed(probe)

    def _probed(self, probe: Probe) -> list[Rate]:
        """The results of this probe in all slots at once; a ValueError if a worker cannot do it."""
        futures = [self.submit(probe) for _ in range(self.slots)]
        try:
            return [future.result() for future in futures]
        except (WorkerDied, RuntimeError, MemoryError) as error:
            raise ValueError(f"a worker could not run {probe.experiment.label}: {first_line(error)}") from None

    def rate(self, experiment: Experiment, seconds: float, device: torch.device) -> Rate:
        """Speed of one training while all slots run the same."""
        self.check(experiment, device)
        probe = Probe(experiment=experiment, seconds=seconds, device=str(device), threads=self.threads)
        return min(self._probed(probe))

    def measure(self, work: Work, progress: Progress) -> tuple[Any, dict[str, Any]]:
        """Run work that needs an idle machine; returns its result and a description of the machine, if another one.
        Raises WorkerDied if no machine could complete it."""
        self.shutdown()
        return work.run(self.datasets, forward_progress(progress)), {}


def job_records(job: Job, future: Future[Any]) -> list[Record]:
    """The records of a job that has ended; a `failed` record if its process died or ran out of memory."""
    try:
        return future.result()
    except (WorkerDied, RuntimeError, MemoryError) as error:
        return job.failed(first_line(error))


def forward_progress(progress: Progress) -> OnEvent:
    """A listener that passes on progress, and nothing else."""

    def forward(event: Event) -> None:
        if isinstance(event, Progressed):
            progress(event.done, event.total, event.what)

    return forward


EXECUTORS: Registry[type[Executor]] = Registry("executor", "linvit.execute")


def executor_type(address: str) -> type[Executor]:
    """By name, which an address may follow: `ray`, `ray://head:10001`."""
    return EXECUTORS[address.partition("://")[0]]
