"""Bidirectional linear attention by Triton kernels, which make features in registers: q, k and v are read once.

They compute as accelerated.py does: Ωx, maxima, exponentials, sums and denominators in float32, the products φ(k)ᵀv and
φ(q)S in v's dtype, of factors that are normalised before they are rounded. The device code is in jit/kernels.py. It is
imported on first use, so that this module needs no Triton.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.kernels.base import Features, Prepared
from linvit.kernels.pointwise import Elu, Elu1, Relu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_WIDTH = 128  # of q, k and v
MAX_FEATURES = 256

# Functions of Ωx that the kernels compute: by name, and what is to be added.
FORMULAS = {
    Relu.f: ("relu", 0.0),
    Elu1.f: ("elu", 1.0),
    torch.abs: ("abs", 0.0),
    torch.sigmoid: ("sigmoid", 0.0),
    torch.tanh: ("tanh", 0.0),
    torch.cos: ("cos", 0.0),
    F.gelu: ("gelu", 0.0),
    torch.clone: ("identity", 0.0),
}


def formula(φ: Features) -> tuple[str, float] | None:
    """The name by which the kernels know f, and the floor; None where they do not."""
    if φ.f is None:
        return "exp", 0.0
    function = getattr(φ.f, "__func__", φ.f)
    if function is Elu.f and φ.f.__self__.options.alpha == 1:  # type: ignore[attr-defined]
        return "elu", φ.floor
    name, more = FORMULAS.get(function, (None, 0.0))
    return None if name is None else (name, φ.floor + more)


def covers(prepared: Prepared, v: Tensor) -> bool:
    """Whether the kernels compute this, gradients included, on a device that has them."""
    q, k, φ, weight, bias = prepared
    recorded = torch.is_grad_enabled()
    if formula(φ) is None or not φ.divide or any(x.dtype not in DTYPES for x in (q, k, v)):
        return False
    if φ.omega is None:
        fits = not φ.norm and q.shape[-1] <= MAX_FEATURES
    else:
        fits = q.shape[-1] <= MAX_WIDTH and len(φ.omega) <= MAX_FEATURES
        fits = fits and not (recorded and φ.omega.requires_grad)
    if not φ.exponential:
        fits = fits and not φ.norm and bias is None
        fits = fits and not (recorded and weight is not None and weight.requires_grad)
    return fits and v.shape[-1] <= MAX_WIDTH and v.numel() > 0


def triton_attention(prepared: Prepared, v: Tensor) -> Tensor:
    """q, k (G, N, d) or (B, H, N, d) and v of as many axes, or (G, N, e) → out of v's shape and dtype."""
    try:
        from linvit.attention.jit.ops import linear_attention
    except ImportError as error:
        raise ImportError("Triton kernels need Triton: pip install 'linvit[triton]'") from error
    q, k, φ, weight, bias = prepared
    found = formula(φ)
    if found is None:
        raise ValueError(f"the Triton kernels do not compute {φ.f}")
    q, k = (x if x.dim() == 4 else x.unsqueeze(1) for x in (q, k))
    q, k, values = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v.reshape(*q.shape[:3], -1)))
    omega = None if φ.omega is None else φ.omega.float().contiguous()
    weight = None if weight is None else weight.flatten(1).float().contiguous()
    bias = None if bias is None else bias.flatten(1).float().contiguous()
    out = linear_attention(q, k, values, omega, weight, bias, found[0], [found[1], φ.norm, φ.least])[0]
    return out.reshape(v.shape)
