"""The page of the published studies: what was printed beside what comes out here, claims judged, mistakes shown.

It is told everything: which studies there are, what their rows are and what was run of them is no business of a report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import altair as alt

from linvit import metrics
from linvit.report import tables, theme
from linvit.report.charts import Chart
from linvit.report.merit import ACCURACY, Merit
from linvit.report.page import shell, template
from linvit.report.statistics import LEVEL
from linvit.report.summary import Result, count_seeds

COLUMNS = ("published", "literal", "fair")
VERDICTS = {"holds": "good", "does not hold": "bad", "cannot tell at this scale": "warn", "not run": ""}  # → look
TIMES = {"ms_per_step": "ms a step", "train_s_per_epoch": "s an epoch", "s_per_epoch": "s an epoch"}


@dataclass(frozen=True)
class Line:
    """One row of a published table."""

    name: str
    numbers: Mapping[str, Any] = field(default_factory=dict)  # as printed; none: the report does not have it
    accuracy: float | None = None  # printed, as a fraction
    flags: Sequence[str] = ()  # what is known to be wrong with it
    place: str = ""
    columns: Sequence[str] = COLUMNS[1:]  # that have it
    results: Mapping[str, Result] = field(default_factory=dict)  # column → what came of it here

    @property
    def softmax(self) -> bool:
        return any(result.attention.partition(":")[0] == "softmax" for result in self.results.values())

    @property
    def here(self) -> Result | None:
        """Of which speed and memory are told."""
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
    smoke: bool = False  # it was shown to run, and no more
    figure: bool = False
    picture: str = ""  # data: address

    @property
    def printed(self) -> list[Line]:
        return [line for line in self.lines if line.numbers]

    @property
    def flags(self) -> list[str]:
        """What holds for all of its printed rows."""
        mine = self.printed
        return [flag for flag in (mine[0].flags if mine else ()) if all(flag in line.flags for line in mine)]

    @property
    def places(self) -> str:
        return ", ".join(dict.fromkeys(line.place for line in self.printed))


@dataclass(frozen=True)
class Book:
    """All that the page says. A verdict has a claim, a word, parts, `denied` and `own`; a mistake what it showed."""

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
        """Of tables; figures have a place of their own."""
        found: dict[str, list[Sheet]] = {}
        for sheet in self.sheets:
            if not sheet.figure:
                found.setdefault(sheet.report, []).append(sheet)
        return found


def headline(book: Book) -> str:
    count, words = book.counts, []
    for word, text in (("holds", "{} hold{s}"), ("does not hold", "{} {do} not"),
                       ("cannot tell at this scale", "{} cannot be told")):  # fmt: skip
        if n := count[word]:
            words.append(text.format(n, s="s" * (n == 1), do="does" if n == 1 else "do"))
    left = count["not run"]
    said = ", ".join(words) if words else "none is judged yet"
    return f"Of {len(book.verdicts)} claims {said}" + (f"; {left} are untested" if left and words else "")


def findings(book: Book) -> list[str]:
    """The three that matter most, of what is known."""
    return [text for text in (_rerun(book), _first_mistake(book), _speed(book), _denied(book)) if text][:3]


def _rerun(book: Book) -> str:
    both = [(line.results["fair"], line.accuracy) for line in book.run("fair") if line.accuracy is not None]
    gains = [ours.best.mean - theirs for ours, theirs in both if ours.best and theirs and not ours.diverged]
    if not gains:
        return f"None of the {len(book.printed)} published numbers has been run again under a fair protocol yet."
    more, middle = sum(gain > 0 for gain in gains), 100 * median(gains)
    scales = {sheet.columns["fair"].scale for sheet in book.sheets if sheet.printed and "fair" in sheet.columns}
    smaller = "" if scales == {"full"} else f", at scale {' and '.join(sorted(scales))}, far less trained than theirs,"
    return (f"Under a fair protocol{smaller} {more} of {len(gains)} numbers that were run again come out above the "
            f"published one; the median difference is {middle:+.1f} points.").replace("-", "−")  # fmt: skip


def _first_mistake(book: Book) -> str:
    return book.mistakes[0][1].says if book.mistakes else ""


def _speed(book: Book) -> str:
    able = [line for sheet in book.sheets for line in sheet.lines if line.here and not line.here.control]
    every = [(line.name, speed) for line in able
             if not line.softmax and line.here and (speed := line.here.get("train_step_vs_softmax"))]  # fmt: skip
    if not every:
        return ""
    name, best = max(every, key=lambda pair: pair[1])
    faster = sum(speed > 1 for _, speed in every)
    return (f"{faster} of {len(every)} linear attentions train faster than softmax at the sizes that were run; the "
            f"fastest, {name}, at {best:.2f} times its speed.")  # fmt: skip


def _denied(book: Book) -> str:
    count = sum(verdict.denied for verdict in book.verdicts)
    return f"{count} of {len(book.verdicts)} claims are at odds with the numbers that the same report prints."


@dataclass(frozen=True)
class Cell:
    """What stands in a table: a number, what is small below it, and how it looks."""

    text: str = ""
    small: Sequence[str] = ()
    look: str = ""


def columns(sheet: Sheet) -> dict[str, list[Cell]]:
    """The table of a study, heading by heading; one under which there is nothing is left out."""
    softmax = next((line for line in sheet.lines if line.softmax), None)
    found = {
        "Published": [printed(line) for line in sheet.lines if sheet.printed],
        "Literal": [rerun(line, sheet, "literal") for line in sheet.lines],
        "Fair": [rerun(line, sheet, "fair") for line in sheet.lines],
        "Time, printed": [_time(line, sheet) for line in sheet.lines],
        "Training speed here": [_speed_here(line) for line in sheet.lines],
        "Memory, printed": [_share(line.numbers.get("resource_pct_of_vit")) for line in sheet.lines],
        "Memory here": [_memory(line, softmax) for line in sheet.lines],
        "Known of it": [Cell(small=[f for f in line.flags if f not in sheet.flags]) for line in sheet.lines],
    }
    return {name: cells for name, cells in found.items() if any(cell.text or cell.small for cell in cells)}


def printed(line: Line) -> Cell:
    if not line.numbers:
        return Cell()
    if line.accuracy is None:
        return Cell("NaN" if any("NaN" in flag for flag in line.flags) else "–", look="bad")
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
    return Cell(tables.points(result, column.merit), [f"{_runs(result)}, {column.scale}", *last])


def _runs(result: Result) -> str:
    return (f"{result.folds} folds × " if result.folds else "") + count_seeds(result.seeds)


def _time(line: Line, sheet: Sheet) -> Cell:
    """The printed time, and the speed beside the softmax row of the same table."""
    key = next((key for key in TIMES if key in line.numbers), None)
    if key is None:
        return Cell()
    base = next((other.numbers[key] for other in sheet.printed if other.name in ("transformer", "ViT")), None)
    small = [f"speed {base / line.numbers[key]:.2f}×"] if base and len(sheet.printed) > 1 else []
    if "inference_s" in line.numbers:
        small.append(f"inference {line.numbers['inference_s']:g} s")
    return Cell(f"{line.numbers[key]:g} {TIMES[key]}", small)


def _speed_here(line: Line) -> Cell:
    """Beside softmax in one race."""
    names = ("train_step_vs_softmax", "inference_vs_softmax")
    values = [line.here.get(name) for name in names] if line.here else []
    shown = [metrics.METRICS[name].show(value) for name, value in zip(names, values, strict=False) if value is not None]
    return Cell(shown[0], [f"inference {text}" for text in shown[1:]]) if shown else Cell()


def _memory(line: Line, softmax: Line | None) -> Cell:
    mine, other = (of.here.get("peak_memory") if of and of.here else None for of in (line, softmax))
    return _share(100 * mine / other if mine and other else None)


def _share(value: float | None) -> Cell:
    """Of softmax's, in percent."""
    return Cell() if value is None else Cell(f"{value:.0f}\N{NO-BREAK SPACE}%")


