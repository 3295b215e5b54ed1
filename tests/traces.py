"""What a run leaves behind, and how one is ended at a chosen moment."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from pathlib import Path
from typing import Any

from linvit.records import Records


def weights(folder: Path, models: str = "*/*") -> dict[str, str]:
    """A sum of each model's file."""
    files = folder.glob(f"{models}/model.safetensors")
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def order(folder: Path) -> list[tuple]:
    rows = Records(folder / "records.jsonl")
    return [(r.metric, r.tags.get("variant"), r.tags.get("seed"), r.tags.get("class")) for r in rows]


def die_at(number: int | None) -> None:
    """This process dies at so-manieth call that makes something durable, or takes it away."""
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
    """A split whose images and labels nobody may see; only how many there are."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getattr__(self, name: str):
        raise AssertionError(f"the test split was asked for its {name}")
