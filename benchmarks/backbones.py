"""Make the backbones that ship: small models for 64 px photos, one per usual attention and the control.

    python benchmarks/backbones.py --out runs/backbones

Data: `tiny-imagenet:part=most`, 80 of the first 100 classes of Tiny ImageNet; every fifth class is kept out, to show
what the start is worth. softmax is trained from scratch, the others start from its weights or, with `--same`, from
scratch too. The same command resumes. Finished backbones are written, in half precision with their cards, to
src/linvit/backbones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save

from linvit.durations import duration
from linvit.files import slug, write_atomically
from linvit.measure.accuracy import wilson
from linvit.pipeline.train import Trained, train
from linvit.training.backbones import HOME
from linvit.training.checkpoint import read_config, read_model
from linvit.training.defaults import ATTENTIONS, CONTROL

DATA = "tiny-imagenet:part=most"
CARD = """# A linvit backbone: {attention}

{parameters:,} parameters for {size} px photos, in half precision.

- **Data**: 80 of the first 100 classes of Tiny ImageNet (Stanford CS231n, from ImageNet; for research, see its terms),
  {train:,} images to train on. Every fifth class was kept out.
- **Recipe**: {recipe}, {time} of one core.
- **Figures**: {accuracy:.1%} of {n:,} test images of these classes right ({low:.1%} to {high:.1%}), one seed.
- **Use**: `linvit compare PHOTOS` and `linvit train PHOTOS` start from it; `linvit.load` reads this folder.
- **Limits**: small, for 64 or 128 px; a start for one's own images, not a classifier to rely on.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/backbones"))
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--epochs", type=float, default=5, help="of those that begin with nothing")
    parser.add_argument("--further", type=float, default=1, help="epochs of those that begin with softmax's weights")
    parser.add_argument("--same", nargs="*", default=[], metavar="SPEC", help="train these from scratch, too")
    parser.add_argument("--only", nargs="*", metavar="SPEC", help="these attentions alone")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for spec in given.only or (*ATTENTIONS, CONTROL):
        scratch = spec == "softmax" or spec in given.same
        start = "scratch" if scratch else given.out / "softmax"
        found = train(
            DATA,
            attention=spec,
            start=start,
            out=given.out / slug(spec),
            data_root=given.data_root,
            epochs=given.epochs if scratch else given.further,
            listeners=[_tell],
        )
        how = f"{given.epochs:g} epochs from scratch" if scratch else f"{given.further:g} epochs from softmax's weights"
        ship(found, how)
        print(f"{spec:22} {how:36} {found.test_accuracy:.4f} in {duration(found.value('train_seconds') or 0)}")


def _tell(event: object) -> None:
    if row := getattr(event, "row", None):
        print(f"  epoch {row['epoch']:g}: validation {row['validation_accuracy']:.4f}", flush=True)


def ship(found: Trained, how: str) -> None:
    """The best model in half precision, with its configuration and card."""
    stored, (_, config) = read_model(found.folder), read_config(found.folder)
    tested = found.find("test_accuracy", "best")
    assert tested is not None
    assert tested.value is not None
    folder = HOME / slug(stored.config.attention)
    half = {name: value.half() if value.is_floating_point() else value for name, value in stored.tensors.items()}
    low, high = wilson(tested.value, tested.n)
    card = CARD.format(
        attention=stored.config.attention,
        parameters=int(found.value("parameters") or 0),
        size=stored.config.image_size,
        train=len(found.data.train),
        recipe=how,
        time=duration(found.value("train_seconds") or 0),
        accuracy=tested.value,
        n=tested.n,
        low=low,
        high=high,
    )
    write_atomically(folder / "model.safetensors", save(half))
    write_atomically(folder / "config.json", json.dumps(config, indent=1, ensure_ascii=False) + "\n")
    write_atomically(folder / "README.md", card)


if __name__ == "__main__":
    main()
