"""Crew: who does a study's jobs, and how fast."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from linvit.progress import Progress
from linvit.records import Record
from linvit.study.design import Placing, Study
from linvit.study.jobs import Hear, Job
from linvit.study.measuring import Measuring
from linvit.study.protocol import Protocol
from linvit.study.runners import RUNNERS, Runner, runner_of
from linvit.train import Experiment
from linvit.train.loop import Rate

PROBE = 1.5  # seconds for which each way to place jobs is tried


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Crew:
    """Who does the jobs: as asked, or as an earlier call found to be faster, or as is found when there is work."""

    def __init__(
        self, protocol: Protocol, study: Study, device: torch.device, runner: str | None, jobs: int | None,
        threads: int | None,
    ):  # fmt: skip
        self.protocol, self.device, self.study, self.threads = protocol, device, study, threads
        self.runner: Runner | None = None
        whole = threads or torch.get_num_threads()
        if runner is None and jobs is not None and jobs > 1:
            runner = "processes"
        if runner == "here" and jobs not in (None, 1):
            raise ValueError(f"jobs={jobs} cannot be done at a time by the runner 'here'")
        if runner is not None and runner_of(runner).opens and protocol.source is None:
            raise ValueError(f"jobs={jobs} needs images that workers can find: give a name or a path, not a Dataset")
        if runner is not None and runner_of(runner) is not RUNNERS["here"]:
            self.runner = runner_of(runner)(jobs, protocol.datasets, runner)
            self.runner.jobs = self.runner.room(threads or 1, device)
            self.known: Placing | None = Placing(runner=runner, jobs=self.runner.jobs, threads=threads or 1)
        elif runner or jobs == 1 or threads is not None or protocol.source is None or device.type != "cpu":
            self.known = Placing(runner="here", threads=whole)
        else:  # as an earlier call found, unless that was on other machines
            known = study.placing
            self.known = known if known is None or known.runner in ("here", "processes") else None

    def placing(self, progress: Progress) -> Placing:
        """Where jobs run; the runner stands ready."""
        if self.known is None:
            self.known = self._measured(progress)
        if self.runner is None:
            self.runner = runner_of(self.known.runner)(self.known.jobs, self.protocol.datasets, self.known.runner)
        return self.known

    def _measured(self, progress: Progress) -> Placing:
        """One job on all cores, or as many at a time as there are cores and runs: whichever trains faster. What workers
        cannot do, such as an attention that only this process knows, is done here."""
        whole, jobs, every = torch.get_num_threads(), min(cores(), len(self.study.runs())), self.study.variants
        if jobs == 1:
            return Placing(runner="here", threads=whole)
        job = self._trial(self.protocol.base, whole)
        here, self.runner = (
            RUNNERS["here"](1, self.protocol.datasets),
            RUNNERS["processes"](jobs, self.protocol.datasets),
        )
        progress(0, 2, "trying one training at a time")
        measured = {"here": round(here.rate(job, PROBE).steps, 2)}
        progress(1, 2, f"trying {jobs} trainings at a time")
        try:
            able = [self._trial(self.protocol.experiment(variant)) for variant in every if not variant.published]
            self.runner.check(able)
            one = self.runner.rate(job.model_copy(update={"threads": 1}), PROBE)
            measured["processes"] = round(jobs * one.steps, 2)
        except ValueError:
            measured["processes"] = 0.0
        progress(2, 2, "done")
        if measured["here"] < measured["processes"]:
            return Placing(runner="processes", jobs=jobs, threads=1, measured=measured)
        self.close()
        return Placing(runner="here", threads=whole, measured=measured)

    def _trial(self, experiment: Experiment, threads: int = 1) -> Job:
        return Job(
            number=0, jobs=1, variant="", experiment=experiment, folder="", device=str(self.device), threads=threads
        )

    def rates(self, seconds: float, progress: Progress) -> dict[str, Rate]:
        """How fast each variant gets on where its jobs will run, beside as many others; about so long for all."""
        placing = self.placing(progress)
        assert self.runner is not None
        every, found = [variant for variant in self.study.variants if variant.id in self.study.seeds], {}
        for i, variant in enumerate(every):
            progress(i, len(every), f"timing {variant.label}")
            job = self._trial(self.protocol.experiment(variant), placing.threads)
            found[variant.id] = self.runner.rate(job, seconds / len(every))
        progress(len(every), len(every), "timed")
        return found

    def run(self, jobs: list[Job], hear: Hear) -> Iterator[tuple[Job, list[Record]]]:
        """Each job with its records, in order; what is finished needs nobody."""
        done = {job.number: job.finished() for job in jobs}
        left = [
            job.model_copy(update={"threads": self.known.threads})
            for job in jobs
            if self.known and not done[job.number]
        ]
        work = self.runner.run(left, hear) if self.runner else iter(())
        for job in jobs:
            yield (job, found) if (found := done[job.number]) else next(work)

    def measure(self, what: Measuring) -> tuple[list[str], dict[str, Any]]:
        """All beside accuracy, where nothing else runs then; and which machine that was, if it is another one."""
        return self.runner.measure(what, self.threads) if self.runner else (what.all(), {})

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()
            self.runner = None
