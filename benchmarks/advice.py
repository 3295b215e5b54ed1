"""Accuracy of `linvit advise` for shapes that it has not measured: its forecasts and the times of whole models.

    python benchmarks/advice.py --out docs/benchmarks      # at most 15 minutes on two cores, which must be quiet

Draws vision transformers at random (seeded): image and patch size, heads, head_dim, depth, MLP, batch, inference or
training, and a linear attention with its m or k. The forecast knows attention layers at the points of
`linvit.measure.advice` alone; then the model is timed with softmax, with the linear attention and with `identity`,
interleaved. A forecast is correct if it has the right sign; differences below 5 % are ties and do not count. It ends
after `--decided` shapes that are not ties. Writes advice.md.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from linvit.measure.advice import Forecast, forecast, workloads
from linvit.measure.models import model_calls
from linvit.measure.provenance import cpu_name
from linvit.measure.race import quartiles, race
from linvit.models import ModelConfig, estimate, model_config
from linvit.records import commit

DECIDED, TIE, GOAL = 40, 1.05, 0.95
KINDS = {"performer-relu": "m", "performer-exp": "m", "performer-theta": "m", "performer-hyp": "m", "linformer": "k"}
TASKS = {"inference": "inference", "training": "train_step"}  # ours, and the race's
MACS = {"inference": 8e9, "training": 4e9}  # of a batch with softmax: about a second
TOKENS = 49, 4096
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    config: ModelConfig  # with softmax
    spec: str
    task: str
    batch: int

    @property
    def words(self) -> str:
        c, site = self.config, self.config.site
        return (
            f"{c.image_size} px / {c.patch_size} | {site.tokens:,} | {c.heads} × {site.head_dim} | {c.depth} | "
            f"{self.task}, {self.batch} | {self.spec}"
        )


def cases(seed: int) -> Iterator[Case]:
    """Without end; even over the kinds of attention and the logarithm of the number of tokens."""
    draw = random.Random(seed)
    while True:
        low, high = (n**0.5 for n in TOKENS)
        side, patch = round(low * (high / low) ** draw.random()), draw.choice((2, 4, 8, 14, 16))
        heads, head_dim = draw.choice((2, 3, 4, 6, 8, 12)), draw.choice((16, 24, 32, 48, 64))
        dim, task, batch = heads * head_dim, draw.choice([*TASKS]), 2 ** draw.randrange(7)
        kind = draw.choice([*KINDS])
        config = model_config(
            image_size=side * patch,
            patch_size=patch,
            dim=dim,
            heads=heads,
            depth=draw.choice((2, 3, 4, 6, 8, 12)),
            mlp_dim=draw.choice((2, 4)) * dim,
            pool=draw.choice(("mean", "cls")),
        )
        size = draw.choice((16, 32, 64, 128) if KINDS[kind] == "m" else (16, 32, 48))
        if batch * estimate(config).macs <= MACS[task]:
            yield Case(config, f"{kind}:{KINDS[kind]}={size}", task, batch)


def said(case: Case, known: Forecast, without: float) -> float:
    """How many times faster than with softmax, where the model with `identity` takes so many seconds."""
    load, depth = workloads(case.config, case.batch)[case.task], case.config.depth
    whole = {
        spec: without + depth * (known.seconds(spec, load) - known.seconds("identity", load))
        for spec in ("softmax", case.spec)
    }
    return whole["softmax"] / whole[case.spec]


def measured(case: Case, rounds: int) -> tuple[list[float], float]:
    """Quartiles of how many times faster it is, and seconds with `identity`."""
    specs = ("softmax", case.spec, "identity")
    configs = {spec: case.config.model_copy(update={"attention": spec}) for spec in specs}
    calls = {spec: model_calls(config, CPU, case.batch)[TASKS[case.task]] for spec, config in configs.items()}
    times = race(calls, device=CPU, rounds=rounds)
    return quartiles(times.ratios("softmax", case.spec, times.clock)), quartiles(times.of("identity"))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--decided", type=int, default=DECIDED, help="shapes that are not ties")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=14.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    begun = time.monotonic()
    known = forecast(KINDS, device=CPU, fresh=True)
    points, spent = len(known.records) // (2 * (2 + len(KINDS))), time.monotonic() - begun
    rows, right, ties = [], 0, 0
    for case in cases(asked.seed):
        if len(rows) - ties >= asked.decided or time.monotonic() - begun > 60 * asked.minutes:
            break
        (low, truth, high), without = measured(case, asked.rounds)
        guess = said(case, known, without)
        tie = max(truth, 1 / truth) < TIE
        correct = (guess > 1) == (truth > 1)
        ties, right = ties + tie, right + (correct and not tie)
        word = "tie" if tie else "correct" if correct else "**wrong**"
        rows.append(f"| {case.words} | {guess:.2f} | {truth:.2f} ({low:.2f}–{high:.2f}) | {word} |")
        print(rows[-1], flush=True)
    decided = len(rows) - ties
    share = right / max(1, decided)
    lines = [
        "# Accuracy of `linvit advise`",
        "",
        f"**{right} of {decided} models ({share:.0%}; goal: {GOAL:.0%})** were classified correctly as faster or "
        f"slower than with softmax. {ties} more were ties: times within {TIE - 1:.0%}.",
        "",
        f"Measured on {cpu_name()}, {torch.get_num_threads()} threads, float32, torch {torch.__version__}, commit "
        f"{commit()}, in {(time.monotonic() - begun) / 60:.0f} minutes. Made by `python benchmarks/advice.py --seed "
        f"{asked.seed}`.",
        "",
        f"The forecast is a fit to {points} points measured in {spent:.0f} s (median leave-one-out error: "
        f"{known.error:.0%}). Whole vision transformers were then drawn at random and timed with softmax and with the "
        "linear attention, interleaved. *Forecast* and *measured* are times as fast as with softmax (median and "
        f"quartiles of {asked.rounds} rounds).",
        "",
        "| image / patch | tokens | heads × head_dim | depth | task, batch | attention | forecast | measured | |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "advice.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(lines[2])


if __name__ == "__main__":
    main()
