"""Speed by image size: DeiT-Tiny of transformers, with SDPA and with linear attention.

    python benchmarks/pixels.py --out docs/benchmarks      # two minutes on two cores

One image at a time, no gradients, all calls of a size interleaved in one race (`linvit.measure.race`). The weights are
random, which no speed depends on; the linear models are made by `linvit.linearize`. Writes pixels.md.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import torch
import transformers

import linvit
from linvit.measure.provenance import cpu_name
from linvit.measure.race import quartiles, race
from linvit.records import commit

SIZES = (224, 512, 1024)
GOALS = {512: 1.5, 1024: 3.5}
ATTENTIONS = ("linformer:k=32", "linformer:k=64", "performer-relu:m=64", "performer-exp:m=64", "uniform")
SDPA = "softmax (SDPA)"


def deit_tiny(size: int) -> torch.nn.Module:
    config = transformers.ViTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768, image_size=size)
    config.num_labels = 1000
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config).eval()
    assert model.config._attn_implementation == "sdpa"
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    lines = [
        "# Speed by image size",
        "",
        f"Measured on {cpu_name()}, {torch.get_num_threads()} threads, float32, torch {torch.__version__},",
        f"transformers {transformers.__version__}, commit {commit()}. Made by `python benchmarks/pixels.py`.",
        "",
        "DeiT-Tiny as a `ViTForImageClassification`, one image at a time, with all 12 layers linear or none; wall",
        f"time, interleaved. × SDPA: times as fast as with SDPA; median (quartiles) of {asked.rounds} rounds.",
        "",
        "| pixels | tokens | attention | ms | × SDPA | goal |",
        "|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
        models = {SDPA: deit_tiny(size)} | {spec: linvit.linearize(deit_tiny(size), spec)[0] for spec in ATTENTIONS}
        calls = {name: torch.inference_mode()(functools.partial(model, image)) for name, model in models.items()}
        times = race(calls, device=torch.device("cpu"), rounds=asked.rounds)
        best = max(quartiles(times.ratios(SDPA, name, by="wall"))[1] for name in ATTENTIONS if name != "uniform")
        for name in calls:
            low, middle, high = quartiles(times.ratios(SDPA, name, by="wall"))
            ms, first = 1e3 * quartiles(times.of(name, by="wall"))[1], name == SDPA
            goal = f"≥ {GOALS[size]}×, best {best:.2f}×" if first and size in GOALS else ""
            tokens = (size // 16) ** 2 + 1
            lines.append(f"| {size} | {tokens:,} | {name} | {ms:.0f} | {middle:.2f} ({low:.2f}–{high:.2f}) | {goal} |")
            print(lines[-1], flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "pixels.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
