"""Bidirectional linear attention for GPUs: few, large operations, products in the precision of v, all else in float32.

The same mathematics as linear.py, without blocks: a GPU is fast where operations are few and memory traffic is low.

- Inputs in half precision are only ever widened: Ωx, maxima, exponentials, sums and denominators are float32.
- φ(k) and φ(q) are rounded to v's dtype for the two large products, S = φ(k)ᵀv and φ(q)S. Both are normalised before
  they are rounded, φ(k) by its sum over tokens and φ(q) by its denominator, so that no product leaves the range of
  float16. A factor s = √(N/F), moved from queries to keys, keeps the elements of both near 1/√(N·F).
- Nothing but q, k and v is kept for the backward pass; features are recomputed.

On CUDA it is compiled, which fuses everything between the products; where that fails it runs as it is. Where Triton's
kernels (fused.py) cover the features, the first call of each shape times both, and the faster one is used.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from functools import cache

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linvit.attention import fused, pieces
from linvit.kernels.base import Features, Prepared, tracing

HALF = (torch.float16, torch.bfloat16)
RACE_WARM_UP, RACE_ROUNDS = 3, 5
LOWEST = -1e30  # log-weight of a masked key: e^LOWEST is zero, and differences of it are not NaN


def accelerated_attention(prepared: Prepared, v: Tensor) -> Tensor:
    """q, k (G, N, d) as prepared by a kernel, or (B, H, N, d) as they are, and v (G, N, e) → (G, N, e) in v's dtype."""
    q, k, φ, weight, bias = prepared
    attend = _attend if tracing() else _fastest(v.device.type)
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, weight, bias))
    if not tracing() and v.device.type == "cuda" and _triton_wins(prepared, v, recorded):
        return fused.triton_attention(prepared, v)
    if not recorded or transformed():
        return attend(q, k, v, weight, bias, φ)
    made: Tensor = checkpoint(attend, q, k, v, weight, bias, φ, use_reentrant=False, preserve_rng_state=False)  # type: ignore[assignment]
    return made


def transformed() -> bool:
    """Whether a transformation of torch.func is active: it takes neither hand-written gradients nor recomputation."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]


def _attend(q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, bias: Tensor | None, φ: Features) -> Tensor:
    q, k = _wide(q), _wide(k)
    u_q, u_k = (pieces.projected(x, φ.omega) for x in (q, k))
    w = pieces.log_weight(k, weight, φ.norm)
    features = (_exponential if φ.exponential else _pointwise)(u_q, u_k, w, bias, φ, weight is not None)
    f_q, f_k = (x.to(v.dtype) for x in features)
    return f_q @ (f_k.transpose(1, 2) @ v)


def _wide(x: Tensor) -> Tensor:
    """(G, N, d), float32 or better; one kernel widens and brings the heads together."""
    x = x.to(torch.float32, memory_format=torch.contiguous_format) if x.dtype in HALF else x
    return x.flatten(0, -3)


def _balance(f: Tensor) -> float:
    return math.sqrt(f.shape[1] / f.shape[2])


def _exponential(
    u_q: Tensor, u_k: Tensor, w: Tensor | None, bias: Tensor | None, φ: Features, masked: bool
) -> tuple[Tensor, Tensor]:
    """Q'/s and K'·s: Q' = softmax_f(Ωq + λ + bias) and K' = exp(Ωk + w − λ) with λ_f = logsumexp_j(Ωk + w)."""
    if w is not None:
        u_k = u_k + (w.clamp_min(LOWEST) if masked else w)
    λ = u_k.logsumexp(1, keepdim=True)
    f_k = (u_k - λ).exp() * _balance(u_k)
    if masked:
        assert w is not None
        f_k = f_k.masked_fill(w <= LOWEST, 0.0)  # also where every key is masked
    return torch.softmax(u_q + (λ if bias is None else λ + bias), -1) / _balance(u_k), f_k


def _pointwise(
    u_q: Tensor, u_k: Tensor, w: Tensor | None, bias: Tensor | None, φ: Features, masked: bool
) -> tuple[Tensor, Tensor]:
    """φ(q)/(D·c) and φ(k)·c, D = φ(q)·Σφ(k), with a factor c for each feature, or for each head where some of Σφ(k) may
    vanish."""
    assert φ.f is not None
    if φ.omega is None:  # what f may overwrite is the caller's
        u_q, u_k = u_q.clone(), u_k.clone()
    f_q, f_k = (φ.f(u) + φ.floor for u in (u_q, u_k))
    count: Tensor | int = f_k.shape[1]
    if w is not None:
        factor = (w - w.detach().amax(1, keepdim=True).clamp_min(LOWEST)).exp()
        f_k, count = f_k * factor, factor.sum(1, keepdim=True)
    z = f_k.sum(1, keepdim=True)
    if not φ.divide:  # an RMS norm follows
        return f_q, f_k
    d = (f_q * z).sum(-1, keepdim=True)
    safe = φ.positive and not masked
    over = d.reciprocal() if safe else pieces.inverse(d, φ.least * f_k.shape[2] * count)
    size = z.detach() if φ.positive else z.detach().abs().amax(-1, keepdim=True)
    c = _balance(f_k) / size.clamp_min(torch.finfo(z.dtype).tiny)
    return f_q * (over / c), f_k * c


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
        except RuntimeError as error:
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
    """`_attend` for this type of device, compiled where there is a compiler for it."""
    if device != "cuda" or not _has_triton():
        return _attend
    compiled, failed = torch.compile(_attend), []

    def attend(*inputs):
        if failed:
            return _attend(*inputs)
        try:
            return compiled(*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:  # type: ignore[attr-defined]
            failed.append(error)
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"linear attention runs uncompiled on {device}: {reason}", RuntimeWarning, stacklevel=2)
            return _attend(*inputs)

    return attend
