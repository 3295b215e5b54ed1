"""`linvit convert`: a trained vision transformer in, the same with linear attention out."""

from __future__ import annotations

from linvit.cli._output import nothing_lost, show, warnings_in_one_line
from linvit.requests import ConvertRequest


def run(request: ConvertRequest) -> None:
    from linvit.cli._display import Display
    from linvit.pipeline.convert import ConversionRun

    with Display(request.quiet or request.as_json) as display, warnings_in_one_line(), nothing_lost():
        result = ConversionRun(request, on_event=display.on_event, log=print, progress=display.progress).run()
    if result is not None:
        show(result, request.as_json, request.quiet)
