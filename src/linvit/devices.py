"""Devices: which one is used, in what precision it computes, and moving tensors there without waiting for it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from linvit.machine import MEMORY, cpu_count

AMP = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SUPPORTED = ("cpu", "cuda", "mps")
NATIVE_BF16 = (8, 0)  # compute capability from which on CUDA devices multiply in bfloat16


def pick_device(name: str = "auto") -> torch.device:
    """`auto` is the first of cuda, mps and cpu that is there. On CUDA, products of float32 may from now on use TF32,
    unless this process has chosen otherwise before."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in SUPPORTED:
            raise RuntimeError("only cpu, cuda and mps are supported")
        if device.type == "mps" and not torch.backends.mps.is_available():
            raise RuntimeError("this machine, or this build of PyTorch, has no MPS")
        if device.type == "cuda" and 0 < torch.cuda.device_count() <= (device.index or 0):
            raise RuntimeError(f"the last one is cuda:{torch.cuda.device_count() - 1}")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"device '{name}' cannot be used here ({why}); choose auto or cpu") from None
    if device.type == "cuda" and torch.get_float32_matmul_precision() == "highest":
        torch.set_float32_matmul_precision("high")
    return device


def amp_dtype(amp: str, device: torch.device) -> torch.dtype:
    """What autocast computes in; float32 for none. `auto` is bfloat16 on CUDA devices that have it, float16 on older
    ones, and none elsewhere. A ValueError where the device cannot do it, or only many times slower."""
    if amp == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= NATIVE_BF16 else torch.float16
    if amp == "fp16" and device.type != "cuda":
        raise ValueError(f"amp=fp16 needs a CUDA device, not {device.type}: choose amp=off")
    if amp == "bf16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < NATIVE_BF16:
        raise ValueError(f"amp=bf16: {torch.cuda.get_device_name(device)} has no bfloat16: choose amp=fp16")
    if amp == "bf16" and device.type == "cpu":
        has = torch.cpu.get_capabilities()
        if has.get("architecture") == "x86_64" and not (has.get("avx512_bf16") or has.get("amx_bf16")):
            raise ValueError("amp=bf16: this CPU has no native bfloat16 and would take many times longer: use amp=off")
        check_bfloat16("amp=bf16", device)
    return AMP[amp]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """In it, a model computes in this precision; nothing for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


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


def memory(device: torch.device) -> int:
    """Bytes of the memory that the device computes in."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else MEMORY


def places(device: torch.device) -> int:
    """How many trainings this machine has a device for: cores, or all of its GPUs if none was named."""
    if device.type == "cpu":
        return cpu_count()
    return torch.cuda.device_count() if device.type == "cuda" and device.index is None else 1


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on the device. To CUDA it is copied from pinned memory, so that neither side waits."""
    device = torch.device(device)
    return pinned(x, device).to(device, non_blocking=True)


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host in memory from which the device copies by itself."""
    return x.pin_memory() if device.type == "cuda" and x.is_cpu and not x.is_pinned() else x


def settings(device: torch.device) -> str:
    """What else decides speed and rounding on a GPU: how float32 is multiplied, and which fused softmax may be used."""
    if device.type != "cuda":
        return ""
    backends = ("flash", "mem_efficient", "cudnn", "math")
    enabled = [name for name in backends if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    return f"float32 matmul {torch.get_float32_matmul_precision()}, SDPA {'/'.join(enabled)}"
