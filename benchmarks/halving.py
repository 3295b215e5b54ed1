"""Whether ending unpromising variants after the first seed keeps the report's verdicts honest: simulated studies.

    python benchmarks/halving.py --out docs/benchmarks      # about half a minute on one core

A budget pays for a number of runs. With equal time every variant gets the same number of seeds. With successive
halving all get one seed, then softmax, the reference, and the more accurate half of the others share the rest. The
verdicts are the report's. A verdict that a variant loses less than the margin, one point, to every other is wrong if it
truly loses a point or more to one. The report allows that in 5 % of studies, over two looks. Two analyses of halving:

- `halving, all in the verdict`: an ended variant, with its one seed, may still be better than any other;
- `halving, ended left out`: verdicts are among those that remain, from the seeds after the one that selected them.

Reported besides: how often the best of the others is shown to be within the margin where it truly is, and how often it
was ended after its first seed. Writes halving.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from decisions import World

from linvit.records import commit
from linvit.report.statistics import MARGIN, judge

DEVIATION, IMAGES = 0.007, 5000  # of an accuracy between seeds, as plans assume; test images
WORLDS = {  # name → accuracies, the first that of softmax
    "all others lose 1 point": (0.90, 0.89, 0.89, 0.89, 0.89, 0.89),
    "one is equal, the rest lose 5": (0.90, 0.90, 0.85, 0.85, 0.85, 0.85),
    "another is 1 point better than all": (0.89, 0.90, 0.89, 0.89, 0.89, 0.89),
}
EQUAL, ALL, LEFT_OUT = "equal time", "halving, all in the verdict", "halving, ended left out"
SEEDS = 5  # of each variant that the budget pays for


def seeds_of(way: str, first: np.ndarray, runs: int) -> np.ndarray:
    """How many seeds each variant has in the end, the first included; `first`: accuracies with it."""
    count = len(first)
    if way == EQUAL:
        return np.full(count, runs // count)
    others = 1 + np.argsort(-first[1:], kind="stable")
    kept = [0, *others[: max(1, (count - 1) // 2)]]
    found = np.ones(count, dtype=int)
    found[kept] = 1 + (runs - count) // len(kept)
    return found


def study(world: World, way: str, runs: int) -> tuple[bool, bool, bool]:
    """Whether a verdict is wrong; whether the best of the others, truly within the margin, is shown to be; whether it
    was ended after one seed."""
    loss = world.truth.max() - world.truth
    scores, right = world.train(runs)
    assert right is not None
    counts = seeds_of(way, scores[:, 0], runs)
    skipped = 1 if way == LEFT_OUT else 0
    names = [str(i) for i in range(len(loss))]
    chosen = {name: range(skipped, counts[i]) for i, name in enumerate(names) if counts[i] > skipped}
    found = judge(
        {name: {s: scores[int(name), s] for s in seeds} for name, seeds in chosen.items()},
        {name: {s: right[int(name), s] for s in seeds} for name, seeds in chosen.items()},
    )
    shown = {name: found.of[name].shown for name in chosen}
    best = names[1 + int(np.argmin(loss[1:]))]
    wrong = any(shown[name] and loss[int(name)] >= MARGIN - 1e-12 for name in chosen)
    return wrong, bool(shown.get(best)), bool(counts[int(best)] == 1)


def row(name: str, truth: Sequence[float], way: str, runs: int, studies: int) -> str:
    rng = np.random.default_rng(0)
    found = np.array([study(World(truth, DEVIATION, IMAGES, rng), way, runs) for _ in range(studies)], dtype=float)
    wrong, shown, ended = 100 * found.mean(axis=0)
    error = 100 * np.sqrt(max(found[:, 0].mean(), 1 / studies) / studies)
    able = min(np.delete(max(truth) - np.array(truth), 0)) < MARGIN - 1e-12
    cells = (name, str(runs), way, f"{wrong:.1f} ± {error:.1f} %", f"{shown:.0f} %" if able else "–", f"{ended:.0f} %")
    line = f"| {' | '.join(cells)} |"
    print(line, flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--studies", type=int, default=200)
    options = parser.parse_args()
    lines = [
        row(name, truth, way, SEEDS * len(truth), options.studies)
        for name, truth in WORLDS.items()
        for way in (EQUAL, ALL, LEFT_OUT)
    ]
    head = ["accuracies", "runs", "analysis", "wrongly “within”", "rightly “within”", "best other ended early"]
    text = [
        "# Ending unpromising variants after the first seed",
        "",
        f"`python benchmarks/halving.py --studies {options.studies}` at commit {commit()}: simulated studies of six "
        f"variants with a deviation of {100 * DEVIATION:g} points between seeds and {IMAGES:,} test images, as plans "
        "assume. Read benchmarks/halving.py for the analyses.",
        "",
        "All variants of a comparison therefore get equal time. With halving either nothing can be shown, or verdicts "
        "are wrong far more often than the report allows: the best variant may be among those that were ended.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *lines,
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "halving.md").write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
