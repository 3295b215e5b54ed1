"""`linvit reproduce`: the published studies, run again beside an honest one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from linvit.cli import _options as options


def run(
    ctx: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(
        metavar="[NAME]…", help="Studies, one after the other; without any, they are listed.")] = None,
    scale: Annotated[Literal["full", "cpu", "smoke"], typer.Option(
        help="full: the report's recipe, for a GPU; cpu: real data, an hour at most; smoke: it runs.")] = "cpu",
    page: Annotated[bool, typer.Option(
        "--report", help="Write the one page of all of them, from what was run.")] = False,
    publish: Annotated[Path | None, typer.Option(
        metavar="DIR", help="Write it to DIR/reports.html, with the tables that it links to, to be kept.")] = None,
    out: Annotated[Path, typer.Option(
        metavar="DIR", help="Where results lie: DIR/NAME/SCALE.")] = Path("runs/reproduce"),
    seeds: Annotated[int | None, typer.Option(
        min=1, help="Of each row, instead of the scale's; more than before adds to what was run.")] = None,
    jobs: options.Jobs = None,
    threads: options.EachThreads = None,
    on: options.On = None,
    device: options.Device = "auto",
    data_root: options.DataRoot = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Run the published studies: the report's numbers, its recipe here, and the fair protocol.

    The same command again goes on where it stopped. A data set that is not there is named, and the other studies run.

    Examples:

        linvit reproduce

        linvit reproduce 000-mnist

        linvit reproduce 001-I 001-V --scale smoke

        linvit reproduce 001-I --seeds 5

        linvit reproduce --report
    """
    idle = {"--seeds": seeds, "--jobs": jobs, "--threads": threads, "--on": on}
    if not names and (given := [name for name, value in idle.items() if value is not None]):
        raise ValueError(f"{given[0]} has no effect without the name of a study: `linvit reproduce` lists them")
    missing = _run(ctx, names, scale, out, seeds, jobs, threads, on, device, data_root, json, quiet) if names else ""
    if page or publish:
        _page(out, publish, json)
    elif not names:
        _list(out, json)
    if missing:
        raise ValueError(missing)


def _run(
    ctx: typer.Context, names: list[str], scale: str, out: Path, seeds: int | None, jobs: int | None,
    threads: int | None, on: str | None, device: str, data_root: Path | None, json: bool, quiet: bool,
) -> str:  # fmt: skip
    """What could not be run for want of data, and why; empty for nothing."""
    from linvit.cli import _output
    from linvit.cli._display import Display
    from linvit.data import Missing
    from linvit.studies import Table, Where, reproduce, runnable

    again = options.again(ctx)
    for name in names:
        found = runnable(name, scale)  # one that nobody knows, or that cannot be run, is an error before anything is
        for flag, value in {"--seeds": seeds, "--jobs": jobs, "--on": on}.items():
            if value is not None and not isinstance(found, Table):
                raise ValueError(f"{flag}={value} has no effect on {name}, which is measured, not trained")
    missing: dict[str, list[str]] = {}  # what is not there → for whom
    done: dict[str, str] = {}
    for name in names:
        with Display(json or quiet) as display, _output.warnings_in_one_line():
            where = Where(device=device, runner=on, jobs=jobs, threads=threads, data_root=data_root, seeds=seeds,
                          command=again, say=display.say, hear=display.hear, progress=display.progress)  # fmt: skip
            display.say(_about(name, scale, seeds))
            try:
                done[name] = str(reproduce(name, scale, out, where))
            except KeyboardInterrupt as stop:
                raise KeyboardInterrupt(f"nothing that was trained is lost; go on with: {again}") from stop
            except Missing as error:
                missing[str(error)] = [*missing.get(str(error), []), name]
        if name in done and not json:
            if rows := _rows(name, scale, out, quiet):
                _output.print_table(rows, title=_title(name), right=list(rows[0])[1:])
            print(f"{name}: {done[name]}" + (f" (the page of all: linvit reproduce --report --out {out})" * bool(rows)))
    if json:
        _output.print_json([{"study": name, "scale": scale, "folder": folder, "rows": _rows(name, scale, out)}
                            for name, folder in done.items()])  # fmt: skip
    return "; ".join(f"{', '.join(of)} not run: {what}" for what, of in missing.items())


SHOWN = ("Published", "Literal", "Fair", "Training speed here")


def _rows(name: str, scale: str, out: Path, quiet: bool = False) -> list[dict[str, str]]:
    """What came of a table's rows beside what was published; nothing of one that was only to run."""
    from linvit.report.reproduction import columns
    from linvit.studies.page import sheet
    from linvit.studies.results import Results

    found = sheet(name, Results(out))
    if quiet or not found.lines or {column.scale for column in found.columns.values()} != {scale}:
        return []
    cells = {heading: of for heading, of in columns(found).items() if heading in SHOWN}
    return [{"row": line.name} | {heading.lower(): of[i].text for heading, of in cells.items()}
            for i, line in enumerate(found.lines)]  # fmt: skip


def _title(name: str) -> str:
    from linvit.studies import study

    return f"{name}, {study(name).title}"


def _about(name: str, scale: str, seeds: int | None) -> str:
    from linvit.report.summary import count_seeds
    from linvit.studies import COLUMNS, Table, study

    found = study(name)
    parts = [f"{name}, {found.title}", f"scale {scale}: {found.takes[scale]}" + " on two cores" * (scale == "cpu")]
    if gives := found.gives_way(scale):
        parts.append(f"smaller than the report's: {gives}")
    if isinstance(found, Table):
        each = {column: count_seeds(seeds or found.size(scale, column).seeds) for column in COLUMNS if found.of(column)}
        same = len(set(each.values())) == 1
        parts.append(
            f"{next(iter(each.values()))} a row" if same else "; ".join(f"{column}: {n}" for column, n in each.items())
        )
    if found.mistakes:
        parts.append(f"mistakes of the report that matter here: {', '.join(found.mistakes)}")
    return ". ".join(parts) + "."


def _list(out: Path, json: bool) -> None:
    from linvit.cli._output import print_json, print_table
    from linvit.studies import SCALES, STUDIES, study

    rows, never = [], []
    for name in sorted(STUDIES.names(), key=_order):
        found = study(name)
        if not found.takes:
            never.append(f"{name} cannot be run: {found.gives_way('full')}.")
        state = {scale: found.state(out / name / scale) for scale in SCALES if scale in found.takes}
        rows.append({"study": name, "what": found.title, **{s: state.get(s, "–") or found.takes[s] for s in SCALES}})
    if json:
        print_json(rows)
        return
    note = (
        f"How long each takes on two cores, or how far it is in {out}. `linvit reproduce NAME` runs one at scale cpu; "
    )
    print_table(rows, notes=[note + "--report writes the page of all.", *never])


def _order(name: str) -> tuple[str, int]:
    """By report, then as they are declared; figures by their number."""
    number = re.search(r"fig(\d+)", name)
    return name.partition("-")[0], int(number[1]) if number else 0


def _page(out: Path, into: Path | None, json: bool) -> None:
    from linvit.cli._output import print_json
    from linvit.studies.page import publish, write

    page = publish(out, into) if into else write(out)
    print_json({"report": str(page)}) if json else print(f"Report: {page}")
