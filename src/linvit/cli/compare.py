"""`linvit compare`: from images to a recommendation."""

from __future__ import annotations

from linvit.cli._output import carry_out
from linvit.requests import CompareRequest


def run(request: CompareRequest) -> None:
    from linvit.study import Comparison

    carry_out(Comparison, request, "on_job_event")
