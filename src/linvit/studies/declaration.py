"""What a published study declares: its rows and columns, its size at each scale, and what to expect.

A study is a value: a `PublishedStudy`, whose rows are trained, a `Figure`, which is measured, or a `NotReproducible`.
The file that declares it passes it to `register`.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from linvit.records import Record
from linvit.registry import Registry
from linvit.studies.agenda import AGENDA
from linvit.studies.pinned import STARTED, pinned

if TYPE_CHECKING:
    from linvit.studies.run import Reproduction

Column = Literal["literal", "fair"]
COLUMNS: tuple[Column, ...] = ("literal", "fair")
SCALES = ("full", "cpu", "smoke")
Options = Mapping[str, Any]  # of the model and the recipe

# Options and durations that several reports share.
PLAIN = {"warmup": 0.0, "clip_norm": 0.0, "label_smoothing": 0.0}
ADAM = PLAIN | {"optimizer": "adam", "betas": (0.9, 0.999)}
# A quarter of the width tuned for CIFAR-10, half of that for MNIST: more than 1,000 images per second on one core.
NARROW = {"trunk": (16, 32, 64), "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}
FEW = 15_000  # training images at scale cpu: with fewer images, the same time allows epochs enough to be near the limit
HOURS = {"full": "hours on a GPU", "cpu": "an hour", "smoke": "30 s"}
DAY = {"full": "a day on a GPU", "cpu": "an hour", "smoke": "30 s"}
MINUTES = {"full": "minutes", "cpu": "minutes", "smoke": "seconds"}


@dataclass(frozen=True)
class Published:
    """One published result."""

    numbers: Mapping[str, Any]  # as printed: accuracies in percent, times in the unit of their name
    place: str = ""  # in the report
    flags: Sequence[str] = ()  # what is known to be wrong with it

    @property
    def accuracy(self) -> float | None:
        """The accuracy by which the report judges, as a fraction."""
        names = ("test_accuracy", "valid_accuracy", "max_accuracy")
        return next((self.numbers[name] / 100 for name in names if name in self.numbers), None)


@cache
def all_published() -> dict[str, dict[str, Published]]:
    """study → row → result, of the five reports, in their order."""
    found: dict[str, dict[str, Published]] = {}
    for entry in json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8")):
        result = Published(entry["numbers"], entry["place"], entry["quality"])
        found.setdefault(entry["study"], {})[entry["row"]] = result
    return found


@dataclass(frozen=True)
class Row:
    """One row of a published table: its name there, and the attention and options that stand for it here."""

    name: str
    attention: str
    literal: str | None = None  # the literal column's attention, if it differs
    _: KW_ONLY
    options: Options = field(default_factory=dict)
    literal_options: Options = field(default_factory=dict)  # in the literal column, in addition to `options`
    literal_data: Options = field(default_factory=dict)  # options of the literal column's images
    checkpoint: bool = False  # starts from the trained softmax model of the same column and seed
    pretrained: str = ""  # the backbone that ships with linvit from which it starts
    times: int = 1  # training length, in units of the column's
    columns: tuple[Column, ...] = COLUMNS  # that have this row
    changed: str = ""  # in the literal column, in addition to what the study changes
    published: Published | None = None  # those of the five reports are in published.json

    @property
    def length(self) -> int:
        """The steps behind its weights in units of the column's, with those of the model it started from."""
        return self.times + self.checkpoint


@dataclass(frozen=True)
class Scale:
    """The size of one column at one scale."""

    seeds: int = 3
    limit: int | None = None  # images of each split
    folds: int | None = None  # cross-validation instead of a validation split
    image_size: int | None = None  # to which images are resized, instead of the column's
    options: Options = field(default_factory=dict)  # override the column's; a row's override both
    measured: bool = True  # speed, memory and the other measurements besides accuracy


ONE_STEP = {"steps": 1, "batch_size": 8, "dim": 32, "depth": 1, "heads": 2, "mlp_dim": 64}
SMOKE = Scale(seeds=1, options=ONE_STEP, measured=False)


@dataclass(frozen=True)
class Rerun:
    """How the rows of one column are trained."""

    options: Options = field(default_factory=dict)
    full: Scale = Scale()
    cpu: Scale = Scale()
    image_size: int | None = None  # to which images are resized


@dataclass(frozen=True)
class Declaration:
    """What all studies have."""

    name: str  # starts with its report, if it has one: 000 to 002, or paper
    _: KW_ONLY
    title: str
    about: str  # what it shows and what to expect
    durations: Mapping[str, str] = field(default_factory=dict)  # by scale; without an entry it cannot be run
    mistakes: tuple[str, ...] = ()  # of the report, that matter here

    def __post_init__(self) -> None:
        for name in ("about", "kept", "changed"):  # written in several lines
            if text := getattr(self, name, ""):
                object.__setattr__(self, name, " ".join(text.split()))
        if (planned := AGENDA.get(self.name)) is not None:
            object.__setattr__(self, "durations", {**self.durations, "cpu": planned.duration})

    def __str__(self) -> str:
        return f"{self.name}, {self.title}"

    @property
    def report(self) -> str:
        """The report it is from: 000 to 003, 004 for the paper, 2026 for the attentions made for vision; empty for a
        study of another origin."""
        start = self.name.partition("-")[0]
        named = {"paper": "004", "attentions": "2026"}
        return named.get(start, start if re.fullmatch(r"00\d", start) else "")

    def reduction(self, scale: str) -> str:
        """What is smaller than at scale full, or in the report."""
        return ""


