"""Verdicts: what each variant of a study is shown to be, by the bounds of `report.comparison`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from linvit.report.comparison import ENOUGH, LEVEL, LOOK, MAX_SEEDS, Comparison, compare, dunnett
from linvit.report.merit import ACCURACY, Merit
from linvit.schemas.study import DEFAULT_MARGIN

MARGIN = DEFAULT_MARGIN

WORSE, OPEN = "worse", "undecided"
UNKNOWN, DIVERGED, MISSING, PUBLISHED = "too few seeds", "diverged", "no result", "published"
BESIDE = "not compared"  # a variant that was trained for longer, or for less


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % t-interval; no interval from a single value."""

    mean: float
    low: float | None
    high: float | None
    n: int


def interval(values: Iterable[float], shared: float = 0.0) -> Interval | None:
    """`shared`: of folds, the images that are held out over those that are not, which makes it the corrected one."""
    x = np.asarray([value for value in values if np.isfinite(value)], dtype=float)
    if not len(x):
        return None
    mean = float(x.mean())
    if len(x) < 2:
        return Interval(mean, None, None, 1)
    half = float(stdtrit(len(x) - 1, 1 - LEVEL / 2) * x.std(ddof=1) * np.sqrt(1 / len(x) + shared))
    return Interval(mean, mean - half, mean + half, len(x))


def over_images(share: float, count: int) -> Interval:
    """Of one model's accuracy: what other test images could have given."""
    half = float(stdtrit(1e12, 1 - LEVEL / 2)) * math.sqrt(share * (1 - share) / count)
    return Interval(share, max(0.0, share - half), min(1.0, share + half), 1)


@dataclass(frozen=True)
class Standing:
    """What is known of one variant against the others; differences are accuracies, negative where it loses."""

    word: str
    behind: float | None = None  # its difference to the most accurate, and the 95 % intervals of that
    over_seeds: tuple[float, float] | None = None
    over_images: tuple[float, float] | None = None
    loses_at_most: float | None = None  # to any other variant; both hold together for all variants
    loses_at_least: float | None = None
    shown: bool = False  # to lose less than the margin
    undecided: bool = False


@dataclass(frozen=True)
class Verdicts:
    """What each variant is; `best` is the most accurate."""

    best: str | None
    of: dict[str, Standing]
    names: tuple[str, ...]  # those compared, in the comparison's order
    comparison: Comparison
    margin: float

    def deviation(self, name: str, other: str) -> tuple[float, float]:
        """Variance of the two's difference between single seeds, and how many they share."""
        at = self.names.index(name), self.names.index(other)
        return float(self.comparison.noise[at]), float(self.comparison.seeds[at])

    def ahead(self, name: str, other: str) -> float:
        """By how much the first is the better one, over the seeds that both have."""
        return float(self.comparison.difference[self.names.index(name), self.names.index(other)])

    def between(self, name: str, other: str, among: int = 1) -> tuple[float, float, float] | None:
        """The difference of two variants, with its 95 % interval over seeds and images; `among`: the first is the best
        of this many, which makes its lead look larger than it is."""
        at = self.names.index(name), self.names.index(other)
        d, half = (float(found[at]) for found in (self.comparison.difference, self.comparison.half(LEVEL / 2, among)))
        return (d, d - half, d + half) if math.isfinite(half) else None

    @property
    def too_few_images(self) -> bool:
        """Whether no number of seeds could show a loss below the margin on these test images."""
        constant = dunnett(max(1, len(self.names) - 1), math.inf, LOOK)
        return bool((constant**2 * self.comparison.blur(self.margin) > self.margin**2).any())

    def settle(self, names: Iterable[str]) -> tuple[float, list[str], float]:
        """The seeds that would settle these undecided variants, and who needs them; if that is infinite, how many times
        as many test images would be needed (infinite: seeds differ too much for any)."""
        found, half = self.comparison, self.comparison.half(loss=self.margin)
        needed, times = found.needed(self.margin)
        rows = np.isin(self.names, list(names))
        is_open = (found.difference - half <= -self.margin) & rows[:, None] & ~np.eye(len(rows), dtype=bool)
        if not is_open.any():
            return 0.0, [], 0.0
        seeds, now = float(needed[is_open].max()), float(found.seeds[is_open].max())
        if math.isfinite(seeds) and now >= ENOUGH:  # a second look with few more would add little
            seeds = min(max(seeds, 2 * now), MAX_SEEDS) if now < MAX_SEEDS else math.inf
        runs = rows | is_open.any(axis=0) | np.isin(self.names, [str(self.best)])
        who = [name for name, wanted in zip(self.names, runs, strict=True) if wanted]
        return math.ceil(seeds) if math.isfinite(seeds) else seeds, who, float(times[is_open].max())


