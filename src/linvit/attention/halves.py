"""Half precision for what is computed in float32: a number is the sum of two parts, so that only the output is rounded.

q, k and v in half precision are used as they are. What an attention computes of them (features, weights, projected
keys, means, sums) is split where a product needs half precision: x = hi + lo, which leaves 2⁻¹⁶ of x in bfloat16 and
2⁻²² in float16. Gradients are those of hi.

- `sums`: float32 weights times v. On CUDA a product with twice as many rows, whose results stay in float32.
- `average`: float32 weights times float32 values → half precision. On CUDA one product, three times as deep.
- `doubled`: computed keys and values for fused softmax. Keys are [hi, lo], for the queries [q, q]. Each is there twice,
  with weights 1 : 5/16 and values hi and hi + 4.2 lo: their average is hi + lo but for a quarter of a rounding.
  Gradients do not cancel, as they would with equal weights and values 2 hi and 2 lo.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
RATIO = 5 / 16  # of the weights of a key's two copies, which half precision holds: where one key has all the weight,
# nothing is rounded; elsewhere the two are rounded independently
ADDED_CHANNELS = 8  # of queries and keys, for log-weights: fused kernels need multiples of eight


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
    if transformed():
        return high, (x - high).detach().to(dtype)
    with torch.no_grad():
        low = torch.empty_like(high, memory_format=torch.contiguous_format)  # as torch.compile wants it
        return high, torch.sub(x, high, out=low)  # rounded by the same kernel


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
        of_p, of_s = (torch.bmm(a, b, out_dtype=torch.float32) for a, b in ((gradient, s.mT), (p.mT, gradient)))
        return of_p, of_s, None


def doubled(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys (…, K, d) and values (…, K, e) → (…, 2K, 2d) and (…, 2K, e). The caller adds log RATIO to the scores of the
    last K."""
    keys, high = torch.cat(halves(k, dtype), -1), v.to(dtype)
    rest = (v - high).detach() / RATIO
    return torch.cat([keys, keys], -2), torch.cat([high, (v + rest).to(dtype)], -2)


def fused_softmax(q: Tensor, k: Tensor, v: Tensor, d: int, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ/√d) v, for q and k with more than d channels: FlashAttention needs values as wide as keys."""
    padded = F.pad(v, (0, max(0, k.shape[-1] - v.shape[-1])))
    return F.scaled_dot_product_attention(q, k, padded, attn_mask=mask, scale=d**-0.5)[..., : v.shape[-1]]


def softmax_over_computed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ/√d) v of q in half precision and computed k and v; mask (B, K); a row with no key left gives zero.
    What is added to scores of the second copies are channels of theirs, which queries multiply by one: four coarse
    ones, and four for the rest."""
    d, half = q.shape[-1], ADDED_CHANNELS // 2
    each = math.log(RATIO) * math.sqrt(d) / half
    coarse = round(16 * each) / 16  # which half precision can hold
    keys, values = doubled(k, v, q.dtype)
    first, second = keys.chunk(2, -2)
    second = F.pad(F.pad(second, (0, half), value=coarse), (0, half), value=each - coarse)
    keys = torch.cat([F.pad(first, (0, 2 * half)), second], -2)
    queries = F.pad(torch.cat([q, q], -1), (0, 2 * half), value=1.0)
    if mask is None:
        return fused_softmax(queries, keys, values, d)
    keep, some = torch.cat([mask, mask], -1)[:, None, None, :], mask.any(-1)[:, None, None, None]
    return torch.where(some, fused_softmax(queries, keys, values, d, keep | ~some), 0.0)