@dataclass(frozen=True, kw_only=True)
class PublishedStudy(Declaration):
    """A published table of accuracies: rows × (published, literal, fair).

    Literal is the report's recipe, including its flaws; fair is one protocol for all rows. They are two comparisons in
    two folders, so that neither influences the other.
    """

    data: str
    rows: Sequence[Row]
    durations: Mapping[str, str] = field(default_factory=lambda: HOURS)
    literal: Rerun | None = None  # without it there is no literal column
    kept: str = ""  # of the report, in the literal column
    changed: str = ""  # there
    fair: Rerun = Rerun()  # its options override the defaults tuned for these images
    task: str = "classification"
    smoke_images: int = 40  # of each split at scale smoke: at least one per class
    log_curves: bool = False  # its learning curves are shown on logarithmic axes, those of diverged runs too

    @property
    def published(self) -> dict[str, Published]:
        """row → its published result, where there is one."""
        return {
            **all_published().get(self.name, {}),
            **{row.name: row.published for row in self.rows if row.published is not None},
        }

    @property
    def columns(self) -> list[Column]:
        return [column for column in COLUMNS if self.rows_of(column)]

    def rows_of(self, column: Column) -> list[Row]:
        exists = column == "fair" or self.literal is not None
        return [row for row in self.rows if exists and column in row.columns]

    def rerun(self, column: Column) -> Rerun:
        return self.fair if column == "fair" or self.literal is None else self.literal

    def size(self, column: Column, scale: str) -> Scale:
        rerun = self.rerun(column)
        smoke = replace(SMOKE, limit=self.smoke_images, image_size=rerun.cpu.image_size)
        return {"full": rerun.full, "cpu": rerun.cpu, "smoke": smoke}[scale]

    def image_size(self, column: Column, scale: str) -> int | None:
        """To which images are resized."""
        return self.size(column, scale).image_size or self.rerun(column).image_size

    def length(self, column: Column) -> int:
        """The `Row.length` of most rows: these are judged together, the others are only shown."""
        return statistics.mode(row.length for row in self.rows_of(column))

    def options(self, column: Column, scale: str) -> dict[str, Any]:
        """Options of all rows of a column. Where the scale sets steps, there are no epochs."""
        sized = self.size(column, scale).options
        options = pinned(self.data, self.task, {**self.rerun(column).options, **sized})
        if "steps" in sized:
            options.pop("epochs", None)
        if options.get("block", "standard") != "standard":  # it has no MLP
            options.pop("mlp_dim", None)
        return options

    def row_options(self, column: Column, scale: str, row: Row) -> dict[str, Any]:
        """A row's own options. They override the column's, except for a training length that the scale sets."""
        sized, base = self.size(column, scale).options, self.options(column, scale)
        options = {**row.options, **(row.literal_options if column == "literal" else {})}
        if "steps" in sized or "epochs" in sized:
            options.pop("epochs", None)
        if (row.checkpoint or row.pretrained) and "lr" not in {**self.rerun(column).options, **sized}:
            options = STARTED | options
        if row.times > 1:
            length = "steps" if "steps" in sized else "epochs"
            options[length] = row.times * base[length]
        return options

    def reduced(self, column: Column, scale: str) -> str:
        """What is smaller in a column than at `full`."""
        if scale == "smoke":
            return "one step of eight images through one narrow layer; it only tests that the study runs"
        limit, options, full = self.size(column, scale).limit, self.options(column, scale), self.options(column, "full")
        parts = [f"{limit:,} images"] if limit else []
        if side := self.size(column, scale).image_size:
            parts.append(f"{side} px")
        for key, word in (("epochs", "epochs"), ("depth", "layers"), ("dim", "width"), ("levels", "levels")):
            if key in options and options[key] != full.get(key):
                parts.append(f"{word} {options[key]}" + (f" (full: {full[key]})" if key in full else ""))
        return ", ".join(parts)

    def reduction(self, scale: str) -> str:
        texts = {column: text for column in self.columns if (text := self.reduced(column, scale))}
        if len(self.columns) == 1 or (len(texts) > 1 and len(set(texts.values())) == 1):
            return next(iter(texts.values()), "")
        return "; ".join(f"{column}: {text}" for column, text in texts.items())


Measure = Callable[[Options, Path, "Reproduction"], Iterable[Record]]


@dataclass(frozen=True, kw_only=True)
class Figure(Declaration):
    """A published figure that needs no training: `measure` returns records, `draw` makes an Altair chart of them.

    What a number cannot hold, `measure` stores in files of the folder.
    """

    measure: Measure
    draw: Callable[[Sequence[Record], Path], Any]
    durations: Mapping[str, str] = field(default_factory=lambda: MINUTES)
    scales: Mapping[str, Options]  # what `measure` is given at each scale
    shows_images: bool = False  # of a data set: it is drawn here, and never published
    reduced: Mapping[str, str] = field(default_factory=dict)

    def reduction(self, scale: str) -> str:
        return self.reduced.get(scale, "")


@dataclass(frozen=True)
class NotReproducible(Declaration):
    """A published figure that cannot be made here; `about` says why."""


STUDIES: Registry[Declaration] = Registry("study", "linvit.studies")


def register(*studies: Declaration) -> None:
    """Make studies known to `linvit reproduce`."""
    for study in studies:
        STUDIES.register(study.name)(study)


def studies_in_order() -> list[Declaration]:
    """All studies: those of the reports in order, the paper's figures by number, then the others."""

    def key(study: Declaration) -> tuple[bool, str, float, bool]:
        table = isinstance(study, PublishedStudy)  # before what is only measured
        number = re.search(r"fig(\d+)", study.name)
        return not study.report, study.report, int(number[1]) if number else math.inf, not table

    return sorted((study for _, study in STUDIES.items()), key=key)
