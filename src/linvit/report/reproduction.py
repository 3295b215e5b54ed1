"""The page of the published studies: printed numbers next to what is measured here, claims judged, mistakes shown.

It is given everything: which studies there are, their rows and what was run of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from linvit.metrics import METRICS
from linvit.report.merit import ACCURACY, Merit
from linvit.report.result import NOTHING, Cell, Table
from linvit.report.statistics import LEVEL
from linvit.report.study import accuracy
from linvit.report.summary import VariantResult, count_seeds

if TYPE_CHECKING:
    from linvit.report.vega import Chart

COLUMNS = ("published", "literal", "fair")
VERDICTS = {"holds": "good", "does not hold": "bad", "cannot tell at this scale": "warn", "not run": ""}  # → look
TIMES = {"ms_per_step": "ms per step", "train_s_per_epoch": "s per epoch", "s_per_epoch": "s per epoch"}
WORDS = ("Row", "Known of it")


@dataclass(frozen=True)
class Line:
    """One row of a published table."""

    name: str
    numbers: Mapping[str, Any] = field(default_factory=dict)  # as printed; none: the report does not have it
    accuracy: float | None = None  # printed, as a fraction
    flags: Sequence[str] = ()  # what is known to be wrong with it
    place: str = ""
    columns: Sequence[str] = COLUMNS[1:]  # that have it
    results: Mapping[str, VariantResult] = field(default_factory=dict)  # column → its result here

    @property
    def baseline(self) -> bool:
        return any(result.baseline for result in self.results.values())

    @property
    def here(self) -> VariantResult | None:
        """Whose speed and memory are shown."""
        return self.results.get("fair") or self.results.get("literal")


@dataclass(frozen=True)
class Column:
    """How a column was run."""

    scale: str
    smaller: str  # than in the report, in words
    link: str = ""  # its own page
    merit: Merit = ACCURACY


@dataclass(frozen=True)
class Sheet:
    """One study."""

    name: str
    report: str
    title: str = ""
    about: str = ""
    command: str = ""  # none: it cannot be run
    why: str = ""  # not
    lines: Sequence[Line] = ()
    columns: Mapping[str, Column] = field(default_factory=dict)
    mistakes: Sequence[str] = ()
    smoke: bool = False  # it was only shown to run
    figure: bool = False
    picture: str = ""  # data: address

    @property
    def printed(self) -> list[Line]:
        return [line for line in self.lines if line.numbers]

    @property
    def flags(self) -> list[str]:
        """What holds for all of its printed rows."""
        own = self.printed
        return [flag for flag in (own[0].flags if own else ()) if all(flag in line.flags for line in own)]

    @property
    def places(self) -> str:
        return ", ".join(dict.fromkeys(line.place for line in self.printed))


@dataclass(frozen=True)
class Book:
    """All that the page shows. A verdict has a claim, a word, parts, `denied` and `own`; a mistake what it showed."""

    sheets: Sequence[Sheet]
    verdicts: Sequence[Any]
    mistakes: Sequence[tuple[Any, Any]]  # and what its experiment showed
    facts: Sequence[tuple[str, str]]

    @property
    def printed(self) -> list[Line]:
        return [line for sheet in self.sheets for line in sheet.printed]

    def run(self, column: str) -> list[Line]:
        """Printed rows that were run again."""
        return [line for line in self.printed if column in line.results]

    @property
    def counts(self) -> Counter[str]:
        return Counter(verdict.word for verdict in self.verdicts)

    @property
    def judged(self) -> dict[str, list[Any]]:
        reports = dict.fromkeys(verdict.claim.report for verdict in self.verdicts)
        return {name: [v for v in self.verdicts if v.claim.report == name] for name in reports}

    @property
    def reports(self) -> dict[str, list[Sheet]]:
        """Studies of tables; figures have their own section."""
        tables = [sheet for sheet in self.sheets if not sheet.figure]
        return {name: [s for s in tables if s.report == name] for name in dict.fromkeys(s.report for s in tables)}


def headline(book: Book) -> str:
    count, words = book.counts, []
    texts = {"holds": "{} hold{s}", "does not hold": "{} {do} not", "cannot tell at this scale": "{} are undecided"}
    for word, text in texts.items():
        if n := count[word]:
            words.append(text.format(n, s="s" * (n == 1), do="does" if n == 1 else "do"))
    left = count["not run"]
    said = ", ".join(words) if words else "none is judged yet"
    return f"Of {len(book.verdicts)} claims {said}" + (f"; {left} are untested" if left and words else "")


def findings(book: Book) -> list[str]:
    """The three that matter most, of what is known."""
    first = book.mistakes[0][1].says if book.mistakes else ""
    denied = sum(verdict.denied for verdict in book.verdicts)
    against = f"{denied} of {len(book.verdicts)} claims contradict the numbers that the same report prints."
    return [text for text in (_rerun(book), first, _speed(book), against) if text][:3]


def _rerun(book: Book) -> str:
    both = [(line.results["fair"], line.accuracy) for line in book.run("fair") if line.accuracy is not None]
    gains = [ours.best.mean - theirs for ours, theirs in both if ours.best and theirs and not ours.diverged]
    if not gains:
        return f"None of the {len(book.printed)} published numbers has been run again under a fair protocol yet."
    more, middle = sum(gain > 0 for gain in gains), 100 * median(gains)
    scales = {sheet.columns["fair"].scale for sheet in book.sheets if sheet.printed and "fair" in sheet.columns}
    smaller = "" if scales == {"full"} else f", at scale {' and '.join(sorted(scales))} with far less training,"
    return (
        f"Under a fair protocol{smaller} {more} of {len(gains)} numbers that were run again exceed the published one; "
        f"the median difference is {middle:+.1f} points."
    ).replace("-", "−")


def _speed(book: Book) -> str:
    able = [line for sheet in book.sheets for line in sheet.lines if line.here and not line.here.control]
    every = {line.name: line.here.get("train_step_vs_softmax") for line in able if line.here and not line.baseline}
    timed = {name: speed for name, speed in every.items() if speed}
    if not timed:
        return ""
    best, faster = max(timed, key=timed.__getitem__), sum(speed > 1 for speed in timed.values())
    return (
        f"{faster} of {len(timed)} linear attentions train faster than softmax at the sizes that were run; the "
        f"fastest, {best}, at {timed[best]:.2f} times its speed."
    )


def columns(sheet: Sheet) -> dict[str, list[Cell]]:
    """The table of a study, heading by heading; an empty one is left out."""
    base = next((line for line in sheet.lines if line.baseline), None)
    found = {
        "Published": [printed(line) for line in sheet.lines if sheet.printed],
        "Literal": [rerun(line, sheet, "literal") for line in sheet.lines],
        "Fair": [rerun(line, sheet, "fair") for line in sheet.lines],
        "Time, printed": [_time(line, sheet) for line in sheet.lines],
        "Training speed here": [_speed_here(line) for line in sheet.lines],
        "Memory, printed": [_share(line.numbers.get("resource_pct_of_vit")) for line in sheet.lines],
        "Memory here": [_memory(line, base) for line in sheet.lines],
        "Known of it": [Cell(small=[f for f in line.flags if f not in sheet.flags]) for line in sheet.lines],
    }
    return {name: cells for name, cells in found.items() if any(cell.text or cell.small for cell in cells)}


def table(sheet: Sheet) -> Table:
    found = columns(sheet)
    rows = [
        {"Row": line.name} | {name: cells[i] for name, cells in found.items()} for i, line in enumerate(sheet.lines)
    ]
    return Table.of(rows, WORDS)


def printed(line: Line) -> Cell:
    if not line.numbers:
        return Cell()
    if line.accuracy is None:
        return Cell("NaN" if any("NaN" in flag for flag in line.flags) else NOTHING, look="bad")
    last = line.numbers.get("final_accuracy")
    small = [f"last epoch {last:.2f}\N{NO-BREAK SPACE}%"] if last is not None and last / 100 != line.accuracy else []
    return Cell(f"{100 * line.accuracy:.2f}\N{NO-BREAK SPACE}%", small)


def rerun(line: Line, sheet: Sheet, name: str) -> Cell:
    result, column = line.results.get(name), sheet.columns.get(name)
    if name not in line.columns:
        return Cell()
    if result is None or column is None:
        return Cell("it runs" if sheet.smoke else "not run")
    if result.diverged or result.failed:
        bad = [*result.diverged, *result.failed]
        return Cell("diverged" if result.diverged else "failed", [*bad, f"scale {column.scale}"], "bad")
    last = [f"last epoch {column.merit.show(result.final.mean)}"] if result.final else []
    return Cell(accuracy(result, column.merit), [f"{_runs(result)}, {column.scale}", *last])


def _runs(result: VariantResult) -> str:
    return (f"{result.folds} folds × " if result.folds else "") + count_seeds(result.seeds)


def _time(line: Line, sheet: Sheet) -> Cell:
    """The printed time, and the speed relative to the softmax row of the same table."""
    key = next((key for key in TIMES if key in line.numbers), None)
    if key is None:
        return Cell()
    base = next((other.numbers[key] for other in sheet.printed if other.name in ("transformer", "ViT")), None)
    small = [f"speed {base / line.numbers[key]:.2f}×"] if base and len(sheet.printed) > 1 else []
    if "inference_s" in line.numbers:
        small.append(f"inference {line.numbers['inference_s']:g} s")
    return Cell(f"{line.numbers[key]:g} {TIMES[key]}", small)


def _speed_here(line: Line) -> Cell:
    """Relative to softmax, measured in turn."""
    names = ("train_step_vs_softmax", "inference_vs_softmax")
    values = [(name, line.here.get(name) if line.here else None) for name in names]
    shown = [METRICS[name].show(value) for name, value in values if value is not None]
    return Cell(shown[0], [f"inference {text}" for text in shown[1:]]) if shown else Cell()


def _memory(line: Line, base: Line | None) -> Cell:
    own, other = (of.here.get("peak_memory") if of and of.here else None for of in (line, base))
    return _share(100 * own / other if own and other else None)


def _share(value: float | None) -> Cell:
    """Of softmax's, in percent."""
    return Cell() if value is None else Cell(f"{value:.0f}\N{NO-BREAK SPACE}%")


