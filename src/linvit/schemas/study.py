"""Study: variants × seeds and what they have in common; stored as study.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from linvit.errors import choices
from linvit.metrics import METRICS
from linvit.schemas.base import Document, Frozen
from linvit.schemas.experiment import Source, Start
from linvit.schemas.model import ModelConfig
from linvit.schemas.pixels import ImageSize, parse_size
from linvit.schemas.recipe import Recipe

DEFAULT_MARGIN, MAX_MARGIN = 0.01, 0.2  # accuracy that a faster variant may lose
MIN_SEEDS = 3  # that can prove a difference


class Variant(Frozen):
    """One row of a study: how it differs from the common configuration.

    A `published` variant is not run: it holds printed numbers.
    """

    id: str = ""  # what records and tables refer to; made from the parts below
    label: str = ""  # for people
    attention: str = "softmax"
    options: dict[str, Any] = Field(default_factory=dict)  # of the model and the recipe
    data: dict[str, Any] = Field(default_factory=dict)  # of the source, e.g. image_size
    start: Start | None = None  # for all seeds, or the first of `starts`
    starts: dict[int, Start] = Field(default_factory=dict)  # seed → its own start; there are then no other seeds
    task: str = "classification"
    column: Literal["published", "literal", "fair"] = "fair"
    published: dict[str, float] = Field(default_factory=dict)  # metric → number
    place: str = ""  # where they were printed
    beside: bool = False  # shown, but not compared with the others: it was trained for longer, or for less
    role: Literal["candidate", "baseline", "control", "limit"] = "candidate"  # of its attention

    @field_validator("data")
    @classmethod
    def _check_data(cls, data: dict[str, Any]) -> dict[str, Any]:
        return data | {"image_size": parse_size(data["image_size"])} if data.get("image_size") else data

    @property
    def control(self) -> bool:
        """Whether it is there to be compared with, not to be chosen."""
        return self.role in ("control", "limit")

    def parts(self) -> dict[str, str]:
        """Everything that may distinguish it, in words."""
        given = {**self.options, **self.data}
        found = {"attention": self.attention} | {key: f"{key} {value}" for key, value in given.items()}
        if self.start is not None:
            found["start"] = f"from {self.start.name} ({self.start.sha256[:6]})"
        if self.task != "classification":
            found["task"] = self.task
        if self.column != "fair":
            found["column"] = self.column
        return found | ({"place": self.place} if self.place else {})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.published) != (self.column == "published"):
            raise ValueError("a variant has published numbers if, and only if, its column is published")
        for metric in self.published:
            if metric not in METRICS:
                raise ValueError(f"unknown metric '{metric}'" + choices(metric, METRICS))
        if self.starts and self.start != next(iter(self.starts.values())):
            raise ValueError("a variant whose seeds have starts of their own has the first of them as its start")
        return self


def name_variants(variants: Sequence[Variant]) -> list[Variant]:
    """Each with its id, and with a label that shows only what differs between them."""
    parts_of = [variant.parts() for variant in variants]
    names = [", ".join(parts.values()) for parts in parts_of]
    starts = {variant.start.sha256: variant.start.name for variant in variants if variant.start}
    for variant, parts in zip(variants, parts_of, strict=True):
        if starts and not variant.published:
            parts["start"] = _start_label(variant.start, starts, parts)
    keys = list(dict.fromkeys(key for parts in parts_of for key in parts))
    differing = [key for key in keys if len({parts.get(key) for parts in parts_of}) > 1]
    if not all(set(differing) & set(parts) for parts in parts_of):  # one of them has nothing of its own
        differing = ["attention", *(key for key in differing if key != "attention")]
    named: dict[str, Variant] = {}
    for variant, parts, name in zip(variants, parts_of, names, strict=True):
        name = variant.id or name
        label = variant.label or ", ".join(parts[key] for key in differing if key in parts)
        mine = variant.model_copy(update={"id": name, "label": label})
        if named.setdefault(name, mine) != mine:
            raise ValueError(f"two variants are called '{name}'")
    return list(named.values())


def _start_label(start: Start | None, starts: Mapping[str, str], parts: Mapping[str, str]) -> str:
    """With its checksum only where several starts share a name that a user chose."""
    if start is None:
        return "from scratch"
    several = list(starts.values()).count(start.name) > 1 and not start.shipped
    return parts["start"] if several else f"from {start.name}"


def _differ_in_place_only(old: Variant, new: Variant) -> bool:
    """Whether they differ only in where their start is stored, and therefore in their ids."""
    if old.start is None or new.start is None or old.start.sha256 != new.start.sha256:
        return False
    ids = {re.sub(rf"from .* \({new.start.sha256[:6]}\)", "from", variant.id) for variant in (old, new)}
    return len(ids) == 1 and old.model_copy(update={"id": new.id, "label": new.label, "start": new.start}) == new


def _merged(old: Variant, new: Variant) -> Variant:
    """The old one, with starts for the new one's other seeds; a ValueError if they differ in more than the label."""
    starts = old.starts | new.starts
    changes = {"start": old.start, "starts": starts} if old.starts and new.starts else {}
    found = old.model_copy(update=changes)
    if new.starts | old.starts != starts or found != new.model_copy(update=changes | {"label": old.label}):
        raise ValueError(f"this study has another variant called '{new.id}': choose another id, or another --out")
    return found


