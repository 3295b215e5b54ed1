"""Linear attention in ordinary operations, O(N): what is exported, compiled, decoded, and beyond the fast path's range.

There is no autograd.Function here, nothing in place, and no branch that depends on numbers. Sums over keys are kept in
a `State`, exponential features relative to a maximum per feature, c_f = max_j ℓk_jf, which moves to the queries:

    K' = exp(ℓk − c)      a = ℓq + c      Q' = exp(a − max_f a)      out = Q' (K'ᵀv) / Q' (K'ᵀ1)

All numbers are at most one and the denominator is at least one, so there is no ε. When later keys raise c, rescaling
the sums is exact. Causally, each chunk reads the state of the chunks before it. Inside a chunk one maximum per feature
will not do: a later key would push earlier ones out of range. There each pair of a query and a key has its own
log-sum-exp over the features, which costs C·F exponentials per token, and each query the maximum over its pairs. All
references cancel, so they carry no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linvit.attention.pieces import inverse, log_weight, lowest, projected
from linvit.kernels.base import Features, Prepared

# Tokens of a chunk, where pairs cost a product (pointwise features) and where they cost F exponentials.
CHUNK = 128
PAIRS = 16


class State(NamedTuple):
    """Everything a causal attention remembers of earlier tokens."""

    s: Tensor  # (G, F, e) Σ φ(k) vᵀ
    z: Tensor  # (G, 1, F) Σ φ(k)
    top: Tensor  # (G, 1, F) or (G, 1, 1): log of what s and z were divided by
    count: Tensor  # (G, 1, 1) the keys' own weights, for the least denominator of signed features


class _Sums(NamedTuple):
    """Over some of the keys, for each query, all divided by e^{log}: Σ φ·φ v (G, C, e), Σ φ·φ and Σ e^w (G, C, 1)."""

    numerator: Tensor
    denominator: Tensor
    count: Tensor
    log: Tensor


def plain_attention(prepared: Prepared, v: Tensor, causal: bool = False) -> Tensor:
    """q, k (G, N, d) as prepared by a kernel and v (G, N, e) → (G, N, e)."""
    if causal:
        return plain_causal(prepared, v)[0]
    u_q, u_k, w = terms(prepared)
    state = advance(u_k, v, w, None, prepared.features)
    return _quotient(_read(u_q, state, prepared.features), prepared.features, state.z.shape[-1])


def plain_causal(
    prepared: Prepared, v: Tensor, state: State | None = None, again: bool = False
) -> tuple[Tensor, State]:
    """Each token sees itself, those before it and `state` → the outputs and the state after them.

    `again` makes each chunk's features once more for the backward pass instead of keeping them.
    """
    chunk, outs = PAIRS if prepared.features.exponential else CHUNK, []
    for t in range(0, v.shape[1], chunk):
        inputs = part(prepared, t, t + chunk), v[:, t : t + chunk], state
        out, state = checkpoint(_chunk, *inputs, use_reentrant=False) if again else _chunk(*inputs)  # type: ignore[misc]
        outs.append(out)
    assert state is not None  # there is at least one token
    return torch.cat(outs, 1), state


def part(prepared: Prepared, start: int, stop: int) -> Prepared:
    """Some of the tokens."""
    q, k, φ, weight, bias = prepared
    return Prepared(q[:, start:stop], k[:, start:stop], φ, None if weight is None else weight[:, start:stop], bias)


def _chunk(prepared: Prepared, v: Tensor, state: State | None) -> tuple[Tensor, State]:
    φ = prepared.features
    u_q, u_k, w = terms(prepared)
    sums = _own(u_q, u_k, v, w, φ)
    if state is not None:
        sums = _together(sums, _read(u_q, state, φ))
    after = advance(u_k, v, w, state, φ)
    return _quotient(sums, φ, after.z.shape[-1]), after


def terms(prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
    """Log-features without w for exponential, features without e^w for pointwise kernels, of q and k; and w."""
    q, k, φ, weight, bias = prepared
    u_q, u_k = (projected(x, φ.omega) for x in (q, k))
    if not φ.exponential:
        u_q, u_k = (φ.f(u.clone()) + φ.floor for u in (u_q, u_k))  # type: ignore[misc]
    elif bias is not None:
        u_q = u_q + bias
    w = log_weight(k, weight, φ.norm)
    return u_q, u_k, torch.zeros_like(k[..., :1]) if w is None else w


def advance(u_k: Tensor, v: Tensor, w: Tensor, state: State | None, φ: Features) -> State:
    """The state after these keys too."""
    log = u_k + w if φ.exponential else w
    top = log.detach().amax(1, keepdim=True).clamp_min(lowest(log))
    if state is not None:
        top = torch.maximum(top, state.top)
    weights = (log - top).exp()
    features = weights if φ.exponential else u_k * weights
    s, z = features.transpose(1, 2) @ v, features.sum(1, keepdim=True)
    count = weights.sum(1, keepdim=True)[..., :1]
    if state is not None:
        fade = (state.top - top).exp()
        s, z, count = s + state.s * fade.transpose(1, 2), z + state.z * fade, count + state.count * fade[..., :1]
    return State(s, z, top, count)


def _read(u_q: Tensor, state: State, φ: Features) -> _Sums:
    """What the keys of a state are to these queries."""
    features, log = u_q, state.top
    if φ.exponential:
        a = u_q + state.top
        log = a.detach().amax(-1, keepdim=True)
        features = (a - log).exp()
    return _Sums(features @ state.s, features @ state.z.transpose(1, 2), state.count, log)


def _own(u_q: Tensor, u_k: Tensor, v: Tensor, w: Tensor, φ: Features) -> _Sums:
    """What a chunk's keys are to its own queries, from their own on."""
    logs = w.transpose(1, 2).expand(-1, w.shape[1], -1)
    if φ.exponential:
        logs = logs + (u_q.unsqueeze(2) + u_k.unsqueeze(1)).logsumexp(-1)
    late = torch.ones(w.shape[1], w.shape[1], dtype=torch.bool, device=w.device).triu(1)
    logs = logs.masked_fill(late, -torch.inf)
    top = logs.detach().amax(-1, keepdim=True).clamp_min(lowest(logs))
    weights = (logs - top).exp()
    scores = weights if φ.exponential else weights * (u_q @ u_k.transpose(1, 2))
    return _Sums(scores @ v, scores.sum(-1, keepdim=True), weights.sum(-1, keepdim=True), top)


def _together(one: _Sums, other: _Sums) -> _Sums:
    top = torch.maximum(one.log, other.log)
    a, b = (one.log - top).exp(), (other.log - top).exp()
    return _Sums(*(x * a + y * b for x, y in zip(one[:3], other[:3], strict=True)), top)


def _quotient(sums: _Sums, φ: Features, width: int) -> Tensor:
    if not φ.divide:  # an RMS norm follows, to which a factor of the row is nothing
        return sums.numerator
    return sums.numerator * inverse(sums.denominator, φ.least * width * sums.count)
