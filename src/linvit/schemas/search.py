"""Search: variants, one space for all of them, and how much each may try (search.json); Best: what it found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError

from linvit.errors import choices, clear
from linvit.files import write_atomically
from linvit.schemas.base import Document, Frozen
from linvit.schemas.experiment import Source, Start
from linvit.schemas.model import ModelConfig
from linvit.schemas.recipe import Recipe
from linvit.schemas.study import DatasetFacts, Variant
from linvit.toml import parse_toml, to_toml

Sampler = Literal["tpe", "random", "grid"]
Pruner = Literal["median", "hyperband", "none"]


class Range(Frozen):
    """All numbers from low to high; integers if the option is one."""

    low: int | float
    high: int | float
    log: bool = False  # uniform in the logarithm

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and self.low <= value <= self.high


Values = Range | list[Any]


class SearchSpace(Frozen):
    """What is searched, by option; `linvit.tuning.space` reads and checks it."""

    name: str
    options: dict[str, Values] = Field(default_factory=dict)  # of the model and the recipe
    attention: dict[str, Values] = Field(default_factory=dict)  # of attentions, where they have them
    fixed: dict[str, Any] = Field(default_factory=dict)  # the same in every trial


class Search(Document):
    """A space, its variants, and what each may spend."""

    kind = "search"
    current_format: ClassVar[int] = 2  # goes up when a default changes

    format: int = 2
    name: str  # of the studies in the storage
    requests: list[dict[str, Any]] = Field(default_factory=list)  # what was asked, oldest first (linvit.requests)
    started: float
    finished: float | None = None
    dataset: DatasetFacts
    source: Source | None = None
    variants: list[Variant]
    space: SearchSpace
    sampler: Sampler = "tpe"
    pruner: Pruner = "median"
    trials: int | None = None  # of every variant,
    budget: str | None = None  # or time for all of them,
    share: float | None = None  # of which every variant gets this many seconds of training
    expected: dict[str, float] = Field(default_factory=dict)  # seconds of a full trial with default options, by variant
    defaults: bool = False  # whether the first trial of every variant has the default options
    seed: int = 0
    folds: int | None = None  # that every trial holds out in turn; the test images are in none of them
    match: bool = True
    options: dict[str, Any] = Field(default_factory=dict)  # of the model and the recipe, in every trial
    model: ModelConfig
    recipe: Recipe
    start: Start | None = None
    storage: str = ""  # without its password
    machine: dict[str, Any] = Field(default_factory=dict)

    @property
    def validations(self) -> int:
        """Of every training that is not stopped early."""
        return math.ceil(self.recipe.epochs)

    @property
    def reports(self) -> int:
        """After how many intermediate values a trial is complete: folds, or validations."""
        return self.folds or self.validations

    @property
    def startup(self) -> int:
        """Trials of a variant before the sampler learns from them, and before any is pruned."""
        return 10 if self.trials is None else min(10, max(4, self.trials // 3))

    def settings(self) -> dict[str, Any]:
        """Variants and trials may be added later."""
        return {
            "format": self.format,
            "images": self.dataset.identity,
            "space": self.space.model_dump(mode="json", exclude={"name"}),
            "sampler": self.sampler,
            "pruner": self.pruner,
            "seed": self.seed,
            "folds": self.folds,
            "parameter matching": self.match,
            "start": self.start and self.start.sha256,
            "model": self.model.model_dump(mode="json", exclude={"attention", "seed"}),
            "recipe": self.recipe.model_dump(mode="json"),
        }

    def extended(self, other: Search) -> Search:
        """With the other's variants, trials, storage and request, and images and starts where they are stored now."""
        variants = {variant.id: variant for variant in [*self.variants, *other.variants]}
        taken = ("trials", "budget", "share", "storage", "source", "start")
        changes = {name: getattr(other, name) for name in taken} | {
            "variants": list(variants.values()),
            "expected": self.expected | other.expected,
            "requests": [*self.requests, *(r for r in other.requests if r not in self.requests)],
        }
        return self.model_copy(update=changes)


class Winner(Frozen):
    """The best trial of a variant."""

    variant: str  # the spec as it was searched
    attention: str  # with the options that were found
    validation_accuracy: float  # with folds: over all images, each when it was held out
    trial: int
    options: dict[str, Any] = Field(default_factory=dict)  # of the model and the recipe


class Best(Frozen):
    """best.toml: the best trial of each variant, the best variant first, as `--config` takes it."""

    current_format: ClassVar[int] = 1

    format: int = 1
    data: str
    epochs: float
    trials: int  # of every variant, at most
    seed: int
    start: str | None = None  # what every trial started from
    folds: int | None = None  # by which trials were judged
    winners: list[Winner] = Field(min_length=1, alias="winner")

    @classmethod
    def read(cls, path: Path | str) -> Best:
        try:
            found = cls.model_validate(parse_toml(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ValueError(f"config {path} does not exist: `linvit tune` writes a best.toml") from None
        except ValueError as error:
            why = clear(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"config {path} is not a best.toml of linvit tune ({why})") from None
        if found.format != cls.current_format:
            raise ValueError(f"config {path} has format {found.format}, but this linvit reads {cls.current_format}")
        return found

    def write(self, path: Path, comment: str) -> None:
        write_atomically(path, f"# {comment}\n{to_toml(self.model_dump(mode='json', by_alias=True))}")

    def winner_of(self, attention: str | None) -> Winner:
        """A variant's, by the spec that was searched or found; None: the best of all."""
        for winner in self.winners:
            if attention in (None, winner.variant, winner.attention):
                return winner
        searched = [winner.variant for winner in self.winners]
        raise ValueError(f"attention '{attention}' was not searched" + choices(str(attention), searched))

    def shared(
        self, attentions: Sequence[str], given: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
        """The options that all of these variants share, and each variant's attention with its own options; given
        options override both."""
        winners = [self.winner_of(spec) for spec in attentions] if attentions else self.winners
        every = [{name: v for name, v in winner.options.items() if name not in given} for winner in winners]
        shared = {name: v for name, v in every[0].items() if all(name in own and own[name] == v for own in every)}
        own = [{name: v for name, v in mine.items() if name not in shared} for mine in every]
        return shared, [(winner.attention, mine) for winner, mine in zip(winners, own, strict=True)]
