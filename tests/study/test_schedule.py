"""Which runs a budget has time for, on machines whose speed changes, by a clock that only these runs advance."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from linvit.execute import StopWork
from linvit.schemas.study import Plan
from linvit.study.schedule import GRACE, Schedule
from linvit.training.events import Progressed, Stepped

SECONDS = {"softmax": 40.0, "relu": 55.0, "uniform": 30.0}  # of one run
TICKS, FEATURES = 20, 16  # events of a run, and of them of features


def run(number: int, variant: str, seed: int, half: bool = False, frozen: bool = False) -> Any:
    recipe = SimpleNamespace(steps=0 if frozen else 100)
    return SimpleNamespace(
        number=number,
        variant=variant,
        half=half,
        frozen=frozen,
        fold=None,
        full=not (half or frozen),
        experiment=SimpleNamespace(seed=seed, recipe=recipe),
    )


def trainings(seeds: int) -> list[Any]:
    """In a study's order: three seeds, runs of half the steps, further seeds."""
    first = [(name, seed, False) for seed in range(min(seeds, 3)) for name in SECONDS]
    later = [(name, seed, False) for seed in range(3, seeds) for name in SECONDS]
    found = [*first, *((name, 0, True) for name in SECONDS), *later]
    return [run(number, *each) for number, each in enumerate(found)]


@dataclass
class Machine:
    """Workers that take `slowness(time)` times as long as planned."""

    slots: int
    slowness: Callable[[float], float]
    now: float = 0.0
    done: list[Any] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def carry_out(self, jobs: list[Any], schedule: Schedule, required: int) -> None:
        """As `Executor.run_jobs` does."""
        schedule.begin(jobs, required)
        waiting, running = list(jobs), []
        while waiting or running:
            while waiting and len(running) < self.slots:
                job = waiting.pop(0)
                if schedule.admit(job):
                    heapq.heappush(running, (self.now, job.number, 0, job))
            if not running:
                return
            self.now, number, tick, job = heapq.heappop(running)
            if tick == TICKS:
                schedule.on_end(job)
                self.done.append(job)
                continue
            step = schedule.expected(job) / TICKS * self.slowness(self.now)
            schedule.on_event(job, event(job, tick))
            heapq.heappush(running, (self.now + step, number, tick + 1, job))


def event(job: Any, tick: int) -> Progressed | Stepped:
    if job.frozen:
        return Progressed(min(tick, FEATURES), FEATURES, "features")
    return Stepped(100 * tick // TICKS, 100, 1.0, 0.5, 1.0, 1.0, 0.0, 1.0)


def schedule_of(machine: Machine, seeds: int, budget: float, end: float, **options: Any) -> Schedule:
    plan = Plan(
        seconds=budget, image_size=32, options={}, seeds=seeds, run_seconds=SECONDS, frozen_seconds=dict(SECONDS)
    )
    return Schedule(plan, machine.slots, end, machine.clock, **options)


def whole(seeds: int, slots: int) -> float:
    """Seconds of all runs, by the plan."""
    return sum(SECONDS.values()) * (seeds + 0.5) / slots


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_on_a_machine_as_fast_as_planned_everything_runs(slots: int, seeds: int) -> None:
    machine = Machine(slots, lambda now: 1.0)
    end = whole(seeds, slots) + 25.0 * (slots > 1)  # one worker waits for the other at the end
    machine.carry_out(trainings(seeds), schedule_of(machine, seeds, 1.25 * end, end), 3 * min(seeds, 3))
    assert len(machine.done) == 3 * (seeds + 1)
    assert machine.now <= end


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(
    "slowness",
    [
        lambda now: 1.2,
        lambda now: 1.0 if now < 200 else 2.0,
        lambda now: 1.0 if now < 400 else 4.0,
        lambda now: 3.0 if 100 < now < 250 else 1.0,
    ],
)
def test_what_would_be_late_does_not_begin(slots: int, slowness: Callable[[float], float]) -> None:
    """Every variant has as many seeds, and the end is at most one run late: the last, if the machine slows down."""
    machine, seeds = Machine(slots, slowness), 10
    end = whole(seeds, slots) + 25.0
    budget = 1.2 * end
    machine.carry_out(trainings(seeds), schedule_of(machine, seeds, budget, end, may_stop=False), 9)
    assert machine.now <= end + GRACE * budget + max(SECONDS.values()) * slowness(machine.now)
    counts = [sum(job.variant == name and not job.half for job in machine.done) for name in SECONDS]
    assert max(counts) - min(counts) <= 1
    assert min(counts) < seeds
    assert sum(job.half for job in machine.done) == 3, "they come before the seeds that add little"


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("factor", [1.5, 2.0, 6.0])
def test_slow_runs_are_stopped_soon_if_too_few_would_end_in_time(slots: int, factor: float) -> None:
    machine = Machine(slots, lambda now: factor)
    end = whole(3, slots) + 25.0
    schedule = schedule_of(machine, 3, 1.2 * end, end)
    with pytest.raises(StopWork):
        machine.carry_out(trainings(3), schedule, 9)
    assert schedule.pace == pytest.approx(factor, rel=0.15)
    assert machine.now < 0.2 * end
    with pytest.raises(StopWork):  # all others are stopped, too
        schedule.on_event(trainings(3)[1], event(trainings(3)[1], 1))


def test_it_is_not_planned_again_when_most_is_done() -> None:
    """Beginning again would cost more than the seed that is given up."""
    machine = Machine(1, lambda now: 1.0 if now < 220 else 3.0)
    end = whole(3, 1)
    machine.carry_out(trainings(3), schedule_of(machine, 3, 1.2 * end, end), 9)
    assert 6 <= len(machine.done) < 12


def test_slow_features_are_noticed_before_the_first_variant_has_them() -> None:
    jobs = [run(i, name, 0, frozen=True) for i, name in enumerate(SECONDS)]
    machine = Machine(1, lambda now: 4.0)
    schedule = schedule_of(machine, 1, 180.0, 140.0)
    with pytest.raises(StopWork):
        machine.carry_out(jobs, schedule, 3)
    assert machine.now < 40 * 4
    assert not machine.done
    machine = Machine(1, lambda now: 1.05)
    schedule = schedule_of(machine, 1, 180.0, 140.0)
    machine.carry_out(jobs, schedule, 3)
    assert len(machine.done) == 3


def test_a_plan_that_says_nothing_about_times_runs_everything() -> None:
    machine = Machine(1, lambda now: 1.0)
    schedule = schedule_of(machine, 1, 60.0, 50.0)
    schedule.plan = schedule.plan.model_copy(update={"run_seconds": {}})
    machine.carry_out(trainings(1), schedule, 3)
    assert len(machine.done) == 6
