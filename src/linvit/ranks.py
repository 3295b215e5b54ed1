"""Ranks: the processes that share one training, where a launcher such as torchrun started several.

Each has the whole model and a part of every batch. What is random is drawn by keys, what is decided is agreed, and the
first rank alone writes. Where there is one process, every function here is what it would be without this file.
"""

from __future__ import annotations

import hashlib
import os

import torch
import torch.distributed as dist
from torch import Tensor


def launched() -> int:
    """How many processes the launcher started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def count() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def number() -> int:
    return dist.get_rank() if count() > 1 else 0


def join(device: torch.device) -> torch.device:
    """Meet the others that were launched, for as long as this process lives; the device that is this one's."""
    if launched() == 1:
        return device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else every rank would hold memory of the first device
    try:
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    except (ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"WORLD_SIZE={launched()}, but the other processes cannot be reached: {why}") from None
    return device


def part(length: int) -> slice:
    """Which of so many are this rank's; one more or less than any other's."""
    return slice(length * number() // count(), length * (number() + 1) // count())


def summed(values: Tensor) -> Tensor:
    """Over all ranks, in place; the same bits for each of them."""
    return _reduced(values, dist.ReduceOp.SUM) if count() > 1 else values


def highest(*values: int) -> list[int]:
    """Of each, the highest that any rank has: what all of them go by."""
    if count() == 1:
        return list(values)
    return _reduced(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.MAX).tolist()


def gathered(values: Tensor) -> Tensor:
    """(ranks, …): everybody's, of one shape."""
    every = values.new_zeros(count(), *values.shape)
    every[number()] = values
    return summed(every)


def rolled(rows: Tensor) -> Tensor:
    """For each row the one before it in the whole batch, whose part the rows are: `rows.roll(1, 0)` in one process."""
    if count() == 1:
        return rows.roll(1, 0)
    return torch.cat([gathered(rows[-1])[number() - 1, None], rows[:-1]])


def agree(what: str, value: str) -> None:
    """A ValueError, of all ranks, unless they have the same."""
    digest = int.from_bytes(hashlib.sha256(value.encode()).digest()[:7], "little")
    low, high = highest(-digest, digest)
    if -low != high:
        raise ValueError(f"the {count()} processes of this training differ in {what}: here it is {value}")


def _reduced(values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
    try:
        dist.all_reduce(values, how)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"another process of this training has ended ({why}): nothing that was saved is lost, and the same command "
            "resumes"
        ) from None
    return values
