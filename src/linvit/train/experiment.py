"""Experiment = data + model + recipe + seed. Its canonical JSON is its identity."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linvit.data import Dataset
from linvit.models import ModelConfig
from linvit.records import Record
from linvit.train.files import write_atomically
from linvit.train.recipe import Recipe


@dataclass(frozen=True)
class Experiment:
    data: dict[str, Any]
    model: ModelConfig
    recipe: Recipe
    seed: int
    label: str = ""  # the attention as the user wrote it

    @classmethod
    def of(cls, dataset: Dataset, model: ModelConfig, recipe: Recipe, seed: int) -> Experiment:
        data = {"name": dataset.name, "identity": dataset.identity}
        return cls(data, model, recipe, seed, model.attention)

    def canonical(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "model": self.model.model_dump(mode="json"),
            "recipe": self.recipe.model_dump(mode="json"),
            "seed": self.seed,
        }

    @property
    def id(self) -> str:
        text = json.dumps(self.canonical(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def plan(self, images: int) -> tuple[int, int, int]:
        """Batch size, steps of an epoch (the remainder of a shuffled epoch is left out), steps in all."""
        batch = min(self.recipe.batch_size, images)
        per_epoch = images // batch
        return batch, per_epoch, self.recipe.steps or max(1, round(self.recipe.epochs * per_epoch))

    def claim(self, folder: Path) -> None:
        """Write experiment.json, or make sure that the folder is this experiment's."""
        path = folder / "experiment.json"
        if path.exists():
            try:
                there = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                raise ValueError(f"{path} is not an experiment: choose another --out") from None
            if there.get("id") != self.id:
                raise ValueError(
                    f"{folder} holds another experiment ({_difference(there, self.canonical())}): choose another --out"
                )
            return
        write_atomically(path, json.dumps({"id": self.id} | self.canonical(), indent=1) + "\n")

    def record(self, metric: str, value: float | None, device: torch.device) -> Record:
        return Record(
            metric,
            value,
            experiment=self.id,
            device=device.type,
            threads=torch.get_num_threads(),
            dtype="float32" if self.recipe.amp == "off" else self.recipe.amp,
            tags={"attention": self.label, "dataset": self.data["name"], "seed": self.seed},
        )


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """The first setting in which two experiments differ, for a message."""

    def flat(tree: Any, path: str = "") -> dict[str, Any]:
        if not isinstance(tree, dict):
            return {path: tree}
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{path}.{key}".lstrip(".")).items()}

    old, new = flat(there), flat(here)
    for key, value in new.items():
        if old.get(key) != value:
            return f"its {key} is {old.get(key)}, not {value}"
    return "its settings differ"
