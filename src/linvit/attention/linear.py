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

**Other features** (relu, …) need no such care: there D = φ(q)·z with z = φ(k)ᵀ1 is divided by. With S = φ(k)ᵀv,
y = ∂out/D and r = y·out, which 1/D takes back,

    ∂φ(q) = y Sᵀ − r zᵀ = (y, −r) (S, z)ᵀ      ∂φ(k) = v ∂Sᵀ + ∂z      ∂v = φ(k) ∂S      ∂S = φ(q)ᵀy      ∂z = −φ(q)ᵀr

For exponential features the same holds with Q', K', D = 1 and z = 1, and ∂ℓ = φ ⊙ ∂φ. So there is one pass forward and
one back, which two classes of features serve. r rides along as one more column of y, z as one more of S.

Features are made in blocks that stay in the cache, and made again for the backward pass when there are many of them.
Where no gradient is wanted of a small input, as for one image at a time, calling costs as much as computing: there the
same formulas stand in as few operations as they take.
`plain.py` is the same in ordinary operations, `reference.py` the ten-line oracle for all of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linvit.attention import pieces
from linvit.attention.pieces import Pull
from linvit.kernels.base import Features, Prepared

# Keeping features for the backward pass saves 5–15 % of the time (m = 32 … 256, N = 1024, an EPYC) and takes 2F numbers
# per token. Up to 64 features that is no more than q and k of a common head; beyond, only while it is 16 MiB in all.
KEEP_WIDTH = 64
KEEP_SIZE = 1 << 22

# Inputs with no more features than this take the short path, in memory of its own: up to 40 % less time on one core.
# With twice as many, relu took 1.8 times as long there as in blocks, which use their memory again.
FEW_FEATURES = pieces.BLOCK["cpu"] // 4

At = tuple[slice, slice]  # a block: some heads, some tokens


def linear_attention(prepared: Prepared, v: Tensor) -> Tensor:
    """Bidirectional: q, k (G, N, d) as prepared by a kernel and v (G, N, e) → (G, N, e)."""
    q, k, φ, weight, bias = prepared
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, weight, bias))
    if not recorded and math.prod(q.shape[:2]) * pieces.feature_rows(q, φ) <= FEW_FEATURES:
        return short(φ, len(q))(q, k, v, weight, bias)
    return _Linear.apply(q.contiguous(), k.contiguous(), v.contiguous(), weight, bias, φ)  # type: ignore[return-value]


Short = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]  # of q, k, v, weight and bias


def short(φ: Features, heads: int) -> Short:
    """Attention of so many heads in as few operations as it takes, with all decided that φ decides. No gradients."""
    ω = None if φ.omega is None else φ.omega.t().expand(heads, -1, -1)  # products of batches read it where it is
    return (_exponential if φ.exponential else _pointwise)(φ, ω)


