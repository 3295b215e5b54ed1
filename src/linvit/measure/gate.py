"""What an attention must be before it is timed or measured: right, and finite, in its output and its gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from linvit.attention import Attention
from linvit.measure.peers import Peer

TOLERANCE = 1e-3  # of the norm
DEFINED = 128  # tokens on which a peer is compared with its definition, which is quadratic


def wrong(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, *, compare: bool = True
) -> str | None:
    """Why this attention must not be timed, or None: output and gradients are compared with itself in float64, and a
    peer's also with what its package says that it computes. Without `compare` they need only be finite, which takes no
    more than the call itself."""
    found = both(attention, q, k, v, gradient)
    if not compare or q.device.type == "mps":  # which has no float64
        return None if all(bool(x.isfinite().all()) for x in found) else "not finite"
    exact = copy.deepcopy(attention).double()
    why = _differs(found, both(exact, q.double(), k.double(), v.double(), gradient.double()), "float64")
    if why is None and isinstance(exact, Peer):
        q, k, v, gradient = (x[:, :, :DEFINED] for x in (q, k, v, gradient))
        oracle = both(exact.defined, q.double(), k.double(), v.double(), gradient.double())
        why = _differs(both(attention, q, k, v, gradient), oracle, "its definition in float64")
    return why


def _differs(found: list[Tensor], oracle: list[Tensor], what: str) -> str | None:
    allowed = TOLERANCE + 8 * torch.finfo(found[0].dtype).eps
    for name, x, exact in zip(("output", "∂q", "∂k", "∂v"), found, oracle, strict=True):
        if not x.isfinite().all():
            return f"its {name} is not finite"
        # rounding may move an element across a kink of relu, which shows in one row of a gradient
        rows = (x.double() - exact).norm(dim=-1).flatten().sort().values[: None if name == "output" else -1]
        error = (rows.norm() / exact.norm().clamp_min(1e-6)).item()
        if not error <= allowed:
            return f"its {name} differs from {what} by {error:.1e} of its norm (allowed {allowed:.1e})"
    return None


@torch.enable_grad()
def both(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, gradient: Tensor
) -> list[Tensor]:
    """The output and its gradients by q, k and v; a module's parameters get theirs too."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    weights = [w for w in function.parameters() if w.requires_grad] if isinstance(function, nn.Module) else []
    out = function(q, k, v)
    found = torch.autograd.grad(out, [q, k, v, *weights], gradient, allow_unused=True, materialize_grads=True)
    return [out.detach(), *found[:3]]
