"""Bidirectional linear attention for GPUs: few, large operations, products in the precision of v, all else in float32.

The same mathematics as linear.py, without blocks: a GPU is fast where operations are few and memory traffic is low.
With f = φ(k)/c, features of the keys relative to their maximum over tokens c, and z their sum over tokens,

    S' = fᵀv / z      P = φ(q) c z / Σ_f φ(q) c z      out = P S'

so that S' are averages of values, P are weights that sum to one, and nothing leaves the range of float16.

- Inputs in half precision are only ever widened: Ωx, maxima, exponentials, sums and denominators are float32.
- f is rounded to v's dtype for the product with v, and z is the sum of what it was rounded to: a rounded weight then
  moves an average only as far as the weight's key differs from it.
- Few features, or features that are not random, are sums of two parts in half precision: their roundings would not
  average out.
- P and S' are such sums too, so that their product rounds the output alone (halves.py). It is one product three times
  as deep, which costs about 90 MB of traffic in the example below.
- Nothing but q, k and v is kept for the backward pass; features are recomputed.

The error of the output relative to that of softmax, on a simulated device with 64 to 1,024 tokens of 64 channels and 64
features, is 0.7–0.9, 0.9–1.0 and 0.9–1.4 at σ = 1, 2 and 4 in bfloat16, and at most 1.2 in float16. Rounding the exact
output to bfloat16 alone gives 0.7–0.8, 0.9–1.0 and 0.9–1.3: where softmax picks one key, its output is a value, which
needs no rounding.

On CUDA it is compiled, which fuses everything between the products; where that fails it runs as it is. Ωx is a Triton
kernel there, which reads slices of a projection in place; cuBLAS computes it by two products, and cannot read v in
place. ViT-S with 577 tokens and 43 images takes 8 kernels and 441 MB forward (benchmarks/traffic.py). Where Triton's
kernels for the whole of it (fused.py) support the features, the first call of each shape times both, and the faster one
is used.
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
from linvit.attention.halves import HALF, average, halves, sums, transformed, wide_products
from linvit.kernels.base import Features, Prepared, tracing

RACE_WARM_UP, RACE_ROUNDS = 3, 5
MANY_FEATURES = 64  # random ones: the roundings of so many average out, and they need no second part
LOWEST = -1e30  # log-weight of a masked key: e^LOWEST is zero, and differences of it are not NaN


def accelerated_attention(prepared: Prepared, v: Tensor) -> Tensor:
    """q, k (G, N, d) as prepared by a kernel, or (B, H, N, d) as they are, and v of either form → the same in v's
    dtype."""
    q, k, φ, weight, bias = prepared
    attend = _checkpointed if tracing() else _fastest(v.device.type)
    if not tracing() and v.device.type == "cuda" and _triton_wins(prepared, v, _needs_gradient(q, k, v, weight, bias)):
        return fused.triton_attention(prepared, v)
    return attend(q, k, v, weight, bias, φ)


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _checkpointed(q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, bias: Tensor | None, φ: Features) -> Tensor:
    """`_attend`, recomputed in the backward pass. Compiled as a whole, so that the forward pass writes nothing more."""
    if not _needs_gradient(q, k, v, weight, bias) or transformed():
        return _attend(q, k, v, weight, bias, φ)
    made: Tensor = checkpoint(_attend, q, k, v, weight, bias, φ, use_reentrant=False, preserve_rng_state=False)  # type: ignore[assignment]
    return made


def _attend(q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, bias: Tensor | None, φ: Features) -> Tensor:
    parts = None
    if q.dtype in HALF and φ.omega is not None and not φ.omega.requires_grad and wide_products(q):
        parts = torch.cat(halves(φ.omega, q.dtype))
    u_q = _projected(q, φ.omega, parts)
    u_k = _projected(k, φ.omega, parts, φ.norm if φ.exponential else 0.0, tokens_last=True)
    if weight is not None:
        weight = weight.transpose(1, 2)
    if φ.exponential:
        p, f, z = _exponential(u_q, u_k, weight, bias, v.dtype)
    else:
        p, f, z = _pointwise(u_q, u_k, _log_weight(k, weight, φ.norm), weight is not None, φ, v.dtype)
    s = sums(f, v.flatten(0, -3))
    return average(p, s if z is None else s / z, v.dtype).view(v.shape)


def _projected(
    x: Tensor, omega: Tensor | None, parts: Tensor | None, norm: float = 0.0, tokens_last: bool = False
) -> Tensor:
    """Ωx + norm·‖x‖², (…, N, d) → (G, N, F) or (G, F, N), in float32 or better. parts: Ω in half precision."""
    if parts is not None:
        return _HalfProjection.apply(x if x.dim() == 4 else x.unsqueeze(1), omega, parts, norm, tokens_last)  # type: ignore[return-value]
    x = (x.to(torch.float32, memory_format=torch.contiguous_format) if x.dtype in HALF else x).flatten(0, -3)
    squares = pieces.log_weight(x, None, norm)
    if tokens_last:
        x, squares = x.transpose(1, 2), None if squares is None else squares.transpose(1, 2)
        u = x if omega is None else omega @ x
    else:
        u = pieces.projected(x, omega)
    return u if squares is None else u + squares


class _HalfProjection(torch.autograd.Function):
    """Ωx + norm·‖x‖², (B, H, N, d) → (B·H, N, F) or (B·H, F, N): one Triton kernel, or cuBLAS's products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, omega: Tensor, parts: Tensor, norm: float, tokens_last: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(omega, *([x] if norm else []))
        ctx.shape, ctx.dtype, ctx.norm, ctx.tokens_last = x.shape, x.dtype, norm, tokens_last
        if x.is_cuda and _has_triton() and fused.supports_projection(x, omega):
            return fused.projection(x, omega.float().contiguous(), norm, tokens_last)
        return _projection_by_products(x, parts, norm, tokens_last)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        omega, *given = ctx.saved_tensors
        gradient = (gradient.mT if ctx.tokens_last else gradient).unflatten(0, ctx.shape[:2])
        found = gradient @ omega
        if given:
            found = found + 2 * ctx.norm * gradient.sum(-1, keepdim=True) * given[0]
        return found.to(ctx.dtype), None, None, None, None