class DatasetFacts(Frozen):
    """The images as a report describes them."""

    name: str
    identity: str
    classes: list[str]
    image_size: ImageSize
    channels: int
    train: int
    validation: int
    test: int


class Placement(Frozen):
    """Where and how jobs run, and the speeds by which that was chosen (steps per second of all jobs)."""

    executor: str
    jobs: int = 1  # at a time
    threads: int = 1  # of each
    measured: dict[str, float] = Field(default_factory=dict)


class Offer(Frozen):
    """What a budget allows."""

    seconds: float
    image_size: ImageSize
    narrower: int
    seeds: int
    folds: int = 1  # of each seed; 1: none
    epochs: float
    resolves: str  # what such a study can show

    @property
    def text(self) -> str:
        size = {1: "default width", 2: "half width", 4: "quarter width"}[self.narrower]
        length = f"{repetitions(self)}, {self.epochs:.3g} epochs" if self.epochs else "frozen features, a fitted head"
        return f"{self.image_size} px, {size}, {length}: {self.resolves}"


class Plan(Frozen):
    """What was chosen for a budget, and the time it is expected to take."""

    seconds: float  # the budget
    image_size: ImageSize
    options: dict[str, Any]  # of the model and the recipe
    seeds: int
    folds: int = 1  # of each seed; 1: none
    limit: int | None = None  # images of each split, if there is no time for all
    left_out: tuple[str, ...] = ()  # default attentions for which there is no time
    steps: int = 0  # of a trained start: 0, its frozen features with a fitted head
    expected: dict[str, float] = Field(default_factory=dict)  # activity → seconds
    frozen_seconds: dict[str, float] = Field(default_factory=dict)  # variant → of its frozen features and head
    run_seconds: dict[str, float] = Field(default_factory=dict)  # variant → of one training
    offers: list[Offer] = Field(default_factory=list)  # for this budget, then for larger ones


def repetitions(plan: Plan | Offer) -> str:
    """How often each variant is trained, in words."""
    seeds = "1 seed" if plan.seeds == 1 else f"{plan.seeds} seeds"
    return seeds if plan.folds == 1 else f"{plan.folds} folds × {seeds}"


class Run(NamedTuple):
    variant: Variant
    seed: int
    half: bool = False  # for half of the steps, with a schedule of its own
    fold: int | None = None  # held out
    frozen: bool = False  # without any step: the start with a fitted head


