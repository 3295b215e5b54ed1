"""Does every attention learn? Two epochs on 12,000 MNIST images with each, by the data set's own recipe.

    python benchmarks/every_attention.py --out docs/benchmarks      # about twenty minutes on one core

Writes every_attention.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import linvit
from linvit.attention import attention_names, attention_options
from linvit.measure.provenance import cpu_name
from linvit.records import commit

GOAL = 0.93


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--limit", type=int, default=12_000)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for name in attention_names():
        spec = f"{name}:m=32" if "m" in attention_options(name) else name
        found = []
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                trained = linvit.train(
                    args.data, attention=spec, limit=args.limit, epochs=args.epochs, seed=seed, out=Path(folder) / "run"
                )
            found.append(trained.test_accuracy or 0.0)  # nothing, if it diverged
        worst = min(found)
        rows.append((worst, f"| `{spec}` | {worst:.2%} | {'yes' if worst >= GOAL else '**no**'} |"))
        print(rows[-1][1], flush=True)
    text = f"""# Does every attention learn?

Test accuracy after {args.epochs:g} epochs on {args.limit:,} images of {args.data} with the data set's own recipe, the
lowest of {args.seeds} seed(s); goal {GOAL:.0%}. `identity` mixes no tokens and `uniform` does not look at them: what
they reach, stem and MLPs reach without attention. Made by
`python benchmarks/every_attention.py --seeds {args.seeds}` on {cpu_name()},
{args.threads} thread(s), commit {commit()}.

| attention | test accuracy | ≥ {GOAL:.0%} |
|---|---|---|
"""
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [line for _, line in sorted(rows, reverse=True)]
    (args.out / "every_attention.md").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
