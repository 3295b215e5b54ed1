"""Where a number was measured: the part of a Record that only whoever runs torch can know."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

import torch

from linvit.errors import MEMORY


class Provenance(TypedDict):
    device: str
    threads: int
    dtype: str


def provenance(device: torch.device, dtype: torch.dtype) -> Provenance:
    known = device.type == "cuda" and torch.cuda.is_available()  # else it is another machine's
    name = torch.cuda.get_device_name(device) if known else device.type
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


def check_bfloat16(option: str, device: torch.device | str) -> None:
    """Refuse bfloat16 on a CPU that announces AMX and stops at its first instruction, as in some virtual machines."""
    if torch.device(device).type == "cpu" and torch.cpu.get_capabilities().get("amx_bf16") and not _amx_runs():
        raise ValueError(
            f"{option}: this machine stops at AMX instructions, though its CPU announces them: choose float32, or set "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 in the environment"
        )


@cache
def _amx_runs() -> bool:
    """Tried in another process, which it would end."""
    product = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(a, a)"
    return subprocess.run([sys.executable, "-c", product], capture_output=True).returncode == 0


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def machine() -> dict[str, Any]:
    """What stands under a study or a benchmark."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "cpu": cpu_name(), "cores": os.cpu_count(), "memory": MEMORY, "device": device,
        "os": platform.platform(terse=True),
    }  # fmt: skip


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
