"""Features that are powers of the positive and the negative part of q and k, for `pola` and `nala`.

Every feature is at least FLOOR, so no denominator is zero: rows sum to one even for a query that shares no positive
channel with any key. The authors' code adds 10⁻⁶ to the denominator instead, and the output of such a query is zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FLOOR = 1e-15  # a product of two of them is in the range of float32, and so is its reciprocal
TINY = 1e-30  # keeps the logarithm of zero finite


def log_size(x: Tensor) -> Tensor:
    """log|x|, finite where x = 0."""
    return (x.abs() + TINY).log()


def signed_power(x: Tensor, log: Tensor, p: Tensor | float) -> Tensor:
    """sign(x) e^{p·log}. Exponentials and logarithms are faster than powers, and have gradients at zero."""
    return (p * log).exp() * x.detach().sign()


def by_sign(x: Tensor) -> Tensor:
    """[relu(x), relu(−x)], at least FLOOR: (…, d) → (…, 2d). The backward pass of a clamp takes ten times as long."""
    return F.threshold(torch.cat([x, -x], -1), FLOOR, FLOOR)
