"""The page of the published studies: printed numbers next to what was run of them, claims judged, mistakes shown."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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
from linvit.studies.claims import CLAIMS
from linvit.studies.declaration import COLUMNS, studies_in_order
from linvit.studies.hypotheses import FAILS, HOLDS, MISSING, OPEN, Part, Verdict, judge
from linvit.studies.mistakes import MISTAKES, Mistake, Shown
from linvit.studies.results import Results
from linvit.studies.sheets import Line, Sheet, printed, runs, sheet, table

LOOKS = {HOLDS: "good", FAILS: "bad", OPEN: "warn", MISSING: ""}


@dataclass(frozen=True)
class Book:
    """All that the page shows."""

    sheets: Sequence[Sheet]
    verdicts: Sequence[Verdict]
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
    return Book(sheets, judge(CLAIMS, results), experiments, _facts(results, sheets))


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
        {found.name: found.page() for found in charts.values()},
        book=book,
        headline=headline(book),
        findings=findings(book),
        looks=LOOKS,
        charts_of=charts,
        pictures={one.study.name: _picture(one) for one in book.sheets},
        tables={one.study.name: table(one) for one in book.sheets if one.lines},
        printed=printed,
        shown=shown,
    )


def _picture(sheet: Sheet) -> str:
    """A figure as a data: address, with 64 colours, which takes a quarter of the bytes."""
    for column in sheet.columns.values():
        if sheet.figure and (file := column.folder / "figure.png").exists():
            small = io.BytesIO()
            Image.open(file).convert("RGB").quantize(64).save(small, "PNG", optimize=True)
            return "data:image/png;base64," + base64.b64encode(small.getvalue()).decode()
    return ""


def headline(book: Book) -> str:
    count, words = book.counts, []
    texts = {HOLDS: "{} hold{s}", FAILS: "{} {do} not", OPEN: "{} are undecided"}
    for word, text in texts.items():
        if n := count[word]:
            words.append(text.format(n, s="s" * (n == 1), do="does" if n == 1 else "do"))
    left = count[MISSING]
    said = ", ".join(words) if words else "none is judged yet"
    return f"Of {len(book.verdicts)} claims {said}" + (f"; {left} are untested" if left and words else "")


def findings(book: Book) -> list[str]:
    """The three that matter most, of what is known."""
    denied = sum(bool(verdict.claim.contradicted) for verdict in book.verdicts)
    against = f"{denied} of {len(book.verdicts)} claims contradict the numbers that the same report prints."
    return [text for text in (_rerun(book), book.mistakes[0][1].says, _speed(book), against) if text][:3]


def _rerun(book: Book) -> str:
    both = [(line.results["fair"], line.published.accuracy) for line in book.run("fair")]
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
        rows.append({"Test": part.what, "Found": part.found, "Shown": word + sure if p <= LEVEL else "neither"})
    return Table.of(rows, ["Found", "Shown"])
