"""`linvit report`: rebuild or merge the pages of studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linvit.cli import _options as options


def run(
    folders: Annotated[list[Path], typer.Argument(
        metavar="DIR…", help="Folders of studies, or of a conversion or a search.")],
    out: options.Out = None,
    margin: Annotated[float | None, typer.Option(
        metavar="POINTS", help="Accuracy that may be given up for speed. [default: the study's, or 1]")] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Rebuild a study's page from its records, or merge several studies of the same data. Of a study whose jobs a
    scheduler does, it shows those that are finished.

    Examples:

        linvit report runs/mine

        linvit report runs/mine --margin 0.5

        linvit report runs/monday runs/tuesday --out runs/both
    """
    from linvit import report
    from linvit.cli import _conversion, _tuning
    from linvit.cli._study import show

    if len(folders) == 1 and (folders[0] / "convert.json").exists() and out is None:
        from linvit.report import conversion

        conversion.build(folders[0])
        _conversion.show(folders[0], json, quiet)
        return
    if len(folders) == 1 and (folders[0] / "search.json").exists() and out is None:
        from linvit.report import tuning

        tuning.build(folders[0])
        _tuning.show(folders[0], json, quiet)
        return
    if any((folder / "jobs.jsonl").exists() for folder in folders):
        from linvit.study.array import assemble  # takes seconds

        for folder in folders:
            assemble(folder)
    share = None if margin is None else margin / 100
    show(folders, report.build(folders, out, margin=share).parent, json, quiet, share)
