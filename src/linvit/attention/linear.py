"""Linear attention in O(N): the fast path of every Performer, bidirectional and causal.

Shapes: G = batch·heads, N tokens, d head_dim, F features, e value columns. Inputs are raw q and k; the scale d^-¼ is
folded into Ω. A kernel is φ(x)_f = f(ω_f·x)·e^{w(x)}, and attention is

    out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)        computed as   φ(q)·[φ(k)ᵀv] / φ(q)·[φ(k)ᵀ1].

**Exponential features** (f = exp), with ℓk_jf = ω_f·k_j + w_j. Only factors that cancel in the quotient may be used to
keep exponentials in range: one per query, and one per feature moved from keys to queries. Take the latter to be
λ_f = logsumexp_j ℓk_jf. Then K' = exp(ℓk − λ) has columns that sum to one, Q' = softmax_f(ω_f·q_i + λ_f) has rows that
sum to one, and

    out = Q' (K'ᵀ v)

needs no ε and no denominator: attention is a mixture over features of weighted averages of v. w(q) never matters.
Backward, with r_i = ∂out_i·out_i and ∂S = Q'ᵀ∂out:

    ∂ℓq = Q' ⊙ (∂out Sᵀ − r)      ∂ℓk = K' ⊙ (v ∂Sᵀ − Q'ᵀr)      ∂v = K' ∂S

**Other features** (relu, …) need no such care. The gradient has the same form with the denominator D = φ(q)·z written
out. In both, what belongs to the denominator rides along as one more column of ∂out and of S.

Features are made in blocks that stay in the cache, and made again for the backward pass when there are many of them.
`plain.py` is the same in ordinary operations, `reference.py` the ten-line oracle for all of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linvit.attention.pieces import (
    block_size,
    feature_rows,
    features,
    full_precision,
    gradient_and_r,
    inverse,
    log_weight,
    lowest,
    pullback,
)
from linvit.kernels.base import Features, Prepared

# Keeping features for the backward pass saves 5–15 % of the time (m = 32 … 256, N = 1024, an EPYC) and takes 2F numbers
# per token. Up to 64 features that is no more than q and k of a common head; beyond, only while it is 16 MiB in all.
KEEP_WIDTH = 64
KEEP_SIZE = 1 << 22

At = tuple[slice, slice]  # a block: some heads, some tokens


def linear_attention(prepared: Prepared, v: Tensor) -> Tensor:
    """Bidirectional: q, k (G, N, d) as prepared by a kernel and v (G, N, e) → (G, N, e)."""
    q, k, φ, weight, bias = prepared
    inputs = q.contiguous(), k.contiguous(), v.contiguous(), weight
    out = _Exponential.apply(*inputs, bias, φ) if φ.exponential else _Pointwise.apply(*inputs, φ)
    return out  # type: ignore[return-value]


def kept_for_backward(g: int, n: int, width: int) -> bool:
    return width <= KEEP_WIDTH or g * n * width <= KEEP_SIZE


class _Blocks:
    """Groups of heads, each with its chunks of tokens, so that the features of a block fit the cache.

    Features live in one piece of memory that every block uses again (fresh pages cost as much as a product), unless
    `kept` is a dictionary, where the backward pass finds them.
    """

    def __init__(self, like: Tensor, width: int, kept: dict[tuple[str, int, int], Tensor] | None):
        self.like, self.width, self.kept = like, width, kept
        g, n, _ = like.shape
        size = block_size(like) * (1 if kept is None else 4)  # kept features share the cache with no scratch
        self.tokens = -(-n // -(-n * width // size))
        self.heads = max(1, min(g, size // (self.tokens * width))) if self.tokens == n else 1
        self.scratch: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[tuple[slice, list[slice]]]:
        g, n, _ = self.like.shape
        chunks = [slice(t, min(t + self.tokens, n)) for t in range(0, n, self.tokens)]
        for h in range(0, g, self.heads):
            yield slice(h, min(h + self.heads, g)), chunks

    def projected(self, role: str, x: Tensor, omega: Tensor | None, at: At, *start: Tensor) -> Tensor:
        """x Ωᵀ of a block (g, t, F), plus the outer sum a + b of `start`, which the product adds without another pass.

        To be overwritten by what is made of it: that is then what `recall` gives.
        """
        if self.kept is None:
            u = self.room("features", at, self.width)
        else:
            u = self.keep(role, at, self.like.new_empty(self._shape(at, self.width)))
        if start:
            torch.add(*start, out=u)
        if omega is None:
            return u.add_(x[at]) if start else u.copy_(x[at])
        rows, flat = x[at].flatten(0, 1), u.view(-1, self.width)
        return (flat.addmm_(rows, omega.t()) if start else torch.mm(rows, omega.t(), out=flat)).view_as(u)

    def keep(self, role: str, at: At, value: Tensor) -> Tensor:
        if self.kept is not None:
            self.kept[role, at[0].start, at[1].start] = value
        return value

    def recall(self, role: str, at: At) -> Tensor | None:
        return None if self.kept is None else self.kept[role, at[0].start, at[1].start]

    def room(self, role: str, at: At, width: int) -> Tensor:
        if role not in self.scratch:
            self.scratch[role] = self.like.new_empty(self.heads * self.tokens * width)
        shape = self._shape(at, width)
        return self.scratch[role][: math.prod(shape)].view(shape)

    @staticmethod
    def _shape(at: At, width: int) -> tuple[int, int, int]:
        return at[0].stop - at[0].start, at[1].stop - at[1].start, width


def _unproject(du: Tensor, omega: Tensor | None, out: Tensor) -> None:
    """∂x = ∂(Ωx) Ω."""
    if omega is None:
        out.copy_(du)
    else:
        torch.mm(du.flatten(0, 1), omega, out=out.view(-1, omega.shape[1]))


def column_max(u: Tensor) -> Tensor:
    """(g, t, F) → (g, 1, F). Narrow columns are taken several tokens at a time: their reduction is not vectorised."""
    g, t, width = u.shape
    fold = math.gcd(t, 1 << (max(1, 256 // width).bit_length() - 1))
    return u.view(g, t // fold, fold * width).amax(1).view(g, fold, width).amax(1, keepdim=True)


class _Exponential(torch.autograd.Function):
    """out = Q' S with Q' = softmax_f(Ωq + λ + bias) and S = K'ᵀv, K' = softmax_j(Ωk + w) = exp(Ωk + w − λ)."""

    @staticmethod
    def forward(ctx, q, k, v, weight, bias, φ: Features):  # pyright: ignore[reportIncompatibleMethodOverride]
        (g, n, _), width = q.shape, feature_rows(q, φ)
        keep = any(ctx.needs_input_grad) and kept_for_backward(g, n, width)
        blocks = _Blocks(q, width, {} if keep else None)
        w = log_weight(k, weight, φ.norm)
        out, s, λ = torch.empty_like(v), v.new_zeros(g, width, v.shape[-1]), v.new_empty(g, 1, width)
        for heads, chunks in blocks:
            _average_values(k, v, w, φ, blocks, heads, chunks, s[heads], λ[heads])
            shift = _query_shift(λ, bias, heads)
            for tokens in chunks:
                torch.bmm(_mixture(q, φ, shift, blocks, (heads, tokens)), s[heads], out=out[heads, tokens])
        ctx.save_for_backward(q, k, v, w, bias, out, s, λ)
        ctx.φ, ctx.kept = φ, blocks.kept
        return out

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
        """∂ℓq = Q' ⊙ (∂out Sᵀ − r), ∂ℓk = K' ⊙ (v ∂Sᵀ + ∂z), ∂v = K' ∂S with ∂S = Q'ᵀ∂out and ∂z = −Q'ᵀr.

        r is a product with ones, so it rides along: (∂out, −r) times (S, 1)ᵀ is the bracket of ∂ℓq.
        """
        q, k, v, w, bias, out, s, λ = ctx.saved_tensors
        φ: Features = ctx.φ
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dw = None if w is None else torch.empty_like(w)
        dbias = None if bias is None else torch.zeros_like(λ)
        blocks = _Blocks(q, s.shape[1], ctx.kept)
        for heads, chunks in blocks:
            shift, s_one = _query_shift(λ, bias, heads), torch.cat([s[heads], torch.ones_like(s[heads, :, :1])], -1)
            ds, dz = torch.zeros_like(s[heads]), torch.zeros_like(λ[heads])
            for tokens in chunks:
                at = heads, tokens
                dy = gradient_and_r(dout[at], None, out[at])
                mixture = blocks.recall("q", at)
                if mixture is None:
                    mixture = _mixture(q, φ, shift, blocks, at)
                ds.baddbmm_(mixture.transpose(1, 2), dy[..., :-1])
                dz.baddbmm_(dy[..., -1:].transpose(1, 2), mixture)
                dlog = torch.bmm(dy, s_one.transpose(1, 2), out=blocks.room("gradient", at, s.shape[1])).mul_(mixture)
                _unproject(dlog, φ.omega, dq[at])
                if dbias is not None:
                    dbias[heads] += dlog.sum(1, keepdim=True)
            for tokens in chunks:
                at = heads, tokens
                weights, factor = _key_weights(k, w, φ, λ[heads], blocks, at)
                ds_here, dz_here = (ds, dz) if factor is None else (ds * factor.transpose(1, 2), dz * factor)
                torch.bmm(weights, ds_here, out=dv[at])
                dlog = torch.bmm(v[at], ds_here.transpose(1, 2), out=blocks.room("gradient", at, s.shape[1]))
                dlog.add_(dz_here).mul_(weights)
                _unproject(dlog, φ.omega, dk[at])
                if dw is not None:
                    torch.sum(dlog, -1, keepdim=True, out=dw[at])
        if φ.norm and dw is not None:
            dk.addcmul_(k, dw, value=2 * φ.norm)
        if bias is not None and dbias is not None:
            dbias = dbias.sum_to_size(bias.shape)
        return dq, dk, dv, dw if ctx.needs_input_grad[3] else None, dbias, None


def _average_values(
    k: Tensor, v: Tensor, w: Tensor | None, φ: Features, blocks: _Blocks,
    heads: slice, chunks: list[slice], s: Tensor, λ: Tensor,
) -> None:  # fmt: skip
    """Fill s = K'ᵀv and λ of some heads, by sums relative to a maximum per feature that grows from chunk to chunk."""
    mass, top = torch.zeros_like(λ), None
    for tokens in chunks:
        at = heads, tokens
        u = blocks.projected("k", k, φ.omega, at)
        if w is not None:
            u += w[at]
        high = column_max(u).clamp_min_(lowest(u))  # finite where every key is masked
        if top is not None:  # bring what was summed to the new maximum
            high = torch.maximum(high, top)
            fade = (top - high).exp_()
            mass *= fade
            s *= fade.transpose(1, 2)
        mass += u.sub_(high).exp_().sum(1, keepdim=True)
        s.baddbmm_(u.transpose(1, 2), v[at])
        top = blocks.keep("top", at, high)
    assert top is not None  # there is at least one chunk
    mass.clamp_min_(torch.finfo(v.dtype).tiny)
    s /= mass.transpose(1, 2)
    torch.add(top, mass.log_(), out=λ)


