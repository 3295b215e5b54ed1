"""What a study is: variants of one base, seeds, and what holds for all of them; stored as study.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from linvit.data import Dataset
from linvit.errors import choices, clear
from linvit.files import write_atomically
from linvit.metrics import CONTROLS, METRICS
from linvit.models import ModelConfig
from linvit.study.plan import Plan
from linvit.train import Recipe, Source, Start

FORMAT = 3  # goes up when a default changes
OURS = ("experiment.json", "records.jsonl", "report.html", "results.csv")
MARGIN, MOST = 0.01, 0.2  # accuracy that a faster variant may lose, if none is named; and the most that may be named
STRICT = ConfigDict(extra="forbid", validate_assignment=True)


class Variant(BaseModel):
    """What distinguishes one row of a study from the others: any part of an experiment. What is not said is the base's.

    A `published` one is not run: it holds numbers that somebody else printed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = ""  # what records and tables know it by; made from the parts below
    label: str = ""  # what people read
    attention: str = "softmax"
    options: dict[str, Any] = Field(default_factory=dict)  # of the model and the recipe
    data: dict[str, Any] = Field(default_factory=dict)  # of the source, e.g. image_size
    start: Start | None = None  # of all seeds, or the first of `starts`
    starts: dict[int, Start] = Field(default_factory=dict)  # seed → its own; there are then no other seeds
    task: str = "classification"
    column: Literal["published", "literal", "fair"] = "fair"
    published: dict[str, float] = Field(default_factory=dict)  # metric → number
    place: str = ""  # where they are printed
    beside: bool = False  # shown, and not judged with the others: it was trained for longer, or for less

    @property
    def control(self) -> bool:
        """Whether it is there to be compared with, not to be chosen."""
        return self.attention.partition(":")[0] in CONTROLS

    def parts(self) -> dict[str, str]:
        """All that may tell it from others, in words."""
        given = {**self.options, **self.data}
        found = {"attention": self.attention} | {key: f"{key} {value}" for key, value in given.items()}
        if self.start is not None:  # one that has none is known by that
            found["start"] = f"from {self.start.name} ({self.start.sha256[:6]})"
        if self.task != "classification":
            found["task"] = self.task
        if self.column != "fair":
            found["column"] = self.column
        return found | ({"place": self.place} if self.place else {})

    @model_validator(mode="after")
    def _is_run_or_printed(self) -> Self:
        if bool(self.published) != (self.column == "published"):
            raise ValueError("a variant has published numbers if, and only if, its column is published")
        for metric in self.published:
            if metric not in METRICS:
                raise ValueError(f"unknown metric '{metric}'" + choices(metric, METRICS))
        if self.starts and self.start != next(iter(self.starts.values())):
            raise ValueError("a variant whose seeds have starts of their own has the first of them as its start")
        return self


def _same(old: Variant, new: Variant) -> bool:
    """Whether they differ in nothing but where their start lies, and so in what their ids call it."""
    if old.start is None or new.start is None or old.start.sha256 != new.start.sha256:
        return False
    ids = {re.sub(rf"from .* \({new.start.sha256[:6]}\)", "from", variant.id) for variant in (old, new)}
    return len(ids) == 1 and old.model_copy(update={"id": new.id, "label": new.label, "start": new.start}) == new


def _joined(old: Variant, new: Variant) -> Variant:
    """The old one, with starts of the new one's other seeds; a ValueError if they differ in more, but for the label."""
    starts = old.starts | new.starts
    more = {"start": old.start, "starts": starts} if old.starts and new.starts else {}
    found = old.model_copy(update=more)
    if new.starts | old.starts != starts or found != new.model_copy(update=more | {"label": old.label}):
        raise ValueError(f"this study has another variant called '{new.id}': choose another id, or another --out")
    return found


def _beginning(start: Start | None, begun: Mapping[str, str], parts: Mapping[str, str]) -> str:
    """In words; which weights of one name are meant is said only where there are several that somebody chose."""
    if start is None:
        return "from scratch"
    several = list(begun.values()).count(start.name) > 1 and start.name != "backbones"
    return parts["start"] if several else f"from {start.name}"


def named(variants: Sequence[Variant]) -> list[Variant]:
    """Each with its id, and with a label that shows what differs between them and nothing else."""
    every = [variant.parts() for variant in variants]
    names = [", ".join(parts.values()) for parts in every]
    begun = {variant.start.sha256: variant.start.name for variant in variants if variant.start}
    for variant, parts in zip(variants, every, strict=True):
        if begun and not variant.published:
            parts["start"] = _beginning(variant.start, begun, parts)
    keys = list(dict.fromkeys(key for parts in every for key in parts))
    differ = [key for key in keys if len({parts.get(key) for parts in every}) > 1]
    if not all(
        set(differ) & set(parts) for parts in every
    ):  # one that has nothing of its own is called by its attention
        differ = ["attention", *(key for key in differ if key != "attention")]
    found: dict[str, Variant] = {}
    for variant, parts, name in zip(variants, every, names, strict=True):
        name = variant.id or name
        label = variant.label or ", ".join(parts[key] for key in differ if key in parts)
        mine = variant.model_copy(update={"id": name, "label": label})
        if found.setdefault(name, mine) != mine:
            raise ValueError(f"two variants are called '{name}'")
    return list(found.values())


