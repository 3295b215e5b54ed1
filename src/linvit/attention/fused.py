"""Bidirectional linear attention in two Triton kernels forward and two backward: features live in registers alone.

With z_f = Σ_j φ(k_j)_f and S'_f = Σ_j φ(k_j)_f v_j / z_f, a mean of the values, the output is Q'S' with
Q'_f = φ(q)_f z_f / Σ_f φ(q)_f z_f: all weights are between zero and one, so that nothing leaves the range of float16.
`keys` makes S' and log z of a head in one pass over its keys, relative to a running maximum of each feature;
`queries` makes the output. Ωx, maxima, exponentials and sums are float32, the products with values in their dtype.
Backward, with δ = Σ_e ∂out·out of each query and σ_f = Σ_e S'·∂S', `query_gradients` makes ∂q, ∂S' and ∂log z, and
`key_gradients` ∂k and ∂v.

Inputs are read in place, also as slices of one projection. A float32 factor (Ω, Q', S', …) of a product with half
precision is the sum of two parts in half precision, so that little more than the output is rounded.
`project` alone computes Ωx for the features that these kernels do not support.

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
MOST_FEATURES = 128  # at a time, of a projection
TRITON_ERRORS: tuple[type[Exception], ...] = ()  # of compilation, or of sizes beyond a device's shared memory

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl
    from triton.errors import TritonError

    TRITON_ERRORS = (TritonError,)
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
    def _dot(a, b, HALF: tl.constexpr):
        """a·b by products in HALF: what is float32 becomes a sum of two parts, so that hardly anything is rounded."""
        if HALF == tl.float32:  # noqa: SIM300
            out = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        else:
            a_high, b_high = a.to(HALF), b.to(HALF)
            out = tl.dot(a_high, b_high)
            if a.dtype == tl.float32:
                out += tl.dot((a - a_high.to(tl.float32)).to(HALF), b_high)
            if b.dtype == tl.float32:
                out += tl.dot(a_high, (b - b_high.to(tl.float32)).to(HALF))
        return out

    @triton.jit
    def _places(g, n, d, H, SB, SH, SN):
        """Where the channels d of tokens n of a head are, in a tensor (B, H, N, D) with these strides."""
        return (g // H) * SB + (g % H) * SH + n.to(tl.int64)[:, None] * SN + d[None, :]

    @triton.jit
    def _rows(X, at, n, d, N, D: tl.constexpr):
        """Tokens n of one head, zero beyond."""
        return tl.load(X + at, mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)

    @triton.jit
    def _write(X, at, x, n, d, N, D: tl.constexpr):
        tl.store(X + at, x.to(X.dtype.element_ty), mask=(n < N)[:, None] & (d < D)[None, :])

    @triton.jit
    def _matrix(W, m, d, D: tl.constexpr, M: tl.constexpr):
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
        K, V, W, WEIGHT, S, L, N, H, KB, KH, KN, VB, VH, VN,
        D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr,
        BLOCK: tl.constexpr, KIND: tl.constexpr, FLOOR: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ):  # fmt: skip
        g = tl.program_id(0).to(tl.int64)
        d, e, m = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, MP)
        omega = _matrix(W, m, d, D, M)
        s, z = tl.zeros((MP, EP), tl.float32), tl.zeros((MP,), tl.float32)
        top = tl.full((MP,), LOWEST, tl.float32)
        for start in range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            k = _rows(K, _places(g, n, d, H, KB, KH, KN), n, d, N, D)
            v = _rows(V, _places(g, n, e, H, VB, VH, VN), n, e, N, E)
            w, ok = _log_weight(k.to(tl.float32), WEIGHT, g, n, N, NORM, HAS_WEIGHT)
            log, _ = _log_feature(_dot(omega, tl.trans(k), K.dtype.element_ty), KIND, FLOOR)
            counts = (m < M)[:, None] & ok[None, :]
            log = tl.where(counts, log + w[None, :], LOWEST)
            new = tl.maximum(top, tl.max(log, 1))
            p = tl.where(counts, tl.exp(log - new[:, None]), 0.0)
            fade = tl.exp(top - new)
            s = s * fade[:, None] + _dot(p, v, V.dtype.element_ty)
            z, top = z * fade + tl.sum(p, 1), new
        some = z > 0
        tl.store(L + g * M + m, tl.where(some, top + tl.log(tl.where(some, z, 1.0)), LOWEST), mask=m < M)
        s = s / tl.where(some, z, 1.0)[:, None]
        tl.store(S + g * M * E + m[:, None] * E + e[None, :], s, mask=(m < M)[:, None] & (e < E)[None, :])

    @triton.jit
    def _weights(q, omega, log_z, m, M: tl.constexpr, KIND: tl.constexpr, FLOOR: tl.constexpr, HALF: tl.constexpr):
        """Q' and ∂ log φ/∂u of some queries."""
        log, slope = _log_feature(_dot(q, tl.trans(omega), HALF), KIND, FLOOR)  # type: ignore[misc]
        a = tl.where((m < M)[None, :], log + log_z[None, :], 2 * LOWEST)
        p = tl.exp(a - tl.max(a, 1)[:, None])
        return p / tl.sum(p, 1)[:, None], slope

    @triton.jit
    def queries(
        Q, W, S, L, OUT, N, H, QB, QH, QN, OB, OH, ON,
        D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr,
        BLOCK: tl.constexpr, KIND: tl.constexpr, FLOOR: tl.constexpr,
    ):  # fmt: skip
        g = tl.program_id(0).to(tl.int64)
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        d, e, m = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, MP)
        omega, q = _matrix(W, m, d, D, M), _rows(Q, _places(g, n, d, H, QB, QH, QN), n, d, N, D)
        log_z = tl.load(L + g * M + m, mask=m < M, other=0.0)
        p, _ = _weights(q, omega, log_z, m, M, KIND, FLOOR, Q.dtype.element_ty)
        out = _dot(p, _matrix(S + g * M * E, m, e, E, M), OUT.dtype.element_ty)
        _write(OUT, _places(g, n, e, H, OB, OH, ON), out, n, e, N, E)

    @triton.jit
    def query_gradients(
        Q, W, S, L, OUT, DO, DQ, DS, DL, N, H, QB, QH, QN, OB, OH, ON, GB, GH, GN, PB, PH, PN,
        D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr,
        BLOCK: tl.constexpr, KIND: tl.constexpr, FLOOR: tl.constexpr, WIDE: tl.constexpr,
    ):  # fmt: skip
        g = tl.program_id(0).to(tl.int64)
        d, e, m = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, MP)
        omega = _matrix(W, m, d, D, M)
        log_z = tl.load(L + g * M + m, mask=m < M, other=0.0)
        s = _matrix(S + g * M * E, m, e, E, M)
        ds, dl = tl.zeros((MP, EP), tl.float32), tl.zeros((MP,), tl.float32)
        for start in range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            q = _rows(Q, _places(g, n, d, H, QB, QH, QN), n, d, N, D)
            out = _rows(OUT, _places(g, n, e, H, OB, OH, ON), n, e, N, E).to(tl.float32)
            do = _rows(DO, _places(g, n, e, H, GB, GH, GN), n, e, N, E)
            p, slope = _weights(q, omega, log_z, m, M, KIND, FLOOR, Q.dtype.element_ty)
            p = tl.where((n < N)[:, None], p, 0.0)
            dp = _dot(do, tl.trans(s), DO.dtype.element_ty)
            da = p * (dp - tl.sum(out * do.to(tl.float32), 1)[:, None])
            ds += _dot(tl.trans(p), do, DO.dtype.element_ty)
            dl += tl.sum(da, 0)
            _write(DQ, _places(g, n, d, H, PB, PH, PN), _dot(da * slope, omega, WIDE), n, d, N, D)
        tl.store(DL + g * M + m, dl - tl.sum(s * ds, 1), mask=m < M)
        tl.store(DS + g * M * E + m[:, None] * E + e[None, :], ds, mask=(m < M)[:, None] & (e < E)[None, :])

    @triton.jit
    def key_gradients(
        K, V, W, WEIGHT, L, DS, DL, DK, DV, N, H, KB, KH, KN, VB, VH, VN, PB, PH, PN, RB, RH, RN,
        D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr,
        BLOCK: tl.constexpr, KIND: tl.constexpr, FLOOR: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr,
        HAS_WEIGHT: tl.constexpr,
    ):  # fmt: skip
        g = tl.program_id(0).to(tl.int64)
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        d, e, m = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, MP)
        omega = _matrix(W, m, d, D, M)
        k = _rows(K, _places(g, n, d, H, KB, KH, KN), n, d, N, D)
        v = _rows(V, _places(g, n, e, H, VB, VH, VN), n, e, N, E)
        log_z, dl = (tl.load(L + g * M + m, mask=m < M, other=0.0), tl.load(DL + g * M + m, mask=m < M, other=0.0))
        ds = _matrix(DS + g * M * E, m, e, E, M)
        w, ok = _log_weight(k.to(tl.float32), WEIGHT, g, n, N, NORM, HAS_WEIGHT)
        log, slope = _log_feature(_dot(k, tl.trans(omega), K.dtype.element_ty), KIND, FLOOR)
        p = tl.where((m < M)[None, :] & ok[:, None], tl.exp(log + w[:, None] - log_z[None, :]), 0.0)
        dlog = p * (_dot(v, tl.trans(ds), WIDE) + dl[None, :])
        dk = _dot(dlog * slope, omega, WIDE) + 2 * NORM * k.to(tl.float32) * tl.sum(dlog, 1)[:, None]
        _write(DK, _places(g, n, d, H, PB, PH, PN), dk, n, d, N, D)
        _write(DV, _places(g, n, e, H, RB, RH, RN), _dot(p, ds, WIDE), n, e, N, E)

    @triton.jit
    def project(
        X, W, U, N, H, SB, SH, SN, UG, UN, UM,
        D: tl.constexpr, M: tl.constexpr, DP: tl.constexpr, MB: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    ):  # fmt: skip
        g = tl.program_id(0).to(tl.int64)
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        d, m = tl.arange(0, DP), tl.program_id(2) * MB + tl.arange(0, MB)
        x = _rows(X, _places(g, n, d, H, SB, SH, SN), n, d, N, D)
        u = _dot(x, tl.trans(_matrix(W, m, d, D, M)), X.dtype.element_ty)
        wide = x.to(tl.float32)
        u += (NORM * tl.sum(wide * wide, 1))[:, None]
        places = g * UG + n.to(tl.int64)[:, None] * UN + m[None, :] * UM
        tl.store(U + places, u, mask=(n < N)[:, None] & (m < M)[None, :])

    INTERPRETED = not isinstance(keys, triton.JITFunction)

    def _launch(kernel: Any, grid: tuple[int, ...], *tensors: Tensor | int, **constants: Any) -> None:
        """Through PyTorch's wrapper, which torch.compile needs; Triton's interpreter goes without."""
        (kernel if INTERPRETED else torch.library.wrap_triton(kernel))[grid](*tensors, **constants)

    def _constants(q: Tensor, v: Tensor, omega: Tensor, kind: str, floor: float) -> dict[str, Any]:
        sizes = {"D": q.shape[3], "E": v.shape[3], "M": omega.shape[0]}
        padded = {f"{name}P": _padded(size) for name, size in sizes.items()}
        chosen = {"BLOCK": BLOCK, "KIND": kind, "FLOOR": floor, "num_warps": warps(*padded.values())}
        return {**sizes, **padded, **chosen}

    def _padded(size: int) -> int:
        """A power of two, and as large as products need."""
        return max(16, 1 << (size - 1).bit_length())

    def _strides(*tensors: Tensor) -> list[int]:
        """Of batches, heads and tokens."""
        return [stride for x in tensors for stride in x.stride()[:3]]

    @torch.library.triton_op("linvit::projection", mutates_args={})
    def projection(x: Tensor, omega: Tensor, norm: float, tokens_last: bool) -> Tensor:
        """Ωx + norm·‖x‖² in float32, x (B, H, N, d) with any strides and Ω (F, d) → (B·H, N, F), or (B·H, F, N)."""
        batch, heads, tokens, head_dim = x.shape
        features, width = omega.shape[0], min(MOST_FEATURES, _padded(omega.shape[0]))
        shape = (features, tokens) if tokens_last else (tokens, features)
        u = x.new_empty(batch * heads, *shape, dtype=torch.float32)
        strides = (u.stride(0), 1, tokens) if tokens_last else (u.stride(0), features, 1)
        grid = batch * heads, -(-tokens // BLOCK), -(-features // width)
        sizes = {"D": head_dim, "M": features, "DP": _padded(head_dim), "MB": width, "BLOCK": BLOCK, "NORM": norm}
        _launch(project, grid, x, omega, u, tokens, heads, *_strides(x), *strides, **sizes)
        return u

    @torch.library.triton_op("linvit::linear_attention", mutates_args={})
    def linear_attention(
        q: Tensor, k: Tensor, v: Tensor, omega: Tensor, weight: Tensor | None, kind: str, floor: float, norm: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (B, H, N, d), v (B, H, N, e), Ω (F, d) float32, weight (B·H, N) → out (B, H, N, e), S' (B·H, F, e) and
        log z (B·H, F). In out the heads of a token are neighbours, so that joining them copies nothing."""
        batch, heads, tokens, _ = q.shape
        groups, blocks = batch * heads, -(-tokens // BLOCK)
        constants = _constants(q, v, omega, kind, floor)
        s = q.new_empty(groups, omega.shape[0], v.shape[3], dtype=torch.float32)
        log_z = q.new_empty(groups, omega.shape[0], dtype=torch.float32)
        out = v.new_empty(batch, tokens, heads, v.shape[3]).transpose(1, 2)
        given, own = k if weight is None else weight, {"NORM": norm, "HAS_WEIGHT": weight is not None}
        _launch(keys, (groups,), k, v, omega, given, s, log_z, tokens, heads, *_strides(k, v), **constants, **own)
        _launch(queries, (groups, blocks), q, omega, s, log_z, out, tokens, heads, *_strides(q, out), **constants)
        return out, s, log_z

    @torch.library.triton_op("linvit::linear_attention_backward", mutates_args={})
    def linear_attention_backward(
        q: Tensor, k: Tensor, v: Tensor, omega: Tensor, weight: Tensor | None, out: Tensor, s: Tensor, log_z: Tensor,
        gradient: Tensor, kind: str, floor: float, norm: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        batch, heads, tokens, _ = q.shape
        groups, blocks = batch * heads, -(-tokens // BLOCK)
        # gradients of a scaled loss may be beyond the range of float16
        wide = tl.bfloat16 if v.dtype == torch.bfloat16 else tl.float32
        constants = _constants(q, v, omega, kind, floor) | {"WIDE": wide}
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        ds, dl = torch.empty_like(s), torch.empty_like(log_z)
        of_queries = q, omega, s, log_z, out, gradient, dq, ds, dl, tokens, heads, *_strides(q, out, gradient, dq)
        _launch(query_gradients, (groups,), *of_queries, **constants)
        given, own = k if weight is None else weight, {"NORM": norm, "HAS_WEIGHT": weight is not None}
        of_keys = k, v, omega, given, log_z, ds, dl, dk, dv, tokens, heads, *_strides(k, v, dk, dv)
        _launch(key_gradients, (groups, blocks), *of_keys, **constants, **own)
        return dq, dk, dv

    def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.kind, ctx.floor, ctx.norm = inputs
        ctx.save_for_backward(*tensors, *output)

    def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Any, ...]:
        inputs: list[Any] = [*ctx.saved_tensors, _rows_together(gradient), ctx.kind, ctx.floor, ctx.norm]
        found = linear_attention_backward(*inputs)
        return (*found, None, None, None, None, None)

    linear_attention.register_autograd(_backward, setup_context=_setup)


def warps(head_dim: int, columns: int, features: int) -> int:
    """Of a program: with half as many, S' of more than 8,192 elements does not fit its registers."""
    return 8 if features * max(head_dim, columns) > 8192 else 4


def supports(prepared: Prepared, v: Tensor) -> bool:
    """Whether `triton_attention` takes these features and sizes; only q, k and v may need gradients."""
    q, _, φ, weight, bias = prepared
    if φ.omega is None or bias is not None or kind_of(φ) not in FUSED or (φ.norm and not φ.exponential):
        return False
    sizes = HEAD_DIMS[0] <= min(q.shape[-1], v.shape[-1]) <= max(q.shape[-1], v.shape[-1]) <= HEAD_DIMS[1]
    learned = any(x is not None and x.requires_grad for x in (φ.omega, weight))
    return sizes and WIDTHS[0] <= φ.omega.shape[0] <= WIDTHS[1] and φ.divide and not learned


def supports_projection(x: Tensor, omega: Tensor) -> bool:
    """Whether `projection` takes these inputs."""
    return x.dim() == 4 and x.stride(-1) == 1 and HEAD_DIMS[0] <= x.shape[-1] <= HEAD_DIMS[1] and omega.shape[0] >= 16


def kind_of(φ: Features) -> str:
    return "exp" if φ.exponential else φ.name if φ.positive else ""


def triton_attention(prepared: Prepared, v: Tensor) -> Tensor:
    """As `accelerated_attention`, for inputs that it `supports`."""
    q, k, φ, weight, _ = prepared
    assert φ.omega is not None
    weight = None if weight is None else weight.squeeze(-1).float().contiguous()
    omega = φ.omega.detach().float().contiguous()
    apart = q.dim() == v.dim() == 4  # batch and heads
    q, k, value = (_rows_together(x if apart else x.flatten(0, -3).unsqueeze(1)) for x in (q, k, v))
    return linear_attention(q, k, value, omega, weight, kind_of(φ), float(φ.floor), float(φ.norm))[0].view(v.shape)


def _rows_together(x: Tensor) -> Tensor:
    """The channels of a token side by side; all else may be anywhere."""
    return x if x.stride(-1) == 1 else x.contiguous()
