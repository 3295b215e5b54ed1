"""`linvit reproduce --publish DIR`: the page of the studies in a form that a repository can keep.

DIR/records is extended by what was run; DIR/reports.html and DIR/reports are then made from DIR/records alone, so that
the same records and the same linvit give the same bytes, whatever else is on the machine.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from linvit import report
from linvit.files import write_atomically
from linvit.ledger import open_ledger
from linvit.report.benchmarks import save
from linvit.studies.archive import archive_path, pack_figure, pack_study, unpack
from linvit.studies.declaration import Declaration, Figure, PublishedStudy, studies_in_order
from linvit.studies.page import gather, render
from linvit.studies.results import REAL_SCALES
from linvit.studies.sheets import Column, Sheet

LEFT_OUT = "confusion-*"  # figures: one for each row, which results.csv has the essence of


def publish(home: Path, into: Path) -> Path:
    """Add the records of a folder of results to `into`/records, and write the page of all that is there."""
    changed: set[Path] = set()
    with TemporaryDirectory() as place:
        rebuilt = Path(place)
        for study in studies_in_order():
            for scale in REAL_SCALES:
                changed |= collect_records(study, scale, home, into)
                _rebuild(study, scale, into, rebuilt)
        book = gather(rebuilt)
        sheets = []
        for sheet in book.sheets:
            columns = {name: _linked(sheet, name, rebuilt, into, changed) for name in sheet.columns}
            sheets.append(replace(sheet, columns=columns))
        write_atomically(into / "reports.html", render(replace(book, sheets=sheets)))
    return into / "reports.html"


def collect_records(study: Declaration, scale: str, home: Path, into: Path) -> set[Path]:
    """Add a study's records to its archives; those that have changed."""
    folder, found = home / study.name / scale, set()
    if isinstance(study, PublishedStudy):
        for column in study.columns:
            file = archive_path(into, study.name, scale, column)
            started = [row.name for row in study.rows_of(column) if row.checkpoint]
            if len(open_ledger(folder / column)) and pack_study(folder / column, file, started):
                found.add(file)
    elif isinstance(study, Figure) and not study.shows_images and len(open_ledger(folder)):
        file = archive_path(into, study.name, scale)
        found |= {file} if pack_figure(folder, file) else set()
    return found


def _rebuild(study: Declaration, scale: str, into: Path, home: Path) -> None:
    """The folders of results that archives were made from, as far as the page needs them."""
    folder = home / study.name / scale
    if isinstance(study, PublishedStudy):
        for column in study.columns:
            if (file := archive_path(into, study.name, scale, column)).exists():
                unpack(file, folder / column)
    elif isinstance(study, Figure) and (file := archive_path(into, study.name, scale)).exists():
        unpack(file, folder)
        save(study.draw(list(open_ledger(folder)), folder), folder / "figure")


def _linked(sheet: Sheet, name: str, home: Path, into: Path, changed: set[Path]) -> Column:
    """A column with a link to its tables and figures, which are written if its records have changed."""
    column = sheet.columns[name]
    if sheet.figure:
        return column
    source, target = column.folder, Path("reports") / column.folder.relative_to(home)
    file = archive_path(into, sheet.study.name, column.scale, name)
    if file in changed or not (into / target / "report.md").exists():
        report.build(source)
        shutil.rmtree(into / target, ignore_errors=True)
        text = re.sub(rf"!\[.*\]\(figures/{LEFT_OUT.replace('*', '.*')}\)\n\n", "", (source / "report.md").read_text())
        write_atomically(into / target / "report.md", text)
        write_atomically(into / target / "results.csv", (source / "results.csv").read_bytes())
        larger = shutil.ignore_patterns("*.png", LEFT_OUT)  # the same drawings as the .svg files
        if (source / "figures").exists():
            shutil.copytree(source / "figures", into / target / "figures", ignore=larger)
    return replace(column, link=(target / "report.md").as_posix())
