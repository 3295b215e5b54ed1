"""NaLaFormer's attention: linear, and sharper for longer queries.

    p_i = 3 (½ + tanh ‖q_i‖)      φ(q) = [relu(q/‖q‖)^p, relu(−q/‖q‖)^p]      ψ(k) = [relu(k)³, relu(−k)³]

Positive and negative parts are features of their own, so that nothing of a sign is lost. The published model also
rotates both by position, normalises and gates the output; those are no part of the attention.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from linvit.attention.base import Switches, register
from linvit.attention.performer import Performer
from linvit.attention.powers import as_given, by_sign, log_size, signed_power
from linvit.kernels.base import FeatureMap, Prepared, Size
from linvit.site import Cost, Site


@register("nala")
class Nala(Performer):
    """A query of zeros, which has no direction, attends to keys in proportion to Σ|k|³."""

    formula = "φ(q) [ψ(k)ᵀv] / φ(q) [ψ(k)ᵀ1], φ = relu(±q/‖q‖)^p, p = 3(½ + tanh ‖q‖), ψ = relu(±k)³"
    estimates = "itself"

    def __init__(self, site: Site, switches: Switches = Switches()):  # noqa: B008 (frozen)
        super().__init__(site, _NormAware(site), switches)

    @classmethod
    def build(cls, site: Site, switches: Switches, **options: Any) -> Self:
        return cls(site, switches, **options)

    @classmethod
    def own_cost(cls, site: Site) -> Cost:
        return Cost(macs=4 * site.tokens * site.head_dim**2 * site.heads, features=2 * site.head_dim)


class _NormAware(FeatureMap):
    formula = "relu(±q/‖q‖)^p, p = 3(½ + tanh ‖q‖)"
    estimates = "itself"
    signed = False

    @classmethod
    def size(cls, site: Site, options: Any) -> Size:
        return Size(2 * site.head_dim, 0)

    def phi(self, x: Tensor) -> Tensor:
        """Of queries."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return by_sign(signed_power(x, log_size(x) - log_size(length), 1.5 + 3 * length.tanh()))

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        return Prepared(self.phi(q), by_sign(k**3), as_given())
