"""Record: one measurement as one flat JSON line, with its provenance.

A records file is only ever appended to. A line is written by one `write` and synced before the number is reported, so
a kill loses nothing that was shown; a torn last line (power cut) is ignored by readers and removed by the next writer.
This module knows no torch: whoever measures fills in `Provenance`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import NoneType
from typing import Any

from linvit.files import read_lines
from linvit.locks import appending

Tag = str | int | float | bool | None


@cache
def commit() -> str:
    """The commit of the linvit that measures, `+` if its files differ from it; empty outside linvit's own checkout (a
    package installed below somebody else's repository must not claim that one's)."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    if git("rev-parse", "--show-prefix") != "src/linvit/" or not git("ls-files", Path(__file__).name):
        return ""
    changed = git("status", "--porcelain", "--untracked-files=no", ".")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


@cache
def versions() -> str:
    found = []
    for package in ("linvit", "torch", "numpy"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


@dataclass(frozen=True)
class Record:
    """One measurement. `tags` (attention, dataset, seed, split, …) say what was measured."""

    metric: str
    value: float | int | None  # None: not a finite number (a diverged run)
    unit: str = ""
    n: int = 1  # number of observations
    experiment: str = ""
    device: str = ""
    threads: int = 0
    dtype: str = ""
    settings: str = ""  # of a GPU: float32 matmul precision, SDPA backends
    versions: str = field(default_factory=versions)
    commit: str = field(default_factory=commit)
    time: float = field(default_factory=time.time)
    artefact: str = ""  # a file with what one number cannot hold
    tags: dict[str, Tag] = field(default_factory=dict)

    def line(self) -> str:
        row: dict[str, Any] = asdict(self)
        tags = row.pop("tags")
        if clash := set(tags) & {f.name for f in fields(self)}:
            raise ValueError(f"record tags may not be named {sorted(clash)}")
        if isinstance(self.value, float) and not math.isfinite(self.value):
            row["value"] = None
        return json.dumps(row | tags, ensure_ascii=False, allow_nan=False)

    @classmethod
    def of(cls, row: dict[str, Any]) -> Record:
        """The record of a parsed line."""
        own = {name: row.pop(name) for name in OWN if name in row}
        return cls(**own, tags=row)

    def check(self) -> None:
        """A TypeError if a field or a tag holds what no record does."""
        for name, kinds in KINDS.items():
            if not isinstance(value := getattr(self, name), kinds) or _is_odd(value):
                raise TypeError(f"{name}={value!r}")
        for name, value in self.tags.items():
            if not isinstance(value, SCALARS) or _is_odd(value):
                raise TypeError(f"{name}={value!r}")

    def tagged(self, **tags: Tag) -> Record:
        return replace(self, tags=self.tags | tags)

    @property
    def where(self) -> str:
        """Device, threads, dtype and versions."""
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        parts = self.device, threads, self.dtype, self.settings, self.versions
        return ", ".join(part for part in parts if part)


OWN = tuple(f.name for f in fields(Record))
SCALARS = (str, int, float, NoneType)
KINDS: dict[str, tuple[type, ...]] = {
    "value": (int, float, NoneType),
    "n": (int,),
    "threads": (int,),
    "time": (int, float),
}
KINDS |= {name: (str,) for name in OWN if name not in (*KINDS, "tags")}


def _is_odd(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class Records:
    """An append-only file of records, safe for several processes."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def append(self, records: Iterable[Record]) -> None:
        text = "".join(record.line() + "\n" for record in records)
        if not text:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with appending(self.path), open(self.path, "a+b") as file:
            drop_torn_line(file)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[Record]:
        for number, row in enumerate(read_lines(self.path), 1):
            try:
                record = Record.of(row)
                record.check()
                yield record
            except TypeError as error:
                raise ValueError(f"{self.path}:{number}: damaged ({error})") from None


def drop_torn_line(file: Any) -> None:
    """Of a file open for appending: what a writer that was killed has left of its last line."""
    end = file.seek(0, os.SEEK_END)
    keep = end
    while keep:
        step = min(keep, 4096)
        file.seek(keep - step)
        newline = file.read(step).rfind(b"\n")
        if newline >= 0:
            keep = keep - step + newline + 1
            break
        keep -= step
    if keep < end:
        file.truncate(keep)
    file.seek(0, os.SEEK_END)


def unverified(device: str) -> str:
    """What is to be said of figures from this device; nothing of a CPU's."""
    if not device or device.startswith("cpu"):
        return ""
    return "linvit's code for GPUs is tested on a simulated device only; `make test-gpu` checks it on this one"
