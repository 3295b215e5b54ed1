"""Published studies that can be run again. A new one is one file here (or in LINVIT_PLUGINS) with
`@STUDIES.register("name")`; the docstring of its class says what it shows and what to expect.

A study of a published table has three columns: *published*, what the report prints; *literal*, the report's recipe, its
flaws included; *fair*, our protocol. Literal and fair are two ordinary comparisons in two folders, so that neither
decides how the other is run. A scale says what gives way so that a study ends in time: nothing at `full`, which is the
report's own recipe for a GPU; images, epochs or width at `cpu`; nearly all at `smoke`, which only shows that it runs.
"""

from __future__ import annotations

import json
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from linvit.files import slug
from linvit.measure.threads import use_threads
from linvit.progress import Progress, ignore
from linvit.records import Record, Records
from linvit.registry import Registry
from linvit.report.benchmarks import save
from linvit.study import Study, Variant, compare
from linvit.study.jobs import Hear
from linvit.train import start_from

SCALES = ("full", "cpu", "smoke")
Column = Literal["literal", "fair"]
COLUMNS: tuple[Column, ...] = ("literal", "fair")
COLUMN = {"literal": "the report's recipe", "fair": "one protocol for all"}
HOME = Path("runs/reproduce")


@dataclass(frozen=True)
class Where:
    """Where trainings run, and who is told of them: as `compare` takes it."""

    device: str = "auto"
    runner: str | None = None
    jobs: int | None = None
    threads: int | None = None
    data_root: str | Path | None = None
    seeds: int | None = None  # of each row, instead of the scale's
    command: str = ""
    say: Callable[[str], None] = lambda text: None
    hear: Hear = lambda job, event: None
    progress: Progress = ignore


class Reproduction(ABC):
    """One published study. `run` goes on where an earlier run of the same scale stopped."""

    name: ClassVar[str]  # that it is registered by
    report: ClassVar[str]  # which of the five, 000 to 004
    title: ClassVar[str]
    mistakes: ClassVar[tuple[str, ...]] = ()  # of the report, that matter here; the literal column has its recipe's
    takes: ClassVar[Mapping[str, str]]  # scale → how long; one that is not here cannot be run

    @abstractmethod
    def run(self, scale: str, folder: Path, where: Where) -> None:
        """Do it, and leave its records and pages in the folder."""

    @abstractmethod
    def gives_way(self, scale: str) -> str:
        """What is smaller than in the report, in words, or why it cannot be run at all; empty for nothing."""

    @abstractmethod
    def state(self, folder: Path) -> str:
        """`done`, `begun`, or nothing, of what lies there."""


STUDIES: Registry[type[Reproduction]] = Registry("study", "linvit.studies")


def study(name: str) -> Reproduction:
    """A registered study, by its name."""
    found = STUDIES[name]
    found.name = name
    return found()


def reproduce(name: str, scale: str = "cpu", home: str | Path = HOME, where: Where | None = None) -> Path:
    """Run a study at a scale; the folder of its results. The same call again goes on where it stopped."""
    found, folder = runnable(name, scale), Path(home) / name / scale
    found.run(scale, folder, where or Where())
    return folder


def runnable(name: str, scale: str) -> Reproduction:
    """The study, if it can be run at this scale; a ValueError says why not."""
    if scale not in SCALES:
        raise ValueError(f"unknown scale '{scale}': full, cpu or smoke")
    found = study(name)
    if scale not in found.takes:
        why = f"it has {', '.join(found.takes)}" if found.takes else found.gives_way(scale)
        raise ValueError(f"{name} cannot be run at scale '{scale}': {why}")
    return found


class Printed(NamedTuple):
    """One published result, as the report prints it."""

    study: str
    row: str
    place: str  # in the report
    numbers: dict[str, Any]  # as printed: accuracies in percent, times in the unit of their name
    quality: list[str]  # what is known to be wrong with it

    @property
    def accuracy(self) -> float | None:
        """The one that the report judges by, as a fraction."""
        found = next((self.numbers[key] for key in ACCURACIES if key in self.numbers), None)
        return None if found is None else found / 100


ACCURACIES = ("test_accuracy", "valid_accuracy", "max_accuracy")


@cache
def published() -> list[Printed]:
    """All published results, in the order of the reports."""
    file = Path(__file__).with_name("published.json")
    return [Printed(**row) for row in json.loads(file.read_text(encoding="utf-8"))]


