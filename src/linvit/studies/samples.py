"""Tests of a few independent numbers: of one mean, of two means, and of two shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr

from linvit.report.comparison import ENOUGH


class Sample(NamedTuple):
    """Of independent draws."""

    mean: float
    deviation: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        return cls(fmean(values), float(np.std(values, ddof=1)), len(values))


def above(a: Sample, b: Sample) -> float:
    """p of Welch's one-sided t-test that the first has the larger mean; 1 where a deviation is not known."""
    if not math.isfinite(a.deviation + b.deviation):
        return 1.0
    parts = [max(each.deviation, 1e-9) ** 2 / each.count for each in (a, b)]
    freedom = sum(parts) ** 2 / sum(part**2 / (each.count - 1) for part, each in zip(parts, (a, b), strict=True))
    return float(stdtr(freedom, (b.mean - a.mean) / math.sqrt(sum(parts))))


def of_means(values: Sequence[float]) -> tuple[float, float]:
    """p that the mean is above zero, and below it, by a t-test; 1 if there are too few."""
    if len(values) < ENOUGH:
        return 1.0, 1.0
    error = max(float(np.std(values, ddof=1)), 1e-9) / math.sqrt(len(values))
    below = float(stdtr(len(values) - 1, float(np.mean(values)) / error))
    return 1 - below, below


def fisher(bad: int, count: int, other_bad: int, other_count: int) -> float:
    """p of the one-sided exact test that fewer of the first kind are bad."""
    every, total = bad + other_bad, count + other_count
    ways = (math.comb(every, i) * math.comb(total - every, count - i) for i in range(bad + 1))
    return sum(ways) / math.comb(total, count)