def chart(sheet: Sheet) -> Chart | None:
    """The three columns, row by row."""
    from linvit.report.vega import Chart, Series, data, spans, tooltips, x_axis, y_names

    rows, merit = [], next((column.merit for column in sheet.columns.values()), ACCURACY)
    for line in sheet.lines:
        if line.accuracy is not None:
            same = dict.fromkeys(("value", "low", "high"), line.accuracy)
            rows.append({"row": line.name, "column": "published", "shown": printed(line).text, "of": "one run"} | same)
        for name, result in line.results.items():
            if (best := result.best) is not None and not result.diverged:
                low, high = (best.mean if end is None else end for end in (best.low, best.high))
                about = {"row": line.name, "column": name, "shown": accuracy(result, merit), "of": _runs(result)}
                rows.append(about | {"value": best.mean, "low": low, "high": high})
    if not sheet.columns or not rows:
        return None
    names, series = list(dict.fromkeys(row["row"] for row in rows)), Series(COLUMNS, "column")
    x = x_axis("value", merit.title, format=merit.form, tickCount=5)
    tips = tooltips("row", "column", ("shown", merit.title.lower()), ("of", "from"))
    base = data(rows).encode(y=y_names("row", names, labelLimit=180, grid=True), tooltip=tips, **series("color"))
    points = base.mark_point(size=110, filled=True, fillOpacity=0.9).encode(x=x, **series("shape"))
    title, note = f"{sheet.name}: published, literal and fair", "Lines: 95 % intervals over seeds."
    return Chart(f"dots-{sheet.name}", title, max(90, 26 * len(names)), [spans(base, x), points], note)


def shown(parts: Sequence[Any]) -> Table:
    """Tests, their results, and what these show, before the correction for all of a report's claims."""
    rows = []
    for part in parts:
        p, word = (part.holds, "yes") if part.holds <= part.fails else (part.fails, "the contrary")
        sure = "" if p == 0 else f", p\xa0=\xa0{p:.3f}" if p >= 0.001 else ", p\xa0<\xa00.001"
        rows.append({"Test": part.what, "Found": part.found, "Shown": word + sure if p <= LEVEL else "neither"})
    return Table.of(rows, ["Found", "Shown"])


def grid(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A plain table of texts."""
    return Table.of([dict(zip(head, map(str, row), strict=True)) for row in rows], head)


def render(book: Book) -> str:
    from linvit.report import page

    charts = {sheet.name: found for sheet in book.sheets if (found := chart(sheet))}
    return page.render(
        "reproduction.html",
        charts.values(),
        book=book,
        headline=headline(book),
        findings=findings(book),
        looks=VERDICTS,
        charts_of=charts,
        tables={sheet.name: table(sheet) for sheet in book.sheets if sheet.lines},
        shown=shown,
        grid=grid,
    )
