"""`linvit convert`: a trained vision transformer in, the same with linear attention out."""

from __future__ import annotations

from linvit.cli._output import carry_out
from linvit.requests import ConvertRequest


def run(request: ConvertRequest) -> None:
    from linvit.pipeline.convert import ConversionRun

    carry_out(ConversionRun, request, "on_event")