def _query_shift(λ: Tensor, bias: Tensor | None, heads: slice) -> Tensor:
    return λ[heads] if bias is None else λ[heads] + bias.expand_as(λ)[heads]


def _mixture(q: Tensor, φ: Features, shift: Tensor, blocks: _Blocks, at: At) -> Tensor:
    """Q' of a block."""
    u = blocks.projected("q", q, φ.omega, at).add_(shift)
    return torch.softmax(u, -1, out=u)


def _key_weights(
    k: Tensor, w: Tensor | None, φ: Features, λ: Tensor, blocks: _Blocks, at: At
) -> tuple[Tensor, Tensor | None]:
    """K' of a block; where they were kept, relative to the maximum of then, and the factor per feature that is due.

    The factor goes to the small matrices of the caller instead of to all tokens.
    """
    weights, top = blocks.recall("k", at), blocks.recall("top", at)
    if weights is not None and top is not None:
        return weights, (top - λ).exp_()
    start = λ.new_zeros(()).expand(*k[at].shape[:2], 1) if w is None else w[at]
    return blocks.projected("k", k, φ.omega, at, -λ, start).exp_(), None


class _Pointwise(torch.autograd.Function):
    """out = φ(q) S / D with S = φ(k)ᵀ(w v), D = φ(q)·z, z = φ(k)ᵀw, φ = f(Ω·) + floor and w = e^{log-weights}."""

    @staticmethod
    def forward(ctx, q, k, v, weight, φ: Features):  # pyright: ignore[reportIncompatibleMethodOverride]
        (g, n, _), width = q.shape, feature_rows(q, φ)
        keep = any(ctx.needs_input_grad) and kept_for_backward(g, n, width)
        blocks = _Blocks(q, width, {} if keep else None)
        w = log_weight(k, weight, φ.norm)
        if w is not None:  # from here on a factor of each key, at most one
            w = (w - w.amax(1, keepdim=True).clamp_min_(lowest(w))).exp_()
        vw = v if w is None else v * w
        out, over = torch.empty_like(v), v.new_ones(g, n, 1)  # over: 1/D
        sums = []
        for heads, chunks in blocks:
            s, z = _sum_keys(k, vw, w, φ, blocks, heads, chunks)
            sums += [s, z]
            for tokens in chunks:
                at = heads, tokens
                h = features(φ, blocks.projected("q", q, φ.omega, at))
                y = torch.bmm(h, s, out=out[at])
                if φ.divide:
                    count = n if w is None else w[heads].sum(1, keepdim=True)
                    over[at] = _one_over(torch.bmm(h, z.transpose(1, 2)), φ.least * z.shape[-1] * count)
                    y *= over[at]
        ctx.save_for_backward(q, k, v, w, out, over, *sums)
        ctx.φ, ctx.kept = φ, blocks.kept
        return out

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
        """With y = ∂out/D and r = y·out, which 1/D takes back:

        ∂φ(q) = y Sᵀ − r zᵀ = (y, −r) (S, z)ᵀ      ∂S = φ(q)ᵀy      ∂z = −φ(q)ᵀr
        ∂φ(k) = w (v ∂Sᵀ + ∂z)                     ∂v = w φ(k) ∂S   ∂w = φ(k)·∂z + v·(φ(k) ∂S)
        """
        q, k, v, w, out, over, *sums = ctx.saved_tensors
        φ: Features = ctx.φ
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        vw = v if w is None else v * w
        dw = None if w is None else torch.empty_like(w)
        count = v.new_full((len(q), 1, 1), q.shape[1]) if w is None else w.sum(1, keepdim=True)
        dcount = torch.zeros_like(count)
        blocks = _Blocks(q, feature_rows(q, φ), ctx.kept)
        for i, (heads, chunks) in enumerate(blocks):
            s, z = sums[2 * i : 2 * i + 2]
            s_z, ds, dz = torch.cat([s, z.transpose(1, 2)], -1), torch.zeros_like(s), torch.zeros_like(z)
            for tokens in chunks:
                at = heads, tokens
                dy = gradient_and_r(dout[at], over[at] if φ.divide else None, out[at])
                if not φ.divide:
                    dy[..., -1] = 0.0
                elif φ.least:
                    dcount[heads] += _pass_to_count(dy[..., -1:], over[at], φ.least * z.shape[-1], count[heads])
                h, pull = _features_again("q", q, φ, blocks, at)
                ds.baddbmm_(h.transpose(1, 2), dy[..., :-1])
                dz.baddbmm_(dy[..., -1:].transpose(1, 2), h)
                dh = torch.bmm(dy, s_z.transpose(1, 2), out=blocks.room("gradient", at, h.shape[-1]))
                _unproject(pull(dh), φ.omega, dq[at])
            for tokens in chunks:
                at = heads, tokens
                h, pull = _features_again("k", k, φ, blocks, at)
                torch.bmm(h, ds, out=dv[at])  # without its factor w
                dh = torch.bmm(vw[at], ds.transpose(1, 2), out=blocks.room("gradient", at, h.shape[-1]))
                if w is None or dw is None:
                    dh += dz
                else:
                    dh.addcmul_(w[at], dz)
                    dw[at] = torch.bmm(h, dz.transpose(1, 2)) + torch.linalg.vecdot(v[at], dv[at]).unsqueeze(-1)
                _unproject(pull(dh), φ.omega, dk[at])
        if w is not None and dw is not None:
            dv *= w
            dw = (dw + dcount) * w  # of the log-weights
            if φ.norm:
                dk.addcmul_(k, dw, value=2 * φ.norm)
        return dq, dk, dv, dw if ctx.needs_input_grad[3] else None, None


