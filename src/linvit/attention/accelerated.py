"""Bidirectional linear attention for GPUs: few, large operations, products in the precision of v, all else in float32.

The same mathematics as linear.py, without blocks: a GPU is fast where operations are few and memory traffic is low.

- Inputs in half precision are only ever widened: Ωx, maxima, exponentials, sums and denominators are float32.
- φ(k) and φ(q) are rounded to v's dtype for the two large products, S = φ(k)ᵀv and φ(q)S. Both are normalised before
  they are rounded, φ(k) by its sum over tokens and φ(q) by its denominator, so that no product leaves the range of
  float16. A factor s = √(N/F), moved from queries to keys, keeps the elements of both near 1/√(N·F).
- Nothing but q, k and v is kept for the backward pass; features are recomputed.

In bfloat16 the error of the output relative to that of softmax, measured on a simulated device with 67 and 1,021 tokens
of 61 channels, is 0.8–1.0, 1.0–1.2 and 1.2–1.7 at σ = 1, 2 and 4 for pointwise features, and 1.4–1.7, 1.8–2.0 and
1.7–2.5 for exponential ones. Softmax gains from σ: where it picks one key its output is exact. φ(k), S, φ(q) and the
output are rounded once each, with errors of much the same size. To multiply by two parts, as fused.py does without more
traffic, would remove the first three, for a quarter more memory traffic here.

On CUDA it is compiled, which fuses everything between the products; where that fails it runs as it is. Where Triton's
kernels (fused.py) cover the features, the first call of each shape times both, and the faster one is used.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linvit.attention import fused, pieces
from linvit.kernels.base import Features, Prepared, tracing

HALF = (torch.float16, torch.bfloat16)
RACE_WARM_UP, RACE_ROUNDS = 3, 5
LOWEST = -1e30  # log-weight of a masked key: e^LOWEST is zero, and differences of it are not NaN


def accelerated_attention(prepared: Prepared, v: Tensor) -> Tensor:
    """q, k (G, N, d) as prepared by a kernel, or (B, H, N, d) as they are, and v of either form → the same in v's
    dtype."""
    q, k, φ, weight, bias = prepared
    attend = _frugal if tracing() else _fastest(v.device.type)
    if not tracing() and v.device.type == "cuda" and _triton_wins(prepared, v, _recorded(q, k, v, weight, bias)):
        return fused.triton_attention(prepared, v)
    return attend(q, k, v, weight, bias, φ)


def _recorded(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def transformed() -> bool:
    """Whether a transformation of torch.func is active: it takes neither hand-written gradients nor recomputation."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    return isinstance(functorch.peek_interpreter_stack(), functorch.CInterpreter)  # torch.compile sees no `is None`


def _frugal(q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, bias: Tensor | None, φ: Features) -> Tensor:
    """`_attend`, recomputed in the backward pass. Compiled as a whole, so that the forward pass writes nothing more."""
    if not _recorded(q, k, v, weight, bias) or transformed():
        return _attend(q, k, v, weight, bias, φ)
    made: Tensor = checkpoint(_attend, q, k, v, weight, bias, φ, use_reentrant=False, preserve_rng_state=False)  # type: ignore[assignment]
    return made


def _attend(q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, bias: Tensor | None, φ: Features) -> Tensor:
    u_q, u_k = _projected(q, φ.omega), _projected(k, φ.omega, tokens_last=True)
    w = _log_weight(k, weight, φ.norm)
    features = (_exponential if φ.exponential else _pointwise)(u_q, u_k, w, bias, φ, weight is not None)
    f_q, f_k = (x.to(v.dtype) for x in features)
    return (f_q @ (f_k @ v.flatten(0, -3))).view(v.shape)


