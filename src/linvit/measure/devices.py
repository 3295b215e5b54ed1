"""Devices: which one is used, whether it can do bfloat16, and waiting for it."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import torch


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
