"""One process at a time. A lock dies with its process, however that ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from linvit.files import named


@contextmanager
def locked(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """The folder is ours; a ValueError if another process has it for longer than `wait` seconds."""
    with named(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=wait)
    try:
        lock.acquire(poll_interval=0.1)
    except Timeout:
        raise ValueError(f"{folder} is in use by another linvit process: wait, or choose another --out") from None
    except (OSError, NotImplementedError) as error:
        raise ValueError(f"{folder} cannot be locked ({error}): choose another --out") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def appending(path: Path) -> Iterator[None]:
    """Whoever appends to this file waits for its turn."""
    with FileLock(path.with_name(f".{path.name}.lock")):
        yield
