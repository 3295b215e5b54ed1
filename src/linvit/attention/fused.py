"""Bidirectional linear attention in two Triton kernels forward and two backward: features live in registers alone.

With z_f = Σ_j φ(k_j)_f and S'_f = Σ_j φ(k_j)_f v_j / z_f, a mean of the values, the output is Q'S' with
Q'_f = φ(q)_f z_f / Σ_f φ(q)_f z_f: all weights are between zero and one, so that nothing leaves the range of float16.
`keys` makes S' and log z of a head in one pass over its keys, relative to a running maximum of each feature;
`queries` makes the output. Ωx, maxima, exponentials and sums are float32, the products with values in their dtype.
Backward, with δ = Σ_e ∂out·out of each query and σ_f = Σ_e S'·∂S', `query_gradients` makes ∂q, ∂S' and ∂log z, and
`key_gradients` ∂k and ∂v.

Covered are exponential features and those of FUSED, all positive, with given Ω, log-weights and log-constants.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from linvit.kernels.base import Features, Prepared

FUSED = ("exp", "relu", "abs", "sigmoid", "elu1")  # what `_log_feature` computes
HEAD_DIMS, WIDTHS = (16, 128), (16, 256)
BLOCK = 64  # tokens at a time

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    LOWEST = tl.constexpr(-1e30)  # stands for the logarithm of zero: differences of it are not NaN

    @triton.jit
    def _log_feature(u, KIND: tl.constexpr, FLOOR: tl.constexpr):
        """log φ and ∂ log φ/∂u."""
        if KIND == "exp":
            log, slope = u, tl.full(u.shape, 1.0, tl.float32)
        else:
            if KIND == "relu":
                f, df = tl.maximum(u, 0.0), tl.where(u > 0, 1.0, 0.0)
            elif KIND == "abs":
                f, df = tl.abs(u), tl.where(u > 0, 1.0, tl.where(u < 0, -1.0, 0.0))
            elif KIND == "sigmoid":
                f = tl.sigmoid(u)
                df = f * (1 - f)
            else:
                e = tl.exp(tl.minimum(u, 0.0))
                f, df = tl.where(u > 0, u + 1.0, e), tl.where(u > 0, 1.0, e)
            f += FLOOR
            log, slope = tl.log(f), df / f
        return log, slope

    @triton.jit
    def _rows(X, at, n, d, N, D: tl.constexpr):
        """Tokens n of one head, zero beyond."""
        return tl.load(X + at + n[:, None] * D + d[None, :], mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)

    @triton.jit
    def _omega(W, m, d, D: tl.constexpr, M: tl.constexpr):
        return tl.load(W + m[:, None] * D + d[None, :], mask=(m < M)[:, None] & (d < D)[None, :], other=0.0)

    @triton.jit
    def _log_weight(k, WEIGHT, g, n, N, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr):
        """(log-weight of each key, whether it counts)."""
        w, ok = NORM * tl.sum(k * k, 1), n < N
        if HAS_WEIGHT:
            given = tl.load(WEIGHT + g * N + n, mask=ok, other=0.0)
            ok = ok & (given > LOWEST)
            w += tl.where(ok, given, 0.0)
        return w, ok

    @triton.jit
    def keys(
        K, V, W, WEIGHT, S, L, N,
        D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr,
        BLOCK: tl.constexpr, KIND: tl.constexpr, FLOOR: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ):  # fmt: skip
        g = tl.program_id(0).to(tl.int64)
        d, e, m = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, MP)
        omega = _omega(W, m, d, D, M)
        s, z = tl.zeros((MP, EP), tl.float32), tl.zeros((MP,), tl.float32)
        top = tl.full((MP,), LOWEST, tl.float32)
        for start in range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            k = _rows(K, g * N * D, n, d, N, D).to(tl.float32)
            v = _rows(V, g * N * E, n, e, N, E)
            w, ok = _log_weight(k, WEIGHT, g, n, N, NORM, HAS_WEIGHT)
            log, _ = _log_feature(tl.dot(omega, tl.trans(k), input_precision="ieee"), KIND, FLOOR)
            counts = (m < M)[:, None] & ok[None, :]
            log = tl.where(counts, log + w[None, :], LOWEST)
            new = tl.maximum(top, tl.max(log, 1))
            p = tl.where(counts, tl.exp(log - new[:, None]), 0.0)
            fade = tl.exp(top - new)
            s = s * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            z, top = z * fade + tl.sum(p, 1), new
        some = z > 0
        tl.store(L + g * M + m, tl.where(some, top + tl.log(tl.where(some, z, 1.0)), LOWEST), mask=m < M)
        s = s / tl.where(some, z, 1.0)[:, None]
        tl.store(S + g * M * E + m[:, None] * E + e[None, :], s, mask=(m < M)[:, None] & (e < E)[None, :])

    @triton.jit
    def _weights(q, omega, log_z, m, M: tl.constexpr, KIND: tl.constexpr, FLOOR: tl.constexpr):
        """Q' and ∂ log φ/∂u of some queries."""
        log, slope = _log_feature(tl.dot(q, tl.trans(omega), input_precision="ieee"), KIND, FLOOR)  # type: ignore[misc]
        a = tl.where((m < M)[None, :], log + log_z[None, :], 2 * LOWEST)
        p = tl.exp(a - tl.max(a, 1)[:, None])
        return p / tl.sum(p, 1)[:, None], slope

    @triton.jit
    def queries(
        Q, W, S, L, OUT, N,
        D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr,
        BLOCK: tl.constexpr, KIND: tl.constexpr, FLOOR: tl.constexpr,
    ):  # fmt: skip
        g = tl.program_id(0).to(tl.int64)
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        d, e, m = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, MP)
        omega, q = _omega(W, m, d, D, M), _rows(Q, g * N * D, n, d, N, D).to(tl.float32)
        log_z = tl.load(L + g * M + m, mask=m < M, other=0.0)
        p, _ = _weights(q, omega, log_z, m, M, KIND, FLOOR)
        s = _rows(S, g * M * E, m, e, M, E).to(OUT.dtype.element_ty)
        out = tl.dot(p.to(s.dtype), s, input_precision="ieee")
        where = (n < N)[:, None] & (e < E)[None, :]
        tl.store(OUT + g * N * E + n[:, None] * E + e[None, :], out.to(OUT.dtype.element_ty), mask=where)

    @triton.jit
    def query_gradients(
        Q, W, S, L, OUT, DO, DQ, DS, DL, N,
        D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr,
        BLOCK: tl.constexpr, KIND: tl.constexpr, FLOOR: tl.constexpr,
    ):  # fmt: skip
        g = tl.program_id(0).to(tl.int64)
        d, e, m = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, MP)
        omega = _omega(W, m, d, D, M)
        log_z = tl.load(L + g * M + m, mask=m < M, other=0.0)
        s = _rows(S, g * M * E, m, e, M, E)
        ds, dl = tl.zeros((MP, EP), tl.float32), tl.zeros((MP,), tl.float32)
        for start in range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            q, out = _rows(Q, g * N * D, n, d, N, D).to(tl.float32), _rows(OUT, g * N * E, n, e, N, E).to(tl.float32)
            do = _rows(DO, g * N * E, n, e, N, E)
            p, slope = _weights(q, omega, log_z, m, M, KIND, FLOOR)
            p = tl.where((n < N)[:, None], p, 0.0)
            dp = tl.dot(do, tl.trans(s.to(do.dtype)), input_precision="ieee")
            da = p * (dp - tl.sum(out * do.to(tl.float32), 1)[:, None])
            ds += tl.dot(tl.trans(p).to(do.dtype), do, input_precision="ieee")
            dl += tl.sum(da, 0)
            dq = tl.dot(da * slope, omega, input_precision="ieee")
            where = (n < N)[:, None] & (d < D)[None, :]
            tl.store(DQ + g * N * D + n[:, None] * D + d[None, :], dq.to(DQ.dtype.element_ty), mask=where)
        tl.store(DL + g * M + m, dl - tl.sum(s * ds, 1), mask=m < M)
        tl.store(DS + g * M * E + m[:, None] * E + e[None, :], ds, mask=(m < M)[:, None] & (e < E)[None, :])

    @triton.jit
    def key_gradients(
        K, V, W, WEIGHT, L, DS, DL, DK, DV, N,
        D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr,
        BLOCK: tl.constexpr, KIND: tl.constexpr, FLOOR: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ):  # fmt: skip
        g = tl.program_id(0).to(tl.int64)
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        d, e, m = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, MP)
        omega = _omega(W, m, d, D, M)
        k, v = _rows(K, g * N * D, n, d, N, D).to(tl.float32), _rows(V, g * N * E, n, e, N, E)
        log_z, dl = (tl.load(L + g * M + m, mask=m < M, other=0.0), tl.load(DL + g * M + m, mask=m < M, other=0.0))
        ds = _rows(DS, g * M * E, m, e, M, E)
        w, ok = _log_weight(k, WEIGHT, g, n, N, NORM, HAS_WEIGHT)
        log, slope = _log_feature(tl.dot(k, tl.trans(omega), input_precision="ieee"), KIND, FLOOR)
        p = tl.where((m < M)[None, :] & ok[:, None], tl.exp(log + w[:, None] - log_z[None, :]), 0.0)
        if V.dtype.element_ty == tl.bfloat16:
            dv = tl.dot(p.to(tl.bfloat16), ds.to(tl.bfloat16))
            dp = tl.dot(v, tl.trans(ds.to(tl.bfloat16)))
        else:  # gradients of a scaled loss may be beyond the range of float16
            dv = tl.dot(p, ds, input_precision="ieee")
            dp = tl.dot(v.to(tl.float32), tl.trans(ds), input_precision="ieee")
        dlog = p * (dp + dl[None, :])
        dk = tl.dot(dlog * slope, omega, input_precision="ieee") + 2 * NORM * k * tl.sum(dlog, 1)[:, None]
        tl.store(DK + g * N * D + n[:, None] * D + d[None, :], dk.to(DK.dtype.element_ty),
                 mask=(n < N)[:, None] & (d < D)[None, :])  # fmt: skip
        tl.store(DV + g * N * E + n[:, None] * E + e[None, :], dv.to(DV.dtype.element_ty),
                 mask=(n < N)[:, None] & (e < E)[None, :])  # fmt: skip

    INTERPRETED = not isinstance(keys, triton.JITFunction)

    def _launch(kernel: Any, grid: tuple[int, ...], *tensors: Tensor | int, **constants: Any) -> None:
        """Through PyTorch's wrapper, which torch.compile needs; Triton's interpreter goes without."""
        (kernel if INTERPRETED else torch.library.wrap_triton(kernel))[grid](*tensors, **constants)

    def _constants(q: Tensor, v: Tensor, omega: Tensor, kind: str, floor: float) -> dict[str, Any]:
        sizes = {"D": q.shape[2], "E": v.shape[2], "M": omega.shape[0]}
        padded = {f"{name}P": max(16, 1 << (size - 1).bit_length()) for name, size in sizes.items()}
        return {**sizes, **padded, "BLOCK": BLOCK, "KIND": kind, "FLOOR": floor}

    @torch.library.triton_op("linvit::linear_attention", mutates_args={})
    def linear_attention(
        q: Tensor, k: Tensor, v: Tensor, omega: Tensor, weight: Tensor | None, kind: str, floor: float, norm: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (G, N, d), v (G, N, e), Ω (F, d) float32, weight (G, N) → out (G, N, e), S' (G, F, e), log z (G, F)."""
        groups, tokens, _ = q.shape
        constants, blocks = _constants(q, v, omega, kind, floor), -(-tokens // BLOCK)
        s = q.new_empty(groups, omega.shape[0], v.shape[2], dtype=torch.float32)
        log_z, out = q.new_empty(groups, omega.shape[0], dtype=torch.float32), torch.empty_like(v)
        given, own = k if weight is None else weight, {"NORM": norm, "HAS_WEIGHT": weight is not None}
        _launch(keys, (groups,), k, v, omega, given, s, log_z, tokens, **constants, **own)
        _launch(queries, (groups, blocks), q, omega, s, log_z, out, tokens, **constants)
        return out, s, log_z

    @torch.library.triton_op("linvit::linear_attention_backward", mutates_args={})
    def linear_attention_backward(
        q: Tensor, k: Tensor, v: Tensor, omega: Tensor, weight: Tensor | None, out: Tensor, s: Tensor, log_z: Tensor,
        gradient: Tensor, kind: str, floor: float, norm: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        groups, tokens, _ = q.shape
        constants, blocks = _constants(q, v, omega, kind, floor), -(-tokens // BLOCK)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        ds, dl = torch.empty_like(s), torch.empty_like(log_z)
        _launch(query_gradients, (groups,), q, omega, s, log_z, out, gradient, dq, ds, dl, tokens, **constants)
        given, own = k if weight is None else weight, {"NORM": norm, "HAS_WEIGHT": weight is not None}
        grid = groups, blocks
        _launch(key_gradients, grid, k, v, omega, given, log_z, ds, dl, dk, dv, tokens, **constants, **own)
        return dq, dk, dv

    def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.kind, ctx.floor, ctx.norm = inputs
        ctx.save_for_backward(*tensors, *output)

    def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Any, ...]:
        inputs: list[Any] = [*ctx.saved_tensors, gradient.contiguous(), ctx.kind, ctx.floor, ctx.norm]
        found = linear_attention_backward(*inputs)
        return (*found, None, None, None, None, None)

    linear_attention.register_autograd(_backward, setup_context=_setup)


def fits(prepared: Prepared, v: Tensor) -> bool:
    """Whether the kernels cover this: which features, which sizes, and no gradients but those of q, k and v."""
    q, _, φ, weight, bias = prepared
    if φ.omega is None or bias is not None or kind_of(φ) not in FUSED or (φ.norm and not φ.exponential):
        return False
    sizes = HEAD_DIMS[0] <= min(q.shape[-1], v.shape[-1]) <= max(q.shape[-1], v.shape[-1]) <= HEAD_DIMS[1]
    learned = any(x is not None and x.requires_grad for x in (φ.omega, weight))
    return sizes and WIDTHS[0] <= φ.omega.shape[0] <= WIDTHS[1] and φ.divide and not learned


def kind_of(φ: Features) -> str:
    return "exp" if φ.exponential else φ.name if φ.positive else ""


def triton_attention(prepared: Prepared, v: Tensor) -> Tensor:
    """As `accelerated_attention`, where it `fits`."""
    q, k, φ, weight, _ = prepared
    assert φ.omega is not None
    q, k = (x.flatten(0, -3).contiguous() for x in (q, k))
    weight = None if weight is None else weight.squeeze(-1).float().contiguous()
    omega = φ.omega.detach().float().contiguous()
    return linear_attention(q, k, v.contiguous(), omega, weight, kind_of(φ), float(φ.floor), float(φ.norm))[0]
