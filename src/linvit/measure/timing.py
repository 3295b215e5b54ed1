"""One clock for everything that is timed, and how long to time.

With one thread the clock is the process's CPU time, which other programs do not stretch; else, and on other devices, it
is wall time. Ratios may take CPU time with more threads too, if those sleep while they wait.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable

import torch

from linvit.measure.provenance import wait

SHORTEST = 2e-3  # seconds that one timing lasts at least, by repetition
ROUNDS = 30
Call = Callable[[], object]


def clock(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" and torch.get_num_threads() == 1 else "wall"


def ratio_clock(device: torch.device) -> str:
    passive = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    return "cpu" if device.type == "cpu" and passive else clock(device)


def timed(call: Call, repeat: int, device: torch.device) -> dict[str, float]:
    """Seconds of one call by either clock."""
    wait(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeat):
        call()
    wait(device)
    return {"wall": (time.perf_counter() - wall) / repeat, "cpu": (time.process_time() - cpu) / repeat}


def repeats(call: Call, device: torch.device) -> int:
    """How often to call for one timing; the first call warms up."""
    timed(call, 1, device)
    return max(1, math.ceil(SHORTEST / max(timed(call, 1, device)["wall"], 1e-9)))


def quartiles(values: list[float]) -> list[float]:
    """Low, median, high."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
