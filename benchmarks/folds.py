"""How often the report's verdicts on a study with folds are wrong: simulated studies.

    python benchmarks/folds.py --out docs/benchmarks      # about 2 minutes on one core

A study has k variants and one seed of five folds of 1,797 images, each held out once. Images and variants are those of
`decisions.py`, with the best right on 98.5 %; u_is becomes √ρ·u_i + √(1 − ρ)·u_isf: what the models of all folds share,
since they were trained on mostly the same images, and what each model has for itself. Nadeau and Bengio take ρ to be
0.2 for five folds. If some variants are undecided and the report names a number of seeds, the study is run with that
number, and looked at again. Writes folds.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from decisions import LOSSES, Rates, World, accuracies, head, line, summed, wrongly
from scipy.special import ndtr

from linvit.records import commit
from linvit.report.statistics import judge

FOLDS, IMAGES, TOP = 5, 1797, 0.985


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


def looks(world: FoldedWorld) -> tuple[bool, bool, int, int, int, int]:
    """As `looks`; the number is of seeds."""
    names = [str(i) for i in range(len(world.truth))]
    resolution = world.folds / world.images
    first = world.train_until(1).look([], 1, resolution, world.folds)
    undecided = [name for name in names if first.of[name].undecided]
    runs, who, _ = first.settle(undecided)
    wrong = wrongly(world, first)
    if not undecided or not np.isfinite(runs):
        return *wrong, len(undecided), 0, 0, 0
    seeds = int(np.ceil(runs / world.folds))
    second = world.train_until(seeds).look(who, 1, resolution, world.folds)
    settled = sum(not second.of[name].undecided for name in undecided)
    return *(wrong | wrongly(world, second)), len(undecided), len(undecided), settled, seeds


def rates(truth: Sequence[float], deviation: float, share: float, studies: int, seed=0) -> Rates:
    rng = np.random.default_rng(seed)
    worlds = (FoldedWorld(truth, deviation, IMAGES, rng, FOLDS, share) for _ in range(studies))
    return summed(np.array([looks(world) for world in worlds], dtype=float), truth)


def row(k: int, deviation: float, share: float, studies: int) -> str:
    losses = {loss: rates(accuracies(k, loss, TOP), deviation / 100, share, studies) for loss in LOSSES}
    return line([f"{share:g}", str(k), str(deviation)], losses, studies)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--studies", type=int, default=2000)
    options = parser.parse_args()
    lines = [
        row(k, deviation, share, options.studies)
        for k in (2, 3)
        for deviation in (0.05, 0.3, 0.6, 1.0)
        for share in (0.0, 0.2)
    ]
    text = [
        "# Error rates of verdicts with folds",
        (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].replace(" Writes folds.md.", "").strip(),
        "“Deviation” is that of a model's true accuracy between runs. “Wrongly within” is of studies whose other "
        "variants all lose exactly one point, the margin: the worst case. It may be 5 %, both looks together.",
        "\n".join([*head("ρ"), *lines]),
        f"`python benchmarks/folds.py`, {options.studies:,} studies in a row; ±: a standard error; linvit {commit()}.",
    ]
    (options.out / "folds.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
