"""The page of the published studies: printed numbers next to what was run of them, claims judged, mistakes shown."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from linvit.files import write_atomically
from linvit.records import Record
from linvit.report import page
from linvit.report.comparison import LEVEL
from linvit.report.evidence import provenance
from linvit.report.merit import ACCURACY
from linvit.report.result import Facts, Table
from linvit.report.study import accuracy
from linvit.report.vega import Chart, Series, data, spans, tooltips, x_axis, y_names
from linvit.studies.beliefs import beliefs
from linvit.studies.claims import CLAIMS
from linvit.studies.declaration import COLUMNS, studies_in_order
from linvit.studies.hypotheses import FAILS, HOLDS, MISSING, OPEN, Part, Verdict, judge
from linvit.studies.mistakes import MISTAKES, Mistake, Shown
from linvit.studies.power import promise
from linvit.studies.remedies import Remedy, next_runs, remedies
from linvit.studies.results import Results
from linvit.studies.sheets import Line, Sheet, by_classes, printed, runs, sheet, table

LOOKS = {HOLDS: "good", FAILS: "bad", OPEN: "warn", MISSING: ""}


@dataclass(frozen=True)
class Book:
    """All that the page shows."""

    sheets: Sequence[Sheet]
    verdicts: Sequence[Verdict]
    remedies: Mapping[str, Sequence[Remedy]]  # claim → what would decide it
    next: Sequence[tuple[str, str, Sequence[str]]]  # studies to run, how long each takes, for which claims
    mistakes: Sequence[tuple[Mistake, Shown]]  # and what its experiment showed
    facts: Facts

    @property
    def printed(self) -> list[Line]:
        return [line for sheet in self.sheets for line in sheet.printed]

    def run(self, column: str) -> list[Line]:
        """Printed rows that were run again."""
        return [line for line in self.printed if column in line.results]

    @property
    def counts(self) -> Counter[str]:
        return Counter(verdict.word for verdict in self.verdicts)


def write(home: Path) -> Path:
    """Write the page of a folder of results into that folder."""
    write_atomically(home / "report.html", render(gather(home)))
    return home / "report.html"


def gather(home: Path) -> Book:
    results = Results(home)
    sheets = [sheet(study, results) for study in studies_in_order()]
    experiments = [(mistake, mistake.show()) for mistake in MISTAKES]
    verdicts = judge(CLAIMS, results)
    left = {verdict.claim.id: remedies(verdict, results) for verdict in verdicts}
    return Book(sheets, verdicts, left, next_runs(verdicts, results), experiments, _facts(results, sheets))


def _facts(results: Results, sheets: Sequence[Sheet]) -> Facts:
    """Where everything was run, and with which versions."""
    records: list[Record] = []
    for one in sheets:
        ran = [found for column in COLUMNS if (found := results.column(one.study.name, column))]
        records += [record for found in ran for record in found.summary.evidence.records]
        records += results.records(one.study.name) if one.figure else []
    return list(provenance(records, "device", "threads", "dtype", "versions", "commit").items())


def render(book: Book) -> str:
    charts = {one.study.name: found for one in book.sheets if (found := chart(one))}
    return page.render(
        "reproduction.html",
        {found.name: found.page() for found in (*charts.values(), *(c for one in book.sheets for c in one.curves))},
        book=book,
        headline=headline(book),
        findings=beliefs(book.verdicts),
        looks=LOOKS,
        charts_of=charts,
        pictures={one.study.name: _picture(one) for one in book.sheets},
        tables={one.study.name: table(one) for one in book.sheets if one.lines},
        printed=printed,
        shown=shown,
        promise=promise,
        by_classes=by_classes,
    )


def _picture(sheet: Sheet) -> str:
    """A figure as a data: address, with 256 colours, which takes half of the bytes; with fewer, lines lose theirs."""
    for column in sheet.columns.values():
        if sheet.figure and (file := column.folder / "figure.png").exists():
            small = io.BytesIO()
            Image.open(file).convert("RGB").quantize(256).save(small, "PNG", optimize=True)
            return "data:image/png;base64," + base64.b64encode(small.getvalue()).decode()
    return ""


def headline(book: Book) -> str:
    count, words = book.counts, []
    texts = {HOLDS: "{} hold{s}", FAILS: "{} {do} not", OPEN: "{} {are} undecided"}
    for word, text in texts.items():
        if n := count[word]:
            one = n == 1
            words.append(text.format(n, s="s" * one, do="does" if one else "do", are="is" if one else "are"))
    left = count[MISSING]
    said = ", ".join(words) if words else "none is judged yet"
    return f"Of {len(book.verdicts)} claims {said}" + (
        f"; {left} {'is' if left == 1 else 'are'} untested" if left and words else ""
    )


def chart(sheet: Sheet) -> Chart | None:
    """The three columns, row by row."""
    rows, merit = [], next((column.merit for column in sheet.columns.values()), ACCURACY)
    for line in sheet.lines:
        if (old := line.published).accuracy is not None:
            same = dict.fromkeys(("value", "low", "high"), old.accuracy)
            rows.append({"row": line.name, "column": "published", "shown": printed(old).text, "of": "one run"} | same)
        for name, result in line.results.items():
            if (best := result.best) is not None and not result.diverged:
                low, high = (best.mean if end is None else end for end in (best.low, best.high))
                about = {"row": line.name, "column": name, "shown": accuracy(result, merit), "of": runs(result)}
                rows.append(about | {"value": best.mean, "low": low, "high": high})
    if not sheet.columns or not rows:
        return None
    names, series = list(dict.fromkeys(row["row"] for row in rows)), Series(("published", *COLUMNS), "column")
    x = x_axis("value", merit.title, format=merit.form, tickCount=5)
    tips = tooltips("row", "column", ("shown", merit.title.lower()), ("of", "from"))
    base = data(rows).encode(y=y_names("row", names, labelLimit=180, grid=True), tooltip=tips, **series("color"))
    points = base.mark_point(size=110, filled=True, fillOpacity=0.9).encode(x=x, **series("shape"))
    title, note = f"{sheet.study.name}: published, literal and fair", "Lines: 95 % intervals over seeds."
    return Chart(f"dots-{sheet.study.name}", title, max(90, 26 * len(names)), [spans(base, x), points], note)


def shown(parts: Sequence[Part]) -> Table:
    """Tests, their results, and what these show, before the correction for all of a report's claims."""
    rows = []
    for part in parts:
        p, word = (part.holds, "yes") if part.holds <= part.fails else (part.fails, "the contrary")
        sure = "" if p == 0 else f", p\xa0=\xa0{p:.3f}" if p >= 0.001 else ", p\xa0<\xa00.001"
        verdict = word + sure if p <= LEVEL else "neither"
        rows.append({"Test": part.what, "Found": part.found, "Detects": part.detects, "Shown": verdict})
    return Table.of(rows, ["Found", "Shown"])
