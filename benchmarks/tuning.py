"""Whether a short search beats the defaults: tune, then defaults and winners with fresh seeds, on validation images.

    python benchmarks/tuning.py --out docs/benchmarks      # 25 minutes on two cores, and 15 for the fresh seeds

A search flatters its winner: the best of many trials on one seed. So every variant is trained again, with its defaults
and with what was found, on seeds that the search never used, and the two are compared seed by seed. Test images are not
read. Writes tuning.md; what was trained stays under --runs, from which the same command resumes.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from linvit.files import slug
from linvit.measure.provenance import cpu_name
from linvit.metrics import percent
from linvit.pipeline.train import train
from linvit.records import Records, commit
from linvit.schemas.search import Best, Search
from linvit.tuning import tune

ATTENTIONS = ["softmax", "performer-exp:m=32", "performer-relu:m=32"]
DATA: dict[str, Any] = {"data": "mnist", "limit": 6000}
EPOCHS, TRIALS, SEEDS = 4, 14, (1, 2, 3, 4, 5)


def accuracy(spec: str, seed: int, out: str, options: dict[str, Any]) -> float:
    """On the validation images, of the model chosen on them; one thread."""
    torch.set_num_threads(1)
    trained = train(**DATA, attention=spec, seed=seed, test=False, out=out, **options)
    found = trained.value("validation_accuracy")
    assert found is not None, f"{spec} diverged"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark-tuning"))
    asked = parser.parse_args()
    search = asked.runs / "search"
    tune(**DATA, attentions=ATTENTIONS, trials=TRIALS, epochs=EPOCHS, out=search, log=print)
    trials = [r for r in Records(search / "records.jsonl") if r.metric == "trial_accuracy"]
    took = max(r.time for r in trials) - Search.read(search / "search.json").started
    best = Best.read(search / "best.toml")
    ends = Counter(str(r.tags["how"]) for r in trials)
    counts = ", ".join(f"{count} {how}" for how, count in ends.most_common())

    todo: dict[tuple[str, str, int], tuple[str, int, str, dict[str, Any]]] = {}
    for spec in ATTENTIONS:
        winner = best.winner_of(spec)
        found = winner.attention, {"epochs": best.epochs, **winner.options}
        for kind, (attention, options) in {"defaults": (spec, {"epochs": EPOCHS}), "found": found}.items():
            for seed in SEEDS:
                out = asked.runs / f"{kind}-{slug(spec)}-seed{seed}"
                todo[spec, kind, seed] = attention, seed, str(out), options
    with ProcessPoolExecutor(2) as pool:
        scores = dict(zip(todo, pool.map(accuracy, *zip(*todo.values(), strict=True)), strict=True))

    lines = [
        "# A short search compared with the defaults",
        "",
        f"Measured on {cpu_name()}, two trainings at a time, one thread each, torch {torch.__version__}, commit",
        f"{commit()}. Made by `python benchmarks/tuning.py`.",
        "",
        f"MNIST, {DATA['limit']:,} training images, {EPOCHS} epochs; space `default`, TPE, median pruning, {TRIALS}",
        f"trials of each variant: {len(trials)} in all ({counts}) in {took / 60:.1f} minutes. Then {len(SEEDS)} new",
        f"seeds; accuracy on {trials[0].n:,} validation images, and the paired difference with its 95 % interval (t).",
        "",
        "| variant | best trial | defaults | best options | difference, points |",
        "|---|---|---|---|---|",
    ]
    for spec in ATTENTIONS:
        usual, tuned = ([scores[spec, kind, seed] for seed in SEEDS] for kind in ("defaults", "found"))
        gained = [100 * (b - a) for a, b in zip(usual, tuned, strict=True)]
        half = float(stats.t.ppf(0.975, len(SEEDS) - 1)) * statistics.stdev(gained) / len(SEEDS) ** 0.5
        mean = statistics.mean(gained)
        shown = [percent(x) for x in (best.winner_of(spec).validation_accuracy, *map(statistics.mean, (usual, tuned)))]
        shown.append(f"{mean:+.2f} ({mean - half:+.2f} … {mean + half:+.2f})")
        lines.append(f"| {spec} | " + " | ".join(shown) + " |")
    lines += ["", "Best options:", ""]
    for winner in best.winners:
        options = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in winner.options.items())
        lines.append(f"- `{winner.variant}`: {options}")
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "tuning.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
