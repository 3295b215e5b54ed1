"""Devices: choosing one, the precision it computes in, and copies that do not block."""

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
    """`auto` is the first of cuda, mps and cpu that is available. For CUDA, this lets float32 products use TF32, unless
    the process has already changed the matmul precision from PyTorch's default."""
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
    """The dtype of autocast; float32 means none. `auto` is bfloat16 on CPUs and CUDA devices with native bfloat16,
    float16 on older CUDA devices, and none elsewhere. Raises a ValueError if the device does not support it, or only
    emulates it."""
    if amp == "auto":
        if device.type == "cpu":
            return torch.bfloat16 if has_native_bfloat16() and _amx_is_usable() else torch.float32
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= NATIVE_BF16 else torch.float16
    if amp == "fp16" and device.type != "cuda":
        raise ValueError(f"amp=fp16 needs a CUDA device, not {device.type}: choose amp=off")
    if amp == "bf16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < NATIVE_BF16:
        raise ValueError(f"amp=bf16: {torch.cuda.get_device_name(device)} has no bfloat16: choose amp=fp16")
    if amp == "bf16" and device.type == "cpu":
        if torch.cpu.get_capabilities().get("architecture") == "x86_64" and not has_native_bfloat16():
            raise ValueError("amp=bf16: this CPU has no native bfloat16 and would take many times longer: use amp=off")
        check_bfloat16("amp=bf16", device)
    return AMP[amp]


def has_native_bfloat16() -> bool:
    """Whether this is an x86 CPU that multiplies in bfloat16. Other CPUs with bfloat16 were not measured."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Autocast to this dtype; a null context for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def check_bfloat16(option: str, device: torch.device | str) -> None:
    """Refuse bfloat16 on a CPU that announces AMX and stops at its first instruction, as in some virtual machines."""
    if torch.device(device).type == "cpu" and not _amx_is_usable():
        raise ValueError(
            f"{option}: this machine stops at AMX instructions, though its CPU announces them: choose float32, or set "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 in the environment"
        )


def _amx_is_usable() -> bool:
    return not torch.cpu.get_capabilities().get("amx_bf16") or _amx_runs()


@cache
def _amx_runs() -> bool:
    """Tried in a subprocess, because an illegal instruction ends the process."""
    product = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(a, a)"
    return subprocess.run([sys.executable, "-c", product], capture_output=True).returncode == 0


def wait(device: torch.device) -> None:
    """Synchronise with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def memory(device: torch.device) -> int:
    """Bytes of the device's memory."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else MEMORY


def places(device: torch.device) -> int:
    """How many trainings can run at once: one per core, or one per GPU unless the device has an index."""
    if device.type == "cpu":
        return cpu_count()
    return torch.cuda.device_count() if device.type == "cuda" and device.index is None else 1


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to the device; to CUDA from pinned memory and without blocking."""
    device = torch.device(device)
    return pinned(x, device).to(device, non_blocking=True)


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """The host tensor in pinned memory, if the device is CUDA."""
    return x.pin_memory() if device.type == "cuda" and x.is_cpu and not x.is_pinned() else x


def settings(device: torch.device) -> str:
    """Settings that affect speed and rounding on CUDA: the matmul precision and the enabled SDPA backends."""
    if device.type != "cuda":
        return ""
    backends = ("flash", "mem_efficient", "cudnn", "math")
    enabled = [name for name in backends if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    return f"float32 matmul {torch.get_float32_matmul_precision()}, SDPA {'/'.join(enabled)}"
