"""Marks on speeds that were measured while other programs had the core: they decide nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from linvit.records import Record, Tag

MAX_WAITING = 0.03  # part of the time


def marked(measure: Callable[[], Iterable[Record]]) -> Iterator[Record]:
    """All records of a measurement, marked if the core was busy in the meantime."""
    started, waited = time.perf_counter(), waiting()
    found = list(measure())
    marks = busy(waiting() - waited, time.perf_counter() - started)
    for record in found:
        yield replace(record, tags={**record.tags, **marks})


def busy(waited: float, seconds: float) -> dict[str, Tag]:
    """A mark where other programs had this one's core for a noticeable part of the time."""
    return {"busy": True} if waited > MAX_WAITING * seconds else {}


def waiting() -> float:
    """Seconds for which this process's threads have been ready to run without a core; 0 where only Linux would know."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            total += int(path.read_text().split()[1])
    return total / 1e9
