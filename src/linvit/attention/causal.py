"""Causal linear attention, chunk by chunk: earlier tokens through a state, the chunk's own through a small matrix.

The state holds φ(k)ᵀv and φ(k)ᵀ1 of all earlier keys, exponential features relative to a running maximum per feature.
One chunk of one token is the O(1) decoding step.

Inside a chunk a maximum per feature will not do: a later key would push earlier ones out of range. There
ℓk_jf = u_jf + w_j is split. w_j is handled per pair, by e^{w_j − m_t} with m_t the running maximum of w; of u_jf, which
varies far less, the middle of its range per feature is taken out. Queries and keys then share the range of floats, and
rows are exact where one maximum would give 0/0. What underflows is bounded, so a row that it could matter to is known,
and computed by log-sum-exp over pairs instead; that takes norms far beyond a trained model's. All references cancel, so
they carry no gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linvit.attention.linear import BLOCK, KEEP_WIDTH, _inverse, _lowest, _width
from linvit.kernels.base import Features, Prepared, square_norm

CHUNK = 128
TOLERATED = 1e-5  # relative error of a row, by underflow


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
    state, outs = None, []
    again = torch.is_grad_enabled() and _width(q, φ) > KEEP_WIDTH
    for t in range(0, q.shape[1], chunk):
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