@dataclass(frozen=True)
class Row:
    """One line of a published table: its name there, and what it is here."""

    name: str
    attention: str  # fair; and literal, if that is not another
    literal: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the literal one
    data: Mapping[str, Any] = field(default_factory=dict)  # of the literal one's images
    fair: Mapping[str, Any] = field(default_factory=dict)  # options of the fair one
    checkpoint: bool = False  # begins with the softmax model of the same column and seed, trained from nothing
    times: int = 1  # the column's steps; twice is what one from a checkpoint and the model it began with took together
    columns: tuple[str, ...] = COLUMNS  # that have it

    @property
    def lengths(self) -> int:
        """How many times the column's steps were taken to make it."""
        return self.times + self.checkpoint


@dataclass(frozen=True)
class Scale:
    """How large one column is."""

    seeds: int = 3
    limit: int | None = None  # images of each split
    folds: int | None = None  # in turn held out, instead of a part for validation
    options: Mapping[str, Any] = field(default_factory=dict)  # over the column's own; rows' are over both
    measured: bool = True  # speed, memory and what else a page has beside accuracy
    text: str = ""  # what gives way, in words


TESTED = ("test_accuracy", "bits_per_dim")  # metrics of a run that came to a good end
ENDS = (*TESTED, "diverged", "failed")  # or to any
# a quarter of the width tuned for CIFAR-10, half of that for MNIST: a thousand images and more a second on one core
NARROW = {"trunk": (16, 32, 64), "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}
TINY = {"dim": 32, "depth": 1, "heads": 2, "mlp_dim": 64}
SMOKE = Scale(seeds=1, options={"steps": 1, "batch_size": 8, **TINY}, measured=False,
              text="one step of eight images through one narrow layer: it runs, and nothing is learned")  # fmt: skip


class Table(Reproduction):
    """A published table of accuracies: rows × (published, literal, fair)."""

    data: ClassVar[str]
    task: ClassVar[str] = "classification"
    rows: ClassVar[Sequence[Row]]
    literal: ClassVar[Mapping[str, Any]]  # options of the report's recipe
    sides: ClassVar[
        Mapping[str, int]
    ] = {}  # column → that its images are resized to, where they do not stay as they are
    fair: ClassVar[Mapping[str, Any]] = {}  # over the defaults tuned for these images
    scales: ClassVar[Mapping[str, Mapping[str, Scale]]]  # scale → column → how large; smoke is the same for all

    fewest: ClassVar[int] = 40  # images of each split at scale smoke: no fewer than classes

    def size(self, scale: str, column: Column) -> Scale:
        return replace(SMOKE, limit=self.fewest) if scale == "smoke" else self.scales[scale][column]

    def gives_way(self, scale: str) -> str:
        texts = {column: self.size(scale, column).text for column in COLUMNS if self.of(column)}
        said = {column: text for column, text in texts.items() if text}
        if len(said) > 1 and len(set(said.values())) == 1:
            return next(iter(said.values()))
        return "; ".join(f"{column}: {text}" for column, text in said.items())

    def of(self, column: Column) -> list[Row]:
        return [row for row in self.rows if column in row.columns]

    def length(self, column: Column) -> int:
        """Of most of its rows (`Row.lengths`): those that can be judged together. The others stand beside them."""
        return statistics.mode(row.lengths for row in self.of(column))

    def options(self, column: Column, scale: str, row: Row | None = None) -> dict[str, Any]:
        """Of a column, or of what a row has beside that; where steps are given, epochs are not."""
        over = self.size(scale, column).options
        found = {**(self.literal if column == "literal" else self.fair), **over}
        if row is not None:
            length = "steps" if "steps" in over else "epochs"
            longer = {length: row.times * found[length]} if row.times > 1 else {}
            own = row.options if column == "literal" else row.fair
            shorter = {length} & {*over}  # a smaller scale has the last word on how long, a row on all else
            found = {**{key: value for key, value in own.items() if key not in shorter}, **longer}
        return {key: value for key, value in found.items() if key != "epochs" or "steps" not in over}

    def variants(self, column: Column, scale: str, trained: Mapping[int, Path] | None = None) -> list[Variant]:
        """Those from nothing; with the models that seeds begin with, those from a checkpoint."""
        starts = {seed: start_from(model) for seed, model in (trained or {}).items()}
        found = []
        for row in self.of(column):
            if row.checkpoint == bool(starts):
                spec = (row.literal if column == "literal" else None) or row.attention
                data = dict(row.data) if column == "literal" else {}
                found.append(Variant(
                    id=row.name, label=row.name, attention=spec, options=self.options(column, scale, row), data=data,
                    start=next(iter(starts.values()), None), starts=starts, task=self.task, column=column,
                    beside=row.lengths != self.length(column),
                ))  # fmt: skip
        return found

    def trained(self, folder: Path) -> dict[int, Path]:
        """The softmax model of each seed; one that diverged, or failed, is nothing to begin with."""
        name = next(row.name for row in self.rows if row.attention == "softmax")
        tested = {int(r.tags["seed"] or 0): r.experiment for r in Records(folder / "records.jsonl")
                  if r.metric in TESTED and r.tags.get("variant") == name}  # fmt: skip
        return {seed: folder / f"{slug(name)}-seed{seed}-{run[:6]}" / "best" for seed, run in sorted(tested.items())}

    def run(self, scale: str, folder: Path, where: Where) -> None:
        for column in COLUMNS:
            rows, place = self.of(column), folder / column
            later = any(row.checkpoint for row in rows)
            if rows:
                where.say(f"{column}: {COLUMN[column]}, {len(rows)} rows")
                self.compare(column, scale, place, where, self.variants(column, scale), last=not later)
            if later and (trained := self.trained(place)):
                self.compare(column, scale, place, where, self.variants(column, scale, trained))

    def compare(
        self, column: Column, scale: str, folder: Path, where: Where, variants: list[Variant], last: bool = True
    ) -> None:
        size = self.size(scale, column)
        one = None if size.measured or where.runner else 1  # what takes seconds is not worth a second process
        compare(
            self.data, variants=variants, task=self.task, start="scratch",
            controls=column == "fair" and self.length(column) == 1,  # which are trained once, and from nothing
            seeds=where.seeds or size.seeds,
            image_size=self.sides.get(column), limit=size.limit, folds=size.folds,
            match=column == "fair", measured=size.measured and last, out=folder, device=where.device,
            runner=where.runner, jobs=where.jobs or one, threads=where.threads, data_root=where.data_root,
            command=where.command, hear=where.hear, progress=where.progress, **self.options(column, scale),
        )  # fmt: skip

    def state(self, folder: Path) -> str:
        columns: list[Column] = [column for column in COLUMNS if self.of(column)]
        done = [self._done(column, folder / column) for column in columns]
        return "done" if all(done) else "begun" if any((folder / column).exists() for column in columns) else ""

    def _done(self, column: Column, folder: Path) -> bool:
        """Whether each of its runs has come to an end, be that a bad one, and the page was written."""
        if not (folder / "report.html").exists():
            return False
        try:
            study, found = Study.read(folder / "study.json"), Records(folder / "records.jsonl")
        except ValueError:  # of another version: to run it again says what to do
            return False
        ends = {(r.tags.get("variant"), r.tags.get("seed")) for r in found if r.metric in ENDS}
        rows = {row.name for row in self.of(column) if not row.checkpoint or self.trained(folder)}
        runs = {(name, seed) for name, seeds in study.seeds.items() for seed in seeds}
        return study.finished is not None and rows <= set(study.seeds) and runs <= ends


class Figure(Reproduction):
    """A published figure that is measured, not trained for: records, and a picture of them."""

    scales: ClassVar[Mapping[str, Mapping[str, Any]]]  # scale → arguments of what measures it
    text: ClassVar[Mapping[str, str]] = {}  # scale → what gives way

    @abstractmethod
    def measure(self, scale: str, folder: Path, where: Where) -> Iterator[Record]:
        """The records that the figure is drawn from; what one number cannot hold, in files of the folder."""

    @abstractmethod
    def draw(self, records: Sequence[Record], folder: Path) -> Any:
        """An Altair chart of them."""

    def gives_way(self, scale: str) -> str:
        return self.text.get(scale, "")

    def run(self, scale: str, folder: Path, where: Where) -> None:
        records = Records(folder / "records.jsonl")
        if self.state(folder) != "done":
            folder.mkdir(parents=True, exist_ok=True)
            with use_threads(where.threads):
                records.append(list(self.measure(scale, folder, where)))
        save(self.draw(list(records), folder), folder / "figure")

    def state(self, folder: Path) -> str:
        return "done" if (folder / "records.jsonl").exists() else ""


class NotHere(Reproduction):
    """A published figure that nothing here can make; its text says why, and what could."""

    takes: ClassVar[Mapping[str, str]] = {}
    why: ClassVar[str]

    def run(self, scale: str, folder: Path, where: Where) -> None:
        raise ValueError(f"{self.name} cannot be run: {self.why}")

    def gives_way(self, scale: str) -> str:
        return self.why

    def state(self, folder: Path) -> str:
        return ""
