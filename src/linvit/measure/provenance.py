"""Where a number was measured: the part of a Record that only whoever runs torch can know."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch

Progress = Callable[[int, int, str], None]  # (done, total, what is being done now)


def ignore(done: int, total: int, what: str) -> None:
    """No progress wanted."""


class Provenance(TypedDict):
    device: str
    threads: int
    dtype: str


def provenance(device: torch.device, dtype: torch.dtype) -> Provenance:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "threads": torch.get_num_threads(), "dtype": str(dtype).removeprefix("torch.")}


def pick_device(name: str = "auto") -> torch.device:
    """`auto` is the first of cuda, mps and cpu that is there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"device '{name}' cannot be used here ({why}); choose auto or cpu") from None
    return device
