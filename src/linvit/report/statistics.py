"""What a handful of seeds can tell: intervals, paired comparisons and verdicts.

Every variant sees the same seeds (data order, split, initialisation), so accuracies are compared in pairs. Two variants
i and j with paired differences d_s over S shared seeds are compared by

    t = mean(d) / sqrt(v / S),    v = max(var(d), 2·MS),    degrees of freedom = those of MS

where MS is the residual mean square of the additive model `accuracy = variant + seed`, fitted to the whole study. For
two variants 2·MS *is* var(d) and this is the paired t-test; for more, all variants help to estimate the noise (three to
five seeds alone cannot), while a pair that is noisier than the study keeps its own, larger variance. The p-values of
all pairs are corrected by Holm, so the most accurate variant may be picked after seeing the data.

Seeds are what varies: a verdict holds for these test images.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit  # Student's t; scipy.stats takes a second to import

LEVEL = 0.05
ENOUGH = 3  # with fewer seeds, failing to find a difference means nothing

BETTER, SAME, WORSE = "better", "not distinguishable", "worse"
UNKNOWN, BEST, DIVERGED, MISSING = "not enough seeds to tell", "most accurate", "diverged", "no result"


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % t-interval; no interval from a single value."""

    mean: float
    low: float | None
    high: float | None
    n: int


def interval(values: Iterable[float]) -> Interval | None:
    x = np.asarray([value for value in values if np.isfinite(value)], dtype=float)
    if not len(x):
        return None
    mean = float(x.mean())
    if len(x) < 2:
        return Interval(mean, None, None, 1)
    half = float(stdtrit(len(x) - 1, 1 - LEVEL / 2) * x.std(ddof=1) / np.sqrt(len(x)))
    return Interval(mean, mean - half, mean + half, len(x))


def holm(p: np.ndarray) -> np.ndarray:
    """Adjusted p-values: reject where they are at most the level; any false rejection is then rarer than it."""
    order = np.argsort(p, kind="stable")
    adjusted = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return adjusted[np.argsort(order, kind="stable")]


@dataclass(frozen=True)
class Comparison:
    """All pairs of variants: `difference[i, j]` = accuracy i − j, its Holm-adjusted `p`, and `margin`, the half width
    of simultaneous 95 % intervals (Bonferroni); infinite where nothing can be said."""

    difference: np.ndarray  # (variants, variants)
    p: np.ndarray
    margin: np.ndarray


def compare(scores: np.ndarray, resolution: float = 0.0) -> Comparison:
    """`scores` is (variants, seeds), NaN where a seed is missing. No deviation between seeds smaller than `resolution`,
    one test image, is believed."""
    count = len(scores)
    difference, margin, p = np.zeros((count, count)), np.full((count, count), np.inf), np.ones((count, count))
    np.fill_diagonal(margin, 0)
    first, second = np.triu_indices(count, 1)
    d = scores[first] - scores[second]
    seeds = np.isfinite(d).sum(axis=1)
    known = seeds >= 2
    first, second, d, seeds = first[known], second[known], d[known], seeds[known]
    if not len(d):
        return Comparison(difference, p, margin)
    mean = np.nanmean(d, axis=1)
    noise, freedom = _residual(scores)
    variance = np.fmax(np.nanvar(d, axis=1, ddof=1), 2 * noise)
    freedom = freedom if freedom else seeds - 1
    error = np.sqrt(np.fmax(variance, max(resolution, 1e-12) ** 2) / seeds)
    difference[first, second], difference[second, first] = mean, -mean
    p[first, second] = p[second, first] = holm(2 * stdtr(freedom, -np.abs(mean) / error))
    margin[first, second] = margin[second, first] = error * -stdtrit(freedom, LEVEL / 2 / len(d))
    return Comparison(difference, p, margin)


def _residual(scores: np.ndarray) -> tuple[float, float]:
    """Mean square and degrees of freedom that variant and seed leave unexplained, over the seeds every variant has.

    The degrees of freedom carry the Huynh–Feldt correction for variants that are not equally noisy."""
    whole = scores[:, np.isfinite(scores).all(axis=0)]
    k, n = whole.shape[0] - 1, whole.shape[1]
    if k < 1 or n < 2:
        return 0.0, 0.0
    rest = whole - whole.mean(axis=1, keepdims=True) - whole.mean(axis=0) + whole.mean()
    power = np.linalg.svd(rest, compute_uv=False) ** 2
    total = float(power.sum())
    if not total:
        return 0.0, float(k * (n - 1))
    epsilon = total**2 / (k * float((power**2).sum()))  # Greenhouse–Geisser: 1/k … 1
    above, below = n * k * epsilon - 2, k * (n - 1 - k * epsilon)
    if below > 1e-9:
        epsilon = above / below
    elif n > 2:
        epsilon = 1.0
    return total / (k * (n - 1)), k * (n - 1) * float(np.clip(epsilon, 1 / k, 1))


@dataclass(frozen=True)
class Verdicts:
    """What each variant is against the most accurate one, `best`."""

    best: str | None
    of: dict[str, str]
    names: tuple[str, ...]  # those compared, in the comparison's order
    comparison: Comparison

    def against(self, name: str, other: str) -> tuple[float, float] | None:
        """The difference in accuracy and its corrected p; None if the two were not compared."""
        if name == other or not {name, other} <= set(self.names):
            return None
        at = self.names.index(name), self.names.index(other)
        if np.isinf(self.comparison.margin[at]):
            return None
        return float(self.comparison.difference[at]), float(self.comparison.p[at])

    def against_best(self, name: str) -> tuple[float, float] | None:
        return None if self.best is None else self.against(name, self.best)

    def loss(self, name: str) -> float:
        """How much accuracy choosing `name` may give up at most (95 %, over all comparisons)."""
        if len(self.names) < 2:
            return float("inf")
        i = self.names.index(name)
        found = self.comparison
        difference, margin, p = found.difference[:, i], found.margin[:, i], found.p[:, i]
        known = (p <= LEVEL) & (difference < 0)  # by Holm, which may know more than the margins, Bonferroni's
        return max(0.0, float(np.where(known, 0.0, difference + margin).max()))


def verdicts(
    scores: Mapping[str, Mapping[int, float]], diverged: Sequence[str] = (), resolution: float = 0.0
) -> Verdicts:
    """`scores[variant][seed]` → a verdict each. A variant with a diverged seed is only flagged."""
    of = {name: DIVERGED if name in diverged else MISSING for name in scores}
    names = tuple(name for name in scores if scores[name] and name not in diverged)
    if not names:
        return Verdicts(None, of, (), compare(np.empty((0, 0))))
    seeds = sorted({seed for name in names for seed in scores[name]}, key=str)
    table = np.array([[scores[name].get(seed, np.nan) for seed in seeds] for name in names])
    comparison = compare(table, resolution)
    top = int(np.nanargmax(np.nanmean(table, axis=1)))
    for i, name in enumerate(names):
        if comparison.p[i, top] <= LEVEL and i != top:
            of[name] = WORSE if comparison.difference[i, top] < 0 else BETTER
        else:
            of[name] = SAME if np.isfinite(table[i] - table[top]).sum() >= ENOUGH else UNKNOWN
    of[names[top]] = BEST
    return Verdicts(names[top], of, names, comparison)
