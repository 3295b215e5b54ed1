"""Which executor runs a study's jobs: as requested, as an earlier call found to be faster, or by a short benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from linvit.execute import EXECUTORS, Executor, Work
from linvit.machine import cpu_count
from linvit.pipeline.prepare import Prepared, requested_placement, start_executor
from linvit.progress import Progress
from linvit.records import Record
from linvit.requests import CompareRequest
from linvit.schemas.study import Placement, Study
from linvit.study.jobs import OnJobEvent, StudyJob
from linvit.study.schedule import Schedule
from linvit.training.loop import Rate

PROBE_SECONDS = 1.5  # for which each way to place jobs is timed


class JobPlacement:
    """Chooses the executor when there is work, and owns it."""

    def __init__(self, request: CompareRequest, prepared: Prepared, study: Study):
        self.designer, self.device, self.study = prepared.designer, prepared.device, study
        self.executor: Executor | None = None
        self.placement = requested_placement(request, prepared)
        if self.placement is None and request.threads is not None:
            self.placement = Placement(executor="here", threads=request.threads)
        elif self.placement is None and study.placement and study.placement.executor in ("here", "processes"):
            self.placement = study.placement  # as an earlier call found, unless that was on other machines

    def decide(self, progress: Progress) -> Placement:
        """Where jobs run; the executor is ready."""
        if self.placement is None:
            self.placement = self._benchmarked(progress)
        if self.executor is None:
            self.executor = start_executor(self.placement, self.designer)
        return self.placement

    def _benchmarked(self, progress: Progress) -> Placement:
        """One job on all cores, or as many at a time as there are cores and runs, whichever trains faster. What workers
        cannot do, such as an attention that only this process knows, is done here."""
        jobs, base = min(cpu_count(), len(self.study.runs())), self.designer.base
        here = Placement(executor="here", threads=torch.get_num_threads())
        if jobs == 1:
            return here
        progress(0, 2, "timing one training at a time")
        measured = {"here": round(start_executor(here, self.designer).rate(base, PROBE_SECONDS, self.device).steps, 2)}
        progress(1, 2, f"timing {jobs} trainings at a time")
        processes = Placement(executor="processes", jobs=jobs, threads=1)
        self.executor = start_executor(processes, self.designer)
        try:
            for variant in self.study.variants:
                if not variant.published:
                    self.executor.check(self.designer.experiment(variant), self.device)
            rate = self.executor.rate(base, PROBE_SECONDS, self.device)
            measured["processes"] = round(jobs * rate.steps, 2)
        except ValueError:
            measured["processes"] = 0.0
        progress(2, 2, "done")
        if measured["here"] < measured["processes"]:
            return processes.model_copy(update={"measured": measured})
        self.close()
        return here.model_copy(update={"measured": measured})

    def rates(self, seconds: float, progress: Progress) -> dict[str, Rate]:
        """How fast each variant trains where its jobs will run, while all slots are busy. `seconds`: in all."""
        self.decide(progress)
        assert self.executor is not None
        trained = [variant for variant in self.study.variants if variant.id in self.study.seeds]
        found = {}
        for i, variant in enumerate(trained):
            progress(i, len(trained), f"timing {variant.label}")
            experiment = self.designer.experiment(variant)
            found[variant.id] = self.executor.rate(experiment, seconds / len(trained), self.device)
        progress(len(trained), len(trained), "timed")
        return found

    def run(
        self, jobs: Sequence[StudyJob], on_event: OnJobEvent, schedule: Schedule | None = None
    ) -> Iterator[tuple[Any, list[Record]]]:
        """Each job with its records, in order; those for which the schedule has no time have none."""
        threads = {} if self.placement is None else {"threads": self.placement.threads}
        jobs = [job.model_copy(update=threads) for job in jobs]
        hooks: tuple[Any, ...] = () if schedule is None else (schedule.admit, schedule.on_end)
        return self._ready().run_jobs(jobs, on_event, *hooks)  # type: ignore[arg-type]

    def measure(self, work: Work, progress: Progress) -> tuple[Any, dict[str, Any]]:
        """The result of work that needs a machine without other load, and that machine if it is another one."""
        if self.placement and self.placement.executor not in ("here", "processes"):
            self.decide(
                progress
            )  # even if all jobs were finished: measurements belong to the machines that they ran on
        return self._ready().measure(work, progress)

    def _ready(self) -> Executor:
        """Where there was nothing to run, none was started."""
        return self.executor or EXECUTORS["here"](1, 1, self.designer.datasets)

    def close(self) -> None:
        if self.executor is not None:
            self.executor.shutdown()
            self.executor = None