def holm(found: Sequence[float]) -> list[float]:
    """p of several tests, made such that in at most a share α of cases any is below α that should not be."""
    adjusted, reached = [1.0] * len(found), 0.0
    for rank, i in enumerate(sorted(range(len(found)), key=found.__getitem__)):
        reached = max(reached, min(1.0, (len(found) - rank) * found[i]))
        adjusted[i] = reached
    return adjusted


Scores = Mapping[str, Mapping[Any, float]]


def judge(
    scores: Scores,
    right: Mapping[str, Mapping[Any, np.ndarray]] | None = None,
    diverged: Sequence[str] = (),
    resolution: float = 0.0,
    margin: float = MARGIN,
    folds: int = 0,
    merit: Merit = ACCURACY,
    enough: int = ENOUGH,
) -> Verdicts:
    """`scores[variant][seed]` and, where it is known, `right[variant][seed]`, image by image → a verdict each.
    A variant with a diverged seed is only flagged. With folds, scores are of (seed, fold), and `right` of the seed."""
    of = {name: Standing(DIVERGED if name in diverged else MISSING) for name in scores}
    names = tuple(name for name in scores if scores[name] and name not in diverged)
    if not names:
        return Verdicts(None, of, (), compare(np.empty((0, 0))), margin)
    runs = sorted({run for name in names for run in scores[name]}, key=str)
    seeds = runs
    if folds:
        seeds = sorted({seed for seed, _ in runs})
        runs = [(seed, fold) for seed in seeds for fold in range(folds)]
    table = np.array([[scores[name].get(run, np.nan) for run in runs] for name in names])
    known_right = [_stack((right or {}).get(name, {}), scores[name], seeds, bool(folds)) for name in names]
    found = compare(table, known_right, resolution, folds, enough)
    itself = np.eye(len(names), dtype=bool)
    top = int(np.where(itself, np.inf, found.difference).min(axis=1).argmax())  # over shared seeds, pair by pair
    half = found.half(loss=margin)
    low, high = (np.where(itself, np.inf, found.difference + sign * half).min(axis=1) for sign in (-1, 1))
    for i, name in enumerate(names):
        known = len(names) > 1 and (found.seeds[i, top] >= enough or i == top)
        shown, worse = bool(known and low[i] > -margin), bool(known and high[i] < -margin)
        word = merit.within(margin) if shown else WORSE if worse else OPEN if known else UNKNOWN
        of[name] = Standing(
            merit.best if i == top else word,
            **(_against(found, i, top) if i != top else {}),
            loses_at_most=-float(low[i]) if np.isfinite(low[i]) else None,
            loses_at_least=-float(high[i]) if np.isfinite(high[i]) else None,
            shown=shown,
            undecided=known and not (shown or worse),
        )
    return Verdicts(names[top], of, names, found, margin)


def _stack(
    right: Mapping[Any, np.ndarray], scores: Mapping[Any, float], seeds: Sequence[Any], folds: bool
) -> np.ndarray | None:
    """(seeds, images), zeros where a seed is missing; None if it is not known of every seed that has a score."""
    if not right or not {run[0] if folds else run for run in scores} <= set(right):
        return None
    nothing = np.zeros_like(next(iter(right.values())))
    return np.stack([right.get(seed, nothing) for seed in seeds])


def _against(found: Comparison, i: int, j: int) -> dict[str, Any]:
    """A difference and its 95 % intervals over seeds and over images, as a Standing names them."""
    d = float(found.difference[i, j])
    seeds = stdtrit(found.freedom[i, j], 1 - LEVEL / 2) * np.sqrt(found.variance()[i, j])
    seeds = seeds if found.seeds[i, j] > 1 else np.nan
    images = stdtrit(1e12, 1 - LEVEL / 2) * np.sqrt(found.images[i, j])
    if found.folds:  # every fold has images of its own, so its differences are due to both
        seeds, images = max(seeds, np.nan_to_num(images)), np.nan
    spans = {"over_seeds": float(seeds), "over_images": float(images)}
    return {"behind": d} | {name: (d - half, d + half) for name, half in spans.items() if not math.isnan(half)}
