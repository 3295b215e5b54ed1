"""What a few seeds and some thousand test images can show: which variants lose less than a margin.

Seeds and test images are both samples. With d[s, x] = right_i − right_j for seed s and image x, n shared seeds and N
images, the mean difference has the variance of a two-way layout,

    V_seed / n + V_image / N − V_residual / (n·N)

V_seed, between the seeds' mean differences, is estimated by the larger of the pair's own and 2·MS, MS being the
residual mean square of `accuracy = variant + seed` over all variants with these seeds: three seeds alone do not
estimate their noise. The rest, of images, is estimated well. A bound of the difference is therefore d ± h,

    h² = c(f)²·V_seed / n + c(∞)²·(V_image − V_residual / n) / N

where f are the degrees of freedom of MS: each part has its own constant (Howe), since Satterthwaite's single constant
is too optimistic with two degrees of freedom. A variant that loses the margin is wrong on at least that share of the
images more, so V_image is at least margin·(1 − margin) when that is to be refuted: two variants may agree on a few
hundred images by chance. c is Dunnett's one-sided constant for k − 1 comparisons at correlation ½, as in Hsu's multiple
comparisons with the best. Variant i is within the margin if d_ij − h_ij > −margin for every
other j, worse if d_ij + h_ij < −margin for some j, and else undecided.

With K folds, a run is one fold of one seed, and every seed tests each image once. Runs share training images, so their
models are not independent. Nadeau and Bengio take the correlation of two runs to be the share of images that is held
out, which gives the mean difference of n runs the variance V·(1/n + held out / others) with V between runs (Bouckaert
and Frank, for folds that every seed divides differently):

    h² = c(f)²·V·(1/n + 1/(K − 1))

V includes what each run's test images explain, which is not correlated within a seed. Subtracting that would leave a
difference of two estimates with few degrees of freedom: in simulations with five folds and a true correlation of 0.35,
6 % of studies were then wrong, instead of 1 %. Where each image's results are known, h² is at least c(∞)²·V_image/N,
since folds can agree by chance. `benchmarks/folds.py` simulates it.

Models that were not trained have no seeds: the difference of two is one of images alone, V_image / N, and one run
suffices for it.

A study may be looked at twice, first and with the number of seeds that `settle` suggests: c has a level at which, over
both looks, at most 5 % of studies wrongly call a variant within the margin. `benchmarks/decisions.py` simulates it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import gammaincinv, ndtr, stdtrit  # scipy.stats takes a second to import

LEVEL = 0.05  # of both looks together, and of intervals
LOOK = 0.0225  # of each of two looks, one-sided; Pocock's 2.94 % are of looks with known noise, and gave 5.9 %
POWER = 0.8  # with which the suggested number of seeds decides
ENOUGH = 3  # shared seeds without which nothing is claimed
MAX_SEEDS = 30  # that are ever suggested
SEED_SPARE, BLUR_SPARE = 1.5, 1.3  # times the variance that was seen, of seeds and of images, must be low enough


def dunnett(count: int, freedom: float, level: float) -> float:
    """c with P(max of `count` t-variables of correlation ½ > c) = level; freedom is rounded down to three digits."""
    if math.isfinite(freedom):
        unit = 10.0 ** (math.floor(math.log10(freedom)) - 2)
        freedom = math.floor(freedom / unit + 1e-9) * unit
    return _dunnett(count, freedom, level)


Z, WEIGHT = np.polynomial.hermite_e.hermegauss(40)
SHARE, PART = np.polynomial.legendre.leggauss(40)


@lru_cache(maxsize=4096)
def _dunnett(count: int, freedom: float, level: float) -> float:
    """T_j = (Z_j − Z_0) / (√2·s): given Z_0 and s, the Z_j are independent."""
    if count == 1:
        return float(stdtrit(freedom, 1 - level)) if math.isfinite(freedom) else float(-stdtrit(1e12, level))
    s = np.sqrt(gammaincinv(freedom / 2, (SHARE + 1) / 2) * 2 / freedom) if math.isfinite(freedom) else np.ones(1)
    weight = np.outer(PART / 2 if len(s) > 1 else s, WEIGHT / math.sqrt(2 * math.pi))
    low, high = 0.0, 200.0
    while high - low > 1e-6:
        c = (low + high) / 2
        reached = (weight * ndtr(Z + math.sqrt(2) * c * s[:, None]) ** count).sum()
        low, high = (c, high) if reached < 1 - level else (low, c)
    return high


@dataclass(frozen=True)
class Comparison:
    """All pairs (variants, variants): `difference[i, j]` = accuracy i − j over the `seeds` they share; `noise`, its
    variance between seeds, known with `freedom`; `images`, its variance by the choice of test images (NaN: unknown),
    of which `tested` are known to be right or wrong. With `folds`, a seed is one fold of one seed."""

    difference: np.ndarray
    seeds: np.ndarray
    noise: np.ndarray
    freedom: np.ndarray
    images: np.ndarray
    folds: int = 0
    tested: int = 0
    enough: int = ENOUGH

    @property
    def shared(self) -> float:
        """The ratio of images held out to the others."""
        return held_out(self.folds)

    def blur(self, loss: float) -> np.ndarray:
        """Variance by the choice of images, if the question is whether one variant loses this much to the other."""
        least = abs(loss) * (1 - abs(loss)) / self.tested if self.tested else 0.0
        return np.where(np.isfinite(self.images), np.maximum(self.images, least), 0.0)

    def variance(self) -> np.ndarray:
        """Of the mean differences, by the choice of seeds; NaN or infinite where none are shared."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.noise * (1 / self.seeds + self.shared)

    def _total(self, over_seeds: np.ndarray, over_images: np.ndarray) -> np.ndarray:
        """Folds differ in their test images, too, so that what seeds contribute includes images."""
        return np.maximum(over_seeds, over_images) if self.folds else over_seeds + over_images

    def _constants(self, level: float, count: int | None = None) -> tuple[np.ndarray, float]:
        """Dunnett's: of each pair for seeds, and of all for images."""
        count = count or max(1, len(self.difference) - 1)
        seeds = [dunnett(count, freedom, level) for freedom in self.freedom.flat]
        return np.reshape(seeds, self.freedom.shape), dunnett(count, math.inf, level)

    def half(self, level: float = LOOK, count: int | None = None, loss: float = 0.0) -> np.ndarray:
        """Half width of simultaneous one-sided bounds on a loss; infinite where nothing is known."""
        seeds, images = self._constants(level, count)
        found = np.sqrt(self._total(seeds**2 * self.variance(), images**2 * self.blur(loss)))
        found = np.where(self.seeds >= self.enough, found, np.inf)
        np.fill_diagonal(found, 0)
        return found

    def detectable(self, level: float = LEVEL, power: float = POWER) -> np.ndarray:
        """The true difference of each pair that a one-sided test at this level shows with this probability; infinite
        where too few seeds are shared."""
        (seeds, images), (more, and_more) = self._constants(level, 1), self._constants(1 - power, 1)
        over_seeds, over_images = (seeds + more) ** 2 * self.variance(), (images + and_more) ** 2 * self.blur(0.0)
        found = np.sqrt(self._total(over_seeds, over_images))
        return np.where(self.seeds >= self.enough, found, np.inf)

    def exceeds(self, i: int, j: int, than: float = 0.0) -> float:
        """p of the one-sided test that i beats j by more than this: the lowest level whose bound says so; 1 if that is
        none below one half, or if too few seeds are shared."""
        gap = float(self.difference[i, j]) - than
        if self.seeds[i, j] < self.enough or gap <= 0:
            return 1.0
        seeds, images, freedom = self.variance()[i, j], self.blur(than)[i, j], float(self.freedom[i, j])
        low, high = 0.0, 0.5
        while high - low > 1e-6:
            level = (low + high) / 2
            half = self._total(dunnett(1, freedom, level) ** 2 * seeds, dunnett(1, math.inf, level) ** 2 * images)
            low, high = (low, level) if half < gap**2 else (level, high)
        return high

    def needed(self, margin: float) -> tuple[np.ndarray, np.ndarray]:
        """Seeds with which a pair is decided with 80 % probability if it truly differs by 0 or by two margins: after
        Stein, by quantiles of the available degrees of freedom, which may be too many; at most MAX_SEEDS. Infinite if
        MAX_SEEDS would not suffice with something to SPARE, since a number is mostly suggested where noise was
        underestimated; then, how many times as many test images would be needed (infinite: seeds differ too much). A
        pair without a first look needs ENOUGH for that."""
        (seeds, images), (more, and_more) = self._constants(LOOK), self._constants(1 - POWER)
        others = max(1, len(self.difference) - 1)
        most = sum(dunnett(others, MAX_SEEDS - 1, level) for level in (LOOK, 1 - POWER)) ** 2 * self.noise / MAX_SEEDS
        falls = (seeds + more) ** 2 * self.noise
        blur = self._total(self.shared * falls, (images + and_more) ** 2 * self.blur(margin))
        if self.enough == 1:  # seeds would change nothing
            return np.full_like(self.seeds, np.inf), BLUR_SPARE * blur / margin**2
        with np.errstate(divide="ignore", invalid="ignore"):
            count = np.ceil(falls / np.maximum(margin**2 - blur, 0) - 1e-9)
            times = np.where(most < blur, BLUR_SPARE * blur / np.maximum(margin**2 - SEED_SPARE * most, 0), np.inf)
        enough = SEED_SPARE * most + BLUR_SPARE * blur <= margin**2
        return np.where(
            self.seeds < ENOUGH, ENOUGH, np.where(enough, np.minimum(SEED_SPARE * count, MAX_SEEDS), np.inf)
        ), times


