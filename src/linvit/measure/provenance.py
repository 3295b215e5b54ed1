"""Where a number was measured: the parts of a Record that need torch, and this machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, TypedDict

import torch

from linvit.devices import settings
from linvit.machine import MEMORY


class Provenance(TypedDict):
    device: str
    threads: int
    dtype: str
    settings: str


def provenance(device: torch.device, dtype: torch.dtype) -> Provenance:
    known = device.type == "cuda" and torch.cuda.is_available()  # else it is another machine's
    name = torch.cuda.get_device_name(device) if known else device.type
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "settings": settings(device) if known else "",
    }


def machine() -> dict[str, Any]:
    """What stands under a study or a benchmark."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory": MEMORY,
        "device": device,
        "os": platform.platform(terse=True),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
