"""Causal linear attention, chunk by chunk: earlier tokens through a state, the chunk's own through a small matrix.

The state holds φ(k)ᵀv and φ(k)ᵀ1 of all earlier keys, exponential features relative to a running maximum per feature.
One chunk of one token is the O(1) decoding step.

Where all log-features of the keys are moderate, as for any trained model, nothing need be kept in range and `_Causal`
does it all with a backward pass of its own. The rest of this file is for the others, and for decoding.

Inside a chunk a maximum per feature will not do: a later key would push earlier ones out of range. There
ℓk_jf = u_jf + w_j is split. w_j is handled per pair, by e^{w_j − m_t} with m_t the running maximum of w; of u_jf, which
varies far less, the middle of its range per feature is taken out. Queries and keys then share the range of floats, and
rows are exact where one maximum would give 0/0. What underflows is bounded, so a row that it could matter to is known,
and computed by log-sum-exp over pairs instead; that takes norms far beyond a trained model's. All references cancel, so
they carry no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from linvit.attention.linear import BLOCK, _full_precision, _gradient_and_r, _inverse, _lowest, _pullback
from linvit.kernels.base import Features, Prepared, square_norm

CHUNK = 128
Pull = Callable[[Tensor], Tensor]  # from the gradient of features to that of what they are made of
TOLERATED = 1e-5  # relative error of a row, by underflow


def in_range(plan: Prepared, chunk: int) -> int:
    """How many tokens, in whole chunks, come before the first key whose features could leave the range of floats.

    Of later tokens nothing may depend on, not even which path rounds them, so the rest is left to the careful path.
    """
    _, k, φ, weight, _ = plan
    n = k.shape[1]
    if not k.numel() or (not φ.exponential and not φ.norm and weight is None):
        return n
    limit = 0.35 * math.log(torch.finfo(k.dtype).max)
    with torch.no_grad():
        w = torch.zeros_like(k[..., :1]) if weight is None else weight
        if φ.norm:
            w = w + φ.norm * square_norm(k)
        size = torch.where(w == -torch.inf, 0.0, w).abs()
        if φ.exponential and φ.omega is None:
            size = size + k.abs().amax(-1, keepdim=True)
        elif φ.exponential and φ.omega is not None:
            bound = size + (square_norm(k) * square_norm(φ.omega).amax()).sqrt()
            if not bool(bound.amax() <= limit):  # |ω·k| ≤ ‖ω‖‖k‖ does not tell; the thing itself costs a product
                parts = k.split(max(1, BLOCK.get(k.device.type, 1 << 26) // (n * len(φ.omega))))
                bound = size + torch.cat([torch.matmul(x, φ.omega.t()).abs().amax(-1, keepdim=True) for x in parts])
            size = bound
        beyond = (~(size <= limit)).flatten(2).any(-1).any(0).nonzero()
    return n if not len(beyond) else int(beyond[0]) // chunk * chunk


class _Causal(torch.autograd.Function):
    """Chunks of features f_q, f_k ≥ 0: out = (tril(f_q f_kᵀ) v + f_q S) / (the same of 1), S the sum of earlier f_kᵀv.

    Denominators ride along as one more column of v, S and ∂out. Features are made again for the backward pass.
    """

    @staticmethod
    def forward(ctx, q, k, v, w, bias, φ: Features, chunk: int):  # pyright: ignore[reportIncompatibleMethodOverride]
        g, n, e = v.shape
        out, over, states = torch.empty_like(v), v.new_empty(g, n, 1), []
        for heads in _groups(q, φ, chunk):
            s = v.new_zeros(len(v[heads]), _features_of(φ, q[heads, :1], None, None)[0].shape[-1], e + 1)
            for t in range(0, n, chunk):
                at = heads, slice(t, t + chunk)
                f_q, f_k, _, _ = _chunk_features(q, k, w, bias, φ, at)
                v1 = F.pad(v[at], (0, 1), value=1.0)
                both = torch.baddbmm(torch.bmm(f_q, s), torch.bmm(f_q, f_k.transpose(1, 2)).tril_(), v1)
                over[at] = _inverse(both[..., -1:], 0.0)
                torch.mul(both[..., :-1], over[at], out=out[at])
                states.append(s)
                s = torch.baddbmm(s, f_k.transpose(1, 2), v1)
        ctx.save_for_backward(q, k, v, w, bias, out, over, *states)
        ctx.φ, ctx.chunk = φ, chunk
        return out

    @staticmethod
    @once_differentiable
    @_full_precision
    def backward(ctx, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
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
                f_q, f_k, pull_q, pull_k = _chunk_features(q, k, w, bias, φ, at)
                v1 = F.pad(v[at], (0, 1), value=1.0)
                dy = _gradient_and_r(dout[at], over[at], out[at])
                scores = torch.bmm(f_q, f_k.transpose(1, 2)).tril_()
                dscores = torch.bmm(dy, v1.transpose(1, 2)).tril_()
                df_q = torch.bmm(dy, s.transpose(1, 2)).baddbmm_(dscores, f_k)
                df_k = torch.bmm(v1, ds.transpose(1, 2)).baddbmm_(dscores.transpose(1, 2), f_q)
                dv[at] = torch.bmm(scores.transpose(1, 2), dy[..., :-1]).baddbmm_(f_k, ds[..., :-1])
                ds = ds.baddbmm(f_q.transpose(1, 2), dy)
                if dw is not None:
                    torch.linalg.vecdot(df_k, f_k, out=dw[at].squeeze(-1))
                du_q = pull_q(df_q)
                if dbias is not None:
                    dbias[heads] += du_q.sum(1, keepdim=True)
                _unproject(du_q, φ.omega, dq, at)
                _unproject(pull_k(df_k), φ.omega, dk, at)
        return dq, dk, dv, dw, dbias, None, None


def _groups(q: Tensor, φ: Features, chunk: int) -> list[slice]:
    """Heads at a time, so that a chunk of them fits the cache."""
    width = max(chunk, q.shape[-1] if φ.omega is None else φ.omega.shape[0])
    heads = max(1, BLOCK.get(q.device.type, 1 << 26) // (width * min(chunk, q.shape[1])))
    return [slice(h, min(h + heads, len(q))) for h in range(0, len(q), heads)]


def _features_of(φ: Features, x: Tensor, log: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Pull]:
    """φ(x)·e^{log} (g, C, F) and the map from its gradient to that of Ωx; queries' rows relative to their largest."""
    u = x.clone() if φ.omega is None else torch.matmul(x, φ.omega.t())
    if φ.exponential:
        if bias is not None:
            u += bias
        f = (u.sub_(u.amax(-1, keepdim=True)) if log is None else u.add_(log)).exp_()
        return f, lambda df: df.mul_(f)
    if log is None:
        return _pullback(u, φ, kept=False)
    with torch.enable_grad():
        u = u.detach().requires_grad_()
        f = φ.f(u) + φ.floor  # type: ignore[misc]
    factor = log.exp()
    return f.detach() * factor, lambda df: torch.autograd.grad(f, u, df * factor)[0]


