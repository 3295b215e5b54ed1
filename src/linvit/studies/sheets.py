"""A published study next to what was run of it: the table that the terminal and the page show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from linvit.metrics import METRICS
from linvit.records import Record
from linvit.report.merit import ACCURACY, Merit
from linvit.report.result import NOTHING, Cell, Table
from linvit.report.study import accuracy
from linvit.report.summary import VariantResult, count_seeds
from linvit.report.vega import Chart
from linvit.studies.curves import log_curves
from linvit.studies.declaration import Column as ColumnName
from linvit.studies.declaration import Declaration, Published, PublishedStudy
from linvit.studies.details import Details, by_class, details
from linvit.studies.results import ColumnResult, Ref, Results

TIMES = {"ms_per_step": "ms per step", "train_s_per_epoch": "s per epoch", "s_per_epoch": "s per epoch"}
WORDS = ("Row", "Notes")


@dataclass(frozen=True)
class Line:
    """One row of a published table; a row that the report does not have prints no numbers."""

    name: str
    published: Published
    columns: Sequence[str]  # that have it
    results: Mapping[str, VariantResult]  # column → its result here
    changed: str = ""  # in its literal column, in addition to what the study changes
    sized: Mapping[str, Record] = field(default_factory=dict)  # metric → at the report's own size
    details: Mapping[str, Details] = field(default_factory=dict)  # column → what else was found of it
    small: bool = False  # its speed here is of a smaller model than the report's

    @property
    def baseline(self) -> bool:
        return any(result.baseline for result in self.results.values())

    @property
    def here(self) -> VariantResult | None:
        """Whose speed and memory are shown."""
        return self.results.get("fair") or self.results.get("literal")


@dataclass(frozen=True)
class Column:
    """How a column, or a measured figure, was run."""

    scale: str
    smaller: str  # than in the report, in words
    folder: Path
    link: str = ""  # to its own page
    merit: Merit = ACCURACY


@dataclass(frozen=True)
class Sheet:
    study: Declaration
    smoke: bool = False  # it was run at scale smoke
    columns: Mapping[str, Column] = field(default_factory=dict)  # that were run
    lines: Sequence[Line] = ()
    curves: Sequence[Chart] = ()

    @property
    def figure(self) -> bool:
        return not isinstance(self.study, PublishedStudy)

    @property
    def command(self) -> str:
        """Empty if it cannot be run."""
        scale = next((scale for scale in ("cpu", "full") if scale in self.study.durations), "")
        return f"linvit reproduce {self.study.name}" + " --scale full" * (scale == "full") if scale else ""

    @property
    def printed(self) -> list[Line]:
        return [line for line in self.lines if line.published.numbers]

    @property
    def flags(self) -> list[str]:
        """What holds for all of its printed rows."""
        own = [line.published.flags for line in self.printed]
        return [flag for flag in own[0] if all(flag in flags for flags in own)] if own else []

    @property
    def places(self) -> str:
        return ", ".join(dict.fromkeys(line.published.place for line in self.printed))


def sheet(study: Declaration, results: Results) -> Sheet:
    """A study and what was run of it."""
    smoke, found = results.smoke(study.name), results.figure(study.name)
    if isinstance(study, PublishedStudy):
        run: dict[ColumnName, ColumnResult] = {}
        run |= {column: ran for column in study.columns if (ran := results.column(study.name, column))}
        columns = {name: _column(study, name, ran, results.home) for name, ran in run.items()}
        lines = [_completed(study, line, run, results) for line in _lines(study, run)]
        return Sheet(study, smoke, columns, lines, log_curves(study.name, run) if study.log_curves else ())
    return Sheet(study, smoke, {"": Column(found[0], study.reduction(found[0]), found[1])} if found else {})


def _completed(study: PublishedStudy, line: Line, run: Mapping[ColumnName, ColumnResult], results: Results) -> Line:
    """With what else was measured of it."""
    found = {column: details(ran, line.name) for column, ran in run.items() if line.name in ran.rows}
    shown = "fair" if "fair" in found else "literal"
    small = results.shrunk(Ref(study.name, line.name, shown))
    return replace(line, sized=_sized(study, line.name, results), details=found, small=small)


SIZED = ("train_step_vs_softmax", "inference_vs_softmax", "peak_memory")


def _sized(study: PublishedStudy, row: str, results: Results) -> dict[str, Record]:
    """What was measured of a row at the report's own size; for memory the baseline's, too."""
    found = {metric: results.sized(study.report, metric, f"{study.name}: {row}") for metric in SIZED}
    found["baseline"] = results.sized(study.report, "peak_memory", f"{study.name}: softmax")
    return {name: record for name, record in found.items() if record is not None}


def _column(study: PublishedStudy, name: ColumnName, ran: ColumnResult, home: Path) -> Column:
    page = ran.folder / "report.html"
    link = page.relative_to(home).as_posix() if page.exists() else ""
    return Column(ran.scale, reduced(study, name, ran), ran.folder, link, ran.summary.merit)


def reduced(study: PublishedStudy, column: ColumnName, ran: ColumnResult) -> str:
    """As the scale says it, unless the scale was another when the column was run."""
    run = ran.summary.study
    limit, epochs = run.source.limit if run.source else None, run.epochs
    now = study.size(column, ran.scale).limit, study.options(column, ran.scale).get("epochs", epochs)
    if run.source is None or (limit, epochs) == now:
        return study.reduced(column, ran.scale)
    return f"{run.dataset.train:,} training images, {epochs:g} epochs, an earlier definition of this scale"


def _lines(study: PublishedStudy, run: Mapping[ColumnName, ColumnResult]) -> list[Line]:
    """Published rows; if the study was run, also those that only we have, and the controls."""
    declared = {row.name: [column for column in study.columns if column in row.columns] for row in study.rows}
    changed = {row.name: row.changed for row in study.rows}
    ours = [*declared, *(name for ran in run.values() for name in ran.rows)] if run else []
    lines = []
    for name in dict.fromkeys([*study.published, *ours]):
        mine = {column: ran.rows[name] for column, ran in run.items() if name in ran.rows}
        printed, columns = study.published.get(name, Published({})), declared.get(name, list(mine))
        lines.append(Line(name, printed, columns, mine, changed.get(name, "")))
    return lines


def table(sheet: Sheet) -> Table:
    base = next((line for line in sheet.lines if line.baseline), None)
    rows = [
        {
            "Row": line.name,
            "Published": printed(line.published),
            "Literal": rerun(line, sheet, "literal"),
            "Fair": rerun(line, sheet, "fair"),
            "Validation loss, printed": _plain(line.published.numbers.get("best_val_loss")),
            "Validation loss here": _found(line, "loss"),
            "α, printed": _plain(line.published.numbers.get("learned_mixture")),
            "α here": _found(line, "alpha"),
            "Time, printed": _time(line, sheet),
            "Training speed here": _speed_here(line),
            "Memory, printed": _share(line.published.numbers.get("resource_pct_of_vit")),
            "Memory here": _memory(line, base),
            "Speed at the report's size": _sized_speed(line),
            "Memory at the report's size": _sized_memory(line),
            "Notes": Cell(small=known(line, sheet)),
        }
        for line in sheet.lines
    ]
    return Table.of(rows, WORDS)


def by_classes(sheet: Sheet) -> list[Table]:
    """Scores by class of the rows for which they are printed."""
    every = (by_class(line.name, line.published, line.details) for line in sheet.lines)
    return [found for found in every if found is not None]


def _plain(value: float | None) -> Cell:
    return Cell() if value is None else Cell(f"{value:.3f}")


def _found(line: Line, name: str) -> Cell:
    """A number of both columns."""
    both = {column: getattr(found, name) for column, found in line.details.items()}
    texts = [f"{column} {value:.3f}" for column, value in both.items() if value is not None]
    return Cell(texts[0], texts[1:]) if texts else Cell()


def known(line: Line, sheet: Sheet) -> list[str]:
    """What is wrong with the printed number, and how its literal row differs from the other literal rows."""
    flags = [flag for flag in line.published.flags if flag not in sheet.flags]
    return [*flags, f"literal: {line.changed}"] if line.changed else flags


def printed(published: Published) -> Cell:
    if not published.numbers:
        return Cell()
    if published.accuracy is None:
        return Cell("NaN" if any("NaN" in flag for flag in published.flags) else NOTHING, look="bad")
    last = published.numbers.get("final_accuracy")
    other = last is not None and last / 100 != published.accuracy
    return Cell(
        f"{100 * published.accuracy:.2f}\N{NO-BREAK SPACE}%",
        [f"last epoch {last:.2f}\N{NO-BREAK SPACE}%"] if other else [],
    )


def rerun(line: Line, sheet: Sheet, name: str) -> Cell:
    result, column = line.results.get(name), sheet.columns.get(name)
    if name not in line.columns:
        return Cell()
    if result is None or column is None:
        return Cell("smoke only" if sheet.smoke else "not run")
    if result.diverged or result.failed:
        bad = [*result.diverged, *result.failed]
        return Cell("diverged" if result.diverged else "failed", [*bad, f"scale {column.scale}"], "bad")
    last = [f"last epoch {column.merit.show(result.final.mean)}"] if result.final else []
    return Cell(accuracy(result, column.merit), [f"{runs(result)}, {column.scale}", *last])


def runs(result: VariantResult) -> str:
    return (f"{result.folds} folds × " if result.folds else "") + count_seeds(result.seeds)


def _time(line: Line, sheet: Sheet) -> Cell:
    """The printed time, and the speed relative to the softmax row of the same table."""
    numbers = line.published.numbers
    key = next((key for key in TIMES if key in numbers), None)
    if key is None:
        return Cell()
    softmax = (other.published.numbers[key] for other in sheet.printed if other.name in ("transformer", "ViT"))
    base = next(softmax, None)
    small = [f"speed {base / numbers[key]:.2f}×"] if base and len(sheet.printed) > 1 else []
    if "inference_s" in numbers:
        small.append(f"inference {numbers['inference_s']:g} s")
    return Cell(f"{numbers[key]:g} {TIMES[key]}", small)


def _speed_here(line: Line) -> Cell:
    """Relative to softmax, measured in turn."""
    names = ("train_step_vs_softmax", "inference_vs_softmax")
    values = [(name, line.here.get(name) if line.here else None) for name in names]
    shown = [METRICS[name].show(value) for name, value in values if value is not None]
    small = ["a smaller model, which decides nothing"] if line.small and not line.baseline else []
    return Cell(shown[0], [*(f"inference {text}" for text in shown[1:]), *small]) if shown else Cell()


def _memory(line: Line, base: Line | None) -> Cell:
    own, other = (of.here.get("peak_memory") if of and of.here else None for of in (line, base))
    return _share(100 * own / other if own and other else None)


def _sized_speed(line: Line) -> Cell:
    found = [line.sized[name] for name in SIZED[:2] if name in line.sized]
    if not found:
        return Cell()
    texts = [METRICS[record.metric].show(record.value) for record in found]
    busy = ["measured on a busy core"] if any(record.tags.get("busy") for record in found) else []
    return Cell(texts[0], [*(f"inference {text}" for text in texts[1:]), *busy])


def _sized_memory(line: Line) -> Cell:
    own, other = (line.sized.get(name) for name in ("peak_memory", "baseline"))
    if own is None or other is None or not (own.value and other.value):
        return Cell()
    return Cell(_share(100 * own.value / other.value).text, [f"batch {own.tags.get('batch')}"])


def _share(value: float | None) -> Cell:
    """Of softmax's, in percent."""
    return Cell() if value is None else Cell(f"{value:.0f}\N{NO-BREAK SPACE}%")
