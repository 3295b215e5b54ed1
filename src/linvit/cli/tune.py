"""`linvit tune`: the same search for every attention, and what it changes."""

from __future__ import annotations

from linvit.cli._output import carry_out
from linvit.requests import TuneRequest


def run(request: TuneRequest) -> None:
    from linvit.tuning import Tuning

    carry_out(Tuning, request)
