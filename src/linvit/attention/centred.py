"""Centred scores, which `inline` and `mala` have in common.

With n tokens, scores s_ij = φ(q_i)·φ(k_j)/√d, their means z_i over the keys and a factor c_i of each query,

    A_ij = 1/n + c_i (s_ij − z_i)/n      out_i = v̄ + c_i φ(q_i)·S      S = Σ_j (φ(k_j) − φ(k)‾) v_jᵀ / (n√d)

Rows sum to one for any c, without a division. Entries can be negative, so everything is float32 or better. Keys are
centred before the product: with uncentred sums, S would lose digits where the mean of the keys exceeds their spread.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from linvit.attention.base import Attention
from linvit.attention.plain import State, plain_causal
from linvit.kernels.base import Features, Prepared, masked_mean
from linvit.site import Cost, Site

EPS = 1e-6  # added to z in 1/z: z vanishes where all φ(k) underflow; rows sum to one for any value


class CentredState(NamedTuple):
    """Sums over earlier tokens."""

    scores: State  # Σ φ(k) (vᵀ, 1)
    values: Tensor  # (G, 1, e + 1) Σ (vᵀ, 1)


class Centred(Attention):
    """A subclass gives φ, and whether c = 1 + 1/z (`sharpened`) or one."""

    sharpened: ClassVar[bool] = False

    @abstractmethod
    def phi(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""

    @classmethod
    def own_cost(cls, site: Site) -> Cost:
        return Cost(macs=2 * site.tokens * site.head_dim**2 * site.heads, features=site.head_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        keep, shape = None, v.shape
        if mask is not None:
            keep = mask[:, None, :, None].expand(*q.shape[:3], 1).flatten(0, 1).to(q)
        q, k, v = (x.flatten(0, 1) for x in (self.phi(q), self.phi(k), v))
        if keep is not None:  # φ(0) may differ from zero, and so does v = I for the attention's matrix
            k, v = k * keep, v * keep
        if self.site.causal:
            return self._causal(q, k, v, keep, None)[0].view(shape)
        count = k.shape[1] if keep is None else keep.sum(1, keepdim=True).clamp_min(1)
        centre, scale = masked_mean(k, keep), q.shape[-1] ** -0.5
        if self.sharpened:
            q = q * _factor(torch.bmm(q, scale * centre.transpose(1, 2)))
        s = torch.bmm((k - centre).transpose(1, 2), v) * (scale / count)
        return torch.baddbmm(masked_mean(v, keep), q, s).view(shape)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> tuple[Tensor, CentredState]:
        """The cost and the state do not depend on the number of earlier tokens."""
        f_q, f_k, flat = (x.flatten(0, 1) for x in (self.phi(q), self.phi(k), v))
        out, state = self._causal(f_q, f_k, flat, None, state)
        return out.view_as(v), state

    def _causal(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, state: CentredState | None
    ) -> tuple[Tensor, CentredState]:
        """Means over the keys so far; Σ q·k and n come from one more column of v."""
        v1 = torch.cat([v, torch.ones_like(v[..., :1]) if keep is None else keep], -1)
        prepared = Prepared(q, k, Features(f=torch.clone, divide=False))
        sums, scores = plain_causal(prepared, v1, None if state is None else state.scores)
        values = v1.cumsum(1) if state is None else state.values + v1.cumsum(1)
        count = values[..., -1:].clamp_min(1)
        mean, sums = values[..., :-1] / count, sums * (q.shape[-1] ** -0.5 / count)
        z = sums[..., -1:]
        departure = sums[..., :-1] - z * mean
        out = mean + (_factor(z) * departure if self.sharpened else departure)
        return out, CentredState(scores, values[:, -1:])


def _factor(z: Tensor) -> Tensor:
    return 1 + (z + EPS).reciprocal()
