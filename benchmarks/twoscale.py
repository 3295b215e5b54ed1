"""Two-scale attention in place of softmax in a trained model: what it costs in accuracy, and how fast it is.

    python benchmarks/twoscale.py accuracy --model deit-tiny --out docs/benchmarks             # 15 minutes of one core
    python benchmarks/twoscale.py accuracy --model deit-tiny --size 448 --images 1000 --out docs/benchmarks
    python benchmarks/twoscale.py speed --out docs/benchmarks                                  # some minutes, two cores
    python benchmarks/twoscale.py cells                                                        # a minute, one thread

accuracy: test images of Tiny ImageNet (64 pixels, enlarged), of which the model's head keeps the rows of the classes
that are there; nothing is trained, all layers have the attention. speed: DeiT-Tiny's shape with random weights, and the
attention alone, each against PyTorch's fused softmax in one race. Both write twoscale.md, and what it is made of,
twoscale.json, to which every call adds. cells: the time beyond that of the scores, for each side of a cell, in keys of
fused softmax; the constants of `cell=auto` are chosen from it.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linvit.attention import BASELINE, build_attention
from linvit.conversion.search import Drop
from linvit.conversion.student import make_student
from linvit.conversion.teacher import fit_model
from linvit.data import Dataset, normalise
from linvit.data.decode import resized
from linvit.files import write_atomically
from linvit.measure.models import model_calls
from linvit.measure.provenance import cpu_name
from linvit.measure.race import quartiles, race
from linvit.models import VisionTransformer, model_config
from linvit.records import commit
from linvit.site import Site
from linvit.training.source import open_data
from linvit.training.start import start_from, stored_of

DATA = "tiny-imagenet:names=wnid"
CELLS = {224: 2, 448: 4}  # for accuracy
SPECS = ("twoscale:cell={}", "twoscale:cell={},far=bands", "twoscale:cell={},far=mean", "twoscale:cell={},reach=1")
SPEED = ("twoscale",)
SIZES = {224: 8, 448: 4, 672: 2, 1024: 1}  # of images → images at once
TOKENS = {1025: 4, 4097: 1}
DEIT_TINY = {"stem": "patch", "patch_size": 16, "dim": 192, "depth": 12, "heads": 3, "mlp_dim": 768, "pool": "cls"}
Row = dict[str, Any]


@torch.inference_mode()
def predictions(model: VisionTransformer, data: Dataset, chosen: np.ndarray) -> np.ndarray:
    """Classes of these test images, enlarged to the model's size batch by batch."""
    found = []
    for start in range(0, len(chosen), 10):
        pixels, _ = data.test.batch(chosen[start : start + 10])
        pixels = torch.from_numpy(resized(pixels.numpy(), model.config.image_size, 3))
        found.append(model(normalise(pixels, data.mean, data.std)).argmax(-1).numpy())
        print(f"\r{start}/{len(chosen)}", end="", flush=True)
    return np.concatenate(found)


def accuracy(asked: argparse.Namespace) -> list[Row]:
    data, _ = open_data(DATA, root=asked.data_root)
    teacher = fit_model(stored_of(start_from(asked.model)), data, asked.size)
    chosen = np.linspace(0, len(data.test) - 1, asked.images).astype(int)
    rows, right, baseline = [], {}, np.empty(0)
    for template in (BASELINE, *SPECS):
        spec = template.format(CELLS[asked.size])
        model = make_student(teacher, spec, "all", 0).eval()
        guesses = predictions(model, data, chosen)
        right[spec] = guesses == data.test.labels[chosen]
        baseline = guesses if spec == BASELINE else baseline
        drop, attention = Drop.between(right[BASELINE], right[spec]), model.attentions()[0]
        low, high = drop.interval()
        rows.append(
            {
                "part": f"accuracy at {asked.size} px",
                "spec": spec,
                "keys": keys(attention),
                "accuracy": float(right[spec].mean()),
                "share": [1 - x / drop.accuracy for x in (drop.value, high, low)],
                "agreement": float((guesses == baseline).mean()),
                "images": len(guesses),
            }
        )
        print(f"\r{rows[-1]}")
    return rows


def keys(attention: Any) -> float:
    """Of a query, on average, the prefix included."""
    n, first = attention.site.tokens, attention.site.prefix
    image = attention.cut.keys() if hasattr(attention, "cut") else n - first
    return ((n - first) * (image + first) + first * n) / n


