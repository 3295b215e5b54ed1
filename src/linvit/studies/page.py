"""The page of the published studies: everything that was run of them, the claims and the mistakes."""

from __future__ import annotations

import base64
import io
import shutil
from dataclasses import replace
from pathlib import Path

from PIL import Image

from linvit.files import write_atomically
from linvit.records import Record
from linvit.report.reproduction import Book, Column, Line, Sheet, render
from linvit.studies.claims import CLAIMS
from linvit.studies.declaration import COLUMNS, Declaration, Published, PublishedStudy, studies_in_order
from linvit.studies.declaration import Column as ColumnName
from linvit.studies.hypotheses import judge
from linvit.studies.mistakes import MISTAKES
from linvit.studies.results import ColumnResult, Results

COPIED = ("report.md", "results.csv", "figures")  # of each study: small, and readable without a server


def write(home: Path) -> Path:
    """Write the page of a folder of results into that folder."""
    page = home / "report.html"
    write_atomically(page, render(gather(home)))
    return page


def publish(home: Path, into: Path) -> Path:
    """Write the page as `into`/reports.html, and what it links to into `into`/reports, for a repository."""
    book = gather(home)
    sheets = [
        replace(sheet, columns={name: _copied(column, home, into) for name, column in sheet.columns.items()})
        for sheet in book.sheets
    ]
    write_atomically(into / "reports.html", render(replace(book, sheets=sheets)))
    return into / "reports.html"


def _copied(column: Column, home: Path, into: Path) -> Column:
    """Copy the study's tables and figures; the column then links to the copy."""
    source = (home / column.link).parent
    if not column.link or not (source / "report.md").exists():
        return replace(column, link="")
    target = Path("reports") / source.relative_to(home)
    for name in COPIED:
        if (source / name).is_dir():
            larger = shutil.ignore_patterns("*.png")  # the same drawings as the .svg files
            shutil.copytree(source / name, into / target / name, dirs_exist_ok=True, ignore=larger)
        elif (source / name).exists():
            write_atomically(into / target / name, (source / name).read_bytes())
    return replace(column, link=(target / "report.md").as_posix())


def gather(home: Path) -> Book:
    results = Results(home)
    sheets = [sheet(study, results) for study in studies_in_order()]
    experiments = [(mistake, mistake.show()) for mistake in MISTAKES]
    return Book(sheets, judge(CLAIMS, results), experiments, _facts(results, sheets))


def sheet(study: Declaration, results: Results) -> Sheet:
    """One study, as the page shows it."""
    scale = next((scale for scale in ("cpu", "full") if scale in study.durations), "")
    command = f"linvit reproduce {study.name}" + (" --scale full" if scale == "full" else "")
    common = Sheet(
        study.name,
        study.report,
        study.title,
        study.about.replace("`", ""),
        command if scale else "",
        "" if scale else study.reduction("cpu"),
        mistakes=study.mistakes,
        smoke=results.smoke(study.name),
        figure=not isinstance(study, PublishedStudy),
    )
    return _table(common, study, results) if isinstance(study, PublishedStudy) else _figure(common, study, results)


def _table(common: Sheet, study: PublishedStudy, results: Results) -> Sheet:
    """Published rows; if the study was run, also those that only we have, and the controls."""
    run: dict[ColumnName, ColumnResult] = {}
    for column in study.columns:
        if found := results.column(study.name, column):
            run[column] = found
    columns: dict[str, Column] = {}
    for column, found in run.items():
        link = _link(found.folder, results.home)
        columns[column] = Column(found.scale, _reduced(study, column, found), link, found.summary.merit)
    declared = {row.name: [column for column in study.columns if column in row.columns] for row in study.rows}
    found_here = [*declared, *(name for found in run.values() for name in found.rows)] if run else []
    lines = []
    for name in dict.fromkeys([*study.published, *found_here]):
        mine = {column: found.rows[name] for column, found in run.items() if name in found.rows}
        old = study.published.get(name, Published({}))
        columns_of = declared.get(name, tuple(mine))
        lines.append(Line(name, old.numbers, old.accuracy, old.flags, old.place, columns_of, mine))
    folder = next((found.folder.parent for found in run.values()), None)
    return replace(common, lines=lines, columns=columns, picture=_picture(folder))


def _reduced(study: PublishedStudy, column: ColumnName, found: ColumnResult) -> str:
    """As the scale says it, unless the scale was another when the column was run."""
    run = found.summary.study
    limit, epochs = run.source.limit if run.source else None, run.epochs
    now = study.size(column, found.scale).limit, study.options(column, found.scale).get("epochs", epochs)
    if run.source is None or (limit, epochs) == now:
        return study.reduced(column, found.scale)
    return f"{run.dataset.train:,} training images, {epochs:g} epochs, an earlier definition of this scale"


def _link(folder: Path, home: Path) -> str:
    page = folder / "report.html"
    return page.relative_to(home).as_posix() if page.exists() else ""


def _figure(common: Sheet, study: Declaration, results: Results) -> Sheet:
    found = results.figure(study.name)
    if found is None:
        return common
    scale, folder = found
    return replace(common, picture=_picture(folder), columns={"": Column(scale, study.reduction(scale))})


def _picture(folder: Path | None) -> str:
    """A figure as a data: address, with 64 colours, which takes a quarter of the bytes."""
    file = folder and folder / "figure.png"
    if not file or not file.exists():
        return ""
    small = io.BytesIO()
    Image.open(file).convert("RGB").quantize(64).save(small, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(small.getvalue()).decode()


def _facts(results: Results, sheets: list[Sheet]) -> list[tuple[str, str]]:
    """Where everything was run, and with which versions."""
    records: list[Record] = []
    for sheet in sheets:
        columns = [found for column in COLUMNS if (found := results.column(sheet.name, column))]
        records += [record for found in columns for record in found.summary.evidence.records]
        records += results.records(sheet.name) if sheet.picture else []
    facts = {
        name: sorted({str(getattr(record, name)) for record in records} - {"", "0"})
        for name in ("device", "threads", "dtype", "versions", "commit")
    }
    return [(name.capitalize(), ", ".join(values)) for name, values in facts.items() if values]