def _chunk_features(
    q: Tensor, k: Tensor, w: Tensor | None, bias: Tensor | None, φ: Features, at: tuple[slice, slice]
) -> tuple[Tensor, Tensor, Pull, Pull]:
    f_q, pull_q = _features_of(φ, q[at], None, None if bias is None else bias[at[0]])
    log = k.new_zeros(1, 1, 1) if w is None and φ.exponential else None if w is None else w[at]
    f_k, pull_k = _features_of(φ, k[at], log, None)
    return f_q, f_k, pull_q, pull_k


def _unproject(du: Tensor, omega: Tensor | None, into: Tensor, at: tuple[slice, slice]) -> None:
    into[at] = du if omega is None else torch.matmul(du, omega)


class State(NamedTuple):
    """Everything a causal attention remembers of earlier tokens."""

    s: Tensor  # (G, F, e)
    z: Tensor  # (G, 1, F)
    top: Tensor  # (G, 1, F) or (G, 1, 1): log of what s and z were divided by
    count: Tensor  # (G, 1, 1) the keys' own weights, for the least denominator of signed features


class _Part(NamedTuple):
    """Sums over some of the keys, all divided by e^{log}: Σ φ·φ v (G, C, e), Σ φ·φ and Σ e^w (G, C, 1)."""

    numerator: Tensor
    denominator: Tensor
    count: Tensor
    log: Tensor