class Facts(BaseModel):
    """The images as a report describes them."""

    model_config = STRICT

    name: str
    identity: str
    classes: list[str]
    image_size: int
    channels: int
    train: int
    validation: int
    test: int

    @classmethod
    def of(cls, data: Dataset) -> Facts:
        counts = {part: len(getattr(data, part)) for part in ("train", "validation", "test")}
        return cls(name=data.name, identity=data.identity, classes=data.classes, image_size=data.image_size,
                   channels=data.channels, **counts)  # fmt: skip


class Placing(BaseModel):
    """Where and how jobs run, and how fast the ways are that were measured (steps per second of all jobs)."""

    model_config = STRICT

    runner: str
    jobs: int = 1
    threads: int = 1
    measured: dict[str, float] = Field(default_factory=dict)


class Run(NamedTuple):
    variant: Variant
    seed: int
    half: bool = False  # for half of the steps, with a schedule of its own
    fold: int | None = None  # held out


class Stored(BaseModel):
    """What a result folder is of; readable back from its file there, which is called after it."""

    model_config = STRICT
    what: ClassVar[str]

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = clear(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"{path} is not a {cls.what} of this linvit ({why}): choose another --out") from None

    def save(self, folder: Path) -> None:
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)
        write_atomically(folder / f"{self.what}.json", text + "\n")


class Study(Stored):
    """A base, its variants and seeds, and what came of running them; readable back from its study.json."""

    what = "study"

    format: int = FORMAT
    commands: list[str] = Field(default_factory=list)
    started: float
    finished: float | None = None
    dataset: Facts
    source: Source | None = None
    folds: int | None = None  # that every seed deals the images out into; each is held out once
    variants: list[Variant]
    seeds: dict[str, list[int]]  # of each variant, by its id
    margin: float = Field(MARGIN, gt=0, le=MOST)
    plan: Plan | None = None
    model: ModelConfig
    recipe: Recipe
    start: Start | None = None
    match: bool = True
    budget: str | None = None
    steps: int | None = None
    epochs: float | None = None
    placing: Placing | None = None
    machine: dict[str, Any] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)
    seconds: dict[str, float] = Field(default_factory=dict)  # spent on measuring, and on all of it
    looks: list[dict[str, int]] = Field(default_factory=list)  # seeds of each variant whenever all of them had ended

    def settings(self) -> dict[str, Any]:
        return {
            "format": self.format, "images": self.dataset.identity, "folds": self.folds, "budget": self.budget,
            "parameter matching": self.match, "start": self.start and self.start.sha256,
            "model": self.model.model_dump(mode="json", exclude={"attention", "seed"}),
            "recipe": self.recipe.model_dump(mode="json"),
        }  # fmt: skip

    def extended(self, other: Study) -> Study:
        """With the other's variants and seeds, the command that asked for them, and starts where they lie now."""
        every = [other.start, *(start for v in other.variants for start in (v.start, *v.starts.values()))]
        lie = {start.sha256: start for start in every if start}

        def here(start: Start) -> Start:
            return lie.get(start.sha256, start)

        have = {
            v.id: v.model_copy(update={"start": v.start and here(v.start),
                                       "starts": {seed: here(start) for seed, start in v.starts.items()}})
            for v in self.variants
        }  # fmt: skip
        now = {v.id: next((old.id for old in have.values() if _same(old, v)), v.id) for v in other.variants}
        for variant in other.variants:
            variant = variant.model_copy(update={"id": now[variant.id]})
            have[variant.id] = _joined(have.get(variant.id, variant), variant)
        more = {now[name]: found for name, found in other.seeds.items()}
        both = {name: sorted({*self.seeds.get(name, []), *more.get(name, [])}) for name in have}
        seeds = {name: found for name, found in both.items() if found}
        new = (len(have), seeds) != (len(self.variants), self.seeds)
        commands = list(dict.fromkeys([*self.commands, *(other.commands if new else [])]))
        changes = {"variants": list(have.values()), "seeds": seeds, "commands": commands, "margin": other.margin,
                   "start": self.start and here(self.start)}  # fmt: skip
        return self.model_copy(update=changes)

    def runs(self) -> list[Run]:
        """Seeds outermost, then folds, and variants in turn, so that a drift of the machine hits all alike; then each
        variant's first run for half of the steps, which tells whether more of them would change the answer."""
        seeds = sorted({seed for seeds in self.seeds.values() for seed in seeds})
        folds = range(self.folds) if self.folds else [None]
        found = []
        for i, (seed, fold) in enumerate((seed, fold) for seed in seeds for fold in folds):
            mine = [variant for variant in self.variants if seed in self.seeds.get(variant.id, [])]
            mine = mine[i % len(mine) :] + mine[: i % len(mine)]
            found += [Run(variant, seed, fold=fold) for variant in mine]
        halves = [Run(v, self.seeds[v.id][0], True, folds[0]) for v in self.variants if v.id in self.seeds]
        return found + (halves if (self.steps or 0) > 1 else [])
