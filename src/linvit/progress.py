"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread

Progress = Callable[[int, int, str], None]  # (done, total, what is being done now)


def ignore(done: int, total: int, what: str) -> None:
    """No progress wanted."""


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