def compare(
    scores: np.ndarray,
    right: Sequence[np.ndarray | None] = (),
    resolution: float = 0.0,
    folds: int = 0,
    enough: int = ENOUGH,
) -> Comparison:
    """`scores` is (variants, seeds), NaN where a seed is missing; `right` has for each variant whether an image was
    right, or its own score, (seeds, images), where that is known. No deviation between seeds below `resolution`, one
    image, is believed. enough: seeds for a claim; 1: nothing was trained, and one seed has no noise. With folds,
    `scores` is (variants, seeds · folds), all folds of a seed together, and `right` has all images for each seed."""
    k, there = len(scores), np.isfinite(scores)
    mean = np.array([row[known].mean() if known.any() else np.nan for row, known in zip(scores, there, strict=True)])
    difference = mean[:, None] - mean if k else np.zeros((0, 0))
    seeds, noise, freedom, images = (np.full((k, k), value) for value in (0.0, np.nan, 1.0, np.nan))
    groups: dict[bytes, list[tuple[int, int]]] = defaultdict(list)  # pairs by the seeds they share
    for i, j in zip(*np.triu_indices(k, 1), strict=True):
        groups[(there[i] & there[j]).tobytes()].append((int(i), int(j)))
    for key, pairs in groups.items():
        common = np.frombuffer(key, dtype=bool)
        n = int(common.sum())
        if n < 1:
            continue
        rows = np.flatnonzero(there[:, common].all(axis=1))
        pooled, known = _residual(scores[rows][:, common])
        whole = _complete(common, folds)
        seen = {
            i: found[whole] for i, found in enumerate(right) if found is not None and whole is not None and i in rows
        }
        blur = _images(seen)
        for i, j in pairs:
            d = scores[i, common] - scores[j, common]
            own = d.var(ddof=1) if n > 1 else np.nan
            spread = max(own, 2 * pooled, max(resolution, 1e-12) ** 2)
            spread, free = (spread, known or max(1, n - 1)) if n > 1 or enough > 1 else (0.0, math.inf)
            for a, b, sign in ((i, j, 1), (j, i, -1)):
                difference[a, b], seeds[a, b], freedom[a, b], noise[a, b] = sign * d.mean(), n, free, spread
                images[a, b] = blur.get((i, j), np.nan)
    counted = [found.shape[-1] for found in right if found is not None and found.dtype == bool]
    tested = max(counted, default=0)
    return Comparison(difference, seeds, noise, freedom, images, folds, tested, enough)


