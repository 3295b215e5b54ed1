"""Which attentions learn to match tokens by content: each is trained on images that require it.

    python benchmarks/every_attention.py --out docs/benchmarks      # about fifteen minutes on one core

A picture is a grid of 3 × 3 tokens: each has a random pattern and one of four marks, two tokens each, but for one that
has no mark and repeats another's pattern. The class is the mark of that twin. A token alone knows nothing of it; every
picture has the same marks and other patterns, far more than a mean over tokens has room for. So `identity` and
`uniform`, the controls, can do little but guess. Writes every_attention.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import linvit
from linvit.attention import attention_names, attention_options
from linvit.data import DATASETS, Arrays
from linvit.data.sources import stack
from linvit.measure.provenance import cpu_name
from linvit.records import commit

SIDE, PATCH, MARKS = 3, 4, 4  # tokens across a picture, pixels across a token, marks
GOAL = 0.5  # chance is 1 / MARKS
CONTROLS = ("identity", "uniform")
MODEL = {"size": "nano", "depth": 2, "patch_size": PATCH, "pad_crop": 0, "batch_size": 64, "lr": 5e-3}


@DATASETS.register("twins")
def twins(root: Path, *, images: int = 20_000) -> Arrays:
    """Which mark has the token whose pattern is that of the unmarked one?"""
    source = np.random.Generator(np.random.Philox(key=0))

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = SIDE**2
        pictures = np.zeros((count, tokens, PATCH, PATCH), np.uint8)
        pictures[:, :, :-1] = source.integers(0, 2, (count, tokens, PATCH - 1, PATCH))
        pictures[:, 0] = pictures[:, 1]  # the twins, still in the first places
        marks = source.permuted(np.tile(np.arange(tokens - 1) % MARKS, (count, 1)), axis=1)
        pictures[np.arange(count)[:, None], np.arange(1, tokens), -1, marks] = 1
        places = source.permuted(np.tile(np.arange(tokens), (count, 1)), axis=1)
        pictures = np.take_along_axis(pictures, places[:, :, None, None], 1)
        rows = pictures.reshape(count, SIDE, SIDE, PATCH, PATCH).transpose(0, 1, 3, 2, 4)
        return 255 * rows.reshape(count, 1, SIDE * PATCH, SIDE * PATCH), marks[:, 0]

    return stack({"train": draw(images), "test": draw(2000)}, [f"mark {i}" for i in range(MARKS)])


def accuracy(spec: str, images: int, epochs: float, seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        trained = linvit.train(f"twins:images={images}", attention=spec, epochs=epochs, seed=seed, out=out, **MODEL)
    return trained.test_accuracy or 0.0  # nothing, if it diverged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("-a", "--attention", action="append", help="only these")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    specs = args.attention or [f"{n}:m=32" if "m" in attention_options(n) else n for n in attention_names()]
    found: dict[str, list[float]] = {}
    for spec in dict.fromkeys([*CONTROLS, *specs]):
        found[spec] = sorted(accuracy(spec, args.images, args.epochs, seed) for seed in range(args.seeds))
        print(f"{spec}: {', '.join(f'{value:.2%}' for value in found[spec])}", flush=True)
    controls = max(found[name][-1] for name in CONTROLS)
    rows = sorted(((values[0], name) for name, values in found.items() if name not in CONTROLS), reverse=True)
    lines = [f"| `{name}` | {worst:.1%} | {'yes' if worst >= GOAL else '**no**'} |" for worst, name in rows]
    lines += [f"| `{name}` (control) | {found[name][-1]:.1%} | |" for name in CONTROLS]
    separates = f"they reach at most {controls:.1%}" + ("" if controls < GOAL else ": **the goal proves nothing**")
    text = f"""# Which attentions learn to match tokens by content

Images of {SIDE} × {SIDE} tokens with random patterns. One token has no mark and repeats the pattern of another, whose
mark is the class, so tokens must be matched by content. Chance is {1 / MARKS:.0%}, the goal {GOAL:.0%}. The controls
cannot solve the task, since `identity` mixes no tokens and `uniform` ignores their content: {separates}.
Of the other attentions, {sum(worst >= GOAL for worst, _ in rows)} of {len(rows)} reach the goal.

Test accuracy after {args.epochs:g} epochs on {args.images:,} images; the lowest of {args.seeds} seed(s), for controls
the highest; depth {MODEL["depth"]}, size {MODEL["size"]}. Made by
`{" ".join(["python benchmarks/every_attention.py", *sys.argv[1:]])}` on
{cpu_name()}, {args.threads} thread(s), commit {commit()}.

| attention | test accuracy | ≥ {GOAL:.0%} |
|---|---|---|
"""
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "every_attention.md").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
