"""`linvit compare`: from images to a recommendation."""

from __future__ import annotations

import time
from functools import partial

from linvit.cli._output import carry_out
from linvit.requests import CompareRequest


def run(request: CompareRequest) -> None:
    begun = time.perf_counter()  # imports are part of a budget
    from linvit.study import Comparison

    carry_out(partial(Comparison, begun=begun), request, "on_job_event")
