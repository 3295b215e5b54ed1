"""Whether ending unpromising variants after the first seed keeps the report's verdicts honest: simulated studies.

    python benchmarks/halving.py --out docs/benchmarks      # about five minutes on one core

A budget pays for a number of runs. With equal time every variant gets the same number of seeds. With successive halving
all get one seed, then the more accurate half (and softmax, the reference) share the rest of the budget. The verdicts
are those of the report, from all runs that there are. A verdict that a variant loses less than the margin, one point,
is wrong if it truly loses a point or more; the report allows that in 5 % of studies. Three analyses of halving:

- `all seeds`: the first seed, by which variants were selected, counts like the others;
- `fresh seeds`: it is left out of the verdicts, which pays for a run of each variant and uses none of them;
- `equal time`: the plan as it is.

Reported besides: how often a variant that is truly within the margin of the best is shown to be, and how often the
truly best of the others was ended after its first seed. Writes halving.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from decisions import World

from linvit.records import commit
from linvit.report.statistics import ENOUGH, MARGIN, judge

DEVIATION, IMAGES = 0.007, 5000  # of an accuracy between seeds, as plans assume; test images
WORLDS = {  # name → accuracies, the first that of softmax
    "all others lose 1 point": (0.90, 0.89, 0.89, 0.89, 0.89, 0.89),
    "one loses 1 point, the rest 5": (0.90, 0.89, 0.85, 0.85, 0.85, 0.85),
    "one is equal, the rest lose 5": (0.90, 0.90, 0.85, 0.85, 0.85, 0.85),
    "one is equal, one loses 1, the rest 2": (0.90, 0.90, 0.89, 0.88, 0.88, 0.88),
}


def seeds_of(way: str, first: np.ndarray, runs: int) -> np.ndarray:
    """How many seeds each variant has in the end, the first included; `first`: accuracies with it."""
    count = len(first)
    if way == "equal time":
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
    skipped = 1 if way == "fresh seeds" else 0
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
    parser.add_argument("--studies", type=int, default=400)
    options = parser.parse_args()
    lines = [
        row(name, truth, way, runs, options.studies)
        for name, truth in WORLDS.items()
        for runs in (len(truth) * ENOUGH, len(truth) * 5)
        for way in ("equal time", "all seeds", "fresh seeds")
    ]
    head = ["accuracies", "runs", "analysis", "wrongly “within”", "rightly “within”", "best other ended early"]
    text = [
        "# Ending unpromising variants after the first seed",
        "",
        f"`python benchmarks/halving.py --studies {options.studies}` at commit {commit()}: simulated studies of six "
        f"variants with a deviation of {100 * DEVIATION:g} points between seeds and {IMAGES:,} test images, as plans "
        "assume. Read benchmarks/halving.py for the three analyses.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *lines,
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "halving.md").write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
