"""Whose a folder is: one process at a time, and one experiment or study for good.

A lock dies with its process, however that ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

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


class Claimant(Protocol):
    """An experiment or a study: what a folder can hold one of."""

    def settings(self) -> dict[str, Any]:
        """All that makes it what it is, defaults too; what may differ without making it another is left out."""
        ...

    @classmethod
    def read(cls, path: Path) -> Self: ...


T = TypeVar("T", bound=Claimant)


def require_outside(out: Path, data: Path | None) -> None:
    """A ValueError if results would be written into the folder of the images: there they would be taken for some."""
    if data is not None and out.resolve().is_relative_to(data.resolve()):
        raise ValueError(f"--out {out} is in the folder of the data, {data}: choose another --out")


def claim_folder(path: Path, wanted: T, ours: Sequence[str]) -> T | None:
    """What is stored at `path`, if it is what is wanted; None if the folder is free. A ValueError if it holds another
    one, or any of the files that are `ours` without it. Nothing is written."""
    kind, folder = path.stem, path.parent
    if not path.exists():
        if taken := [name for name in ours if (folder / name).exists()]:
            raise ValueError(f"{folder} holds {taken[0]}, but no {path.name}: choose another --out")
        return None
    there = type(wanted).read(path)
    if why := difference(there.settings(), wanted.settings()):
        raise ValueError(f"{folder} holds another {kind} ({why}): choose another --out")
    return there


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """A tree of settings as one mapping, with names such as `model.dim`."""
    if not isinstance(tree, dict):
        return {path: tree}
    return {k: v for key, value in tree.items() for k, v in flat(value, f"{path}.{key}".lstrip(".")).items()}


def difference(there: Any, here: Any) -> str:
    """The first setting in which two trees of settings differ, in words; "" if none does."""
    old, new = flat(there), flat(here)
    for key in new | old:
        if old.get(key) != new.get(key):
            return f"its {key} is {old.get(key)}, not {new.get(key)}"
    return ""
