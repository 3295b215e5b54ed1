"""What every path of linear attention is made of: Ωx, log-weights, features and their gradients, safe quotients."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from linvit.kernels.base import Features

Pull = Callable[[Tensor], Tensor]  # from the gradient of features to that of what they are made of

# Elements of one block of features. Forward and backward of m = 256, N = 1024 on an EPYC with 32 MiB of L3 take the
# same time from 2^17 to 2^20, and a tenth more at 2^15 and from 2^21 on; 2^19 is 2 MiB of float32. A GPU wants whole
# waves: there a block only bounds the memory, to 64 MiB on Apple's and 256 MiB on others (not measured).
BLOCK = {"cpu": 1 << 19, "mps": 1 << 24}


def block_size(x: Tensor) -> int:
    return BLOCK.get(x.device.type, 1 << 26)


def projected(x: Tensor, omega: Tensor | None) -> Tensor:
    """Ωx, (…, d) → (…, F)."""
    return x if omega is None else x @ omega.t()


def feature_rows(q: Tensor, φ: Features) -> int:
    """The width of Ωx."""
    return q.shape[-1] if φ.omega is None else φ.omega.shape[0]


def lowest(x: Tensor) -> float:
    """Stands in for a maximum over nothing: finite, so that −∞ minus it is still −∞ and not NaN."""
    return torch.finfo(x.dtype).min


def log_weight(k: Tensor, weight: Tensor | None, norm: float) -> Tensor | None:
    """w_j = norm·‖k_j‖² + weight_j, (G, N, 1); None where that is zero for all keys."""
    if not norm:
        return weight
    squares = norm * torch.linalg.vector_norm(k, dim=-1, keepdim=True).square()  # k·k would be as large as k
    return squares if weight is None else squares + weight


def features(φ: Features, u: Tensor) -> Tensor:
    """f(u) + floor, for pointwise features; in place where nothing is recorded."""
    assert φ.f is not None
    h = φ.f(u)
    return h if not φ.floor else h.add_(φ.floor) if not h.requires_grad else h + φ.floor


def pullback(u: Tensor, φ: Features, made: bool = False) -> tuple[Tensor, Pull]:
    """f(u) + floor and the map from its gradient to u's; `made`: u holds f(u) + floor already, if φ.pull wants that."""
    if φ.pull is not None:
        h, pull = u if made else features(φ, u), φ.pull
        return h, lambda dh: pull(dh, h)
    with torch.enable_grad():
        u = u.detach().requires_grad_()
        h = features(φ, u)
    return h.detach(), lambda dh: torch.autograd.grad(h, u, dh)[0]


def inverse(d: Tensor, least: Tensor | float) -> Tensor:
    """1/d with |d| moved up to `least`; 0 where nothing is left to divide by (every key masked)."""
    size = d.abs().clamp_min(least)
    empty = size == 0
    return (torch.where(d < 0, -1.0, 1.0) / size.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


def gradient_and_r(dout: Tensor, factor: Tensor | None, out: Tensor) -> Tensor:
    """(∂out·factor, −r) side by side, r_i = factor·∂out_i·out_i being what the denominator takes back."""
    both = dout.new_empty(*dout.shape[:-1], dout.shape[-1] + 1)
    gradient = both[..., :-1].copy_(dout) if factor is None else torch.mul(dout, factor, out=both[..., :-1])
    torch.neg(torch.linalg.vecdot(gradient, out), out=both[..., -1])
    return both


def full_precision(backward):
    """A backward pass called inside an autocast region still computes in the precision of its forward pass."""

    @functools.wraps(backward)
    def run(ctx, dout):
        with torch.autocast(dout.device.type, enabled=False):
            return backward(ctx, dout)

    return run
