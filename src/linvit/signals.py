"""Signals: a process that is asked to stop finishes its step and saves first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

# By a shutdown and by a scheduler; Windows has no SIGUSR1.
EVICTIONS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
STOPS = (signal.SIGINT, *EVICTIONS)  # the first by hand
REQUEUE = 75  # exit code of an evicted process: BSD's "temporary failure", try again


class Evicted(KeyboardInterrupt):
    """Stopped by SIGTERM or SIGUSR1, as schedulers do. The same command, started again, resumes."""


def stopped(number: int, text: str = "") -> KeyboardInterrupt:
    """The exception that a signal becomes."""
    return KeyboardInterrupt(text) if number == signal.SIGINT else Evicted(text)


@contextlib.contextmanager
def interrupted() -> Iterator[Callable[[], int]]:
    """Defer Ctrl-C, SIGTERM and SIGUSR1: the function returns which of them arrived, 0 for none. A second Ctrl-C is not
    deferred, unless a launcher such as torchrun passes on what its processes have received already."""
    launched = int(os.environ.get("WORLD_SIZE") or 1) > 1
    arrived: list[int] = []
    returned: list[int] = [0]

    def note(number: int, frame: Any) -> None:
        if arrived and number == signal.SIGINT and not launched:
            raise KeyboardInterrupt
        arrived.append(number)

    def pending() -> int:
        returned.append(arrived[0] if arrived else 0)
        return returned[-1]

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    old = {number: signal.signal(number, note) for number in STOPS}
    try:
        yield pending
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if arrived and not returned[-1]:  # it arrived after the last call
        raise stopped(arrived[0])
