"""Training: `train("cifar10", attention="performer-relu:m=32", out="runs/mine")`, and the models it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linvit import data as data_package
from linvit.data import Dataset
from linvit.models import ModelConfig, VisionTransformer, model_config
from linvit.records import Record
from linvit.registry import choices
from linvit.train.checkpoint import load, read_config
from linvit.train.defaults import ATTENTION, defaults
from linvit.train.experiment import Experiment
from linvit.train.loop import Event, Progress, run
from linvit.train.recipe import Recipe, create_recipe

__all__ = [
    "Event", "Experiment", "Progress", "Recipe", "Trained", "create_recipe", "design", "load", "pick_device",
    "read_config", "run", "train",
]  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """What a training leaves: a folder, its records, and the best model."""

    folder: Path
    records: Sequence[Record]
    model: VisionTransformer | None  # None: it diverged before there was one
    diverged: str = ""  # the layer that gave a number that is not finite

    def value(self, metric: str, selection: str | None = None) -> float | None:
        for record in self.records:
            if record.metric == metric and selection in (None, record.tags.get("selection")):
                return record.value
        return None

    @property
    def test_accuracy(self) -> float | None:
        """Of the model chosen on validation data."""
        return self.value("test_accuracy", "best")


def pick_device(name: str = "auto") -> torch.device:
    """auto: the first of cuda, mps and cpu that is there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, found in there.items() if found))
    kind = name.split(":")[0]
    if kind not in there:
        raise ValueError(f"unknown device '{name}'" + choices(name, ["auto", *there]))
    if not there[kind]:
        raise ValueError(f"device '{name}' is not available on this machine; use auto or cpu")
    return torch.device(name)


def design(dataset: Dataset, attention: str, seed: int = 0, **options: Any) -> Experiment:
    """The experiment for a data set: its tuned defaults with `options` of the model and the recipe over them."""
    merged = defaults(dataset) | {key: value for key, value in options.items() if value is not None}
    size = merged.pop("size", None)
    if size is not None:  # a named size replaces the tuned one
        merged = {k: v for k, v in merged.items() if k in options or k not in ModelConfig.model_fields}
    known = [*ModelConfig.model_fields, *Recipe.model_fields]
    if unknown := set(merged) - set(known):
        name = sorted(unknown)[0]
        raise ValueError(f"unknown option '{name}'" + choices(name, known))
    facts = {"image_size": dataset.image_size, "channels": dataset.channels, "classes": len(dataset.classes)}
    shape = {key: value for key, value in merged.items() if key in ModelConfig.model_fields}
    model = model_config(size, **shape | facts | {"attention": attention, "seed": seed})
    recipe = create_recipe(**{key: value for key, value in merged.items() if key in Recipe.model_fields})
    return Experiment.of(dataset, model, recipe, seed)


def train(
    data: str | Path | Dataset = "digits",
    *,
    attention: str = ATTENTION,
    out: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    data_root: str | Path | None = None,
    image_size: int | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
    checkpoint_seconds: float = 30.0,
    **options: Any,
) -> Trained:
    """Train on a named data set or a path; the same call again goes on where it stopped, or returns what it left.

    options: any of ModelConfig's and Recipe's, e.g. epochs=10, lr=1e-3, dim=128, size="001-I".
    """
    if not isinstance(data, Dataset):
        patch = options.get("patch_size") or 4
        data = data_package.load(
            data, root=data_root, image_size=image_size, multiple_of=patch, limit=limit, skip_bad=skip_bad
        )
    experiment = design(data, attention, seed, **options)
    folder = Path(out) if out is not None else Path("runs") / f"{data.name}-{experiment.id}"
    records = run(
        experiment, data, folder, device=pick_device(device), progress=progress, checkpoint_seconds=checkpoint_seconds
    )
    diverged = next((str(r.tags.get("layer")) for r in records if r.metric == "diverged"), "")
    has_model = (folder / "best" / "model.safetensors").exists()
    return Trained(folder, records, load(folder / "best") if has_model else None, diverged)
