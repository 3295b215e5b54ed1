"""`linvit compare`: from images to a recommendation."""

from __future__ import annotations

from linvit.cli._output import nothing_lost, show, warnings_in_one_line
from linvit.requests import CompareRequest


def run(request: CompareRequest) -> None:
    from linvit.cli._display import Display
    from linvit.study import Comparison

    planned = request.dry_run or request.print_config or request.jobs_file
    with Display(request.quiet or request.as_json) as display, warnings_in_one_line():
        log = print if planned else display.log
        comparison = Comparison(request, on_event=display.on_job_event, log=log, progress=display.progress)
        with nothing_lost():
            result = comparison.run()
    if result is not None:
        show(result, request.as_json, request.quiet)
