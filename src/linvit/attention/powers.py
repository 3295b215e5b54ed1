"""Features that are powers of the positive and the negative part of q and k: what `pola` and `nala` share.

Every feature is at least FLOOR. So no denominator is zero, and rows sum to one also for a query that shares no positive
channel with any key. (PolaFormer and NaLaFormer add 10⁻⁶ to the denominator instead, which takes such a row to zero.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.kernels.base import Features

FLOOR = 1e-15  # a product of two of them is in the range of float32, and so is one divided by it
TINY = 1e-30  # has a logarithm, which zero has not


def log_size(x: Tensor) -> Tensor:
    """log|x|, and finite where x = 0."""
    return (x.abs() + TINY).log()


def signed_power(x: Tensor, log: Tensor, p: Tensor | float) -> Tensor:
    """sign(x) e^{p·log}: exponentials and logarithms are faster than powers, and have gradients at zero."""
    return (p * log).exp() * x.detach().sign()


def by_sign(x: Tensor) -> Tensor:
    """[relu(x), relu(−x)] of at least FLOOR, (…, d) → (…, 2d); a clamp takes ten times as long backwards."""
    return F.threshold(torch.cat([x, -x], -1), FLOOR, FLOOR)


def as_given() -> Features:
    """Inputs that are positive features already."""
    return Features(f=_unchanged, pull=_gradient, positive=True)


def _unchanged(features: Tensor) -> Tensor:
    return features


def _gradient(gradient: Tensor, features: Tensor) -> Tensor:
    return gradient
