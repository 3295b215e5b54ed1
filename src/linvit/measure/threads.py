"""How many threads an operation of PyTorch has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from linvit.machine import cpu_count

THREADS_PER_CPU = 4  # more are a mistake, and may not fit into memory


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """So many inside, and as many as before afterwards; None changes nothing."""
    if count is not None and count > (limit := max(64, THREADS_PER_CPU * cpu_count())):
        raise ValueError(f"threads={count} is more than {limit}: this process may use {cpu_count()} CPUs")
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
