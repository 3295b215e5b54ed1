"""RALA: linear attention whose keys are weighted by how well they match the mean query.

    α_j = N softmax_j(φ(q)‾·φ(k_j)/√d)      out_i = Σ_j α_j φ(q_i)·φ(k_j) v_j / Σ_j α_j φ(q_i)·φ(k_j)      φ = elu + 1

A factor that all α_j have in common cancels, so log α_j is the score itself: the log-weight of a key, which every path
of linear attention takes and keeps in range.
"""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from linvit.attention.base import Switches, register
from linvit.attention.performer import Performer
from linvit.kernels.base import FeatureMap, Features, Prepared, Size, masked_mean
from linvit.site import Cost, Site

# Below, φ is e^LOWEST: products of two stay in float32's range, so no denominator vanishes. elu(x) + 1, computed as it
# is written, is zero in float32 from −17 on.
LOWEST = -34.0


@register("rala")
class Rala(Performer):
    """The mean query is that of all tokens which are kept, prefix tokens included."""

    formula = "φ(q) [(α φ(k))ᵀv] / φ(q) [(α φ(k))ᵀ1], α = softmax(mean φ(q)·φ(k)/√d), φ = elu + 1"
    estimates = "itself"
    can_be_causal = False
    why_not_causal = "its keys are weighted by the mean of all queries, later ones too"

    def __init__(self, site: Site, switches: Switches = Switches()):  # noqa: B008 (frozen)
        super().__init__(site, _WeightedElu(site), switches)

    @classmethod
    def build(cls, site: Site, switches: Switches, **options: Any) -> Self:
        return cls(site, switches, **options)

    @classmethod
    def own_cost(cls, site: Site) -> Cost:
        d = site.head_dim
        return Cost(macs=2 * site.tokens * d * (d + 1) * site.heads, features=d)


class _WeightedElu(FeatureMap):
    formula = "elu(x) + 1"
    estimates = "itself"
    signed = False

    @classmethod
    def size(cls, site: Site, options: Any) -> Size:
        return Size(width=site.head_dim, macs=0)

    def phi(self, x: Tensor) -> Tensor:
        return x.clamp(LOWEST, 0.0).exp() + x.relu()

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        f_q, f_k = self.phi(q), self.phi(k)
        weight = f_k @ masked_mean(f_q, keep).transpose(1, 2) * self.site.head_dim**-0.5
        return Prepared(f_q, f_k, Features(f=_unchanged, pull=_pull, positive=True), weight)


def _unchanged(features: Tensor) -> Tensor:
    return features


def _pull(gradient: Tensor, value: Tensor) -> Tensor:
    return gradient