class Study(Document):
    """A study: common configuration, variants, seeds and results that do not belong to one run."""

    kind = "study"
    current_format: ClassVar[int] = 4  # goes up when a default changes

    format: int = 4
    requests: list[dict[str, Any]] = Field(default_factory=list)  # what was asked, oldest first (linvit.requests)
    started: float
    finished: float | None = None
    dataset: DatasetFacts
    source: Source | None = None
    folds: int | None = None  # into which every seed divides the images; each is held out once
    variants: list[Variant]
    seeds: dict[str, list[int]]  # of each variant, by its id
    margin: float = Field(DEFAULT_MARGIN, gt=0, le=MAX_MARGIN)
    plan: Plan | None = None
    model: ModelConfig
    recipe: Recipe
    start: Start | None = None
    match: bool = True
    budget: str | None = None
    steps: int | None = None
    epochs: float | None = None
    placement: Placement | None = None
    machine: dict[str, Any] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)
    seconds: dict[str, float] = Field(default_factory=dict)  # spent on measuring, and in all
    looks: list[dict[str, int]] = Field(default_factory=list)  # seeds of each variant whenever all runs had finished

    def settings(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "images": self.dataset.identity,
            "folds": self.folds,
            "budget": self.budget,
            "parameter matching": self.match,
            "start": self.start and self.start.sha256,
            "model": self.model.model_dump(mode="json", exclude={"attention", "seed"}),
            "recipe": self.recipe.model_dump(mode="json"),
        }

    def extended(self, other: Study) -> Study:
        """The study with the other's variants, seeds and request added."""
        every = [other.start, *(start for v in other.variants for start in (v.start, *v.starts.values()))]
        current = {start.sha256: start for start in every if start}

        def located(start: Start) -> Start:
            return current.get(start.sha256, start)

        variants = {}
        for v in self.variants:
            starts = {seed: located(start) for seed, start in v.starts.items()}
            variants[v.id] = v.model_copy(update={"start": v.start and located(v.start), "starts": starts})
        ids = {
            v.id: next((old.id for old in variants.values() if _differ_in_place_only(old, v)), v.id)
            for v in other.variants
        }
        for variant in other.variants:
            variant = variant.model_copy(update={"id": ids[variant.id]})
            variants[variant.id] = _merged(variants.get(variant.id, variant), variant)
        added = {ids[name]: seeds for name, seeds in other.seeds.items()}
        both = {name: sorted({*self.seeds.get(name, []), *added.get(name, [])}) for name in variants}
        seeds = {name: found for name, found in both.items() if found}
        is_new = (len(variants), seeds) != (len(self.variants), self.seeds)
        requests = [*self.requests, *(r for r in other.requests if is_new and r not in self.requests)]
        changes = {
            "variants": list(variants.values()),
            "seeds": seeds,
            "requests": requests,
            "margin": other.margin,
            "start": self.start and located(self.start),
        }
        return self.model_copy(update=changes)

    def runs(self) -> list[Run]:
        """Seeds outermost, then folds, then variants in rotating order, so that a drift of the machine affects all of
        them alike; then each variant's first run for half of the steps, which shows whether more would matter. With a
        budget these follow the seeds that a proof needs. Before all others the frozen features of a start whose head is
        fitted, which need no training."""
        seeds = sorted({seed for seeds in self.seeds.values() for seed in seeds})
        folds = range(self.folds) if self.folds else [None]
        rounds = []
        for i, (seed, fold) in enumerate((seed, fold) for seed in seeds for fold in folds):
            mine = [variant for variant in self.variants if seed in self.seeds.get(variant.id, [])]
            mine = mine[i % len(mine) :] + mine[: i % len(mine)]
            rounds.append([Run(variant, seed, fold=fold) for variant in mine])
        firsts = [(v, self.seeds[v.id][0]) for v in self.variants if v.id in self.seeds]
        halves = [Run(v, seed, half=True, fold=folds[0]) for v, seed in firsts] if (self.steps or 0) > 1 else []
        frozen = [Run(v, seed, frozen=True, fold=folds[0]) for v, seed in firsts] if self.fitted and self.steps else []
        first = self.required_rounds if self.plan else len(rounds)
        return [*frozen, *chain(*rounds[:first]), *halves, *chain(*rounds[first:])]

    @property
    def required_rounds(self) -> int:
        """Of all variants with one seed and fold each: as many as a proof needs, or one if there will be fewer."""
        runs = max((len(seeds) for seeds in self.seeds.values()), default=0) * (self.folds or 1)
        return MIN_SEEDS if runs >= MIN_SEEDS else 1

    @property
    def fitted(self) -> bool:
        """Whether every run begins with a head fitted to frozen features."""
        return self.recipe.start_head == "fitted"