def held_out(folds: int) -> float:
    """The ratio of images held out to the others."""
    return 1 / (folds - 1) if folds > 1 else 0.0


def _complete(common: np.ndarray, folds: int) -> np.ndarray | None:
    """Which seeds are shared; None if some of their folds are not."""
    if not folds:
        return common
    table = common.reshape(-1, folds)
    whole = np.asarray(table.all(axis=1))
    return whole if np.array_equal(whole, table.any(axis=1)) else None


def _images(right: Mapping[int, np.ndarray]) -> dict[tuple[int, int], float]:
    """Of each pair with known images, the variance of its difference that is due to the choice of images and that
    more seeds do not reduce; of a single seed, all of it."""
    if len(right) < 2:
        return {}
    rows, table = list(right), np.stack(list(right.values()))  # variants, seeds, images
    table = table.astype(np.float32 if table.dtype == bool else np.float64)
    _, n, count = table.shape
    flat, means = table.reshape(len(rows), -1), table.mean(axis=1, dtype=np.float64)
    scores = table.mean(axis=-1, dtype=np.float64)
    both, same = flat @ flat.T, means @ means.T
    found = {}
    for a, i in enumerate(rows):
        for b, j in enumerate(rows[:a]):
            d = scores[a] - scores[b]
            columns = same[a, a] + same[b, b] - 2 * same[a, b] - count * d.mean() ** 2  # squares between images
            every = float(both[a, a] + both[b, b] - 2 * both[a, b]) - n * count * d.mean() ** 2
            rest = every - n * columns - count * n * d.var()
            residual = rest / ((n - 1) * (count - 1)) if n > 1 else 0.0
            found[j, i] = max(0.0, columns / (count - 1) - residual / n) / count
    return found


def _residual(scores: np.ndarray) -> tuple[float, float]:
    """Mean square and degrees of freedom that variant and seed leave unexplained; nothing may be missing.

    The degrees of freedom carry the Huynh–Feldt correction for variants that are not equally noisy."""
    k, n = scores.shape[0] - 1, scores.shape[1]
    if k < 1 or n < 2:
        return 0.0, 0.0
    rest = scores - scores.mean(axis=1, keepdims=True) - scores.mean(axis=0) + scores.mean()
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
