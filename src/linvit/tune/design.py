"""What a search is: variants, one space for all of them, and how much each may try; stored as search.json."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from pydantic import Field

from linvit.attention import attention_options
from linvit.models import ModelConfig
from linvit.registry import parse
from linvit.study.design import Facts, Stored, Variant
from linvit.study.protocol import Protocol
from linvit.train import Experiment, Recipe, Source, Start
from linvit.tune.space import OF_ATTENTION, Point, Space, applied

FORMAT = 1  # goes up when a default changes
OURS = ("study.json", "experiment.json", "convert.json", "records.jsonl", "report.html")
LOOKS = 64  # points that are tried for whether any is possible

SAMPLERS, PRUNERS = ("tpe", "random", "grid"), ("median", "hyperband", "none")


class Search(Stored):
    """A space, its variants, and what each may spend; readable back from its search.json."""

    what = "search"

    format: int = FORMAT
    name: str  # of the studies in the storage
    commands: list[str] = Field(default_factory=list)
    started: float
    finished: float | None = None
    dataset: Facts
    source: Source | None = None
    variants: list[Variant]
    space: Space
    sampler: str = "tpe"  # one of SAMPLERS
    pruner: str = "median"  # one of PRUNERS
    trials: int | None = None  # of every variant,
    budget: str | None = None  # or time for all of it,
    share: float | None = None  # of which so many seconds of training are every variant's
    expected: dict[str, float] = Field(default_factory=dict)  # seconds of a whole trial with the defaults, by variant
    defaults: bool = False  # whether the first trial of every variant is the defaults
    seed: int = 0
    folds: int | None = None  # that every trial holds out one after the other; of images that are not the test split's
    match: bool = True
    options: dict[str, Any] = Field(default_factory=dict)  # of every trial, of model and recipe
    model: ModelConfig
    recipe: Recipe
    start: Start | None = None
    storage: str = ""  # as it may be shown
    machine: dict[str, Any] = Field(default_factory=dict)

    @property
    def validations(self) -> int:
        """Of every training, if nothing ends it."""
        return math.ceil(self.recipe.epochs)

    @property
    def reports(self) -> int:
        """By which a trial may be pruned: after every fold, or every validation."""
        return self.folds or self.validations

    @property
    def startup(self) -> int:
        """Trials of a variant before the search learns from them, and before any is pruned."""
        return 10 if self.trials is None else min(10, max(4, self.trials // 3))

    def settings(self) -> dict[str, Any]:
        """Variants and trials may be added."""
        return {
            "format": self.format, "images": self.dataset.identity,
            "space": self.space.model_dump(mode="json", exclude={"name"}),
            "sampler": self.sampler, "pruner": self.pruner, "seed": self.seed, "folds": self.folds,
            "parameter matching": self.match, "start": self.start and self.start.sha256,
            "model": self.model.model_dump(mode="json", exclude={"attention", "seed"}),
            "recipe": self.recipe.model_dump(mode="json"),
        }  # fmt: skip

    def extended(self, other: Search) -> Search:
        """With the other's variants and what it may spend, and with images and starts where it finds them."""
        have = {variant.id: variant for variant in self.variants} | {variant.id: variant for variant in other.variants}
        changes = {
            "variants": list(have.values()), "trials": other.trials, "budget": other.budget, "share": other.share,
            "expected": self.expected | other.expected, "storage": other.storage, "source": other.source,
            "start": other.start,
            "commands": list(dict.fromkeys([*self.commands, *other.commands])),
        }  # fmt: skip
        return self.model_copy(update=changes)


class Points:
    """The points of a search's space, and the experiments that they make of its protocol."""

    def __init__(self, search: Search, protocol: Protocol):
        self.search, self.space, self.protocol = search, search.space, protocol

    @cached_property
    def grids(self) -> dict[str, list[Point]]:
        """All points of each variant, in an order that is the same for variants with as many."""
        found = {variant.id: list(self.space.grid(variant.attention)) for variant in self.search.variants}
        for points in found.values():
            random.Random(self.search.seed).shuffle(points)
        return found

    @property
    def most(self) -> int | None:
        """Trials that each variant can have."""
        return min(map(len, self.grids.values())) if self.search.sampler == "grid" else None

    def given(self, variant: Variant, number: int) -> Point | None:
        """The point of a trial whose point is not left to the sampler."""
        if self.search.sampler == "grid":
            return self.grids[variant.id][number]
        return self.default(variant) if self.search.defaults and number == 0 else None

    def default(self, variant: Variant) -> Point | None:
        """What a training has that nobody tunes, if that is a point of the space."""
        found = {}
        for name, values in self.space.of(variant.attention).items():
            value = _usual(self.protocol.base, variant.attention, name)
            if value not in values:
                return None
            found[name] = value
        return found

    def experiment(self, variant: Variant, point: Mapping[str, Any]) -> Experiment:
        """A ValueError if the point is impossible. Options of a point are the whole protocol's: where parameters are
        matched, softmax's have them too."""
        spec, options = applied(variant.attention, point)
        mine = replace(self.protocol, options=self.protocol.options | options)
        return mine.experiment(variant.model_copy(update={"attention": spec}))

    def experiments(self, variant: Variant, point: Mapping[str, Any]) -> list[Experiment]:
        """All of a trial: one for each fold."""
        found, every = self.experiment(variant, point), self.protocol.every_fold()
        return [self.protocol.holding_out(found, variant, fold) for fold in every] or [found]

    def check(self) -> None:
        """That some points are possible, before anything is written."""
        if self.most == 0:
            raise ValueError(f"space {self.space.name} has no point")
        for variant in self.search.variants:
            dice, why = random.Random(0), ""
            for _ in range(LOOKS):
                try:
                    self.experiment(variant, self.space.random(variant.attention, dice))
                    break
                except ValueError as error:
                    why = str(error)
            else:
                raise ValueError(f"space {self.space.name} has no possible point for {variant.attention}: {why}")


def _usual(experiment: Experiment, spec: str, name: str) -> Any:
    """The value of an option where nobody sets it, as a space writes it."""
    if name.startswith(OF_ATTENTION):
        options = [attention_options(parse(part.partition("@")[0]).name) for part in spec.split("+")]
        bare = name.removeprefix(OF_ATTENTION)
        value = next(found[bare].default for found in options if bare in found)
    else:
        value = getattr(experiment.recipe if name in Recipe.model_fields else experiment.model, name)
    return list(value) if isinstance(value, tuple) else value
