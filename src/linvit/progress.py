"""How long work tells how far it is, and how times are written and read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread

Progress = Callable[[int, int, str], None]  # (done, total, what is being done now)


def ignore(done: int, total: int, what: str) -> None:
    """No progress wanted."""


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def seconds(text: str) -> float:
    """`90s`, `10m`, `1.5h` or plain seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not found or float(found[1]) <= 0:
        raise ValueError(f"budget '{text}' is not a duration: write 90s, 10m or 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


@contextmanager
def repeated(progress: Progress, every: float = 4.0) -> Iterator[Progress]:
    """The same, which a thread tells again where nobody did for `every` to twice as many seconds: one step of a large
    model, or a process that is waited for, may take minutes."""
    spoke, over, lock = Event(), Event(), Lock()
    last: list[tuple[int, int, str]] = []

    def tell(done: int, total: int, what: str) -> None:
        with lock:
            last[:] = [(done, total, what)]
            spoke.set()
            progress(done, total, what)

    def again() -> None:
        while not over.wait(every):
            with lock, suppress(Exception):  # whoever cannot be told learns so at the next `tell`
                if last and not spoke.is_set() and not over.is_set():
                    progress(*last[0])
                spoke.clear()

    thread = Thread(target=again, daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        over.set()
        thread.join()
