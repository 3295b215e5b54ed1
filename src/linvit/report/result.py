"""Result: what the records of a folder show. The terminal, `--json`, report.md and the page present this one object."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from linvit.records import unverified
from linvit.report.evidence import Evidence, provenance
from linvit.requests import Request, read_request

if TYPE_CHECKING:
    from linvit.report.vega import Chart

NOTHING = "–"
Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class Cell:
    """One cell of a table: text, what is small below it, and how it looks."""

    text: str = ""
    small: Sequence[str] = ()
    look: str = ""  # good, bad, warn or open: a pill
    symbol: int | None = None  # of the variant with this index


@dataclass(frozen=True)
class Table:
    rows: list[dict[str, Cell]]
    right: Sequence[str] = ()  # columns that are aligned right
    chosen: int | None = None  # the row that is emphasised
    title: str = ""
    note: str = ""  # explanation
    open: bool = False  # with a title: whether it is shown at once

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Cell | str]], words: Sequence[str] = (), **more: Any) -> Table:
        """A table of texts or cells. Columns other than the first and `words` hold numbers and are omitted if empty."""
        cells = [{name: v if isinstance(v, Cell) else Cell(v) for name, v in row.items()} for row in rows]
        names = [name for name in (cells[0] if cells else ()) if any(_filled(row[name]) for row in cells)]
        right = [name for name in names[1:] if name not in words]
        return cls([{name: row[name] for name in names} for row in cells], right, **more)

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0]) if self.rows else []

    @property
    def texts(self) -> list[dict[str, str]]:
        return [{name: cell.text for name, cell in row.items()} for row in self.rows]


def _filled(cell: Cell) -> bool:
    return bool(cell.small) or cell.text not in ("", NOTHING)


@dataclass(frozen=True)
class Section:
    """A part of a page: charts under one legend, tables and notes. Charts without data are left out."""

    title: str
    charts: Sequence[Chart | None]
    intro: str = ""
    tables: Sequence[Table] = ()  # those with a title are folded
    notes: Sequence[str] = ()
    small: bool = False  # three charts in a row

    @property
    def drawn(self) -> list[Chart]:
        return [chart for chart in self.charts if chart]

    @property
    def legend(self) -> dict[str, int]:
        """Name → the index of its symbol."""
        found = {name: i for chart in self.drawn for name, i in chart.legend.items()}
        return dict(sorted(found.items(), key=lambda pair: pair[1]))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a page, the terminal and `--json` show. Text is not escaped."""

    kind: ClassVar[str]  # names the template of its page

    title: str
    headline: str
    answer: list[tuple[str, str]] = field(default_factory=list)  # what to use, why, what next: a word and a text each
    sentences: list[str]  # what else there is to say
    confidence: str = ""  # in a word or two
    reason: str = ""  # the rule behind the headline
    limitations: list[str] = field(default_factory=list)
    table: Table
    details: list[Table] = field(default_factory=list)  # further tables
    facts: Facts = field(default_factory=list)  # what was run, where and with what
    commands: list[str] = field(default_factory=list)  # what was requested; empty: a call from Python
    suggested: list[str] = field(default_factory=list)  # next commands
    page: Path

    def rows(self) -> list[dict[str, Any]]:
        """Of results.csv."""
        raise NotImplementedError

    def json(self) -> dict[str, Any]:
        """Plain data, for programs."""
        common = ("headline", "sentences", "confidence", "limitations", "suggested")
        paths = {"report": str(self.page), "results": str(self.page.with_name("results.csv"))}
        found = {name: getattr(self, name) for name in common if getattr(self, name) != ""}
        return found | {name.lower(): text for name, text in self.answer} | self.numbers() | paths

    def numbers(self) -> dict[str, Any]:
        """Additional entries of `json`."""
        return {}

    def sections(self) -> dict[str, Section]:
        """Of the page, in order: `front` is next to the headline, `early` before the limitations."""
        raise NotImplementedError

    def context(self) -> dict[str, Any]:
        """Further values for the template."""
        return {}


def last_request(requests: Sequence[Mapping[str, Any]]) -> Request | None:
    """None if there is none, or if this version cannot read it."""
    with suppress(KeyError, ValueError):
        return read_request(requests[-1]) if requests else None
    return None


def commands(requests: Sequence[Mapping[str, Any]]) -> list[str]:
    """The stored requests as commands."""
    return [found.command() for request in requests if (found := last_request([request]))]


def facts(evidence: Evidence[Any], found: Mapping[str, str], **times: float | None) -> Facts:
    """With where it was measured and when, and without what is empty."""
    when = {n.capitalize(): time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(t)) for n, t in times.items() if t}
    where = provenance(evidence.records, "device", "threads", "versions", "commit")
    if caveat := next(filter(None, (unverified(record.device) for record in evidence.records)), ""):
        where["Accelerator"] = caveat
    return [(name, text) for name, text in ({**found} | where | when).items() if text]


def results_csv(result: Result) -> str:
    """The content of results.csv."""
    rows = result.rows()
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer.writerow(names)
    writer.writerows([_plain(row.get(name)) for name in names] for row in rows)
    return file.getvalue()


def _plain(value: object) -> str:
    """Text that a spreadsheet would run as a formula gets a leading apostrophe."""
    if value is None:
        return ""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) >= 2 else f"{value:.10g}"
    text = str(value)
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def markdown(result: Result, figures: Sequence[tuple[str, str]]) -> str:
    """The content of report.md; figures: names and titles."""
    lines = [
        f"# {escape(result.title)}",
        "",
        f"**{escape(result.headline)}.** {escape(' '.join(result.sentences))}".rstrip(),
        "",
        *(f"- **{name}**: {escape(text)}" for name, text in result.answer),
        *([""] if result.answer else []),
    ]
    lines += _fenced(result.suggested)
    note = " ".join(filter(None, [result.confidence and f"{result.confidence.capitalize()}.", result.reason]))
    lines += [escape(note), ""] if note else []
    if result.limitations:
        lines += ["## Limitations", "", *(f"- {escape(text)}" for text in result.limitations), ""]
    lines += ["## Results", "", *_table(result.table)]
    lines += [f"![{escape(title)}](figures/{name}.svg)\n" for name, title in figures]
    for table in result.details:
        lines += [f"## {escape(table.title)}", "", *_table(table)]
    lines += ["## How it was made", "", *(f"- {name}: {escape(text)}" for name, text in result.facts), ""]
    return "\n".join(lines + _fenced(result.commands))


def _table(table: Table) -> list[str]:
    head = [f"| {' | '.join(map(escape, table.columns))} |"]
    head.append("|" + "".join("---:|" if name in table.right else "---|" for name in table.columns))
    rows = [f"| {' | '.join(escape('; '.join([c.text, *c.small])) for c in row.values())} |" for row in table.rows]
    return [*head, *rows, "", *([escape(table.note), ""] if table.note else [])]


def _fenced(texts: Sequence[str]) -> list[str]:
    return (
        ["```sh", *(line.replace("`", "'") for text in texts for line in text.splitlines()), "```", ""] if texts else []
    )


def escape(text: object) -> str:
    """User text for Markdown: nothing of it is markup."""
    return re.sub(r"([\\`*_{}\[\]<>|#!~&$])", r"\\\1", " ".join(str(text).split()))