def _projection_by_products(x: Tensor, parts: Tensor, norm: float, tokens_last: bool) -> Tensor:
    """One product with both parts of Ω, (2F, d), which are then added. The meta device stands for a GPU with Triton:
    there it is a product with one part, as much traffic as that kernel's."""
    features = len(parts) // 2
    if x.stride(1) > x.stride(2):  # heads are apart in memory; where those of a token are neighbours, nothing is copied
        x = x.reshape(-1, 1, *x.shape[-2:])
    rows, parts = x.transpose(0, 1).flatten(1, 2), parts[:features] if x.is_meta else parts
    omega = parts.expand(len(rows), -1, -1)
    u = torch.bmm(*((omega, rows.mT) if tokens_last else (rows, omega.mT)), out_dtype=torch.float32)
    u = (u if tokens_last else u.mT).unflatten(2, (len(x), -1)).unflatten(1, (-1, features)).permute(1, 3, 0, 2, 4)
    u = u if tokens_last else u.mT  # (1 or 2, batch, heads, …)
    if x.is_meta:
        return u.flatten(0, 2)
    found = torch.add(u[0], u[1], out=u.new_empty(u.shape[1:])).flatten(0, 1)
    if norm:
        squares = norm * torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=u.dtype).square().flatten(0, 1)
        found += squares.mT if tokens_last else squares
    return found


def _log_weight(k: Tensor, weight: Tensor | None, norm: float) -> Tensor | None:
    """w_j of pieces.py as (G, 1, N), without k in float32."""
    if not norm:
        return weight
    dtype = torch.float32 if k.dtype in HALF else k.dtype
    squares = norm * torch.linalg.vector_norm(k, dim=-1, keepdim=True, dtype=dtype).square().flatten(0, -3)
    return squares.transpose(1, 2) if weight is None else squares.transpose(1, 2) + weight


Parts = tuple[Tensor, Tensor, Tensor | None]  # P (G, N, F), f (G, F, N) and z (G, F, 1)


