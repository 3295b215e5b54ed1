"""Two-scale attention in place of softmax in a trained model: what it costs in accuracy, and how fast it is.

    python benchmarks/twoscale.py accuracy --model deit-tiny --out docs/benchmarks             # 15 minutes of one core
    python benchmarks/twoscale.py accuracy --model deit-tiny --size 448 --images 1000 --out docs/benchmarks
    python benchmarks/twoscale.py speed --out docs/benchmarks                                  # some minutes, two cores
    python benchmarks/twoscale.py cells                                                        # a minute, one thread

accuracy: test images of Tiny ImageNet (64 pixels, enlarged), of which the model's head keeps the rows of the classes
that are there; nothing is trained, all layers have the attention. An interrupted call resumes: predictions are kept in
the cache for the commit that made them. speed: DeiT-Tiny's shape with random weights, and the attention alone, each
against PyTorch's fused softmax in one race. Both add to twoscale.json and write twoscale.md from it. cells: the time
beyond that of the scores, for each side of a cell, in keys of fused softmax; the constants of `cell=auto` are chosen
from it.
"""

from __future__ import annotations

import argparse
import io
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
from linvit.data.cache import cache_root
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
BATCH, SAVE_EVERY = 10, 10  # images at once; batches between two savings of the predictions
SPECS = {  # whose accuracy is measured at an image size
    224: [f"twoscale:cell=2{more}" for more in ("", ",far=tangent", ",reach=1")],
    448: [f"twoscale:cell=4{more}" for more in ("", ",far=bands", ",reach=1")],
}
SPEED = ("twoscale",)
SIZES = {224: 8, 448: 4, 672: 2, 1024: 1}  # of images → images at once
TOKENS = {1025: 4, 4097: 1}
DEIT_TINY = {"stem": "patch", "patch_size": 16, "dim": 192, "depth": 12, "heads": 3, "mlp_dim": 768, "pool": "cls"}
Row = dict[str, Any]


class Predictions:
    """The classes that each attention gives to each image, -1 where it has not seen it yet. They are stored while a
    pass goes on, so that an interrupted one resumes."""

    def __init__(self, path: Path, made_by: str, count: int):
        self.path, self.made_by, self.count, self.of = path, made_by, count, {}
        if path.exists() and "+" not in made_by:  # of a commit: changed files may give other predictions
            with np.load(path, allow_pickle=False) as stored:
                if str(stored["made_by"]) == made_by:
                    self.of = {name: stored[name] for name in stored.files if name != "made_by"}

    def __getitem__(self, spec: str) -> np.ndarray:
        return self.of.setdefault(spec, np.full(self.count, -1, np.int64))

    def save(self) -> None:
        content = io.BytesIO()
        np.savez(content, made_by=np.array(self.made_by), **self.of)
        write_atomically(self.path, content.getvalue())

    @torch.inference_mode()
    def complete(self, models: dict[str, VisionTransformer], data: Dataset, chosen: np.ndarray) -> None:
        """One pass over the test images `chosen`, enlarged to the models' size batch by batch."""
        for start in range(0, self.count, BATCH):
            part = slice(start, start + BATCH)
            left = [model for spec, model in models.items() if (self[spec][part] < 0).any()]
            if not left:
                continue
            pixels = resized(data.test.batch(chosen[part])[0].numpy(), left[0].config.image_size, 3)
            x = normalise(torch.from_numpy(pixels), data.mean, data.std)
            for spec, model in models.items():
                if model in left:
                    self[spec][part] = model(x).argmax(-1).numpy()
            if start // BATCH % SAVE_EVERY == 0:
                self.save()
                print(f"\r{start}/{self.count}", end="", flush=True)
        self.save()


def accuracy(asked: argparse.Namespace) -> list[Row]:
    data, _ = open_data(DATA, root=asked.data_root)
    start = start_from(asked.model)
    teacher = fit_model(stored_of(start), data, asked.size)
    chosen = np.linspace(0, len(data.test) - 1, asked.images).astype(int)
    specs = [BASELINE, *SPECS[asked.size]]
    models = {spec: make_student(teacher, spec, "all", 0).eval() for spec in specs}
    made_by = f"{start.sha256} {data.identity} {commit()} {asked.images}"
    seen = Predictions(cache_root(None) / "benchmarks" / f"twoscale-{asked.size}.npz", made_by, asked.images)
    seen.complete(models, data, chosen)
    right, rows = {spec: seen[spec] == data.test.labels[chosen] for spec in specs}, []
    for spec in specs:
        drop = Drop.between(right[BASELINE], right[spec])
        low, high = drop.interval()
        rows.append(
            {
                "part": f"accuracy at {asked.size} px",
                "spec": spec,
                "keys": keys(models[spec].attentions()[0]),
                "accuracy": float(right[spec].mean()),
                "share": [1 - x / drop.accuracy for x in (drop.value, high, low)],
                "agreement": float((seen[spec] == seen[BASELINE]).mean()),
                "images": asked.images,
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
        made: dict[str, Any] = {spec: build_attention(spec, site) for spec in specs}
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
    parser.add_argument("--size", type=int, default=224, choices=SPECS)
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
