"""Half precision for what is computed in float32: a number is the sum of two parts, so that only the output is rounded.

q, k and v in half precision are used as they are. What an attention computes of them (features, weights, projected
keys, means, sums) is split where a product needs half precision: x = hi + lo, which leaves 2⁻¹⁶ of x in bfloat16 and
2⁻²² in float16. Gradients are those of hi.

- `sums`: float32 weights times v. On CUDA a product with twice as many rows, whose results stay in float32.
- `average`: float32 weights times float32 values → half precision. On CUDA one product, three times as deep.
- `doubled`: computed keys and values for fused softmax. Scores need the channels [q, q] and [hi, lo]. Each key is there
  twice, with the values 2 hi and 2 lo, and so with half of its weight: the output is their sum, which is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def wide(x: Tensor) -> torch.dtype:
    """Of what is computed from x: float32 or better."""
    return torch.float32 if x.dtype in HALF else x.dtype


def transformed() -> bool:
    """Whether a transformation of torch.func is active: it takes neither hand-written gradients nor recomputation."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    return isinstance(functorch.peek_interpreter_stack(), functorch.CInterpreter)  # torch.compile sees no `is None`


def wide_products(x: Tensor) -> bool:
    """Whether products of half precision may have results in float32: on CUDA, and with hand-written gradients."""
    return x.device.type in ("cuda", "meta") and not transformed()


def halves(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two tensors whose sum is x but for 2⁻¹⁶ (bfloat16) or 2⁻²² (float16) of it."""
    high = x.to(dtype)
    with torch.no_grad():
        return high, torch.sub(x, high, out=torch.empty_like(high))  # rounded by the same kernel


def sums(f: Tensor, v: Tensor) -> Tensor:
    """Σ_j f_j v_j, (…, F, N) and (…, N, e) → (…, F, e) in float32 or better. Weights in float32 are split; weights in
    half precision are used as they are."""
    if v.dtype not in HALF:
        return f @ v
    if not wide_products(v):
        return f.float() @ v.float()
    batch = v.shape[:-2]
    return _Sums.apply(f.expand(*batch, -1, -1).flatten(0, -3), v.flatten(0, -3)).unflatten(0, batch)  # type: ignore[union-attr]


class _Sums(torch.autograd.Function):
    """f·v with v in half precision, in float32."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        parts = [f] if f.dtype == v.dtype else halves(f, v.dtype)
        ctx.save_for_backward(parts[0], v)
        ctx.dtype = f.dtype
        found = torch.bmm(torch.cat([*parts], 1) if len(parts) > 1 else f, v, out_dtype=torch.float32)
        return found if len(parts) == 1 else found.unflatten(1, (2, -1)).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        f, v = ctx.saved_tensors
        gradient = gradient.to(v.dtype)
        return torch.bmm(gradient, v.mT, out_dtype=ctx.dtype), f.mT @ gradient


def average(p: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """P·S', (…, N, F) and (…, F, e), in this dtype."""
    if dtype not in HALF:
        return p @ s
    if not wide_products(p):
        return (p @ s).to(dtype)
    return _Average.apply(p.flatten(0, -3), s.flatten(0, -3), dtype).unflatten(0, p.shape[:-2])  # type: ignore[union-attr]


class _Average(torch.autograd.Function):
    """P·S' of float32 as one product of half precision: three of the four products of parts are summed; the fourth is
    too small to matter."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        (p_high, p_low), (s_high, s_low) = halves(p, dtype), halves(s, dtype)
        ctx.save_for_backward(p_high, s_high)
        return torch.cat([p_high, p_low, p_high], 2) @ torch.cat([s_high, s_high, s_low], 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        p, s = ctx.saved_tensors
        return *(torch.bmm(a, b, out_dtype=torch.float32) for a, b in ((gradient, s.mT), (p.mT, gradient))), None


def doubled(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys (…, K, d) and values (…, K, e) for fused softmax in this dtype, (…, 2K, 2d) and (…, 2K, e)."""
    both = torch.cat(halves(k, dtype), -1)
    return torch.cat([both, both], -2), torch.cat(halves(2 * v, dtype), -2)


def softmax_over_computed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ/√d) v of q in half precision and computed k and v, by fused softmax; mask (B, K). The kernels of
    FlashAttention need values as wide as keys."""
    d, e = q.shape[-1], v.shape[-1]
    keys, values = doubled(k, v, q.dtype)
    some = None if mask is None else mask.any(-1)[:, None, None, None]
    keep = None if mask is None else (torch.cat([mask, mask], -1)[:, None, None, :] | ~some)  # type: ignore[operator]
    values = F.pad(values, (0, max(0, 2 * d - e)))
    out = F.scaled_dot_product_attention(torch.cat([q, q], -1), keys, values, attn_mask=keep, scale=d**-0.5)[..., :e]
    return out if some is None else torch.where(some, out, 0.0)
