"""Whether conversions keep the allowed drop, and how the greedy search compares with an exhaustive one.

    python benchmarks/drops.py --out docs/benchmarks      # about 25 minutes on two cores; the same call resumes

Ten small softmax ViTs with six layers learn MNIST, each with its own seed. Each is converted with `max_drop`, and
teacher and student are compared on all test images, which no decision has seen. Then each teacher's layers are made
linear without training in all 2^6 ways, on the images that guide the search: how many layers the best of all mixes can
do without, and how many the greedy search's. Writes drops.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from linvit.conversion.images import divide_images
from linvit.conversion.search import Blocks, Mix, MixScore, greedy
from linvit.conversion.student import make_student
from linvit.conversion.teacher import fit_model
from linvit.files import write_atomically
from linvit.pipeline.convert import convert
from linvit.pipeline.train import train
from linvit.records import commit
from linvit.training.checkpoint import load, read_model
from linvit.training.source import open_data

DEPTH, IMAGES, TEACHER = 6, 12_000, {"patch_size": 4, "stem": "patch", "dim": 48, "heads": 3, "mlp_dim": 96}
TO, ALLOWED = "performer-relu:m=32,dwc=3", 0.01
SEARCHED, WITHIN = "linformer:k=16", 0.05  # without training: near enough to softmax for mixes to differ


class Found(NamedTuple):
    """Of one conversion: accuracies on test images, and layers that are linear."""

    seed: int
    teacher: float
    student: float
    linear: int  # after max_drop with training
    greedy: int  # to SEARCHED without training, within that drop on the images that guide
    exhaustive: int

    @property
    def kept(self) -> bool:
        return self.teacher - self.student <= ALLOWED * self.teacher


def one(seed: int, folder: Path, options: argparse.Namespace) -> Found:
    teacher = train(
        "mnist",
        attention="softmax",
        seed=seed,
        depth=DEPTH,
        epochs=options.epochs,
        limit=options.images,
        data_root=options.data_root,
        out=folder / f"teacher-{seed}",
        **TEACHER,
    )
    best = teacher.folder / "best"
    done = convert(
        best,
        to=TO,
        data="mnist",
        data_root=options.data_root,
        limit=options.images,
        stages=(1, 2),
        max_drop=ALLOWED,
        steps=options.steps,
        seed=seed,
        report=False,
        out=folder / f"student-{seed}",
    )
    layers = search(best, seed, options)
    return Found(seed, done.test_accuracy("teacher"), done.test_accuracy(), done.chosen.replaced, *layers)


def search(best: Path, seed: int, options: argparse.Namespace) -> tuple[int, int]:
    """Layers that may be linear without training: the greedy search's, and the best of all mixes'."""
    stored = read_model(best)
    data, _ = open_data("mnist", root=options.data_root, image_size=stored.config.image_size, limit=options.images)
    images = divide_images(data, stored.about, True, True, seed)
    models = [load(best), make_student(fit_model(stored, data), SEARCHED, "all", seed)]
    blocks = Blocks(models, images.search, images.dataset.mean, images.dataset.std)
    every: list[Mix] = [tuple(mix) for mix in itertools.product((0, 1), repeat=DEPTH)]
    known = dict(zip(every, blocks.scores((0,) * DEPTH, every), strict=True))

    def scores(base: Mix, mixes: Sequence[Mix]) -> list[MixScore]:
        return [known[mix] for mix in mixes]

    least = (1 - WITHIN) * known[(0,) * DEPTH].accuracy
    mine = [mix for mix, _ in greedy(DEPTH, (0, 1), scores).values()]
    return tuple(max(sum(mix) for mix in some if known[mix].accuracy >= least) for some in (mine, every))  # type: ignore[return-value]


def page(found: Sequence[Found], options: argparse.Namespace) -> str:
    kept = sum(one.kept for one in found)
    near = sum(one.exhaustive - one.greedy <= 1 for one in found)
    lines = [
        "# Conversions with a bounded drop",
        "",
        f"Made by `python benchmarks/drops.py`, commit {commit()}: softmax ViTs with {DEPTH} layers, "
        f"{options.images:,} images of MNIST, {options.epochs:g} epochs; to `{TO}` with `--max-drop {ALLOWED:.0%} "
        f"--stages 1,2`, {options.steps} steps. Accuracies are for all 10,000 test images.",
        "",
        f"**{kept} of {len(found)}** conversions lost at most {ALLOWED:.0%} of their teacher's test accuracy. "
        f"For untrained conversions to `{SEARCHED}` within {WITHIN:.0%}, the greedy search came within one layer of "
        f"the exhaustive search over all {2**DEPTH} mixes in **{near} of {len(found)}**.",
        "",
        "| seed | teacher | student | lost | linear layers | untrained, greedy | untrained, exhaustive |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {one.seed} | {one.teacher:.2%} | {one.student:.2%} | {1 - one.student / one.teacher:.2%} "
            f"| {one.linear} | {one.greedy} | {one.exhaustive} |"
            for one in found
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--work", type=Path, default=Path("runs/drops"), help="where models are kept")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--data-root", type=Path)
    options = parser.parse_args()
    found = []
    for seed in range(options.seeds):
        found.append(one(seed, options.work, options))
        print(json.dumps(found[-1]._asdict()), flush=True)
        write_atomically(options.out / "drops.md", page(found, options))


if __name__ == "__main__":
    main()
