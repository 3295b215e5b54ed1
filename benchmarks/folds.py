"""How often the report's verdicts on a study with folds are wrong: simulated studies.

    python benchmarks/folds.py --out docs/benchmarks      # about 2 minutes on one core

A study has k variants and one seed of K folds of 1,797 images, each held out once. Images and variants are those of
`decisions.py`; u_is becomes √ρ·u_i + √(1 − ρ)·u_isf: what the models of all folds share, since they were trained on
mostly the same images, and what each model has for itself. Nadeau and Bengio assume that ρ is 1/K. If some variants are
undecided and the report names a number of seeds, the study is run with that number, and looked at again. Writes
folds.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from decisions import Rates, World, accuracies, summed
from scipy.special import ndtr

from linvit.records import commit
from linvit.report.statistics import MARGIN, Verdicts, judge

FOLDS, IMAGES, TOP = 5, 1797, 0.985
HEAD = ("folds", "best", "ρ", "variants", "deviation, points", "wrongly “within”", "wrongly “worse”", "coverage")
HEAD += ("undecided", "seeds named", "median", "resolved")


@dataclass
class Studied:
    """What has been trained: scores by run, and which images were right by seed, of each variant."""

    scores: list[dict]
    right: list[dict]

    def look(self, who: Sequence[str], first: int, resolution: float, folds: int):
        """The verdicts with all seeds of some variants, and the first ones of the others."""
        seeds = {str(i): len(of) if str(i) in who else first for i, of in enumerate(self.right)}
        scores = {
            str(i): {run: value for run, value in of.items() if (run[0] if folds else run) < seeds[str(i)]}
            for i, of in enumerate(self.scores)
        }
        right = {str(i): {s: x for s, x in of.items() if s < seeds[str(i)]} for i, of in enumerate(self.right)}
        return judge(scores, right, resolution=resolution, folds=folds)


class FoldedWorld(World):
    """All images are dealt into folds by every seed; models share `share` of what distinguishes them."""

    def __init__(self, truth: Sequence[float], deviation: float, images: int, rng, folds: int, share: float):
        super().__init__(truth, deviation, images, rng)
        self.folds, self.share = folds, share
        self.common = rng.normal(size=(len(truth), 1))
        self.studied = Studied([{} for _ in truth], [{} for _ in truth])

    def train_until(self, seeds: int) -> Studied:
        for seed in range(len(self.studied.right[0]), seeds):
            hand = self.rng.permutation(self.images) % self.folds
            own = self.rng.normal(size=(len(self.truth), self.folds))
            u = np.sqrt(self.share) * self.common + np.sqrt(1 - self.share) * own
            chance = ndtr(self.latent + (self.seed[:, None] * u)[:, hand])
            for i, right in enumerate(self.rng.random(chance.shape) < chance):
                self.studied.right[i][seed] = right
                for fold in range(self.folds):
                    self.studied.scores[i][seed, fold] = right[hand == fold].mean()
        return self.studied


@dataclass
class FoldedRates(Rates):
    coverage: float  # of the interval of the first two variants' difference


def wrong_calls(world: World, found: Verdicts) -> np.ndarray:
    """Whether a variant that loses the margin is called within it, and whether one that loses no more is called worse.
    Of variants that lose exactly the margin, either may happen: a little more or less would make it wrong."""
    loss = dict(zip(found.names, world.truth.max() - world.truth, strict=True))
    within = any(found.of[name].shown and loss[name] >= MARGIN - 1e-12 for name in loss)
    return np.array([within, any(found.of[name].word == "worse" and loss[name] <= MARGIN + 1e-12 for name in loss)])


def looks(world: FoldedWorld) -> tuple[float, ...]:
    """As of `decisions.looks`, where the number is of seeds; and whether the first interval covers the truth."""
    names = [str(i) for i in range(len(world.truth))]
    resolution = world.folds / world.images
    first = world.train_until(1).look([], 1, resolution, world.folds)
    undecided = [name for name in names if first.of[name].undecided]
    runs, who, _ = first.settle(undecided)
    wrong, span = wrong_calls(world, first), first.between("0", "1")
    covered = span is not None and span[1] <= world.truth[0] - world.truth[1] <= span[2]
    if not undecided or not np.isfinite(runs):
        return *wrong, len(undecided), 0, 0, 0, covered
    seeds = int(np.ceil(runs / world.folds))
    second = world.train_until(seeds).look(who, 1, resolution, world.folds)
    settled = sum(not second.of[name].undecided for name in undecided)
    return *(wrong | wrong_calls(world, second)), len(undecided), len(undecided), settled, seeds, covered


def rates(
    truth: Sequence[float], deviation: float, share: float, studies: int, folds: int = FOLDS, seed: int = 0
) -> FoldedRates:
    rng = np.random.default_rng(seed)
    worlds = (FoldedWorld(truth, deviation, IMAGES, rng, folds, share) for _ in range(studies))
    found = np.array([looks(world) for world in worlds], dtype=float)
    return FoldedRates(**vars(summed(found[:, :-1], truth)), coverage=found[:, -1].mean())


def row(folds: int, top: float, share: float, k: int, deviation: float, studies: int, seed: int) -> str:
    worst = rates(accuracies(k, MARGIN, top), deviation / 100, share, studies, folds, seed)
    equal = rates(accuracies(k, 0.0, top), deviation / 100, share, studies // 4, folds, seed + 1)
    cells = [str(folds), f"{100 * top:g} %", f"{share:g}", str(k), f"{deviation:g}"]
    cells += [f"{100 * x:.1f} %" for x in (worst.wrong, worst.wrongly_worse, worst.coverage)]
    cells += [f"{100 * equal.undecided:.0f} %", f"{100 * equal.named:.0f} %", f"{equal.seeds:.0f}"]
    text = f"| {' | '.join(cells)} | {f'{100 * equal.settled:.0f} %' if equal.named else '–'} |"
    print(text, flush=True)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--studies", type=int, default=2000)
    options = parser.parse_args()
    cases = [
        (folds, top, share, 2, 1.0) for folds in (3, 5, 10) for top in (0.8, TOP) for share in (0.0, 0.2, 0.35, 0.5)
    ]
    cases += [
        (folds, TOP, share, 2, deviation) for folds in (5, 10) for deviation in (0.05, 0.3) for share in (0.2, 0.35)
    ]
    cases += [(folds, TOP, 0.35, 3, 0.6) for folds in (3, 5, 10)]
    lines = [row(*case, options.studies, 2 * i) for i, case in enumerate(cases)]
    text = [
        "# Error rates of verdicts with folds",
        (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].partition(" Writes")[0].strip(),
        "“Best” is the accuracy of the best variant, and “deviation” the standard deviation of a model's true accuracy "
        "between runs. “Wrongly within” and “wrongly worse” are shares of studies, over both looks, whose other "
        "variants all lose exactly one point, the margin, so that either verdict is wrong. Each should be at most 5 %. "
        "“Coverage” is that of the 95 % interval of a difference at the first look. The other columns are of equal "
        "variants: those undecided at first, the share for which a number of seeds is named, its median, and the share "
        "that is resolved with it.",
        "\n".join([f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD), *lines]),
        f"`python benchmarks/folds.py`, {options.studies:,} studies per row, a quarter of that with equal variants. "
        f"The standard error of 5 % is {100 * np.sqrt(0.05 * 0.95 / options.studies):.1f} points. Commit {commit()}.",
    ]
    (options.out / "folds.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