def _sum_keys(
    k: Tensor, vw: Tensor, w: Tensor | None, φ: Features, blocks: _Blocks, heads: slice, chunks: list[slice]
) -> tuple[Tensor, Tensor]:
    """S = φ(k)ᵀ(w v) (g, F, e) and z = φ(k)ᵀw (g, 1, F) of some heads."""
    s = z = None
    for tokens in chunks:
        at = heads, tokens
        h = features(φ, blocks.projected("k", k, φ.omega, at))
        part = torch.bmm(h.transpose(1, 2), vw[at])
        mass = h.sum(1, keepdim=True) if w is None else torch.bmm(w[at].transpose(1, 2), h)
        s, z = (part, mass) if s is None or z is None else (s.add_(part), z.add_(mass))
    assert s is not None  # there is at least one chunk
    assert z is not None
    return s, z


def _one_over(d: Tensor, least: Tensor | float) -> Tensor:
    """1/D of a block; |D| is at least φ.least for each feature and unit of the keys' weights."""
    if isinstance(least, Tensor) or least:
        return inverse(d, least)
    return d.reciprocal_().masked_fill_(d.isinf(), 0.0)  # φ(q) = 0: nothing to divide, or to divide by


def _pass_to_count(r: Tensor, over: Tensor, least: float, count: Tensor) -> Tensor:
    """A denominator that was moved to ±least·count has the count's gradient instead of its own: −r, set to zero here.

    1/D·least·count is one there to rounding, and less elsewhere.
    """
    moved = over.abs() * (least * count) >= 1 - 1e-6
    passed = (least * r * over.sign()).masked_fill_(~moved, 0.0).sum(1, keepdim=True)
    r.masked_fill_(moved, 0.0)
    return passed


def _features_again(role: str, x: Tensor, φ: Features, blocks: _Blocks, at: At):
    """φ(x) of a block, kept or made again, and the map from its gradient to that of Ωx.

    What was kept is Ωx, or what f left in its place.
    """
    kept = blocks.recall(role, at)
    if kept is None:
        return pullback(blocks.projected(role, x, φ.omega, at), φ)
    return pullback(kept, φ, made=True)
