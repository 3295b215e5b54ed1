"""Steps that fit a budget, from the speed of each variant where its jobs will run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from linvit.data import Survey
from linvit.durations import duration
from linvit.training.loop import Rate

PLANNED_SHARE = 0.95  # of the budget
MEASURING_SHARE, MIN_MEASURING, MAX_MEASURING = 0.12, 25.0, 240.0  # of the budget, and seconds, for all but training
WORKER_START, RUN_OVERHEAD = 6.0, 1.0  # seconds for workers to start, and for each run to be built, saved and read


def measuring_seconds(budget: float) -> float:
    return min(MAX_MEASURING, max(MIN_MEASURING, MEASURING_SHARE * budget))


def fitting_steps(
    budget: float,
    spent: float,
    rates: Mapping[str, Rate],
    images: Survey,
    per_epoch: int,
    runs: int,
    jobs: int,
    most: int,
    head: float | None = None,
    frozen: bool = True,
) -> tuple[int, dict[str, float]]:
    """Equal steps for every run that fit what is left of the budget, at most `most`; and the expected time by activity.
    head: seconds to fit one to frozen features, which come first (`frozen`: they are still to do), and again for each
    seed whose features are random.

    `rates` are of one worker while all of them work. A run of half the steps is half a run; at the end one worker waits
    for the other for half a run on average, which the short runs, done last, make a quarter."""
    step = sum(1 / rate.steps for rate in rates.values())
    image = sum(1 / rate.images for rate in rates.values())
    one = step + image * images.validation / per_epoch  # of each variant, with its share of a validation
    fixed = len(rates) * (runs + 1) * RUN_OVERHEAD + image * (images.validation + 2 * images.test) * (runs + 1)
    share = (runs + 0.5) / jobs + (0.25 * (jobs > 1)) / len(rates)
    features = {}
    if head is not None:
        if frozen:
            features = {"frozen features": (image * images.total + len(rates) * (head + RUN_OVERHEAD)) / jobs}
        fixed += (image * images.train + len(rates) * head) * (runs - 1)
    overhead = spent + WORKER_START * frozen + fixed / jobs + sum(features.values())
    steps = min(most, int((PLANNED_SHARE * budget - measuring_seconds(budget) - overhead) / (one * share)))
    if head is not None:
        steps = max(0, steps)
    elif steps < 2:
        need = budget
        while PLANNED_SHARE * need - measuring_seconds(need) < overhead + 2 * one * share:
            need *= 1.1
        raise ValueError(f"budget {duration(budget)} is too small for two steps of each run: use {duration(need)}")
    training = steps * one * share + fixed / jobs
    return steps, {"planning": spent, **features, "training": training, "measuring": measuring_seconds(budget)}


def run_seconds(rates: Mapping[str, Rate], images: Survey, per_epoch: int, steps: int) -> dict[str, float]:
    """Of a run of each variant, which begins with a head that is known."""
    seen = images.validation * (steps / per_epoch + 1) + 2 * images.test
    return {name: RUN_OVERHEAD + steps / rate.steps + seen / rate.images for name, rate in rates.items()}


def frozen_seconds(rates: Mapping[str, Rate], images: Survey, head: float) -> dict[str, float]:
    """Of the features of each variant and the head that is fitted to them."""
    return {name: RUN_OVERHEAD + head + images.total / rate.images for name, rate in rates.items()}


def fitting_images(
    budget: float, spent: float, rates: Mapping[str, Rate], images: Survey, jobs: int, head: float
) -> int:
    """How many images of each split have frozen features in what is left of the budget; head: seconds to fit one."""
    image = sum(1 / rate.images for rate in rates.values()) / jobs
    room = PLANNED_SHARE * budget - measuring_seconds(budget) - WORKER_START - spent
    room -= len(rates) * (head + RUN_OVERHEAD) / jobs
    most = max(images.train, images.validation, images.test)
    return bisect_right(range(most + 1), room, key=lambda count: image * images.limited(count).total) - 1
