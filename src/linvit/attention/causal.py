"""Causal linear attention where all log-features of the keys are moderate, as for most trained models.

Earlier tokens enter through sums, a chunk's own through a small matrix. Nothing need be kept in range, so chunks are
long, features are used as they are, and the backward pass is written out. From the first key that is out of range on,
`plain.py` takes over, from the state that it is handed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from linvit.attention import pieces
from linvit.attention.pieces import Pull, block_size, feature_rows, log_weight, projected, pullback
from linvit.attention.plain import CHUNK, advance, part, plain_causal, terms
from linvit.kernels.base import Features, Prepared, square_norm

# What |ℓk|, less the first key's w, may reach, as a part a of the largest exponent M of a float. Queries are relative
# to their largest feature, so a product of features loses at most e^{−M}·e^{aM} by underflow, in a row of at least
# e^{−aM}: a relative error of e^{−(1−2a)M} per term. For a = 0.35 that is 10^-11 in float32, below its epsilon for 10⁴
# terms. Sums have e^{0.65·M} of room above.
MODERATE = 0.35


def causal_attention(prepared: Prepared, v: Tensor, chunk: int = CHUNK) -> Tensor:
    """q, k (G, N, d) as prepared by a kernel and v (G, N, e) → (G, N, e), each token seeing itself and those before."""
    n, φ = v.shape[1], prepared.features
    moderate = in_range(prepared, chunk) if φ.divide and not φ.least else 0
    outs, state = [], None
    if moderate:
        q, k, _, weight, bias = part(prepared, 0, moderate)
        w, bias = _weight(k, weight, φ.norm), None if bias is None else bias.expand(len(q), -1, -1)
        first = (x.contiguous() for x in (q, k, v[:, :moderate]))
        outs.append(_Causal.apply(*first, w, bias, φ, chunk))
    if moderate < n:
        if moderate:
            _, u_k, w = terms(part(prepared, 0, moderate))
            state = advance(u_k, v[:, :moderate], w, None, φ)
        again = torch.is_grad_enabled() and n > chunk  # their graph would outgrow the cache
        outs.append(plain_causal(part(prepared, moderate, n), v[:, moderate:], state, chunk, again)[0])
    return torch.cat(outs, 1)


def in_range(prepared: Prepared, chunk: int) -> int:
    """How many tokens, in whole chunks, come before the first key whose features could leave the range of floats.

    Nothing may depend on later tokens, not even which path rounds a row, so it is the first key that decides.
    """
    _, k, φ, weight, _ = prepared
    n = k.shape[1]
    if not k.numel() or (not φ.exponential and not φ.norm and weight is None):
        return n
    limit = MODERATE * math.log(torch.finfo(k.dtype).max)
    with torch.no_grad():
        w = _weight(k, weight, φ.norm)
        own = 0.0 if w is None else torch.where(w == -torch.inf, 0.0, w).abs()
        size = own + torch.zeros_like(k[..., :1])
        if φ.exponential and φ.omega is not None:  # |ω·k| ≤ ‖ω‖‖k‖, which costs no product
            size = own + (square_norm(k) * square_norm(φ.omega).amax()).sqrt()
        if φ.exponential and (φ.omega is None or not bool(size.amax() <= limit)):  # the bound does not tell
            groups = k.split(max(1, block_size(k) // (n * feature_rows(k, φ))))
            size = own + torch.cat([projected(x, φ.omega).abs().amax(-1, keepdim=True) for x in groups])
        beyond = (~(size <= limit)).flatten(2).any(-1).any(0).nonzero()
    return n if not len(beyond) else int(beyond[0]) // chunk * chunk


def _weight(k: Tensor, weight: Tensor | None, norm: float) -> Tensor | None:
    """w_j less that of the first key, which every token may know: −‖k‖²/2 is large, but alike for all keys."""
    w = log_weight(k, weight, norm)
    if w is None:
        return None
    first = w[:, :1].detach()
    return w - first.masked_fill(first == -torch.inf, 0.0)


class _Causal(torch.autograd.Function):
    """Chunks of features f_q, f_k ≥ 0 with v₁ = (v, 1), so that denominators ride along as one more column:

    (numerator, D) = A v₁ + f_q S      A = tril(f_q f_kᵀ)      S = the sum of f_kᵀv₁ over earlier chunks

    Features are made again for the backward pass.
    """

    @staticmethod
    def forward(ctx, q, k, v, w, bias, φ: Features, chunk: int):  # pyright: ignore[reportIncompatibleMethodOverride]
        g, n, e = v.shape
        out, over, states = torch.empty_like(v), v.new_empty(g, n, 1), []
        for heads in _groups(q, φ, chunk):
            s = None
            for t in range(0, n, chunk):
                at = heads, slice(t, t + chunk)
                (f_q, _), (f_k, _) = _query_features(φ, q, bias, at), _key_features(φ, k, w, at)
                if s is None:
                    s = v.new_zeros(len(f_k), f_k.shape[-1], e + 1)
                v1 = F.pad(v[at], (0, 1), value=1.0)
                both = torch.baddbmm(torch.bmm(f_q, s), torch.bmm(f_q, f_k.transpose(1, 2)).tril_(), v1)
                over[at] = pieces.inverse(both[..., -1:], 0.0)
                torch.mul(both[..., :-1], over[at], out=out[at])
                states.append(s)
                s = torch.baddbmm(s, f_k.transpose(1, 2), v1)
        ctx.save_for_backward(q, k, v, w, bias, out, over, *states)
        ctx.φ, ctx.chunk = φ, chunk
        return out

    @staticmethod
    @once_differentiable
    @pieces.full_precision
    def backward(ctx, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
        """From the last chunk to the first, with y = (∂out/D, −∂out·out/D) and ∂S the sum of f_qᵀy over later chunks:

        ∂A = tril(y v₁ᵀ)      ∂f_q = y Sᵀ + ∂A f_k      ∂f_k = v₁ ∂Sᵀ + ∂Aᵀ f_q      ∂v₁ = Aᵀ y + f_k ∂S
        """
        q, k, v, w, bias, out, over, *states = ctx.saved_tensors
        φ, chunk, n = ctx.φ, ctx.chunk, q.shape[1]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dw = None if w is None else torch.empty_like(w)
        dbias = None if bias is None else torch.zeros_like(bias)
        starts = range(0, n, chunk)
        for i, heads in enumerate(_groups(q, φ, chunk)):
            ds = torch.zeros_like(states[i * len(starts)])
            for j, t in reversed(list(enumerate(starts))):
                at, s = (heads, slice(t, t + chunk)), states[i * len(starts) + j]
                (f_q, pull_q), (f_k, pull_k) = _query_features(φ, q, bias, at), _key_features(φ, k, w, at)
                v1, y = F.pad(v[at], (0, 1), value=1.0), pieces.gradient_and_r(dout[at], over[at], out[at])
                a = torch.bmm(f_q, f_k.transpose(1, 2)).tril_()
                da = torch.bmm(y, v1.transpose(1, 2)).tril_()
                df_q = torch.bmm(y, s.transpose(1, 2)).baddbmm_(da, f_k)
                df_k = torch.bmm(v1, ds.transpose(1, 2)).baddbmm_(da.transpose(1, 2), f_q)
                dv[at] = torch.bmm(a.transpose(1, 2), y[..., :-1]).baddbmm_(f_k, ds[..., :-1])
                ds = ds.baddbmm(f_q.transpose(1, 2), y)
                if dw is not None:
                    torch.linalg.vecdot(df_k, f_k, out=dw[at].squeeze(-1))
                du_q, du_k = pull_q(df_q), pull_k(df_k)
                if dbias is not None:
                    dbias[heads] += du_q.sum(1, keepdim=True)
                dq[at] = du_q if φ.omega is None else torch.matmul(du_q, φ.omega)
                dk[at] = du_k if φ.omega is None else torch.matmul(du_k, φ.omega)
        return dq, dk, dv, dw, dbias, None, None


def _groups(q: Tensor, φ: Features, chunk: int) -> list[slice]:
    """Heads at a time, so that a chunk of them fits the cache."""
    width = max(chunk, feature_rows(q, φ))
    heads = max(1, block_size(q) // (width * min(chunk, q.shape[1])))
    return [slice(h, min(h + heads, len(q))) for h in range(0, len(q), heads)]


def _query_features(φ: Features, q: Tensor, bias: Tensor | None, at: tuple[slice, slice]) -> tuple[Tensor, Pull]:
    """φ(q) (g, C, F), rows relative to their largest, and the map from its gradient to that of Ωq."""
    u = q[at].clone() if φ.omega is None else torch.matmul(q[at], φ.omega.t())
    if not φ.exponential:
        return pullback(u, φ)
    if bias is not None:
        u += bias[at[0]]
    f = u.sub_(u.amax(-1, keepdim=True)).exp_()
    return f, lambda df: df.mul_(f)


def _key_features(φ: Features, k: Tensor, w: Tensor | None, at: tuple[slice, slice]) -> tuple[Tensor, Pull]:
    """φ(k)·e^w (g, C, F) and the map from its gradient to that of Ωk."""
    u = k[at].clone() if φ.omega is None else torch.matmul(k[at], φ.omega.t())
    if φ.exponential:
        f = (u if w is None else u.add_(w[at])).exp_()
        return f, lambda df: df.mul_(f)
    h, pull = pullback(u, φ)
    if w is None:
        return h, pull
    factor = w[at].exp()
    return h * factor, lambda df: pull(df * factor)