def _exponential(φ: Features, ω: Tensor | None) -> Short:
    """Q' (K'ᵀv). Keys are powers of two, twice as fast as of e; products add w and λ as they go."""
    log2e, norm = math.log2(math.e), φ.norm
    baddbmm, bmm, softmax, length = torch.baddbmm, torch.bmm, torch.softmax, torch.linalg.vector_norm

    def attend(q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if ω is None:
            w = pieces.log_weight(k, weight, norm)
            u = (k if w is None else k + w) * log2e
        elif weight is None:
            squares = length(k, dim=-1, keepdim=True).square_() if norm else k[:1, :1, :1]
            u = baddbmm(squares, k, ω, beta=norm * log2e, alpha=log2e)
        else:
            w = pieces.log_weight(k, weight, norm)
            assert w is not None
            u = baddbmm(w, k, ω, beta=log2e, alpha=log2e)
        top = u.amax(1, keepdim=True)
        if weight is not None:
            top.clamp_min_(pieces.lowest(u))  # finite where every key is masked
        mass = u.sub_(top).exp2_().sum(1, keepdim=True)
        if weight is not None:
            mass.clamp_min_(torch.finfo(u.dtype).tiny)
        s = bmm(u.transpose(1, 2), v).div_(mass.transpose(1, 2))
        λ, unit = mass.log2_().add_(top), 1 / log2e
        if bias is not None or ω is None:
            λ, unit = λ * unit if bias is None else torch.add(bias, λ, alpha=unit), 1.0
        return bmm(softmax(q + λ if ω is None else baddbmm(λ, q, ω, beta=unit), -1), s)

    return attend


def _pointwise(φ: Features, ω: Tensor | None) -> Short:
    """φ(q) S / D."""
    f, floor, norm, bmm = φ.f, φ.floor, φ.norm, torch.bmm
    assert f is not None

    def attend(q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        f_q = f(q.clone() if ω is None else bmm(q, ω))
        f_k = f(k.clone() if ω is None else bmm(k, ω))
        if floor:
            f_q.add_(floor)
            f_k.add_(floor)
        factor = None
        if norm or weight is not None:
            w = pieces.log_weight(k, weight, norm)
            assert w is not None
            factor = _relative(w)
            f_k = f_k * factor
        s = bmm(f_k.transpose(1, 2), v)
        if φ.divide:  # features, which are mostly fewer than value columns
            d = _denominators(f_q, f_k.sum(1, keepdim=True))
            if φ.positive and factor is None:
                f_q.div_(d)
            else:
                f_q.mul_(_one_over(d, φ, f_k.shape[2], k.shape[1] if factor is None else factor.sum(1, keepdim=True)))
        return bmm(f_q, s)

    return attend


def _denominators(h: Tensor, z: Tensor) -> Tensor:
    """D = h·z, (G, N, 1): as a row, which is a product of two to four times the speed of one column's."""
    return torch.bmm(z, h.transpose(1, 2)).transpose(1, 2)


def _relative(w: Tensor) -> Tensor:
    """e^w over that of the largest."""
    return (w - w.amax(1, keepdim=True).clamp_min_(pieces.lowest(w))).exp_()


def _one_over(d: Tensor, φ: Features, width: int, count: Tensor | int) -> Tensor:
    """1/D in d's place, |D| being at least φ.least·F·Σe^w."""
    if φ.least or isinstance(count, Tensor):
        return pieces.inverse(d, φ.least * width * count)
    return d.reciprocal_().masked_fill_(d.isinf(), 0.0)  # φ(q) = 0: nothing to divide, or to divide by


class _Linear(torch.autograd.Function):
    """out = φ(q) S / D with S = φ(k)ᵀv and D = φ(q)·z."""

    @staticmethod
    def forward(ctx, q, k, v, weight, bias, φ: Features):  # pyright: ignore[reportIncompatibleMethodOverride]
        g, n, width = *q.shape[:2], pieces.feature_rows(q, φ)
        keep = any(ctx.needs_input_grad) and (width <= KEEP_WIDTH or g * n * width <= KEEP_SIZE)
        w = pieces.log_weight(k, weight, φ.norm)
        blocks: Any = (_Exponential if φ.exponential else _Pointwise)(q, k, w, bias, φ, {} if keep else None)
        out, over, sums = torch.empty_like(v), v.new_ones(g, n, 1), []  # over: 1/D
        for heads, chunks in blocks:
            s, z = blocks.sums(v, heads, chunks)
            sums += [s, z]
            for tokens in chunks:
                at = heads, tokens
                h = blocks.queries(at, z)
                y = torch.bmm(h, s, out=out[at])
                if blocks.divides:
                    over[at] = blocks.one_over(_denominators(h, z), z, heads)
                    y *= over[at]
        ctx.save_for_backward(q, k, v, w, bias, out, over, *sums)
        ctx.φ, ctx.kept = φ, blocks.kept
        return out

    @staticmethod
    @once_differentiable
    @pieces.full_precision
    def backward(ctx, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, w, bias, out, over, *sums = ctx.saved_tensors
        φ: Features = ctx.φ
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dw = None if w is None else torch.empty_like(w)
        dbias = None if bias is None else v.new_zeros(len(q), 1, sums[0].shape[1])
        blocks: Any = (_Exponential if φ.exponential else _Pointwise)(q, k, w, bias, φ, ctx.kept)
        for i, (heads, chunks) in enumerate(blocks):
            s, z = sums[2 * i : 2 * i + 2]
            ds, dz = torch.zeros_like(s), torch.zeros_like(z)
            s_z = torch.cat([s, (torch.ones_like(z) if φ.exponential else z).transpose(1, 2)], -1)
            for tokens in chunks:
                at = heads, tokens
                y = pieces.gradient_and_r(dout[at], over[at] if blocks.divides else None, out[at])
                if not φ.exponential:
                    blocks.settle(y[..., -1:], over[at], z, heads)
                h, pull = blocks.queries_again(at, z)
                ds.baddbmm_(h.transpose(1, 2), y[..., :-1])
                dz.baddbmm_(y[..., -1:].transpose(1, 2), h)
                du = pull(torch.bmm(y, s_z.transpose(1, 2), out=blocks.room("gradient", at, h.shape[-1])))
                _unproject(du, φ.omega, dq[at])
                if dbias is not None:
                    dbias[heads] += du.sum(1, keepdim=True)
            for tokens in chunks:
                at = heads, tokens
                h, pull, factor = blocks.keys_again(at, z)
                ds_here, dz_here = (ds, dz) if factor is None else (ds * factor.transpose(1, 2), dz * factor)
                torch.bmm(h, ds_here, out=dv[at])
                dh = torch.bmm(v[at], ds_here.transpose(1, 2), out=blocks.room("gradient", at, h.shape[-1]))
                dh += dz_here
                if dw is not None and not φ.exponential:
                    torch.linalg.vecdot(dh, h, out=dw[at].squeeze(-1))
                du = pull(dh)
                _unproject(du, φ.omega, dk[at])
                if dw is not None and φ.exponential:  # the same, and one pass less
                    torch.sum(du, -1, keepdim=True, out=dw[at])
        if dw is not None and blocks.factor is not None:
            dw += blocks.factor * blocks.dcount
        if dw is not None and φ.norm:
            dk.addcmul_(k, dw, value=2 * φ.norm)
        if bias is not None and dbias is not None:
            dbias = dbias.sum_to_size(bias.shape)
        return dq, dk, dv, dw if ctx.needs_input_grad[3] else None, dbias, None


class _Blocks:
    """Groups of heads, each with its chunks of tokens, so that the features of a block fit the cache.

    Features live in one piece of memory that every block uses again (fresh pages cost as much as a product), unless
    `kept` is a dictionary, where the backward pass finds them.
    """

    divides, factor, dcount = False, None, None  # what only pointwise features have

    def __init__(self, q: Tensor, k: Tensor, w: Tensor | None, bias: Tensor | None, φ: Features, kept: dict | None):
        self.q, self.k, self.w, self.bias, self.φ, self.kept = q, k, w, bias, φ, kept
        (g, n, _), self.width = q.shape, pieces.feature_rows(q, φ)
        size = pieces.block_size(q) * (1 if kept is None else 4)  # kept features share the cache with no scratch
        self.tokens = -(-n // -(-n * self.width // size))
        self.heads = max(1, min(g, size // (self.tokens * self.width))) if self.tokens == n else 1
        self.scratch: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[tuple[slice, list[slice]]]:
        g, n, _ = self.q.shape
        chunks = [slice(t, min(t + self.tokens, n)) for t in range(0, n, self.tokens)]
        for h in range(0, g, self.heads):
            yield slice(h, min(h + self.heads, g)), chunks

    def projected(self, role: str, at: At, *start: Tensor) -> Tensor:
        """Ωx of a block (g, t, F), plus the outer sum a + b of `start`, which the product adds without another pass.

        To be overwritten by what is made of it: that is then what `recall` gives.
        """
        x, omega = (self.q if role == "q" else self.k)[at], self.φ.omega
        u = self.room("features", at, self.width) if self.kept is None else x.new_empty(*x.shape[:2], self.width)
        self.keep(role, at, u)
        if start:
            torch.add(*start, out=u)
        if omega is None:
            return u.add_(x) if start else u.copy_(x)
        rows, flat = x.flatten(0, 1), u.view(-1, self.width)
        return (flat.addmm_(rows, omega.t()) if start else torch.mm(rows, omega.t(), out=flat)).view_as(u)

    def keep(self, role: str, at: At, value: Tensor) -> None:
        if self.kept is not None:
            self.kept[role, at[0].start, at[1].start] = value

    def recall(self, role: str, at: At) -> Tensor | None:
        return None if self.kept is None else self.kept[role, at[0].start, at[1].start]

    def room(self, role: str, at: At, width: int) -> Tensor:
        if role not in self.scratch:
            self.scratch[role] = self.q.new_empty(self.heads * self.tokens * width)
        shape = at[0].stop - at[0].start, at[1].stop - at[1].start, width
        return self.scratch[role][: math.prod(shape)].view(shape)


class _Exponential(_Blocks):
    """Q' = softmax_f(Ωq + λ + bias) and K' = exp(Ωk + w − λ). Where others have z, λ stands; the true z is one."""

    def sums(self, v: Tensor, heads: slice, chunks: list[slice]) -> tuple[Tensor, Tensor]:
        """S = K'ᵀv and λ of some heads, by sums relative to a maximum per feature that grows from chunk to chunk."""
        s, mass, top = v.new_zeros(len(v[heads]), self.width, v.shape[-1]), 0.0, torch.empty(0)
        for tokens in chunks:
            at = heads, tokens
            u = self.projected("k", at)
            if self.w is not None:
                u += self.w[at]
            high = column_max(u).clamp_min_(pieces.lowest(u))  # finite where every key is masked
            if tokens.start:  # bring what was summed to the new maximum
                high = torch.maximum(high, top)
                fade = (top - high).exp_()
                mass, s = mass * fade, s.mul_(fade.transpose(1, 2))
            mass = u.sub_(high).exp_().sum(1, keepdim=True) + mass
            s.baddbmm_(u.transpose(1, 2), v[at])
            self.keep("top", at, high)
            top = high
        mass = mass.clamp_min_(torch.finfo(v.dtype).tiny)  # type: ignore[union-attr]
        return s.div_(mass.transpose(1, 2)), mass.log_().add_(top)

    def queries(self, at: At, λ: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.expand(len(self.q), -1, -1)[at[0]]
        u = self.projected("q", at).add_(λ if bias is None else λ + bias)
        return torch.softmax(u, -1, out=u)

    def queries_again(self, at: At, λ: Tensor) -> tuple[Tensor, Pull]:
        h = self.recall("q", at)
        h = self.queries(at, λ) if h is None else h
        return h, lambda dh: dh.mul_(h)

    def keys_again(self, at: At, λ: Tensor) -> tuple[Tensor, Pull, Tensor | None]:
        """K'; where it was kept, relative to the maximum of then, with the factor per feature that is due.

        The factor goes to the small matrices ∂S and ∂z instead of to all tokens.
        """
        h, top = self.recall("k", at), self.recall("top", at)
        if h is not None and top is not None:
            return h, lambda dh: dh.mul_(h), (top - λ).exp_()
        start = λ.new_zeros(()).expand(*self.k[at].shape[:2], 1) if self.w is None else self.w[at]
        h = self.projected("k", at, -λ, start).exp_()
        return h, lambda dh: dh.mul_(h), None


class _Pointwise(_Blocks):
    """φ = f(Ω·) + floor, for keys times e^w relative to the largest of these; |D| is at least φ.least·F·Σe^w."""

    def __init__(self, q, k, w, bias, φ: Features, kept):
        super().__init__(q, k, w, bias, φ, kept)
        self.divides = φ.divide
        self.factor = None if w is None else _relative(w)
        ones = q.new_ones(()).expand(*q.shape[:2], 1)
        self.count = (ones if self.factor is None else self.factor).sum(1, keepdim=True)
        self.dcount = torch.zeros_like(self.count)

    def sums(self, v: Tensor, heads: slice, chunks: list[slice]) -> tuple[Tensor, Tensor]:
        s = z = None
        for tokens in chunks:
            at = heads, tokens
            h = pieces.features(self.φ, self.projected("k", at))
            w = None if self.factor is None else self.factor[at]
            part = torch.bmm(h.transpose(1, 2), v[at] if w is None else v[at] * w)
            mass = h.sum(1, keepdim=True) if w is None else torch.bmm(w.transpose(1, 2), h)
            s, z = (part, mass) if s is None or z is None else (s.add_(part), z.add_(mass))
        assert s is not None  # there is at least one chunk
        assert z is not None
        return s, z

    def queries(self, at: At, z: Tensor) -> Tensor:
        return pieces.features(self.φ, self.projected("q", at))

    def one_over(self, d: Tensor, z: Tensor, heads: slice) -> Tensor:
        return _one_over(d, self.φ, z.shape[-1], self.k.shape[1] if self.factor is None else self.count[heads])

    def settle(self, r: Tensor, over: Tensor, z: Tensor, heads: slice) -> None:
        """A denominator that was moved to ±least·count passes −r on to the count, and one that is not used has none."""
        if not self.divides:
            r.zero_()
        elif self.φ.least:
            least = self.φ.least * z.shape[-1]
            moved = over.abs() * (least * self.count[heads]) >= 1 - 1e-6  # one to rounding there, and less elsewhere
            self.dcount[heads] += (least * r * over.sign()).masked_fill_(~moved, 0.0).sum(1, keepdim=True)
            r.masked_fill_(moved, 0.0)

    def _again(self, role: str, at: At) -> tuple[Tensor, Pull]:
        kept = self.recall(role, at)  # Ωx, or what f left in its place
        return pieces.pullback(self.projected(role, at) if kept is None else kept, self.φ, made=kept is not None)

    def queries_again(self, at: At, z: Tensor) -> tuple[Tensor, Pull]:
        return self._again("q", at)

    def keys_again(self, at: At, z: Tensor) -> tuple[Tensor, Pull, Tensor | None]:
        h, pull = self._again("k", at)
        if self.factor is None:
            return h, pull, None
        w = self.factor[at]
        return h * w, lambda dh: pull(dh.mul_(w)), None


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