def causal_attention(plan: Prepared, v: Tensor, chunk: int = CHUNK) -> Tensor:
    """q, k (G, N, d) and v (G, N, e) → (G, N, e), each token seeing itself and those before it."""
    q, k, φ, weight, bias = plan
    n, state, outs = q.shape[1], None, []
    easy = in_range(plan, chunk) if φ.divide and not φ.least else 0
    if easy:
        w = weight
        if φ.norm:
            w = φ.norm * square_norm(k) + (0.0 if weight is None else weight)
        first = (x[:, :easy].contiguous() for x in (q, k, v))
        rest = None if w is None else w[:, :easy], None if bias is None else bias.expand(len(q), -1, -1)
        outs.append(_Causal.apply(*first, *rest, φ, chunk))
        if easy < n:
            u_k = k[:, :easy] if φ.omega is None else k[:, :easy] @ φ.omega.t()
            w = torch.zeros_like(k[..., :1]) if w is None else w
            u_k = u_k if φ.exponential else φ.f(u_k) + φ.floor  # type: ignore[misc]
            state = _advance(u_k, v[:, :easy], w[:, :easy], None, φ)
    again = torch.is_grad_enabled() and n > chunk  # their graph would outgrow the cache
    for t in range(easy, n, chunk):
        at = slice(t, t + chunk)
        inputs = q[:, at], k[:, at], v[:, at], None if weight is None else weight[:, at], bias, φ, state
        out, state = checkpoint(causal_chunk, *inputs, use_reentrant=False) if again else causal_chunk(*inputs)  # type: ignore[misc]
        outs.append(out)
    return torch.cat(outs, 1)


def causal_chunk(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, bias: Tensor | None, φ: Features, state: State | None
) -> tuple[Tensor, State]:
    """One chunk of C tokens after `state` → its output (G, C, e) and the state after it."""
    u_q, u_k = (x if φ.omega is None else x @ φ.omega.t() for x in (q, k))
    w = k.new_zeros(*k.shape[:2], 1) if weight is None else weight
    if φ.norm:
        w = w + φ.norm * square_norm(k)
    if φ.exponential:
        if bias is not None:
            u_q = u_q + bias
        parts = [_exponential_own(u_q, u_k, v, w)] + ([] if state is None else [_exponential_past(u_q, state)])
    else:
        u_q, u_k = (φ.f(u) + φ.floor for u in (u_q, u_k))  # type: ignore[misc]
        parts = [_pointwise_own(u_q, u_k, v, w)] + ([] if state is None else [_pointwise_past(u_q, state)])
    top = torch.stack([part.log for part in parts]).amax(0).detach()
    fades = [(part.log - top).exp() for part in parts]
    numerator, denominator, count = (
        torch.stack([part[i] * fade for part, fade in zip(parts, fades, strict=True)]).sum(0) for i in range(3)
    )
    after = _advance(u_k, v, w, state, φ)
    if not φ.divide:  # an RMS norm follows, to which a factor of the row is nothing
        return numerator, after
    return numerator * _inverse(denominator, φ.least * after.z.shape[-1] * count), after


def _pair_weights(w: Tensor) -> tuple[Tensor, Tensor]:
    """e^{w_j − m_t} for j ≤ t and 0 beyond, (G, C, C), and m_t = max_{j≤t} w_j, (G, C, 1)."""
    m = w.detach().cummax(1).values.clamp_min(_lowest(w))
    late = torch.ones(w.shape[1], w.shape[1], dtype=torch.bool, device=w.device).triu(1)
    return (w.transpose(1, 2) - m).masked_fill(late, -torch.inf).exp(), m


