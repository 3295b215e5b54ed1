"""Tensors with checksums, and signals that wait until a step is whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from linvit import ranks
from linvit.errors import Evicted
from linvit.files import write_atomically

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # by hand, by a shutdown, by a scheduler


def save_tensors(path: Path, tensors: Mapping[str, Tensor], **facts: Any) -> None:
    """One safetensors file that carries its own checksum and facts, in its only metadata entry (more would be written
    in random order, and equal weights should be equal bytes)."""
    tensors = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    seals = {"sha256": checksum(tensors), "facts_sha256": _checksum_of(facts)}
    write_atomically(path, save(tensors, {"linvit": json.dumps(facts | seals, sort_keys=True)}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts; a ValueError that names the file if it is not whole."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
            facts = json.loads((file.metadata() or {}).get("linvit", "{}"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error})") from None
    sums = facts.pop("sha256", None), facts.pop("facts_sha256", None)
    found = checksum(tensors), _checksum_of(facts)
    if any(wanted not in (None, have) for wanted, have in zip(sums, found, strict=True)):
        raise ValueError(f"{path} is damaged: its checksum does not match its content")
    return tensors, facts


def _checksum_of(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of names, types, shapes and values."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def stopped(number: int, text: str = "") -> KeyboardInterrupt:
    """What a signal becomes."""
    return KeyboardInterrupt(text) if number == signal.SIGINT else Evicted(text)


@contextlib.contextmanager
def interrupted() -> Iterator[Callable[[], int]]:
    """Hold back Ctrl-C and a polite kill until the step is whole: the function tells which signal came, 0 for none. A
    second Ctrl-C is not held back, but for that of a launcher, which passes on what its processes have had already."""
    asked: list[int] = []
    told: list[int] = [0]

    def note(number: int, frame: Any) -> None:
        if asked and number == signal.SIGINT and ranks.launched() == 1:
            raise KeyboardInterrupt
        asked.append(number)

    def heard() -> int:
        told.append(asked[0] if asked else 0)
        return told[-1]

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    old = {number: signal.signal(number, note) for number in STOPS}
    try:
        yield heard
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if asked and not told[-1]:  # it came after the last question: nobody has heard of it yet
        raise stopped(asked[0])
