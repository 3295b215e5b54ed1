"""`linvit reproduce`: run the published studies again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from linvit.cli._output import print_json, print_table, working
from linvit.requests import ReproduceRequest
from linvit.requests.base import flag_name, flag_of

if TYPE_CHECKING:
    from linvit.studies.declaration import Declaration

SHOWN = ("Row", "Published", "Literal", "Fair", "Training speed here")  # columns of the page


def run(request: ReproduceRequest) -> None:
    skipped = _run(request, _studies(request)) if request.names or request.all else ""
    if request.report or request.publish:
        from linvit.studies.page import write
        from linvit.studies.publishing import publish

        page = publish(request.out, request.publish) if request.publish else write(request.out)
        print_json({"report": str(page)}) if request.as_json else print(f"Report: {page}")
    elif not (request.names or request.all):
        _list(request)
    if skipped:
        raise ValueError(skipped)


def _studies(request: ReproduceRequest) -> list[Declaration]:
    """The studies to run; an unknown name or an option without effect is an error before anything runs."""
    from linvit.studies.agenda import AGENDA
    from linvit.studies.declaration import PublishedStudy
    from linvit.studies.run import runnable

    if request.all and request.names:
        raise ValueError(f"--all runs every study: leave {request.names[0]} out, or --all")
    studies = [runnable(name, request.scale) for name in (AGENDA if request.all else request.names)]
    for study in studies if not request.all else ():
        for flag, value in _given(request, "seeds", "jobs", "runner"):
            if not isinstance(study, PublishedStudy):
                raise ValueError(f"{flag}={value} has no effect on {study.name}, which is measured, not trained")
    return studies


def _given(request: ReproduceRequest, *fields: str) -> list[tuple[str, object]]:
    flags = {field: flag_name(field, flag_of(ReproduceRequest.model_fields[field])) for field in fields}
    return [(flag, getattr(request, field)) for field, flag in flags.items() if getattr(request, field) is not None]


def _run(request: ReproduceRequest, studies: list[Declaration]) -> str:
    """Run each study and print its results; returns which could not be run for lack of data."""
    from linvit.data import Missing
    from linvit.studies.run import Reproduction

    missing: dict[str, list[str]] = {}  # what is missing → the studies that need it
    refused = (Missing, ValueError) if request.all else Missing  # one that cannot be run here does not end the others
    done = []
    for study in studies:
        with working(request) as display:
            display.log(_announcement(study, request))
            try:
                folder = Reproduction(request, display.on_job_event, display.log, display.progress).run(study)
            except refused as error:
                missing.setdefault(str(error), []).append(study.name)
                continue
        rows = _rows(study, request)
        done.append({"study": study.name, "scale": request.scale, "folder": str(folder), "rows": rows})
        if rows and not (request.as_json or request.quiet):
            print_table(rows, title=str(study), right=list(rows[0])[1:])
        if not request.as_json:
            print(f"{study.name}: {folder}")
    if request.as_json:
        print_json(done)
    return "; ".join(f"{', '.join(names)} not run: {what}" for what, names in missing.items())


def _announcement(study: Declaration, request: ReproduceRequest) -> str:
    from linvit.report.summary import count_seeds
    from linvit.studies.declaration import PublishedStudy
    from linvit.studies.power import promise

    scale = request.scale
    parts = [str(study), f"Scale {scale}: {study.durations[scale]}"]
    if reduction := study.reduction(scale):
        parts.append(f"Smaller than {'in the report' if study.report else 'at scale full'}: {reduction}")
    if isinstance(study, PublishedStudy):
        counts = {column: count_seeds(request.seeds or study.size(column, scale).seeds) for column in study.columns}
        parts.append("Per row: " + ", ".join(f"{count} ({column})" for column, count in counts.items()))
    if scale == "cpu" and (power := promise(study, request.seeds)):
        parts.append(power)
    if study.mistakes:
        parts.append(f"Mistakes of the report that matter here: {', '.join(study.mistakes)}")
    return ". ".join(parts) + "."


def _rows(study: Declaration, request: ReproduceRequest) -> list[dict[str, str]]:
    """What was published and what was found; nothing at scale smoke."""
    from linvit.studies.results import Results
    from linvit.studies.sheets import sheet, table

    found = sheet(study, Results(request.out))
    if not found.lines or {column.scale for column in found.columns.values()} != {request.scale}:
        return []
    return [{name.lower(): text for name, text in row.items() if name in SHOWN} for row in table(found).texts]


def _list(request: ReproduceRequest) -> None:
    from linvit.studies.declaration import SCALES, studies_in_order
    from linvit.studies.power import claims_of
    from linvit.studies.run import state

    for flag, _ in _given(request, "seeds", "jobs", "threads", "runner", "restore"):
        raise ValueError(f"{flag} has no effect without the name of a study: `linvit reproduce` lists them")
    notes = [
        f"“done” and “started” refer to {request.out}. `linvit reproduce NAME` runs a study at scale cpu; --all runs "
        "every study, those that decide most first; --report writes the page of all studies."
    ]
    rows = []
    for study in studies_in_order():
        states = {s: state(study, request.out / study.name / s) or study.durations.get(s, "–") for s in SCALES}
        claims = str(len(claims_of(study.name)) or "")
        rows.append({"study": study.name, "what": study.title, "claims": claims, **states})
        if not study.durations:
            notes.append(f"{study.name} cannot be run: {study.about}.")
    print_json(rows) if request.as_json else print_table(rows, notes=notes)
