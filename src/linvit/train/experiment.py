"""Experiment = data + model + recipe + seed. Its canonical JSON is its identity."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linvit.data import Dataset
from linvit.errors import choices
from linvit.files import write_atomically
from linvit.measure.provenance import provenance
from linvit.models import ModelConfig, model_config, without_effect
from linvit.records import Record
from linvit.train.defaults import OTHERS, defaults
from linvit.train.recipe import Recipe, create_recipe

OURS = ("log.jsonl", "records.jsonl", "confusion.json", "best", "last")  # what a run writes into its folder


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

    def claim(self, folder: Path, source: dict[str, Any] | None = None) -> None:
        """Write experiment.json, or make sure that the folder is this experiment's. `source` says where the data
        were found, which is no part of what the experiment is."""
        path = folder / "experiment.json"
        there: dict[str, Any] | None = None
        if path.exists():
            try:
                there = json.loads(path.read_text(encoding="utf-8"))
                known = there["id"] if isinstance(there, dict) else None
            except (ValueError, KeyError):
                known = None
            if known is None:
                raise ValueError(f"{path} is not an experiment: choose another --out")
            if known != self.id:
                why = _difference(there, self.canonical())
                raise ValueError(f"{folder} holds another experiment ({why}): choose another --out")
        elif taken := [name for name in OURS if (folder / name).exists()]:
            raise ValueError(f"{folder} holds {taken[0]}, but no experiment.json: choose another --out")
        source = source or (there or {}).get("source")
        wanted = {"id": self.id} | self.canonical() | ({"source": source} if source else {})
        if wanted != there:
            write_atomically(path, json.dumps(wanted, indent=1, ensure_ascii=False) + "\n")

    def record(self, metric: str, value: float | None, device: torch.device) -> Record:
        dtype = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.recipe.amp]
        tags = {"attention": self.label, "dataset": self.data["name"], "seed": self.seed}
        return Record(metric, value, experiment=self.id, **provenance(device, dtype), tags=tags)


FROM_DATA = ("image_size", "channels", "classes")


def design(dataset: Dataset, attention: str, seed: int = 0, **options: Any) -> Experiment:
    """The experiment for a data set: its tuned defaults with `options` of the model and the recipe over them."""
    given = {key: value for key, value in options.items() if value is not None}
    known = ["size", *(key for key in ModelConfig.model_fields if key not in FROM_DATA), *Recipe.model_fields]
    for name in sorted(given):
        if name in FROM_DATA:
            raise ValueError(f"{name} comes from the data, it cannot be set")
        if name not in known:
            raise ValueError(f"unknown option '{name}'" + choices(name, known))
    if "epochs" in given and "steps" in given:
        raise ValueError("give epochs or steps, not both")
    tuned = defaults(dataset)
    if "epochs" in given:
        tuned.pop("steps", None)
    size = given.pop("size", None)
    if size is not None:  # a named size replaces the tuned one
        tuned = {key: value for key, value in tuned.items() if key not in ModelConfig.model_fields}
    elif "patch_size" not in given and "patch_size" in tuned:
        sizes = range(1, tuned["patch_size"] + 1)
        tuned["patch_size"] = max(p for p in sizes if dataset.image_size % p == 0)
    tuned = {key: value for key, value in tuned.items() if key not in without_effect(tuned | given)}
    tuned |= OTHERS.get(str(given.get("optimizer")), {})
    merged = tuned | given
    facts = {"image_size": dataset.image_size, "channels": dataset.channels, "classes": len(dataset.classes)}
    shape = {key: value for key, value in merged.items() if key in ModelConfig.model_fields}
    model = model_config(size, **shape | facts | {"attention": attention, "seed": seed})
    recipe = create_recipe(**{key: value for key, value in merged.items() if key in Recipe.model_fields})
    return Experiment.of(dataset, model, recipe, seed)


def _difference(there: Any, here: dict[str, Any]) -> str:
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