def speed(asked: argparse.Namespace) -> list[Row]:
    rows, cpu = [], torch.device("cpu")
    for size, batch in SIZES.items():
        calls = {}
        for spec in (BASELINE, *SPEED):
            config = model_config(**DEIT_TINY, image_size=size, classes=1000, attention=spec)
            made = model_calls(config, cpu, batch)
            calls |= {(spec, task): made[task] for task in ("inference", "train_step")}
        rows += timed(f"DeiT-Tiny at {size} px, {batch} images", calls, asked.rounds)
    for tokens, batch in TOKENS.items():
        side = round((tokens - 1) ** 0.5)
        site, shape = Site(3, 64, tokens, (side, side), 1), (batch, 3, tokens, 64)
        x = [torch.randn(shape) for _ in "qkv"]
        calls = {}
        for spec in (BASELINE, *SPEED):
            attention = build_attention(spec, site)
            calls[spec, "inference"] = partial(forward, attention, x)
            calls[spec, "train_step"] = partial(both, attention, x)
        rows += timed(f"attention alone, {tokens:,} tokens, {batch} images", calls, asked.rounds)
    return rows


def cells(asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for side in (20, 24, 28, 32, 42, 64):
        site, x = Site(3, 64, side**2 + 1, (side, side), 1), [torch.randn(2, 3, side**2 + 1, 64) for _ in "qkv"]
        specs = [BASELINE, *(f"twoscale:cell={cell}" for cell in range(3, 9))]
        made = {spec: build_attention(spec, site) for spec in specs}
        calls = {(spec, "inference"): partial(forward, attention, x) for spec, attention in made.items()}
        times = race(calls, device=torch.device("cpu"), rounds=asked.rounds)
        for spec in specs[1:]:
            faster = quartiles(times.ratios((BASELINE, "inference"), (spec, "inference"), by="wall"))[1]
            extra = side**2 / faster - made[spec].cut.scores()
            print(f"{side} × {side} tokens, {spec}: {faster:.2f} times as fast, {extra:.0f} keys beyond its scores")


def forward(attention: torch.nn.Module, x: list[torch.Tensor]) -> None:
    with torch.inference_mode():
        attention(*x)


def both(attention: torch.nn.Module, x: list[torch.Tensor]) -> None:
    given = [each.detach().requires_grad_() for each in x]
    out = attention(*given)
    out.backward(out.detach())


def timed(part: str, calls: dict[tuple[str, str], Any], rounds: int) -> list[Row]:
    times, rows = race(calls, device=torch.device("cpu"), rounds=rounds), []
    for spec in SPEED:
        found = {task: quartiles(times.ratios((BASELINE, task), (spec, task), by="wall")) for _, task in calls}
        rows.append({"part": part, "spec": spec, "threads": torch.get_num_threads(), "rounds": rounds, **found})
        print(rows[-1], flush=True)
    return rows


def page(rows: list[Row]) -> str:
    lines = [
        "# Two-scale attention",
        "",
        "Made by `python benchmarks/twoscale.py`, whose docstring describes the measurements.",
        "",
    ]
    lines += ["## Accuracy without training", ""]
    lines += ["| pixels | attention | keys per query | top-1 | relative to softmax (95 %) | agreement | images |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in (row for row in rows if "accuracy" in row):
        middle, low, high = (f"{100 * x:.1f}" for x in row["share"])
        share = "" if row["spec"] == BASELINE else f"{middle} % ({low} to {high})"
        cells = [row["part"].split()[-2], f"`{row['spec']}`", f"{row['keys']:.0f}", f"{100 * row['accuracy']:.1f} %"]
        lines.append(f"| {' | '.join([*cells, share])} | {100 * row['agreement']:.1f} % | {row['images']:,} |")
    lines += ["", "## Speed relative to fused softmax", "", "Median (quartiles) over rounds.", ""]
    lines += ["| what | attention | inference | training step | threads | rounds |", "|---|---|---|---|---|---|"]
    for row in (row for row in rows if "rounds" in row):
        ratios = (f"{row[task][1]:.2f} ({row[task][0]:.2f}–{row[task][2]:.2f})" for task in ("inference", "train_step"))
        cells = [row["part"], f"`{row['spec']}`", *ratios, str(row["threads"]), str(row["rounds"])]
        lines.append(f"| {' | '.join(cells)} |")
    made = sorted({f"{row['cpu']}, torch {row['torch']}, commit {row['commit']}" for row in rows})
    return "\n".join([*lines, "", f"Measured on {'; '.join(made)}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "speed", "cells"])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--model", help="a folder or a name of the hub")
    parser.add_argument("--data-root")
    parser.add_argument("--size", type=int, default=224, choices=CELLS)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    if asked.what == "cells":
        return cells(asked)
    found = {"accuracy": accuracy, "speed": speed}[asked.what](asked)
    where = {"cpu": cpu_name(), "torch": torch.__version__, "commit": commit()}
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "twoscale.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    parts = {row["part"] for row in found}
    rows = [row for row in old if row["part"] not in parts] + [row | where for row in found]
    write_atomically(path, json.dumps(rows, indent=1) + "\n")
    write_atomically(asked.out / "twoscale.md", page(rows))


if __name__ == "__main__":
    main()
