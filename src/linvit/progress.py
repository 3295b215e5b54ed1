"""Progress of long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread

Progress = Callable[[int, int, str], None]  # (done, total, what is being done now)


def ignore(done: int, total: int, what: str) -> None:
    """No progress wanted."""


@contextmanager
def repeated(progress: Progress, every: float = 4.0) -> Iterator[Progress]:
    """The same, repeated by a thread if nothing was reported for `every` seconds or up to twice that: one step of a
    large model, or waiting for a process, may take minutes."""
    spoke, over, lock = Event(), Event(), Lock()
    last: list[tuple[int, int, str]] = []

    def tell(done: int, total: int, what: str) -> None:
        with lock:
            last[:] = [(done, total, what)]
            spoke.set()
            progress(done, total, what)

    def again() -> None:
        while not over.wait(every):
            with lock, suppress(Exception):  # an error is raised by the next `tell`
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
