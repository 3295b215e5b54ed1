"""`linvit report`: rebuild or merge the pages of studies."""

from __future__ import annotations

from linvit.cli._output import show
from linvit.requests import ReportRequest


def run(request: ReportRequest) -> None:
    from linvit import report

    if any((folder / "jobs.jsonl").exists() for folder in request.folders):
        from linvit.study.jobs import assemble  # takes seconds

        for folder in request.folders:
            assemble(folder)
    result = report.build(request.folders, request.out, margin=request.margin)
    show(result, request)
