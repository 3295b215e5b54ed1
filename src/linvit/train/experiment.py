"""Experiment = data + model + recipe + seed + task + start + teacher: its identity, but for options at defaults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from linvit import ranks
from linvit.data import Dataset
from linvit.errors import choices, clear
from linvit.files import write_atomically
from linvit.locks import claimed
from linvit.measure.provenance import provenance
from linvit.models import ModelConfig, model_config, without_effect
from linvit.records import Record
from linvit.train.defaults import GENTLER, OF_TASK, tuned
from linvit.train.optimizers import OPTIMIZERS
from linvit.train.recipe import Recipe, create_recipe, idle
from linvit.train.source import Source
from linvit.train.tasks import TASKS

FORMAT = 3  # goes up when a default changes, ids leave defaults out; or which model is kept
OURS = ("log.jsonl", "records.jsonl", "confusion.json", "best", "last")  # what a run writes into its folder
BACKBONES = Path(__file__).resolve().parent.parent / "backbones"  # those that ship
FROM_DATA = ("image_size", "channels", "classes")


class Images(BaseModel):
    """Which images: equal identities are equal data, wherever they lie."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    identity: str


class Start(BaseModel):
    """A trained model to begin with. Which one is told by its weights; the folder only says where they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str
    sha256: str

    @property
    def name(self) -> str:
        folder = Path(self.folder)
        if folder.parent == BACKBONES:
            return BACKBONES.name
        return folder.parent.name if folder.name in ("best", "last") else folder.name


class Length(NamedTuple):
    batch: int
    per_epoch: int  # steps; the remainder of a shuffled epoch is left out
    total: int  # steps


class Experiment(BaseModel):
    """One training, wholly described: whoever has this and the images can do it, and get the same weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    data: Images
    model: ModelConfig
    recipe: Recipe
    seed: int = Field(0, ge=0)
    task: str = "classification"
    start: Start | None = None  # None: from scratch
    teacher: Start | None = None  # of a task that learns from a model
    label: str = ""  # what people call it
    source: Source | None = None  # where its images lie

    def settings(self, defaults: bool = True) -> dict[str, Any]:
        """What it is; neither its name nor where its images lie."""
        found = self.model_dump(mode="json", exclude_defaults=not defaults, exclude={"label", "source"})
        taught = {"teacher": self.teacher.sha256} if self.teacher else {}
        return found | {"format": self.format, "start": self.start and self.start.sha256} | taught

    @property
    def id(self) -> str:
        """Without options at their defaults: a new option does not disown old folders."""
        return hashlib.sha256(json.dumps(self.settings(False), sort_keys=True).encode()).hexdigest()[:12]

    @classmethod
    def read(cls, path: Path) -> Self:
        """From an experiment.json."""
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            stored.pop("id", None)
            found = cls.model_validate(stored)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            why = clear(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"{path} is not an experiment of this linvit ({why}): choose another --out") from None
        if found.format != FORMAT:
            raise ValueError(f"{path} has format {found.format}, but this linvit reads {FORMAT}: choose another --out")
        return found

    def claim(self, folder: Path) -> None:
        """Write experiment.json with everything resolved, or make sure that the folder is this experiment's."""
        path = folder / "experiment.json"
        there = claimed(path, self, OURS)
        wanted = self if self.source or there is None else self.model_copy(update={"source": there.source})
        if wanted != there:
            text = json.dumps({"id": self.id} | wanted.model_dump(mode="json"), indent=1, ensure_ascii=False)
            write_atomically(path, text + "\n")

    def length(self, images: int) -> Length:
        batch = min(self.recipe.batch_size, images)
        per_epoch = images // batch
        return Length(batch, per_epoch, self.recipe.steps or max(1, round(self.recipe.epochs * per_epoch)))

    def record(self, device: torch.device) -> Record:
        """One to make all others from: where and of what they are."""
        dtype = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.recipe.amp]
        tags = {"attention": self.model.attention, "dataset": self.data.name, "seed": self.seed}
        found = provenance(device, dtype)
        found["threads"] *= ranks.count()  # of all processes that train it
        return Record("", None, experiment=self.id, **found, tags=tags)


def design(
    dataset: Dataset, attention: str, seed: int = 0, *, source: Source | None = None, start: Start | None = None,
    like: ModelConfig | None = None, task: str = "classification", **options: Any,
) -> Experiment:  # fmt: skip
    """The experiment for a data set: its tuned defaults with `options` of the model and the recipe over them.

    like: a model whose shape is taken instead of the tuned one, as whoever starts from its weights must."""
    facts = {"image_size": dataset.image_size, "channels": dataset.channels, "classes": len(dataset.classes)}
    model, recipe = resolve(dataset.name, facts, attention, seed, options, like, start is not None, task)
    TASKS[task].check(task, model, recipe)
    return Experiment(
        data=Images(name=dataset.name, identity=dataset.identity), model=model, recipe=recipe, seed=seed, task=task,
        start=start, label=attention, source=source,
    )  # fmt: skip


def resolve(
    name: str, facts: dict[str, int], attention: str, seed: int, options: Mapping[str, Any],
    like: ModelConfig | None = None, trained: bool = False, task: str = "classification",
) -> tuple[ModelConfig, Recipe]:  # fmt: skip
    """For the data set of this name, whose `facts` are those that a model's options take from it. `like` has the shape
    to take; a `trained` model is trained on more gently than a new one."""
    given = {key: value for key, value in options.items() if value is not None}
    known = ["size", *(key for key in ModelConfig.model_fields if key not in FROM_DATA), *Recipe.model_fields]
    for option in sorted(given):
        if option in FROM_DATA:
            raise ValueError(f"{option} comes from the data, it cannot be set")
        if option not in known:
            raise ValueError(f"unknown option '{option}'" + choices(option, known))
    if "epochs" in given and "steps" in given:
        raise ValueError("give epochs or steps, not both")
    usual = tuned(name, facts["image_size"], facts["channels"], task)
    stem = {"stem": usual["stem"]} if task in OF_TASK else {}
    if like is not None:
        if facts["channels"] != like.channels:
            raise ValueError(f"the images have channels={facts['channels']}, but the start takes {like.channels}")
        usual = {key: value for key, value in usual.items() if key not in ModelConfig.model_fields}
        usual |= like.model_dump(exclude={*FROM_DATA, "attention", "seed"}, exclude_none=True)
    if trained:
        usual |= GENTLER
    if "epochs" in given:
        usual.pop("steps", None)
    size = given.pop("size", None)
    if size is not None:  # a named size replaces the tuned one
        usual = stem | {key: value for key, value in usual.items() if key not in ModelConfig.model_fields}
    elif like is None and "patch_size" not in given and "patch_size" in usual:
        sizes = range(1, usual["patch_size"] + 1)
        usual["patch_size"] = max(p for p in sizes if facts["image_size"] % p == 0)
    usual = {key: value for key, value in usual.items() if key not in without_effect(usual | given)}
    if isinstance(given.get("optimizer"), str) and given["optimizer"] in OPTIMIZERS:
        suits = dict(OPTIMIZERS[given["optimizer"]].options)
        usual |= suits | ({"lr": suits["lr"] / 2} if trained and "lr" in suits else {})
    merged = usual | given
    shape = {key: value for key, value in merged.items() if key in ModelConfig.model_fields}
    recipe = create_recipe(**{key: value for key, value in merged.items() if key in Recipe.model_fields})
    for option, why in idle(recipe).items():
        if option in given:
            raise ValueError(f"{option}={given[option]} has no effect: {why}: leave it out")
    return model_config(size, **shape | facts | {"attention": attention, "seed": seed}), recipe
