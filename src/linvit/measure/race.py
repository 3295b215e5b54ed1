"""Calls timed side by side: the one way in which anything here is timed.

Each round times every call once, in a random order, so that whatever else the machine does hits all alike; a ratio is
taken inside a round, and medians and quartiles are over rounds.

With one thread the clock is the process's CPU time, which other programs do not stretch; else, and on other devices, it
is wall time. Ratios may take CPU time with more threads too, if those sleep while they wait. Under a limit of CPU time
(`ulimit -t`, as batch systems set it) Linux advances that clock every few milliseconds only: then all is wall time.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from linvit.attention import BASELINE, LIMIT
from linvit.devices import wait
from linvit.measure.provenance import Provenance
from linvit.progress import Progress, ignore
from linvit.records import Record, Tag

BASELINES = (BASELINE, LIMIT)  # what everything is compared with: fused softmax, and the speed limit
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
HOST = "host"  # the share of the wall time until the last operation was launched: a device may still have to compute
ROUNDS, MIN_ROUNDS = 30, 5  # of a race; as few as that to end near a deadline
SHORTEST = 2e-3  # seconds that one timing lasts at least, by repetition
FINE, STEPS = 5e-4, 3  # seconds: the longest of this number of steps of a clock that short calls can be timed with
LAUNCH_BOUND = 0.9  # of the time in which a device is given work: it waits for more, and does not show how fast it is
Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Times(Generic[Key]):
    """Seconds of one call: of each key, by either clock, in each round."""

    seconds: Mapping[Key, Mapping[str, Sequence[float]]]
    clock: str
    ratio_clock: str
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)

    def of(self, *keys: Key, by: str | None = None) -> list[float]:
        """Of each round; of several keys, their sum."""
        return [sum(parts) for parts in zip(*(self.seconds[key][by or self.clock] for key in keys), strict=True)]

    def launch_bound(self, *keys: Key) -> dict[str, bool]:
        """The tag of a time in which a device mostly waited for this process to launch operations; none otherwise."""
        if self.device.type == "cpu":
            return {}
        shares = ratios(self.of(*keys, by=HOST), self.of(*keys, by="wall"))
        return {"launch_bound": True} if statistics.median(shares) > LAUNCH_BOUND else {}

    def ratios(self, over: Key, under: Key, by: str | None = None) -> list[float]:
        return ratios(*(self.of(key, by=by or self.ratio_clock) for key in (over, under)))


def race(
    calls: Mapping[Key, Call],
    *,
    device: torch.device,
    rounds: int = ROUNDS,
    shortest: float = SHORTEST,
    progress: Progress = ignore,
    deadline: float | None = None,
) -> Times[Key]:
    """Every call is warmed up and repeated so that one timing lasts at least `shortest` seconds by the wall's clock.
    After MIN_ROUNDS rounds, another begins only if it is likely to end before the `deadline` (of time.monotonic)."""
    total = rounds * len(calls)
    repeats = {}
    for i, (key, call) in enumerate(calls.items()):
        progress(0, total, f"warming up {i + 1} of {len(calls)}")
        timed(call, 1, device)  # the first call warms up
        repeats[key] = max(1, math.ceil(shortest / max(timed(call, 1, device)["wall"], 1e-9)))
    seconds: dict[Key, dict[str, list[float]]] = {key: {clock: [] for clock in (*CLOCKS, HOST)} for key in calls}
    shuffle, keys, begun = random.Random(0).shuffle, list(calls), time.monotonic()
    for turn in range(rounds):
        now = time.monotonic()
        if deadline is not None and turn >= MIN_ROUNDS and now + (now - begun) / turn > deadline:
            break
        shuffle(keys)
        for i, key in enumerate(keys):
            progress(turn * len(keys) + i, total, f"round {turn + 1} of {rounds}")
            for clock, found in timed(calls[key], repeats[key], device).items():
                seconds[key][clock].append(found)
    moved = all(
        one > 0 for spent in seconds.values() for one in spent["cpu"]
    )  # a coarse clock can stand still during a timing
    usable = device.type == "cpu" and moved and is_fine(time.process_time)
    alone = torch.get_num_threads() == 1
    asleep = alone or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    clock, ratio_clock = ("cpu" if usable and fair else "wall" for fair in (alone, asleep))
    return Times(seconds, clock, ratio_clock, device)


def is_fine(clock: Callable[[], float]) -> bool:
    """Whether a clock advances in steps that are short relative to what is timed."""
    steps = []
    for _ in range(STEPS):
        begin = now = clock()
        while now == begin:
            now = clock()
        steps.append(now - begin)
    return max(steps) < FINE


def timed(call: Call, repeats: int, device: torch.device) -> dict[str, float]:
    """Seconds of one call by either clock and until it was launched, as the mean of so many."""
    wait(device)
    begin = {name: clock() for name, clock in CLOCKS.items()}
    for _ in range(repeats):
        call()
    launched = time.perf_counter() - begin["wall"]
    wait(device)
    spent = {name: clock() - begin[name] for name, clock in CLOCKS.items()}
    return {name: seconds / repeats for name, seconds in {**spent, HOST: launched}.items()}


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """over / under, each inside its round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def quartiles(values: Sequence[float]) -> list[float]:
    """Low, median, high."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * list(values)


def over_rounds(metric: str, values: Sequence[float], unit: str, where: Provenance, tags: Mapping[str, Tag]) -> Record:
    """A record of the median, with the quartiles as tags."""
    low, middle, high = quartiles(values)
    return Record(metric, middle, unit, len(values), **where, tags={**tags, "low": low, "high": high})
