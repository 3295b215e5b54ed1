"""`linvit tune`: the same search for every attention, and what it changes."""

from __future__ import annotations

from linvit.cli._output import nothing_lost, show, warnings_in_one_line
from linvit.requests import TuneRequest


def run(request: TuneRequest) -> None:
    from linvit.cli._display import Display
    from linvit.tuning import Tuning

    planned = request.dry_run or request.print_config
    with Display(request.quiet or request.as_json) as display, warnings_in_one_line():
        tuning = Tuning(request, log=print if planned else display.log, progress=display.progress)
        with nothing_lost():
            result = tuning.run()
    if result is not None:
        show(result, request.as_json, request.quiet)