def _exponential_own(u_q: Tensor, u_k: Tensor, v: Tensor, w: Tensor) -> _Part:
    low, top = u_k.detach().amin(1, keepdim=True), u_k.detach().amax(1, keepdim=True)
    middle, reach = 0.5 * (top + low), 0.5 * (top - low).amax(-1, keepdim=True)
    a = u_q + middle
    high = a.detach().amax(-1, keepdim=True)
    pairs, m = _pair_weights(w)
    range_ = torch.finfo(v.dtype)
    furthest = 0.8 * math.log(range_.max)  # leaves room for sums
    products = torch.bmm((a - high).exp(), (u_k - middle).clamp_max(furthest).exp().transpose(1, 2))
    scores = products * pairs
    total = scores.sum(-1, keepdim=True)
    # each of C·F terms may have lost tiny·e^reach: too much for a total of less than that, divided by what is tolerated
    lost = math.log(range_.tiny * pairs.shape[-1] * u_k.shape[-1] / TOLERATED) + reach
    empty = pairs.detach().amax(-1, keepdim=True) == 0
    doubtful = ((total.detach().log() < lost) | (reach > furthest)) & ~empty
    safe = total.masked_fill(empty | doubtful, 1.0)
    # normalised here, so that what the parts are weighed by is their true size, not the reference's
    part = _Part(torch.bmm(scores, v) / safe, total / safe, total, high + m + safe.log())
    rows = doubtful.squeeze(-1).nonzero()
    if not len(rows):
        return part
    at_once = max(1, BLOCK.get(v.device.type, 1 << 26) // (u_k.shape[1] * u_k.shape[2]))
    exact = zip(*(_exponential_rows(u_q, u_k, v, w, *some.unbind(1)) for some in rows.split(at_once)), strict=True)
    return _Part(*(old.index_put(rows.unbind(1), torch.cat(new)) for old, new in zip(part, exact, strict=True)))


def _exponential_rows(u_q: Tensor, u_k: Tensor, v: Tensor, w: Tensor, g: Tensor, t: Tensor) -> _Part:
    """The rows t of the groups g, by log-sum-exp over features for each key up to t."""
    late = torch.arange(u_k.shape[1], device=t.device) > t[:, None]
    logs = ((u_q[g, t][:, None] + u_k[g]).logsumexp(-1) + w[g].squeeze(-1)).masked_fill(late, -torch.inf)
    log = logs.logsumexp(-1, keepdim=True)
    one = torch.ones_like(log)
    return _Part(torch.bmm((logs - log).exp().unsqueeze(1), v[g]).squeeze(1), one, one, log)


def _exponential_past(u_q: Tensor, state: State) -> _Part:
    a = u_q + state.top
    high = a.detach().amax(-1, keepdim=True)
    features = (a - high).exp()
    total = torch.bmm(features, state.z.transpose(1, 2))
    safe = total.clamp_min(torch.finfo(total.dtype).tiny)
    return _Part(torch.bmm(features, state.s) / safe, total / safe, total, high + safe.log())


def _pointwise_own(f_q: Tensor, f_k: Tensor, v: Tensor, w: Tensor) -> _Part:
    pairs, m = _pair_weights(w)
    scores = torch.bmm(f_q, f_k.transpose(1, 2)) * pairs
    return _Part(torch.bmm(scores, v), scores.sum(-1, keepdim=True), pairs.sum(-1, keepdim=True), m)


def _pointwise_past(f_q: Tensor, state: State) -> _Part:
    log = state.top.expand(-1, f_q.shape[1], 1)
    return _Part(torch.bmm(f_q, state.s), torch.bmm(f_q, state.z.transpose(1, 2)), state.count, log)


def _advance(u_k: Tensor, v: Tensor, w: Tensor, state: State | None, φ: Features) -> State:
    """The state after this chunk's keys. For pointwise features u_k is φ(k) without its weight."""
    log = u_k + w if φ.exponential else w
    top = log.detach().amax(1, keepdim=True).clamp_min(_lowest(log))
    if state is not None:
        top = torch.maximum(top, state.top)
    weights = (log - top).exp()
    features = weights if φ.exponential else u_k * weights
    s, z = torch.bmm(features.transpose(1, 2), v), features.sum(1, keepdim=True)
    count = weights.sum(1, keepdim=True)[..., :1]
    if state is not None:
        fade = (state.top - top).exp()
        s, z, count = s + state.s * fade.transpose(1, 2), z + state.z * fade, count + state.count * fade[..., :1]
    return State(s, z, top, count)
