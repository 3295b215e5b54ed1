"""Experiment = data + model + recipe + seed + task + start + teacher, and its identity."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field, PositiveFloat

from linvit.schemas.base import Document, Frozen
from linvit.schemas.model import ModelConfig
from linvit.schemas.pixels import ImageSize
from linvit.schemas.recipe import Recipe

Resize = Literal["crop", "squeeze"]  # how an image of another shape fits: its centre, or all of it
BACKBONES = Path(__file__).resolve().parent.parent / "backbones"  # the pretrained models that ship with linvit


@dataclass(frozen=True)
class Fold:
    """One of `of` parts of the images, each of which is held out once."""

    index: int  # from 0
    of: int
    seed: int = 0  # decides which images are in which fold
    spare_test: bool = False  # test images stay out of all folds, even if they were taken from the training images


class Source(Frozen):
    """Location of the images and how they are read: everything a worker on another machine needs."""

    data: str  # a registered name or an absolute path
    root: str | None = None
    image_size: ImageSize | None = None
    multiple_of: int = 4
    channels: int | None = None  # if a pretrained model takes another number than the images have
    limit: int | None = None
    skip_bad: bool = False
    resize: Resize = "squeeze"  # of sources that were stored before there was a choice
    cached: bool = True  # decoded at once into the cache, not whenever an image is read
    fold: Fold | None = None  # None: the data set's own splits

    def folded(self, fold: Fold | None) -> Source:
        """The same images with this fold held out, or with their own splits (None)."""
        return self.model_copy(update={"fold": fold})


class DatasetRef(Frozen):
    """A data set by its content: equal identities are equal images, wherever they are stored."""

    name: str
    identity: str


class TrainedOn(Frozen):
    """What config.json says of the data that a model was trained on, for whoever uses it."""

    model_config = ConfigDict(extra="allow")

    name: str
    classes: list[str]
    mean: list[float] = Field(min_length=1)  # per channel, as fractions of white
    std: list[PositiveFloat] = Field(min_length=1)
    resize: Resize = "squeeze"  # models that were stored before there was a choice
    thresholds: list[float] | None = None  # of each class, where images have several


class Start(Frozen):
    """A trained model to start from, identified by the hash of its weights."""

    folder: str
    sha256: str

    @property
    def shipped(self) -> bool:
        """Whether it is one of linvit's backbones, which published records hold as backbones/NAME."""
        return Path(self.folder).parent in (BACKBONES, Path(BACKBONES.name))

    @property
    def name(self) -> str:
        folder = Path(self.folder)
        if self.shipped:
            return BACKBONES.name
        return folder.parent.name if folder.name in ("best", "last") else folder.name


class Length(NamedTuple):
    batch: int
    per_epoch: int  # steps; the remainder of a shuffled epoch is left out
    total: int  # steps


class Experiment(Document):
    """Complete description of one training: with it and the images, the weights are reproducible."""

    model_config = Frozen.model_config
    kind = "experiment"
    current_format: ClassVar[int] = 3  # goes up when a default changes (ids leave defaults out), or which model is kept

    format: int = 3
    data: DatasetRef
    model: ModelConfig
    recipe: Recipe
    seed: int = Field(0, ge=0)
    task: str = "classification"
    start: Start | None = None  # None: from scratch
    teacher: Start | None = None  # of a task that learns from a model
    label: str = ""  # for people
    source: Source | None = None

    def settings(self, defaults: bool = True) -> dict[str, Any]:
        """Everything that determines the weights, without the label and the location of the images."""
        found = self.model_dump(mode="json", exclude_defaults=not defaults, exclude={"label", "source"})
        taught = {"teacher": self.teacher.sha256} if self.teacher else {}
        return found | {"format": self.format, "start": self.start and self.start.sha256} | taught

    @property
    def id(self) -> str:
        """Hash of the options that differ from their defaults, so that new options do not change existing ids."""
        return hashlib.sha256(json.dumps(self.settings(False), sort_keys=True).encode()).hexdigest()[:12]

    def stored(self) -> dict[str, Any]:
        return {"id": self.id} | self.model_dump(mode="json")

    def length(self, images: int) -> Length:
        batch = min(self.recipe.batch_size, images)
        per_epoch = images // batch
        steps = self.recipe.steps
        return Length(batch, per_epoch, max(1, round(self.recipe.epochs * per_epoch)) if steps is None else steps)
