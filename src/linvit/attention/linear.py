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

Features are made in blocks that stay in the cache and are made again for the backward pass when there are many of
them: reading them back from memory costs more than the product that makes them. The ten-line oracle for all of this is
`reference.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linvit.kernels.base import Features, Prepared

# Elements of one block of features: a few MiB of float32 stay in a CPU's cache; a GPU wants whole waves.
BLOCK = {"cpu": 1 << 19, "mps": 1 << 24}
KEEP_WIDTH = 64  # features are kept for the backward pass up to this many per token,
KEEP_SIZE = 1 << 22  # or this many in all; beyond, making them again is cheaper than the memory


def linear_attention(plan: Prepared, v: Tensor) -> Tensor:
    """Bidirectional: q, k (G, N, d) of the plan and v (G, N, e) → (G, N, e)."""
    q, k, features, weight, bias = plan
    if features.exponential:
        inputs = q.contiguous(), k.contiguous(), v.contiguous(), weight, bias, features
        return _Exponential.apply(*inputs)  # type: ignore[return-value]
    return _Pointwise.apply(q.contiguous(), k.contiguous(), v.contiguous(), weight, features)  # type: ignore[return-value]


class _Blocks:
    """Groups of heads, each with its chunks of tokens, so that the features of a block fit the cache.

    Features live in one piece of memory that every block uses again (fresh pages cost as much as a product), unless
    they are kept for the backward pass.
    """

    def __init__(self, like: Tensor, width: int, keep: bool = False, kept: bool = False):
        self.like, self.width = like, width
        g, n, _ = like.shape
        size = BLOCK.get(like.device.type, 1 << 26) * (4 if keep or kept else 1)  # kept features need no scratch
        self.tokens = -(-n // -(-n * width // size))
        self.heads = max(1, min(g, size // (self.tokens * width))) if self.tokens == n else 1
        self.kept: dict[tuple[str, int, int], Tensor] | None = {} if keep else None
        self.scratch: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[tuple[slice, list[slice]]]:
        g, n, _ = self.like.shape
        chunks = [slice(t, min(t + self.tokens, n)) for t in range(0, n, self.tokens)]
        for h in range(0, g, self.heads):
            yield slice(h, min(h + self.heads, g)), chunks

    def features(self, role: str, heads: slice, tokens: slice) -> Tensor:
        """Room for the features of one block."""
        if self.kept is None:
            return self._room("features", heads, tokens, self.width)
        room = self.like.new_empty(heads.stop - heads.start, tokens.stop - tokens.start, self.width)
        self.keep(role, heads, tokens, room)
        return room

    def gradient(self, heads: slice, tokens: slice, width: int | None = None) -> Tensor:
        return self._room("gradient", heads, tokens, width or self.width)

    def keep(self, role: str, heads: slice, tokens: slice, value: Tensor) -> None:
        if self.kept is not None:
            self.kept[role, heads.start, tokens.start] = value

    def _room(self, role: str, heads: slice, tokens: slice, width: int) -> Tensor:
        if role not in self.scratch:
            self.scratch[role] = self.like.new_empty(self.heads * self.tokens * width)
        shape = heads.stop - heads.start, tokens.stop - tokens.start, width
        return self.scratch[role][: math.prod(shape)].view(shape)


def _width(q: Tensor, φ: Features) -> int:
    return q.shape[-1] if φ.omega is None else φ.omega.shape[0]


def _keeps(g: int, n: int, width: int) -> bool:
    return width <= KEEP_WIDTH or g * n * width <= KEEP_SIZE


def _project(x: Tensor, omega: Tensor | None, u: Tensor, *start: Tensor) -> Tensor:
    """Fill u (g, t, F) with x Ωᵀ, plus the outer sum a + b of `start`, which the product adds without another pass."""
    if start:
        torch.add(*start, out=u)
    if omega is None:
        return u.add_(x) if start else u.copy_(x)
    rows, flat = x.flatten(0, 1), u.view(-1, u.shape[-1])
    return (flat.addmm_(rows, omega.t()) if start else torch.mm(rows, omega.t(), out=flat)).view_as(u)


def _unproject(du: Tensor, omega: Tensor | None, out: Tensor) -> None:
    if omega is None:
        out.copy_(du)
    else:
        torch.mm(du.flatten(0, 1), omega, out=out.view(-1, omega.shape[1]))


def _log_weight(k: Tensor, weight: Tensor | None, norm: float) -> Tensor | None:
    """w_j = norm·‖k_j‖² + weight_j, (G, N, 1)."""
    if not norm:
        return weight
    squares = torch.linalg.vector_norm(k, dim=-1, keepdim=True).square_().mul_(norm)
    return squares if weight is None else squares.add_(weight)


def _lowest(x: Tensor) -> float:
    return torch.finfo(x.dtype).min


def _column_max(u: Tensor) -> Tensor:
    """(g, t, F) → (g, 1, F). Narrow columns are taken several tokens at a time: their reduction is not vectorised."""
    g, t, width = u.shape
    fold = math.gcd(t, 1 << (max(1, 256 // width).bit_length() - 1))
    return u.view(g, t // fold, fold * width).amax(1).view(g, fold, width).amax(1, keepdim=True)


def _inverse(d: Tensor, least: Tensor | float) -> Tensor:
    """1/d with |d| moved up to `least`; 0 where nothing is left to divide by (every key masked)."""
    size = d.abs().clamp_min(least)
    empty = size == 0
    return (torch.where(d < 0, -1.0, 1.0) / size.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


def _features(φ: Features, u: Tensor) -> Tensor:
    assert φ.f is not None
    h = φ.f(u)
    return h if not φ.floor else h.add_(φ.floor) if not h.requires_grad else h + φ.floor


def _with_column(x: Tensor, column: Tensor) -> Tensor:
    return torch.cat([x, column], -1)


def _again(role: str, x: Tensor, φ: Features, at: tuple[slice, slice], block: _Blocks, kept: dict | None) -> Tensor:
    """Ωx of a block, or what f left of it (if its gradient comes from its value), kept or made again."""
    if kept is not None:
        return kept[role, at[0].start, at[1].start]
    return _project(x[at], φ.omega, block.features(role, *at))


def _pullback(u: Tensor, φ: Features, kept: bool) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """φ(u) and the map from its gradient to u's."""
    if φ.pull is not None:
        h, pull = u if kept else _features(φ, u), φ.pull
        return h, lambda dh: pull(dh, h)
    with torch.enable_grad():
        u = u.detach().requires_grad_()
        h = _features(φ, u)
    return h.detach(), lambda dh: torch.autograd.grad(h, u, dh)[0]


def _full_precision(backward):
    """A backward pass called inside an autocast region still computes in the precision of its forward pass."""

    @functools.wraps(backward)
    def run(ctx, dout):
        with torch.autocast(dout.device.type, enabled=False):
            return backward(ctx, dout)

    return run


def _gradient_and_r(dout: Tensor, factor: Tensor | None, out: Tensor) -> Tensor:
    """(∂out·factor, −r) side by side, r_i = ∂out_i·out_i being what the denominator takes back."""
    both = dout.new_empty(*dout.shape[:-1], dout.shape[-1] + 1)
    gradient = both[..., :-1].copy_(dout) if factor is None else torch.mul(dout, factor, out=both[..., :-1])
    torch.neg(torch.linalg.vecdot(gradient, out), out=both[..., -1])
    return both


class _Exponential(torch.autograd.Function):
    """out = softmax_f(Ωq + λ + bias) · softmax_j(Ωk + w)ᵀ v."""

    @staticmethod
    def forward(ctx, q, k, v, weight, bias, φ: Features):  # pyright: ignore[reportIncompatibleMethodOverride]
        (g, n, _), width = q.shape, _width(q, φ)
        block = _Blocks(q, width, keep=any(ctx.needs_input_grad) and _keeps(g, n, width))
        w = _log_weight(k, weight, φ.norm)
        out = torch.empty_like(v)
        state = v.new_zeros(g, width, v.shape[-1])  # S = K'ᵀv
        shift = v.new_empty(g, 1, width)  # λ
        for heads, chunks in block:
            s, mass, top = state[heads], 0.0, None
            for tokens in chunks:
                u = _project(k[heads, tokens], φ.omega, block.features("k", heads, tokens))
                if w is not None:
                    u += w[heads, tokens]
                high = _column_max(u).clamp_min_(_lowest(u))  # finite where every key is masked
                if top is not None:  # bring what was summed to the new maximum
                    high = torch.maximum(high, top)
                    fade = (top - high).exp_()
                    mass, s = mass * fade, s.mul_(fade.transpose(1, 2))
                mass = u.sub_(high).exp_().sum(1, keepdim=True) + mass
                s.baddbmm_(u.transpose(1, 2), v[heads, tokens])
                block.keep("top", heads, tokens, high)
                top = high
            mass = mass.clamp_min_(torch.finfo(v.dtype).tiny)  # type: ignore[union-attr]
            s /= mass.transpose(1, 2)
            λ = torch.add(top, mass.log_(), out=shift[heads])  # type: ignore[arg-type]
            if bias is not None:
                λ = λ + bias.expand(g, 1, width)[heads]
            for tokens in chunks:
                u = _project(q[heads, tokens], φ.omega, block.features("q", heads, tokens)).add_(λ)
                torch.bmm(torch.softmax(u, -1, out=u), s, out=out[heads, tokens])
        ctx.save_for_backward(q, k, v, w, bias, out, state, shift)
        ctx.φ, ctx.kept = φ, block.kept
        return out

    @staticmethod
    @once_differentiable
    @_full_precision
    def backward(ctx, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, w, bias, out, state, shift = ctx.saved_tensors
        g, width, φ, kept = len(q), state.shape[1], ctx.φ, ctx.kept
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dw = None if w is None else torch.empty_like(w)
        dbias = None if bias is None else v.new_zeros(g, 1, width)
        block = _Blocks(q, width, kept=kept is not None)
        for heads, chunks in block:
            s, λ = _with_column(state[heads], torch.ones_like(state[heads, :, :1])), shift[heads]
            full = λ if bias is None else λ + bias.expand(g, 1, width)[heads]
            ds, dz = torch.zeros_like(state[heads]), torch.zeros_like(λ)
            for tokens in chunks:
                at = heads, tokens
                dy = _gradient_and_r(dout[at], None, out[at])
                if kept is not None:
                    u = kept["q", heads.start, tokens.start]
                else:
                    u = _project(q[at], φ.omega, block.features("q", *at)).add_(full)
                    torch.softmax(u, -1, out=u)
                ds.baddbmm_(u.transpose(1, 2), dy[..., :-1])
                dz.baddbmm_(dy[..., -1:].transpose(1, 2), u)
                du = torch.bmm(dy, s.transpose(1, 2), out=block.gradient(*at)).mul_(u)
                _unproject(du, φ.omega, dq[at])
                if dbias is not None:
                    dbias[heads] += du.sum(1, keepdim=True)
            for tokens in chunks:
                at, dsu, dzu = (heads, tokens), ds, dz
                if kept is not None:
                    u = kept["k", heads.start, tokens.start]
                    factor = (kept["top", heads.start, tokens.start] - λ).exp_()  # on the small matrices, not on u
                    dsu, dzu = ds * factor.transpose(1, 2), dz * factor
                else:
                    start = λ.new_zeros(()).expand(*k[at].shape[:2], 1) if w is None else w[at]
                    u = _project(k[at], φ.omega, block.features("k", *at), -λ, start).exp_()
                torch.bmm(u, dsu, out=dv[at])
                du = torch.bmm(v[at], dsu.transpose(1, 2), out=block.gradient(*at)).add_(dzu).mul_(u)
                _unproject(du, φ.omega, dk[at])
                if dw is not None:
                    torch.sum(du, -1, keepdim=True, out=dw[at])
        if φ.norm and dw is not None:
            dk.addcmul_(k, dw, value=2 * φ.norm)
        if dbias is not None:
            dbias = dbias.sum_to_size(bias.shape)  # type: ignore[union-attr]
        return dq, dk, dv, dw if ctx.needs_input_grad[3] else None, dbias, None


class _Pointwise(torch.autograd.Function):
    """out = φ(q) [φ(k)ᵀv] / φ(q) [φ(k)ᵀ1] with φ = f(Ω·) + floor."""

    @staticmethod
    def forward(ctx, q, k, v, weight, φ: Features):  # pyright: ignore[reportIncompatibleMethodOverride]
        (g, n, _), width = q.shape, _width(q, φ)
        block = _Blocks(q, width, keep=any(ctx.needs_input_grad) and _keeps(g, n, width))
        w = _log_weight(k, weight, φ.norm)
        if w is not None:  # from here on a factor of each key, at most one
            w = (w - w.amax(1, keepdim=True).clamp_min_(_lowest(w))).exp_()
        vw = v if w is None else v * w
        out, over = torch.empty_like(v), v.new_ones(g, n, 1)
        states = []
        for heads, chunks in block:
            s = z = None
            for tokens in chunks:
                h = _features(φ, _project(k[heads, tokens], φ.omega, block.features("k", heads, tokens)))
                mass = h.sum(1, keepdim=True) if w is None else torch.bmm(w[heads, tokens].transpose(1, 2), h)
                part = torch.bmm(h.transpose(1, 2), vw[heads, tokens])
                s, z = (part, mass) if s is None or z is None else (s.add_(part), z.add_(mass))
            assert s is not None  # there is at least one chunk
            assert z is not None
            for tokens in chunks:
                h = _features(φ, _project(q[heads, tokens], φ.omega, block.features("q", heads, tokens)))
                y = torch.bmm(h, s, out=out[heads, tokens])
                if φ.divide:
                    d = torch.bmm(h, z.transpose(1, 2))
                    if φ.least or w is not None:
                        d = _inverse(d, φ.least * z.shape[-1] * (n if w is None else w[heads].sum(1, keepdim=True)))
                    else:
                        d.reciprocal_().masked_fill_(d.isinf(), 0.0)  # φ(q) = 0: nothing to divide, or to divide by
                    y *= d
                    over[heads, tokens] = d
            states += [s, z]
        ctx.save_for_backward(q, k, v, w, out, over, *states)
        ctx.φ, ctx.kept = φ, block.kept
        return out

    @staticmethod
    @once_differentiable
    @_full_precision
    def backward(ctx, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, w, out, over, *states = ctx.saved_tensors
        φ, kept = ctx.φ, ctx.kept
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        vw = v if w is None else v * w
        dw = None if w is None else torch.empty_like(w)
        count = v.new_full((len(q), 1, 1), q.shape[1]) if w is None else w.sum(1, keepdim=True)
        dcount = torch.zeros_like(count)
        block = _Blocks(q, _width(q, φ), kept=kept is not None)
        for i, (heads, chunks) in enumerate(block):
            s, z = states[2 * i], states[2 * i + 1]
            s, ds, dz = _with_column(s, z.transpose(1, 2)), None, None
            for tokens in chunks:
                at = heads, tokens
                dy = _gradient_and_r(dout[at], over[at] if φ.divide else None, out[at])
                if not φ.divide:
                    dy[..., -1] = 0.0
                elif φ.least:  # a denominator that was moved to ±least·count passes its gradient to the count
                    least, r = φ.least * z.shape[-1], dy[..., -1:]
                    moved = over[at].abs() * (least * count[heads]) >= 1 - 1e-6
                    dcount[heads] += (least * r * over[at].sign()).masked_fill_(~moved, 0.0).sum(1, keepdim=True)
                    r.masked_fill_(moved, 0.0)
                u = _again("q", q, φ, at, block, kept)
                h, pull = _pullback(u, φ, kept is not None)
                parts = torch.bmm(h.transpose(1, 2), dy[..., :-1]), torch.bmm(dy[..., -1:].transpose(1, 2), h)
                ds, dz = parts if ds is None or dz is None else (ds.add_(parts[0]), dz.add_(parts[1]))
                dh = torch.bmm(dy, s.transpose(1, 2), out=block.gradient(heads, tokens, h.shape[-1]))
                _unproject(pull(dh), φ.omega, dq[at])
            assert ds is not None
            assert dz is not None
            for tokens in chunks:
                at = heads, tokens
                u = _again("k", k, φ, at, block, kept)
                h, pull = _pullback(u, φ, kept is not None)
                torch.bmm(h, ds, out=dv[at])
                dh = torch.bmm(vw[at], ds.transpose(1, 2), out=block.gradient(heads, tokens, h.shape[-1]))
                if w is None or dw is None:
                    dh += dz
                else:
                    dh.addcmul_(w[at], dz)
                    pushed = torch.bmm(h, dz.transpose(1, 2))
                    dw[at] = w[at] * (pushed + torch.linalg.vecdot(v[at], dv[at]).unsqueeze(-1))
                _unproject(pull(dh), φ.omega, dk[at])
        if w is not None and dw is not None:
            dv *= w
            dw += w * dcount
        if φ.norm and dw is not None:
            dk.addcmul_(k, dw, value=2 * φ.norm)
        return dq, dk, dv, dw if ctx.needs_input_grad[3] else None, None