def _exponential(u_q: Tensor, u_k: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Parts:
    """f = exp(Ωk + w − c), c_f the maximum over tokens plus log ρ, and P = softmax_f(Ωq + c + log z + bias)."""
    if weight is not None:
        u_k = u_k + weight.clamp_min(LOWEST)
    c = u_k.detach().amax(2, keepdim=True) + math.log(_ρ(u_k.shape[2]))
    f = (u_k - c).exp()
    if weight is not None:
        f = f.masked_fill(weight <= LOWEST, 0.0)  # also where every key is masked
    f, z = _rounded(f, dtype)
    z = z if weight is None else _divisor(z)
    λ = (c + z.log()).transpose(1, 2)
    return torch.softmax(u_q + (λ if bias is None else λ + bias), -1), f, z


def _pointwise(u_q: Tensor, u_k: Tensor, w: Tensor | None, masked: bool, φ: Features, dtype: torch.dtype) -> Parts:
    """f = φ(k)/c, c_f the maximum over tokens times ρ, and P = φ(q) c z / Σ_f φ(q) c z; but in float32 and float64,
    where features may be negative and z zero, f = φ(k) and P = φ(q) / Σ_f φ(q) Σ_j φ(k)."""
    assert φ.f is not None
    if φ.omega is None:  # what f may overwrite is the caller's
        u_q, u_k = u_q.clone(), u_k.clone()
    f_q, f_k = φ.f(u_q) + φ.floor, φ.f(u_k.transpose(1, 2)).transpose(1, 2) + φ.floor  # f may widen the last axis
    count: Tensor | int = f_k.shape[2]
    if w is not None:
        factor = (w - w.detach().amax(2, keepdim=True).clamp_min(LOWEST)).exp()
        f_k, count = f_k * factor, factor.sum(2, keepdim=True)
    if not φ.divide:  # an RMS norm follows
        return f_q, f_k, None
    least, safe = φ.least * f_k.shape[1] * count, φ.positive and not masked  # safe: no sum over keys is zero
    if dtype in HALF:
        few = φ.omega is None or f_k.shape[1] < MANY_FEATURES
        c = f_k.detach().amax(2, keepdim=True) * _ρ(f_k.shape[2])
        c = c if safe else c.clamp_min(torch.finfo(c.dtype).tiny)
        f_k, z = _rounded(f_k / c, f_k.dtype if few else dtype)
        f_q, z = f_q * (c * z).transpose(1, 2), z if safe else _divisor(z)
        d = f_q.sum(-1, keepdim=True)
    else:
        z = None
        d = (f_q * f_k.sum(2, keepdim=True).transpose(1, 2)).sum(-1, keepdim=True)
    return f_q / d if safe else f_q * pieces.inverse(d, least), f_k, z


def _ρ(tokens: int) -> float:
    """A power of two near √N: with f of this size, gradients of sums over tokens stay in the range of float16."""
    return 2.0 ** round(math.log2(tokens) / 2)


def _rounded(f: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """f in this dtype, and the sum over tokens of what it is then."""
    if dtype not in HALF or transformed():
        rounded, z = f.to(dtype), f.sum(2, keepdim=True)
    else:
        rounded, z = _Rounded.apply(f, dtype)  # type: ignore[misc]
    return rounded, z


def _divisor(z: Tensor) -> Tensor:
    """z, and 1 where it is zero: the gradient of a quotient by the smallest number is beyond the range of float16."""
    return torch.where(z > 0, z, 1.0)


class _Rounded(torch.autograd.Function):
    """The gradient of the sum is not rounded."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rounded = f.to(dtype)
        return rounded, rounded.sum(2, keepdim=True, dtype=f.dtype)

    @staticmethod
    def backward(ctx: Any, of_rounded: Tensor, of_sum: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return of_rounded + of_sum, None


_WINNERS: dict[tuple, bool] = {}  # by shape: whether Triton's kernels were faster


def _triton_wins(prepared: Prepared, v: Tensor, needs_gradient: bool) -> bool:
    """From a race at the first call of each shape; False where there is no Triton for this device."""
    if not _has_triton() or not fused.supports(prepared, v) or transformed():
        return False
    φ = prepared.features
    assert φ.omega is not None
    shapes = v.shape, prepared.q.shape, φ.omega.shape
    key = (v.device, v.dtype, *shapes, fused.kind_of(φ), prepared.weight is not None, needs_gradient)
    if key not in _WINNERS:
        try:
            _WINNERS[key] = _race(prepared, v, needs_gradient)
        except (RuntimeError, *fused.TRITON_ERRORS) as error:
            _WINNERS[key] = False
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"linear attention runs without Triton's kernels: {reason}", RuntimeWarning, stacklevel=3)
    return _WINNERS[key]


def _race(prepared: Prepared, v: Tensor, needs_gradient: bool) -> bool:
    """Whether Triton's kernels take less time than the compiled formulas: forward, or both ways with gradients."""
    q, k, φ, weight, bias = prepared
    q, k, v = (x.detach().requires_grad_(needs_gradient) for x in (q, k, v))
    weight, bias = (x if x is None else x.detach() for x in (weight, bias))
    given, attend = Prepared(q, k, φ, weight, bias), _fastest(v.device.type)

    def seconds(call) -> float:
        times = []
        for turn in range(RACE_WARM_UP + RACE_ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            with torch.set_grad_enabled(needs_gradient):
                out = call()
            if needs_gradient:
                torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
            end.record()
            end.synchronize()
            if turn >= RACE_WARM_UP:
                times.append(begin.elapsed_time(end))
        return min(times)

    formulas = seconds(lambda: attend(q, k, v, weight, bias, φ))
    return seconds(lambda: fused.triton_attention(given, v)) < formulas


FAILURES: list[Exception] = []  # of compilation, or of a Triton kernel: neither is tried again


@torch.compiler.assume_constant_result
def _has_triton() -> bool:
    """Whether Triton is installed, finds a CUDA device and has not failed."""
    return not FAILURES and _finds_triton()


@cache
def _finds_triton() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from triton.runtime import driver

    try:
        return driver.active.get_current_target().backend == "cuda"  # type: ignore[union-attr]
    except (RuntimeError, AssertionError, OSError):  # no driver, in Triton's ways to say so
        return False


@cache
def _fastest(device: str):
    """`_checkpointed` for this type of device, compiled where there is a compiler for it."""
    if device != "cuda" or not _finds_triton():
        return _checkpointed
    compiled = torch.compile(_checkpointed)

    def attend(*inputs):
        if FAILURES:
            return _checkpointed(*inputs)
        try:
            return compiled(*inputs)
        except (torch._dynamo.exc.TorchDynamoException, *fused.TRITON_ERRORS) as error:  # type: ignore[attr-defined]
            FAILURES.append(error)
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"linear attention runs uncompiled on {device}: {reason}", RuntimeWarning, stacklevel=2)
            return _checkpointed(*inputs)

    return attend
