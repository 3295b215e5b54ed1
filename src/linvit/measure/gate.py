"""What an attention must be before it is timed or measured: right, and finite, in its output and its gradients."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention import Attention
from linvit.measure.peers import Peer
from linvit.randomness import generator

Function = Callable[[Tensor, Tensor, Tensor], Tensor]

TOLERANCE = 1e-3  # of the norm
TF32 = 2**-10
FINE = 1e-5  # rounding below which kinks need no care
CPU = torch.empty(0)
DEFINED = 128  # tokens on which a peer is compared with its definition, which is quadratic


def wrong(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, *, compare: bool = True
) -> str | None:
    """Why this attention must not be timed, or None: output and gradients are compared with itself in float64, and a
    peer's also with what its package says that it computes. Without `compare` they need only be finite, which takes no
    more than the call itself."""
    found = both(attention, q, k, v, gradient)
    if not compare:
        return None if all(bool(x.isfinite().all()) for x in found) else "not finite"
    exact, inputs = _precise(copy.deepcopy(attention)), (q, k, v, gradient)
    why = _differs(found, exact, inputs, "float64")
    if why is None and isinstance(exact, Peer):
        q, k, v, gradient = (x[:, :, :DEFINED] for x in inputs)
        why = _differs(
            both(attention, q, k, v, gradient), exact.defined, (q, k, v, gradient), "its definition in float64"
        )
    return why


def _differs(found: list[Tensor], exact: Function, inputs: Sequence[Tensor], what: str) -> str | None:
    q, k, v, gradient = (_precise(x) for x in inputs)
    oracle, rounding = both(exact, q, k, v, gradient), product_rounding(found[0])
    moved = oracle
    if rounding > FINE:
        source = generator("gate")
        q, k = (x + rounding * x * torch.randn(x.shape, generator=source, dtype=x.dtype).to(x.device) for x in (q, k))
        moved = both(exact, q, k, v, gradient)
    for name, x, true, other in zip(("output", "∂q", "∂k", "∂v"), found, oracle, moved, strict=True):
        if not x.isfinite().all():
            return f"its {name} is not finite"
        size = true.norm().clamp_min(1e-6)
        # Rounding may move an element across a kink of relu or abs, where gradients jump. In float32 that shows in one
        # row at most; where products are coarser, in as much as inputs that are rounded as coarsely differ.
        rows = (_precise(x) - true).norm(dim=-1).flatten().sort().values[: None if name == "output" else -1]
        allowed = TOLERANCE + 8 * rounding + 2 * ((other - true).norm() / size).item()
        if not (error := (rows.norm() / size).item()) <= allowed:
            return f"its {name} differs from {what} by {error:.1e} of its norm (allowed {allowed:.1e})"
    return None


def product_rounding(x: Tensor) -> float:
    """The relative rounding of factors of a product of tensors like x: of their dtype, or of TF32."""
    tf32 = x.is_cuda and x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return TF32 if tf32 else torch.finfo(x.dtype).eps


def _precise(x: Any) -> Any:
    """A tensor or a module in float64, on the host where its device has none."""
    device = x.device if isinstance(x, Tensor) else next(itertools.chain(x.parameters(), x.buffers()), CPU).device
    return (x.cpu() if device.type == "mps" else x).double()


@torch.enable_grad()
def both(function: Function, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """The output and its gradients by q, k and v; a module's parameters get theirs too."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    weights = [w for w in function.parameters() if w.requires_grad] if isinstance(function, nn.Module) else []
    out = function(q, k, v)
    found = torch.autograd.grad(out, [q, k, v, *weights], gradient, allow_unused=True, materialize_grads=True)
    return [out.detach(), *found[:3]]