def _projected(x: Tensor, omega: Tensor | None, tokens_last: bool = False) -> Tensor:
    """Ωx, (…, N, d) → (G, N, F) or (G, F, N), in float32 or better."""
    half = x.dtype in HALF
    if half and not (omega is None or omega.requires_grad or transformed()) and x.device.type in ("cuda", "meta"):
        neighbours = x.dim() == 4 and x.stride(1) < x.stride(2)  # heads of a token are, in memory: this needs no copy
        x = x if neighbours else x.reshape(-1, 1, *x.shape[-2:])
        return _HalfProjection.apply(x, omega, tokens_last).flatten(0, 1)  # type: ignore[union-attr]
    x = (x.to(torch.float32, memory_format=torch.contiguous_format) if half else x).flatten(0, -3)
    if not tokens_last:
        return pieces.projected(x, omega)
    return x.transpose(1, 2) if omega is None else omega @ x.transpose(1, 2)


class _HalfProjection(torch.autograd.Function):
    """Ωx, (B, H, N, d) → (B, H, N, F) or (B, H, F, N), with x read as it is: Ω is the sum of two matrices in half
    precision, and products are summed in float32. The second product is 2⁻⁸ of the first, and may be rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, omega: Tensor, tokens_last: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(omega)
        ctx.dtype, ctx.tokens_last = x.dtype, tokens_last
        rows = x.transpose(0, 1).flatten(1, 2)
        parts = [part.expand(len(rows), -1, -1) for part in halves(omega, x.dtype)]
        high, low = ((part, rows.mT) if tokens_last else (rows, part.mT) for part in parts)
        u = torch.bmm(*high, out_dtype=torch.float32) + torch.bmm(*low)
        u = u.unflatten(2 if tokens_last else 1, (len(x), -1))
        return u.permute(2, 0, 1, 3) if tokens_last else u.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (omega,) = ctx.saved_tensors
        return ((gradient.mT if ctx.tokens_last else gradient) @ omega).to(ctx.dtype), None, None


def halves(omega: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two matrices whose sum is Ω but for 2⁻¹⁶ (bfloat16) or 2⁻²² (float16) of it."""
    high = omega.to(dtype)
    return high, (omega - high).to(dtype)


def _log_weight(k: Tensor, weight: Tensor | None, norm: float) -> Tensor | None:
    """w_j of pieces.py as (G, 1, N), without k in float32."""
    w = weight
    if norm:
        dtype = torch.float32 if k.dtype in HALF else k.dtype
        squares = norm * torch.linalg.vector_norm(k, dim=-1, keepdim=True, dtype=dtype).square().flatten(0, -3)
        w = squares if w is None else squares + w
    return None if w is None else w.transpose(1, 2)


def _balance(f_k: Tensor) -> float:
    return math.sqrt(f_k.shape[2] / f_k.shape[1])


def _exponential(
    u_q: Tensor, u_k: Tensor, w: Tensor | None, bias: Tensor | None, φ: Features, masked: bool
) -> tuple[Tensor, Tensor]:
    """Q'/s and K'·s: Q' = softmax_f(Ωq + λ + bias) and K' = exp(Ωk + w − λ) with λ_f = logsumexp_j(Ωk + w)."""
    if w is not None:
        u_k = u_k + (w.clamp_min(LOWEST) if masked else w)
    λ = u_k.logsumexp(2, keepdim=True)
    f_k = (u_k - λ).exp() * _balance(u_k)
    if masked:
        assert w is not None
        f_k = f_k.masked_fill(w <= LOWEST, 0.0)  # also where every key is masked
    λ = λ.transpose(1, 2)
    return torch.softmax(u_q + (λ if bias is None else λ + bias), -1) / _balance(u_k), f_k