def chart(sheet: Sheet) -> Chart | None:
    """The three columns, row by row."""
    rows, merit = [], next((column.merit for column in sheet.columns.values()), ACCURACY)
    for line in sheet.lines:
        if line.accuracy is not None:
            rows.append({"row": line.name, "column": "published", "value": line.accuracy, "low": line.accuracy,
                         "high": line.accuracy, "shown": printed(line).text, "of": "one run"})  # fmt: skip
        for name, result in line.results.items():
            if (best := result.best) is not None and not result.diverged:
                low, high = (best.mean if end is None else end for end in (best.low, best.high))
                rows.append({"row": line.name, "column": name, "value": best.mean, "low": low, "high": high,
                             "shown": tables.points(result, merit), "of": _runs(result)})  # fmt: skip
    if not sheet.columns or not rows:
        return None
    names = list(dict.fromkeys(row["row"] for row in rows))
    x = alt.X("value:Q", title=merit.title, axis=alt.Axis(format=merit.form, tickCount=5), scale=alt.Scale(zero=False))
    y = alt.Y("row:N", title=None, scale=alt.Scale(domain=names), axis=alt.Axis(labelLimit=180, grid=True))
    tips = ["row:N", "column:N", alt.Tooltip("shown:N", title=merit.title.lower()), alt.Tooltip("of:N", title="from")]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        y=y, tooltip=tips, color=alt.Color("column:N", scale=alt.Scale(domain=list(COLUMNS))))  # fmt: skip
    layers = [
        base.mark_rule(strokeWidth=2, strokeOpacity=0.6).encode(x=alt.X("low:Q", title=merit.title), x2="high:Q"),
        base.mark_point(size=110, filled=True, fillOpacity=0.9).encode(
            x=x, shape=alt.Shape("column:N", scale=alt.Scale(domain=list(COLUMNS), range=list(theme.SHAPES[:3])))),
    ]  # fmt: skip
    return Chart(f"dots-{sheet.name}", f"{sheet.name}: published, literal and fair", max(90, 26 * len(names)), layers,
                 "Lines are 95 % intervals over seeds.")  # fmt: skip


def shown(parts: Sequence[Any]) -> list[tuple[str, str, str]]:
    """Tests, what they found, and what that shows, before the correction for all of a report's claims."""
    rows = []
    for part in parts:
        p, word = (part.holds, "yes") if part.holds <= part.fails else (part.fails, "the contrary")
        sure = "" if p == 0 else f", p\xa0=\xa0{p:.3f}" if p >= 0.001 else ", p\xa0<\xa00.001"
        rows.append((part.what, part.found, word + sure if p <= LEVEL else "neither"))
    return rows


def render(book: Book) -> str:
    charts = {sheet.name: found for sheet in book.sheets if (found := chart(sheet))}
    return template("reproduction.html").render(
        book=book, headline=headline(book), findings=findings(book), looks=VERDICTS, charts=charts,
        columns=columns, shown=shown,
        **shell({name: [found] for name, found in charts.items()}),
    )  # fmt: skip
