"""Which runs begin within a budget, decided while they run: from the time that those before them took.

What a run can still show decides the order. With three variants and 5,000 test images, the smallest margin within
which a variant can be proved is usually 2.2 points with three seeds, 1.8 with four, 1.6 with five and 1.3 with ten
(`pipeline.plan.resolution`), and fewer than three prove nothing. So three seeds of every variant come first. Runs of
half the steps follow, which show at half a run's cost whether more training would change the order, then further seeds.
A seed begins only if all its variants are likely to end in time: intervals are of seeds that variants share. No variant
is given up for its first results: in simulations (`benchmarks/halving.py`) verdicts were then wrong too often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from linvit.execute import StopWork
from linvit.schemas.study import Plan
from linvit.study.jobs import StudyJob
from linvit.training.events import Event, Progressed, Stepped

EVIDENCE = 5.0  # seconds of runs before anything is concluded from them
GRACE = 0.03  # of the budget by which runs may be late
TOO_LATE = 0.5  # of the runs that are required; later it does not pay to begin again

Round = tuple[int, int | None] | None  # a seed and a fold; None: runs of half the steps, each for itself


@dataclass
class Schedule:
    """The runs of one plan. `admit` is asked before each begins, `on_event` hears of all of them."""

    plan: Plan
    slots: int  # runs at a time
    end: float  # by `clock`, of the last run
    clock: Callable[[], float] = time.monotonic
    may_stop: bool = True  # whether what has begun can be planned again
    features: float = 0.8  # of a frozen run's time until those of the training images are computed
    begun: dict[int, float] = field(default_factory=dict)  # job → when
    ended: dict[int, float] = field(default_factory=dict)
    share: dict[int, float] = field(default_factory=dict)  # of a job that is done
    first: dict[int, tuple[float, float]] = field(default_factory=dict)  # when it was first heard of, and its share
    seen: dict[int, float] = field(default_factory=dict)  # when its share was heard
    left_out: set[Round] = field(default_factory=set)
    stopped: bool = False

    def begin(self, jobs: Sequence[StudyJob], required: int) -> None:
        """The jobs that are about to run, in their order, of which the first `required` must fit."""
        self.jobs = {job.number: job for job in jobs}
        self.required = list(self.jobs)[:required]
        for kept in (self.begun, self.ended, self.share, self.first, self.seen):
            kept.clear()

    def expected(self, job: StudyJob) -> float:
        """Seconds, by the plan; 0 if it does not say."""
        frozen = job.frozen or not job.experiment.recipe.steps
        seconds: Mapping[str, float] = self.plan.frozen_seconds if frozen else self.plan.run_seconds
        return seconds.get(job.variant, 0.0) * (0.5 if job.half else 1.0)

    @property
    def pace(self) -> float:
        """How many times longer than expected runs take; 1 while too little is known. Until its first event a run is
        built, which takes no longer for a long one."""
        taken = sum(seen - self.first[number][0] for number, seen in self.seen.items())
        done = sum(self.expected(self.jobs[n]) * (self.share[n] - self.first[n][1]) for n in self.seen)
        return taken / done if taken >= EVIDENCE and done > 0 else 1.0

    def left(self, numbers: Sequence[int]) -> float:
        """Seconds until these jobs have ended, with all slots busy."""
        work = sum(self.expected(self.jobs[n]) * (1 - self.share.get(n, 0.0)) for n in numbers if n not in self.ended)
        return self.pace * work / self.slots

    def admit(self, job: StudyJob) -> bool:
        """Whether there is time for a job that could begin now."""
        if self._fits(job):
            self.begun[job.number], self.share[job.number] = self.clock(), 0.0
            return True
        return False

    def _fits(self, job: StudyJob) -> bool:
        round_of = None if job.half else (job.experiment.seed, job.fold)
        if round_of is not None and round_of in self.left_out:
            return False
        mine = [n for n, other in self.jobs.items() if round_of == (other.experiment.seed, other.fold)]
        mine = [n for n in mine if self.jobs[n].full == job.full]
        is_new = round_of is not None and not any(n in self.begun for n in mine)
        running = [n for n in self.begun if n not in self.ended]
        needed = self.left([*running, *mine]) if is_new else self.pace * self.expected(job)
        first = job.number in self.required[: self.slots]
        if first or self.clock() + needed <= self.end + GRACE * self.plan.seconds:
            return True
        self.left_out.add(round_of)
        return False

    def on_event(self, job: StudyJob, event: Event) -> None:
        """A StopWork if the runs that are required will not end in time, and it is early enough to plan them again."""
        if self.stopped:
            raise StopWork
        if isinstance(event, Stepped) and event.total:
            self._hear(job, event.step / event.total)
        elif isinstance(event, Progressed) and event.total and not job.experiment.recipe.steps:
            self._hear(job, self.features * event.done / event.total)
        if self.may_stop and self.overdue:
            self.stopped = True
            raise StopWork

    def on_end(self, job: StudyJob) -> None:
        if job.number in self.begun:
            self.ended[job.number] = self.clock()
            self._hear(job, 1.0)

    def _hear(self, job: StudyJob, share: float) -> None:
        self.first.setdefault(job.number, (self.clock(), share) if share < 1 else (self.begun[job.number], 0.0))
        if share > self.share[job.number]:
            self.share[job.number], self.seen[job.number] = share, self.clock()

    @property
    def overdue(self) -> bool:
        """Whether the runs that are required will be late by more than the grace, with most of them still to do."""
        now, work = self.clock(), sum(self.expected(self.jobs[n]) for n in self.required)
        done = sum(self.expected(self.jobs[n]) * self.share.get(n, 0.0) for n in self.required)
        if not work or done > TOO_LATE * work:
            return False
        return now + self.left(self.required) > self.end + GRACE * self.plan.seconds
