"""RALA: linear attention whose keys are weighted by how well they match the mean query.

    α_j = N softmax_j(φ(q)‾·φ(k_j)/√d)      out_i = Σ_j α_j φ(q_i)·φ(k_j) v_j / Σ_j α_j φ(q_i)·φ(k_j)      φ = elu + 1

A common factor of all α_j cancels, so the score of a key is used as its log-weight.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from linvit.attention.base import register
from linvit.attention.performer import OwnKernel, ready_made
from linvit.kernels.base import FeatureMap, Prepared, Size, masked_mean
from linvit.site import Site

# Below, φ is e^LOWEST: a product of two is in float32's range, so no denominator vanishes. elu(x) + 1 as it is written
# is zero in float32 below −17.
LOWEST = -34.0


class _WeightedElu(FeatureMap):
    signed = False

    @classmethod
    def size(cls, site: Site, options: Any) -> Size:
        return Size(site.head_dim, site.head_dim)  # a score for each key, and the sum of weighted keys

    def phi(self, x: Tensor) -> Tensor:
        return x.clamp(LOWEST, 0.0).exp() + x.relu()

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        f_q, f_k = self.phi(q), self.phi(k)
        weight = f_k @ masked_mean(f_q, keep).transpose(1, 2) * self.site.head_dim**-0.5
        return Prepared(f_q, f_k, ready_made(), weight)


@register("rala")
class Rala(OwnKernel):
    """The mean query is that of all kept tokens, prefix tokens included."""

    formula = "φ(q) [(α φ(k))ᵀv] / φ(q) [(α φ(k))ᵀ1], α = softmax(mean φ(q)·φ(k)/√d), φ = elu + 1"
    estimates = "itself"
    origin = "RALA (CVPR 2025), arXiv:2411.07635"
    invariants = "rows sum to one and are not negative; rank at most d"
    can_be_causal = False
    why_not_causal = "its keys are weighted by the mean of all queries, later ones too"
    own = _WeightedElu
