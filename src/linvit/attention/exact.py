"""Softmax, and the two controls every comparison needs: `identity` (the speed limit) and `uniform` (no attention)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.attention.base import Attention, register, softmax_attention
from linvit.attention.halves import wide
from linvit.site import Cost, Site


@register("softmax")
class Softmax(Attention):
    """Exact attention by PyTorch's fused kernel."""

    formula = "softmax(q·k/√d) v"
    estimates = "itself"
    origin = "Transformer (NeurIPS 2017), arXiv:1706.03762"
    invariants = "rows sum to one and are positive; adding one vector to all keys changes nothing"
    role = "baseline"
    is_softmax = True
    precision = "half"
    linear = False
    without_effect = {"exact_cls": "softmax is exact for every query"}  # noqa: RUF012

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return softmax_attention(q, k, v, mask, self.site.causal)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The state is all earlier keys and values."""
        if state is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(state, (k, v), strict=True))
        new, every = q.shape[2], k.shape[2]
        seen = torch.ones(new, every, dtype=torch.bool, device=q.device).tril(every - new)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen), (k, v)

    @classmethod
    def own_cost(cls, site: Site) -> Cost:
        return Cost(macs=2 * site.tokens**2 * site.head_dim * site.heads)


@register("identity")
class Identity(Attention):
    """Returns v: no mixing of tokens, the upper bound of speed."""

    formula = "v"
    estimates = "the speed limit"
    invariants = "returns v; the matrix is the identity"
    role = "limit"
    precision = "half"
    without_effect = dict.fromkeys(("qk_norm", "rope"), "q and k do not matter")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return v

    def decode(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> tuple[Tensor, Any]:
        return v, ()

    @classmethod
    def own_cost(cls, site: Site) -> Cost:
        return Cost()


@register("uniform")
class Uniform(Attention):
    """The mean of v over all kept tokens, whatever q and k are."""

    formula = "mean_j v_j"
    estimates = "the control"
    invariants = "every row is 1/N; rank one; independent of q and k"
    role = "control"
    precision = "half"
    without_effect = Identity.without_effect

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        kept = torch.ones_like(v[..., :1]) if mask is None else mask[:, None, :, None].to(v)
        if self.site.causal:
            return ((v * kept).cumsum(2, dtype=wide(v)) / kept.cumsum(2, dtype=wide(v)).clamp_min(1)).to(v.dtype)
        total, count = (x.sum(2, keepdim=True, dtype=wide(v)) for x in (v * kept, kept))
        return (total / count.clamp_min(1)).to(v.dtype).expand_as(v)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The state is the sum of v so far, and of how many."""
        total, count = state or (torch.zeros_like(v[:, :, :1]), 0)
        sums = total + v.cumsum(2)
        counts = count + torch.arange(1, v.shape[2] + 1, device=v.device).to(v)[:, None]
        return sums / counts, (sums[:, :, -1:], count + v.shape[2])

    @classmethod
    def own_cost(cls, site: Site) -> Cost:
        return Cost(macs=site.tokens * site.head_dim * site.heads)
