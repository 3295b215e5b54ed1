"""Overhead of a training step: reading, augmenting, logging and saving, relative to the model's own step.

    python benchmarks/training.py --out docs/benchmarks      # about three minutes on two cores

Inside one real training, groups of its steps alternate with groups of steps of a twin model on one fixed batch. The
ratio of the two speeds is reported per pair of groups, and so is the share of a step that augmentation takes. Writes
training.md.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from linvit import data
from linvit.measure.provenance import cpu_name
from linvit.measure.race import quartiles, ratios, timed
from linvit.models import VisionTransformer
from linvit.pipeline.design import Designer
from linvit.records import commit
from linvit.schemas.study import Variant
from linvit.training.events import Event, Stepped
from linvit.training.optimizers import make_optimizer
from linvit.training.run import run

CASES = {  # name → data set, options over its defaults
    "digits": ("digits", {}),
    "mnist": ("mnist", {}),
    "cifar10": ("cifar10", {}),
    "cifar10, pure patches": ("cifar10", {"size": "tiny"}),
}
GROUP = 3  # steps
CPU = torch.device("cpu")


class Twin:
    """The training's callback: after each group of its steps, as many of a twin on one fixed batch."""

    def __init__(self, experiment, dataset) -> None:
        self.recipe, config = experiment.recipe, experiment.model
        self.model = VisionTransformer(config)
        self.optimizer = make_optimizer(self.recipe.model_copy(update={"lr": 1e-12}), self.model)
        images, labels = dataset.train.batch(slice(0, experiment.length(len(dataset.train)).batch))
        augment = dataset.augment(**self.recipe.augmentation())
        self.x, self.y = augment(images, labels, torch.arange(len(labels)), 0, 0)
        self.augment = lambda: augment(images, labels, torch.arange(len(labels)), 0, 0)
        self.mine: list[float] = []
        self.theirs: list[float] = []
        self.augmenting: list[float] = []
        self.steps, self.spent, self.start = 0, 0.0, time.perf_counter()

    def step(self) -> None:
        loss = F.cross_entropy(self.model(self.x), self.y, label_smoothing=self.recipe.label_smoothing)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self.optimizer.step()

    def __call__(self, event: Event) -> None:
        now = time.perf_counter()
        if type(event) is Stepped:  # an epoch's end validates: that is no step
            self.spent, self.steps = self.spent + now - self.start, self.steps + 1
        if self.steps == GROUP:
            self.mine.append(timed(self.step, GROUP, CPU)["wall"])
            self.theirs.append(self.spent / GROUP)
            self.augmenting.append(timed(self.augment, GROUP, CPU)["wall"])
            self.steps, self.spent = 0, 0.0
        self.start = time.perf_counter()


def measure(name: str, options: dict, seconds: float) -> str:
    dataset = data.load_data(name)
    designer = Designer(dataset, None, 0, options | {"steps": 100_000}, match=False)
    experiment = designer.experiment(Variant(attention="performer-relu:m=32"))
    twin, end = Twin(experiment, dataset), time.monotonic() + seconds

    def watch(event: Event) -> None:
        twin(event)
        if time.monotonic() > end:
            raise TimeoutError

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(TimeoutError):
        run(experiment, dataset, Path(folder) / "run", device=CPU, listeners=[watch])
    mine, theirs, augmenting = twin.mine[1:], twin.theirs[1:], twin.augmenting[1:]  # the first group warms up
    low, middle, high = quartiles(ratios(mine, theirs))
    share = statistics.median(ratios(augmenting, theirs))
    speed = experiment.recipe.batch_size / statistics.median(theirs)
    return f"{speed:,.0f} | {middle:.3f} ({low:.3f}–{high:.3f}) | {share:.1%} | {len(mine)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--seconds", type=float, default=40, help="for each case")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for case, (name, options) in CASES.items():
        rows.append(f"| {case} | {measure(name, options, args.seconds)} |")
        print(rows[-1], flush=True)
    text = f"""# Overhead of a training step

Measured on {cpu_name()}, {args.threads} threads, torch {torch.__version__}, commit {commit()}, by
`python benchmarks/training.py --threads {args.threads} --seconds {args.seconds:g}`.
Groups of {GROUP} steps of a real training alternate with groups of steps of the same model and optimizer on one fixed
batch; medians (quartiles) over pairs of groups. Checkpoints are included, validation is not.

| training | images/s | relative to the fixed batch (goal ≥ 0.95) | augmentation, share of a step (goal < 5 %) | pairs |
|---|---|---|---|---|
"""
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "training.md").write_text(text + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
