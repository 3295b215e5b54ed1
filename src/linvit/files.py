"""Files that a crash cannot harm: written under another name, synced, renamed; lines appended whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any


def write_atomically(path: Path, content: bytes | str) -> None:
    """The file is there whole, or as it was before."""
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    with named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:  # Ctrl-C too
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)  # a full disk needs the room
            raise
        sync_folder(path.parent)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """An error of the file system says which file it is about, and what is to be done."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = ": what was saved before is whole; make room and give the same command again" if full else ""
        raise OSError(error.errno, f"cannot be written ({error.strerror}){hint}", str(path)) from error


def remove_parts(*folders: Path) -> None:
    """What a killed process had not finished writing, in folders that nobody else is writing to."""
    for folder in folders:
        for part in folder.glob(".*.part"):
            part.unlink(missing_ok=True)  # whoever wrote it may still be at it


def sync_folder(folder: Path) -> None:
    """A rename in it survives a power cut. Windows cannot open a folder; its file system logs renames by itself."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """One more line of JSON, on disk before this returns."""
    with named(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def parse_json(text: str | bytes) -> Any:
    """What JSON says. A ValueError also where it is nested so deeply that Python's parser gives up."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_lines(path: Path, skip_bad: bool = False) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file. A torn last line is left out; any other bad one is an error that names it,
    or is left out too."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise ValueError(f"{type(row).__name__}, not an object")
                yield row
            except ValueError as error:
                if not skip_bad:
                    raise ValueError(f"{path}:{number}: damaged ({error})") from None


def below(folder: Path, name: str) -> Path | None:
    """The path of a file of this name in the folder; None if it is outside on some system: Windows also reads
    backslashes and drives."""
    path = PurePosixPath(name)
    target = folder.joinpath(*path.parts)
    outside = path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name
    return None if outside or not target.resolve().is_relative_to(folder.resolve()) else target


def slug(text: str, longest: int = 60) -> str:
    """The text as a part of a file's name."""
    return re.sub(r"[^\w.]+", "-", text)[:longest].strip("-.") or "unnamed"
