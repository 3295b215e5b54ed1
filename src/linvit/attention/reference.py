"""The oracle: linear attention as its definition, quadratic, in log-space, with autograd's gradients.

Every fast path is tested against this in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linvit.attention.pieces import inverse, projected
from linvit.kernels.base import Prepared, square_norm


def reference_attention(prepared: Prepared, v: Tensor, causal: bool = False) -> Tensor:
    """A = normalised Σ_f φ(q)_f φ(k)_f e^{w}; out = A v."""
    q, k, φ, weight, bias = prepared
    u_q, u_k = (projected(x, φ.omega) for x in (q, k))
    w = (0.0 if weight is None else weight) + φ.norm * square_norm(k)
    late = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1) if causal else torch.tensor(False)
    if φ.exponential:
        pairs = (u_q + (0.0 if bias is None else bias))[:, :, None] + u_k[:, None]
        logs = (pairs.logsumexp(-1) + w.transpose(1, 2)).masked_fill(late, -torch.inf)
        empty = (logs == -torch.inf).all(-1, keepdim=True)
        return torch.softmax(logs.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0) @ v
    assert φ.f is not None
    f_q, f_k = φ.f(u_q.clone()) + φ.floor, φ.f(u_k.clone()) + φ.floor
    logs = (w * torch.ones_like(k[..., :1])).transpose(1, 2).expand(-1, q.shape[1], -1).masked_fill(late, -torch.inf)
    weights = (logs - logs.amax(-1, keepdim=True).clamp_min(torch.finfo(logs.dtype).min)).exp()
    scores = (f_q @ f_k.transpose(1, 2)) * weights
    if not φ.divide:
        return scores @ v
    least = φ.least * f_k.shape[-1] * weights.sum(-1, keepdim=True)
    return (scores @ v) * inverse(scores.sum(-1, keepdim=True), least)
