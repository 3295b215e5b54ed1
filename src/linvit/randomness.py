"""Everything random is a function of a key: the same on every machine, device and rank, in any order of calls."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator for this key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def permutation(n: int, *key: int | str) -> np.ndarray:
    """A permutation of n, by its key alone."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    bits = np.random.Philox(key=np.frombuffer(digest[:16], np.uint64)).random_raw(n)
    return np.argsort(bits, kind="stable")
