"""What a run leaves behind, and how to end one at a chosen moment."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from pathlib import Path
from typing import Any

from linvit.records import Records


def weights(folder: Path, models: str = "*/*") -> dict[str, str]:
    """The checksum of each model's file."""
    files = folder.glob(f"{models}/model.safetensors")
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def order(folder: Path) -> list[tuple]:
    rows = Records(folder / "records.jsonl")
    return [(r.metric, r.tags.get("variant"), r.tags.get("seed"), r.tags.get("class")) for r in rows]


def die_at(number: int | None) -> None:
    """Kill this process at the call of this number that makes something durable, or removes it."""
    if number is None:
        return
    count = itertools.count(1)

    def deadly(call: Any) -> Any:
        def wrapped(*args: Any, **named: Any) -> Any:
            if next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **named)

        return wrapped

    for name in ("fsync", "replace", "rename", "unlink", "mkdir"):
        setattr(os, name, deadly(getattr(os, name)))


class Forbidden:
    """A split of which only the number of images may be read."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getattr__(self, name: str):
        raise AssertionError(f"the test split was asked for its {name}")
