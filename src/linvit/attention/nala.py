"""NaLaFormer's attention: linear, and sharper for longer queries.

    p_i = 3 (½ + tanh ‖q_i‖)      φ(q) = [relu(q/‖q‖)^p, relu(−q/‖q‖)^p]      ψ(k) = [relu(k)³, relu(−k)³]

Positive and negative parts are separate features, so that signs are not lost. The published model also rotates both by
position, normalises and gates the output; those are options or parts of the model, not of the attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linvit.attention.base import register
from linvit.attention.performer import OwnKernel, ready_made
from linvit.attention.powers import by_sign, log_size, signed_power
from linvit.kernels.base import FeatureMap, Prepared, Size
from linvit.site import Site


class _NormAware(FeatureMap):
    signed = False

    @classmethod
    def size(cls, site: Site, options: Any) -> Size:
        return Size(2 * site.head_dim, 0)

    def phi(self, x: Tensor) -> Tensor:
        """Of queries."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return by_sign(signed_power(x, log_size(x) - log_size(length), 1.5 + 3 * length.tanh()))

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        return Prepared(self.phi(q), by_sign(k**3), ready_made())


@register("nala")
class Nala(OwnKernel):
    """A query of zeros, which has no direction, attends to keys in proportion to Σ|k|³."""

    formula = "φ(q) [ψ(k)ᵀv] / φ(q) [ψ(k)ᵀ1], φ = relu(±q/‖q‖)^p, p = 3(½ + tanh ‖q‖), ψ = relu(±k)³"
    estimates = "itself"
    origin = "NaLaFormer (ICML 2026), arXiv:2506.21137"
    invariants = "rows sum to one and are not negative; rank at most 2d; longer queries give sharper rows"
    own = _NormAware
