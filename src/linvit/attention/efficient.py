"""Efficient attention: softmax over features for queries, over tokens for keys; no denominator is needed."""

from __future__ import annotations

import torch
from torch import Tensor

from linvit.attention.base import Attention, register
from linvit.attention.halves import average, sums, wide
from linvit.site import Cost, Site


@register("efficient")
class Efficient(Attention):
    formula = "softmax_features(q) [softmax_tokens(k)ᵀ v]"
    estimates = "itself"
    origin = "Efficient Attention (WACV 2021), arXiv:1812.01243"
    invariants = "rows sum to one and are not negative; rank at most d"
    precision = "half"
    can_be_causal = False
    why_not_causal = "its softmax over tokens sees later keys"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k = (x.to(wide(x)) for x in (q, k))
        if mask is not None:
            k = k.masked_fill(~mask[:, None, :, None], -torch.inf)
        keys = torch.softmax(k, 2)
        if mask is not None:
            keys = keys.masked_fill(~mask[:, None, :, None], 0.0)  # also where every key is masked
        return average(torch.softmax(q, -1), sums(keys.transpose(2, 3), v), v.dtype)

    @classmethod
    def own_cost(cls, site: Site) -> Cost:
        return Cost(macs=2 * site.tokens * site.head_dim**2 * site.heads)
