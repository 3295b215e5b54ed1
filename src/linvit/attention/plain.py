"""Linear attention in ordinary operations, O(N): what is exported, compiled, decoded, and beyond the fast path's range.

There is no autograd.Function here, nothing in place, and no branch that depends on numbers. Sums over keys are kept in
a `State`, exponential features relative to a maximum per feature, c_f = max_j ℓk_jf, which moves to the queries:

    K' = exp(ℓk − c)      a = ℓq + c      Q' = exp(a − max_f a)      out = Q' (K'ᵀv) / Q' (K'ᵀ1)

All numbers are at most one and the denominator is at least one, so there is no ε. When later keys raise c, rescaling
the sums is exact. Causally, each chunk reads the state of the chunks before it. Inside a chunk one maximum per feature
will not do: a later key would push earlier ones out of range. So the chunk is halved again and again: queries of a
second half see all keys of the first, which needs nothing but the scheme above, until only the token itself is left.
All references cancel, so they carry no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linvit.attention.pieces import inverse, log_weight, lowest, projected
from linvit.kernels.base import Features, Prepared

# Forward and backward of m = 64 and 256, N = 1024 on an EPYC take a tenth less in chunks of 64 and a third more in 256;
# 64 would store twice as many states.
CHUNK = 128
LEAF = 4  # tokens whose pairs cost F exponentials each: 249 ms, 312 ms with 1 (small products), 321 ms with 8


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
    prepared: Prepared, v: Tensor, state: State | None = None, chunk: int = CHUNK, again: bool = False
) -> tuple[Tensor, State]:
    """Each token sees itself, those before it and `state` → the outputs and the state after them.

    `again` makes each chunk's features once more for the backward pass instead of keeping them.
    """
    outs = []
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
    sums = (_own_exponential if φ.exponential else _own_pointwise)(u_q, u_k, v, w)
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


def _own_pointwise(f_q: Tensor, f_k: Tensor, v: Tensor, w: Tensor) -> _Sums:
    """What a chunk's keys are to its queries from their own on; e^w of each pair relative to the query's largest."""
    weights, top = _up_to_own(w.transpose(1, 2).expand(-1, w.shape[1], -1))
    scores = weights * (f_q @ f_k.transpose(1, 2))
    return _Sums(scores @ v, scores.sum(-1, keepdim=True), weights.sum(-1, keepdim=True), top)


def _own_exponential(u_q: Tensor, u_k: Tensor, v: Tensor, w: Tensor) -> _Sums:
    """The same for exponential features: pairs inside leaves one by one, then halves of twice the size."""
    tokens, half = v.shape[1], LEAF
    fill = (LEAF << max(0, -(-tokens // LEAF) - 1).bit_length()) - tokens
    u_q, u_k, v = (F.pad(x, (0, 0, 0, fill)) for x in (u_q, u_k, v))
    w = F.pad(w, (0, 0, 0, fill), value=-torch.inf)  # what fills the last leaf has no weight
    leaf_q, leaf_k, leaf_w = (x.unflatten(1, (-1, LEAF)) for x in (u_q, u_k, w))
    scores, top = _up_to_own((leaf_q.unsqueeze(3) + leaf_k.unsqueeze(2)).logsumexp(-1) + leaf_w.transpose(2, 3))
    while half < tokens:  # scores (G, C/half, half, half) relative to e^{top} (G, C/half, half, 1)
        (_, queries), (keys, _) = (x.unflatten(1, (-1, 2, half)).unbind(2) for x in (u_q, u_k + w))
        (first, second), (first_top, second_top) = (x.unflatten(1, (-1, 2)).unbind(2) for x in (scores, top))
        found, found_top = _all_pairs(queries, keys)
        both_top = torch.maximum(found_top, second_top)
        both = torch.cat([found * (found_top - both_top).exp(), second * (second_top - both_top).exp()], -1)
        scores = torch.cat([F.pad(first, (0, half)), both], -2)
        top = torch.cat([first_top, both_top], -2)
        half *= 2
    scores, top = scores[:, 0, :tokens], top[:, 0, :tokens]
    total = scores.sum(-1, keepdim=True)
    return _Sums(scores @ v, total, total, top)


def _up_to_own(logs: Tensor) -> tuple[Tensor, Tensor]:
    """e^{logs} of pairs (…, C, C), zero for later keys, relative to the largest of each query's."""
    late = torch.ones(logs.shape[-2:], dtype=torch.bool, device=logs.device).triu(1)
    logs = logs.masked_fill(late, -torch.inf)
    top = logs.detach().amax(-1, keepdim=True).clamp_min(lowest(logs))
    return (logs - top).exp(), top


def _all_pairs(u_q: Tensor, log_k: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of every query (…, C, F) and key (…, C, F), relative to a maximum per query, by the scheme above."""
    c = log_k.detach().amax(-2, keepdim=True).clamp_min(lowest(log_k))
    a = u_q + c
    top = a.detach().amax(-1, keepdim=True)
    return (a - top).exp() @ (log_k - c).exp().transpose(-1, -2), top


def _together(one: _Sums, other: _Sums) -> _Sums:
    top = torch.maximum(one.log, other.log)
    a, b = (one.log - top).exp(), (other.log - top).exp()
    numerator, denominator, count = (x * a + y * b for x, y in zip(one[:3], other[:3], strict=True))
    return _Sums(numerator, denominator, count, top)


def _quotient(sums: _Sums, φ: Features, width: int) -> Tensor:
    if not φ.divide:  # an RMS norm follows, to which a factor of the row is nothing
        return sums.numerator
    return sums.numerator * inverse(sums.denominator, φ.least * width * sums.count)
