"""`linvit reproduce --report`: all that was run of the published studies, as one page."""

from __future__ import annotations

import base64
import inspect
import io
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

from PIL import Image

from linvit.files import write_atomically
from linvit.report import reproduction
from linvit.report.reproduction import Book, Column, Line, Sheet
from linvit.studies import COLUMNS, STUDIES, Reproduction, Table, published, study
from linvit.studies.claims import CLAIMS, judge
from linvit.studies.mistakes import MISTAKES, table
from linvit.studies.results import Ran, Results


def write(home: Path) -> Path:
    """The page of what lies in a folder of results, into that folder."""
    page = home / "report.html"
    write_atomically(page, reproduction.render(gather(home)))
    return page


PUBLISHED = ("report.md", "results.csv", "figures")  # of each study: what is small and can be read without a server


def publish(home: Path, into: Path) -> Path:
    """The page as `into`/reports.html, and beside it, in `into`/reports, the tables and figures that it links to, as
    they can be kept in a repository."""
    book = gather(home)
    sheets = [replace(sheet, columns={name: _published(column, home, into) for name, column in sheet.columns.items()})
              for sheet in book.sheets]  # fmt: skip
    write_atomically(into / "reports.html", reproduction.render(replace(book, sheets=sheets)))
    return into / "reports.html"


def _published(column: Column, home: Path, into: Path) -> Column:
    source = (home / column.link).parent
    if not column.link or not (source / "report.md").exists():
        return replace(column, link="")
    place = Path("reports") / source.relative_to(home)
    for name in PUBLISHED:
        if (source / name).is_dir():
            drawings = shutil.ignore_patterns("*.png")  # which are the same, larger
            shutil.copytree(source / name, into / place / name, dirs_exist_ok=True, ignore=drawings)
        elif (source / name).exists():
            write_atomically(into / place / name, (source / name).read_bytes())
    return replace(column, link=(place / "report.md").as_posix())


def gather(home: Path) -> Book:
    results = Results(home)
    names = dict.fromkeys([*(row.study for row in published()), *sorted(STUDIES.names(), key=_in_order)])
    sheets = sorted((sheet(name, results) for name in names), key=lambda sheet: sheet.report)
    experiments = [(mistake, mistake.show()) for mistake in MISTAKES]
    return Book(sheets, judge(CLAIMS, results), experiments, _facts(results, sheets))


def _in_order(name: str) -> list[tuple[int, str]]:
    """fig5 before fig15."""
    return [(int(part or 0), word) for word, part in re.findall(r"(\D*)(\d*)", name)]


def sheet(name: str, results: Results) -> Sheet:
    """One study, as the page has it."""
    found = study(name)
    able = next((scale for scale in ("cpu", "full") if scale in found.takes), "")
    command = f"linvit reproduce {name}" + (" --scale full" if able == "full" else "")
    one = Sheet(
        name, found.report, found.title, _about(found), command if able else "", "" if able else found.gives_way("cpu"),
        mistakes=found.mistakes, smoke=results.smoke(name), figure=not isinstance(found, Table),
    )  # fmt: skip
    return _table(one, found, results) if isinstance(found, Table) else _figure(one, found, results)


def _about(found: Reproduction) -> str:
    """What its docstring says of it, without the command."""
    return " ".join((inspect.getdoc(type(found)) or "").partition("\n\n")[0].replace("`", "").split())


def _table(sheet: Sheet, found: Table, results: Results) -> Sheet:
    """Published rows; and where it was run, those that only we have, and the controls beside them."""
    ran = {column: of for column in COLUMNS if (of := results.column(sheet.name, column))}
    columns = {
        column: Column(of.scale, _gave_way(found, column, of), _link(of.folder, results.home), of.summary.merit)
        for column in COLUMNS
        if (of := ran.get(column))
    }
    known, rows, lines = table(sheet.name), {row.name: row for row in found.rows}, []
    for name in dict.fromkeys([*known, *(rows if ran else ()), *(name for of in ran.values() for name in of.rows)]):
        mine = {column: of.rows[name] for column, of in ran.items() if name in of.rows}
        line = Line(name, columns=rows[name].columns if name in rows else tuple(mine), results=mine)
        if row := known.get(name):
            line = replace(line, numbers=row.numbers, accuracy=row.accuracy, flags=row.quality, place=row.place)
        lines.append(line)
    folder = next((of.folder.parent for of in ran.values()), None)
    return replace(sheet, lines=lines, columns=columns, picture=_picture(folder))


def _gave_way(found: Table, column: Literal["literal", "fair"], ran: Ran) -> str:
    """As the scale says it, if it was run at the scale as that is now."""
    size, info = found.size(ran.scale, column), ran.summary.study.info
    images, epochs = ran.summary.study.dataset.get("train"), info.get("epochs")
    now = size.limit, found.options(column, ran.scale).get("epochs", epochs)
    if images is None or epochs is None or ((info.get("source") or {}).get("limit"), epochs) == now:
        return size.text
    return f"{images:,} training images, {epochs:g} epochs, as this scale once was"


def _link(folder: Path, home: Path) -> str:
    page = folder / "report.html"
    return page.relative_to(home).as_posix() if page.exists() else ""


def _figure(sheet: Sheet, found: Reproduction, results: Results) -> Sheet:
    there = results.figure(sheet.name)
    if there is None:
        return sheet
    scale, folder = there
    return replace(sheet, picture=_picture(folder), columns={"": Column(scale, found.gives_way(scale))})


def _picture(folder: Path | None) -> str:
    """A figure inside the page, in as few colours as such drawings have: a quarter of the bytes."""
    file = folder and folder / "figure.png"
    if not file or not file.exists():
        return ""
    small = io.BytesIO()
    Image.open(file).convert("RGB").quantize(64).save(small, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(small.getvalue()).decode()


def _facts(results: Results, sheets: list[Sheet]) -> list[tuple[str, str]]:
    """Where all of it was run, and with what."""
    records = [record for sheet in sheets for column in COLUMNS if (ran := results.column(sheet.name, column))
               for record in ran.summary.study.records]  # fmt: skip
    records += [record for sheet in sheets if sheet.picture for record in results.records(sheet.name)]
    found = {name: sorted({str(getattr(record, name)) for record in records} - {"", "0"})
             for name in ("device", "threads", "dtype", "versions", "commit")}  # fmt: skip
    return [(name.capitalize(), ", ".join(values)) for name, values in found.items() if values]
