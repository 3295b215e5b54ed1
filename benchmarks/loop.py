"""What a training step on photos costs around its forward and backward pass: augmentation, the optimizer, bookkeeping.

    python benchmarks/loop.py --out docs/benchmarks                            # about two minutes on one quiet core
    python benchmarks/loop.py --against ../old --out docs/benchmarks           # and the same of another checkout

Groups of real steps alternate with groups of forward and backward passes of the same model on one fixed batch. Overhead
is the time of the former over that of the latter, less one, in each pair of groups. With --against both checkouts do a
group in turn, each in a process of its own, so that whatever else the machine does hits both. One thread; CPU time,
which other programs do not stretch, though they may slow memory down. Writes loop.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

CASES = {  # name → images, options
    "64 px, batch 64": (64, {"batch_size": 64}),
    "64 px, batch 128": (64, {"batch_size": 128}),
    "96 px, batch 64": (96, {"batch_size": 64}),
    "224 px, patches, batch 16": (224, {"stem": "patch", "patch_size": 16, "dim": 192, "depth": 4, "batch_size": 16}),
}
GROUP = 3  # steps
Pair = tuple[float, float]  # CPU seconds of a group of steps, and of as many passes


class Steps:
    """The training of one case, in this process."""

    def __init__(self, case: str, attention: str):
        import torch
        import torch.nn.functional as F

        from linvit import data
        from linvit.machine import keep_freed_memory
        from linvit.pipeline.design import Designer
        from linvit.schemas.study import Variant
        from linvit.training.loop import READ, Training

        keep_freed_memory()
        torch.set_num_threads(1)
        size, options = CASES[case]
        dataset = data.load_data(f"synthetic:classes=20,images=1000,size={size},channels=3")
        designer = Designer(dataset, None, 0, options | {"steps": 10**6}, match=False)
        experiment = designer.experiment(Variant(attention=attention))
        training = self.training = Training(experiment, dataset, torch.device("cpu"), [])
        self.begun = training._begun()
        self.begun.__enter__()  # until the process ends
        self.batches, self.read, self.done = training._batches(), READ, 0
        some = dataset.train.batch(slice(0, training.batch))
        x, y = training.task.augment(*some, torch.arange(training.batch), 0, 0)
        smoothing = experiment.recipe.label_smoothing
        self.loss = lambda: F.cross_entropy(training.model(x), y, label_smoothing=smoothing)

    def step(self) -> None:
        self.training._step(next(self.batches))
        self.done += 1
        if self.done % self.read == 0:
            self.training._read()

    def passes(self) -> None:
        self.training.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()

    def pair(self) -> Pair:
        spent = []
        for call in (self.step, self.passes):
            start = time.process_time()
            for _ in range(GROUP):
                call()
            spent.append(time.process_time() - start)
        return spent[0], spent[1]


def serve(case: str, attention: str) -> None:
    """A pair for each line of input; the first, which warms up, is not counted."""
    steps = Steps(case, attention)
    for _ in sys.stdin:
        print(json.dumps(steps.pair()), flush=True)


class Checkout:
    """A process that imports linvit from this checkout, and runs pairs on demand."""

    def __init__(self, root: Path, case: str, attention: str):
        command = [sys.executable, __file__, "--serve", case, "--attention", attention]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(root / "src")},
        )
        self.pair()

    def pair(self) -> Pair:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        steps, passes = json.loads(self.process.stdout.readline())
        return steps, passes

    def close(self) -> None:
        self.process.communicate()


def measure(roots: dict[str, Path], case: str, attention: str, seconds: float) -> list[str]:
    """A row of the table for each checkout."""
    checkouts = {name: Checkout(root, case, attention) for name, root in roots.items()}
    found: dict[str, list[Pair]] = {name: [] for name in roots}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(found[next(iter(roots))]) < 5:
        for name, checkout in checkouts.items():
            found[name].append(checkout.pair())
    rows = []
    for name, checkout in checkouts.items():
        checkout.close()
        low, middle, high = statistics.quantiles([a / b - 1 for a, b in found[name]], n=4, method="inclusive")
        steps, passes = (statistics.median(pair[i] for pair in found[name]) / GROUP for i in (0, 1))
        rows.append(
            f"| {case} | {name} | {1e3 * steps:.1f} | {1e3 * passes:.1f} | {middle:.1%} ({low:.1%} to {high:.1%}) | "
            f"{len(found[name])} |"
        )
        print(rows[-1], flush=True)
    return rows


def commit_of(root: Path) -> str:
    done = subprocess.run(["git", "-C", root, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or root.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--seconds", type=float, default=30, help="for each case")
    parser.add_argument("--attention", default="softmax")
    parser.add_argument("--serve", metavar="CASE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve, args.attention)
    here = Path(__file__).parents[1]
    roots = {commit_of(root): root for root in [*([args.against] if args.against else []), here]}
    rows = [row for case in CASES for row in measure(roots, case, args.attention, args.seconds)]

    import torch

    from linvit.measure.provenance import cpu_name

    words = f" --against OLD --seconds {args.seconds:g}" if args.against else f" --seconds {args.seconds:g}"
    text = f"""# What a training step on photos costs around forward and backward

Measured on {cpu_name()}, 1 thread, torch {torch.__version__}, by `python benchmarks/loop.py{words}`: CPU time of
{args.attention}, groups of {GROUP} steps alternating with as many forward and backward passes on one fixed batch, and
checkouts with each other; medians (quartiles) over pairs of groups. Reading of validation images and saving are not
part of a step.

| training | commit | step, ms | forward and backward, ms | overhead (goal ≤ 5 %) | pairs |
|---|---|---|---|---|---|
"""
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "loop.md").write_text(text + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