def _pointwise(
    u_q: Tensor, u_k: Tensor, w: Tensor | None, bias: Tensor | None, φ: Features, masked: bool
) -> tuple[Tensor, Tensor]:
    """φ(q)/(D·c) and φ(k)·c, D = φ(q)·Σφ(k), with a factor c for each feature, or for each head where some of Σφ(k) may
    vanish."""
    assert φ.f is not None
    if φ.omega is None:  # what f may overwrite is the caller's
        u_q, u_k = u_q.clone(), u_k.clone()
    f_q, f_k = φ.f(u_q) + φ.floor, φ.f(u_k.transpose(1, 2)).transpose(1, 2) + φ.floor  # f may widen the last axis
    count: Tensor | int = f_k.shape[2]
    if w is not None:
        factor = (w - w.detach().amax(2, keepdim=True).clamp_min(LOWEST)).exp()
        f_k, count = f_k * factor, factor.sum(2, keepdim=True)
    z = f_k.sum(2, keepdim=True).transpose(1, 2)
    if not φ.divide:  # an RMS norm follows
        return f_q, f_k
    d = (f_q * z).sum(-1, keepdim=True)
    safe = φ.positive and not masked
    over = d.reciprocal() if safe else pieces.inverse(d, φ.least * f_k.shape[1] * count)
    size = z.detach() if φ.positive else z.detach().abs().amax(-1, keepdim=True)
    c = _balance(f_k) / size.clamp_min(torch.finfo(z.dtype).tiny)
    return f_q * (over / c), f_k * c.transpose(1, 2)


_WINNERS: dict[tuple, bool] = {}  # by shape: whether Triton's kernels were faster


def _triton_wins(prepared: Prepared, v: Tensor, recorded: bool) -> bool:
    """From a race at the first call of each shape; False where there is no Triton for this device."""
    if not _has_triton() or not fused.fits(prepared, v) or transformed():
        return False
    φ = prepared.features
    key = (v.device, v.dtype, v.shape, prepared.q.shape, fused.kind_of(φ), len(φ.omega), recorded)  # type: ignore[arg-type]
    if key not in _WINNERS:
        try:
            _WINNERS[key] = _race(prepared, v, recorded)
        except fused.FAILURES as error:
            _WINNERS[key] = False
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"linear attention runs without Triton's kernels: {reason}", RuntimeWarning, stacklevel=3)
    return _WINNERS[key]


def _race(prepared: Prepared, v: Tensor, recorded: bool) -> bool:
    """Whether Triton's kernels take less time than the compiled formulas, forward or, if recorded, both ways."""
    q, k, φ, weight, bias = prepared
    q, k, v = (x.detach().requires_grad_(recorded) for x in (q, k, v))
    weight, bias = (x if x is None else x.detach() for x in (weight, bias))
    given, attend = Prepared(q, k, φ, weight, bias), _fastest(v.device.type)

    def seconds(call) -> float:
        times = []
        for turn in range(RACE_WARM_UP + RACE_ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            with torch.set_grad_enabled(recorded):
                out = call()
            if recorded:
                torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
            end.record()
            end.synchronize()
            if turn >= RACE_WARM_UP:
                times.append(begin.elapsed_time(end))
        return min(times)

    theirs = seconds(lambda: attend(q, k, v, weight, bias, φ))
    return seconds(lambda: fused.triton_attention(given, v)) < theirs


@cache
def _has_triton() -> bool:
    """Whether Triton is installed and finds a CUDA device."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton.runtime import driver

    try:
        return driver.active.get_current_target().backend == "cuda"  # type: ignore[union-attr]
    except (RuntimeError, AssertionError, OSError):  # no driver, in Triton's ways to say so
        return False


@cache
def _fastest(device: str):
    """`_frugal` for this type of device, compiled where there is a compiler for it."""
    if device != "cuda" or not _has_triton():
        return _frugal
    compiled, failed = torch.compile(_frugal), []

    def attend(*inputs):
        if failed:
            return _frugal(*inputs)
        try:
            return compiled(*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:  # type: ignore[attr-defined]
            failed.append(error)
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"linear attention runs uncompiled on {device}: {reason}", RuntimeWarning, stacklevel=2)
            return _frugal(*inputs)

    return attend
