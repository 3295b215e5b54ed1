"""Focused linear attention (FLatten): a power separates the directions of q and k and keeps their lengths.

    r = (relu(x) + ε)/softplus(t)      φ(x) = r^p ‖r‖/‖r^p‖      out = φ(q) [φ(k)ᵀv] / φ(q) [φ(k)ᵀ1]

Norms are over the channels of all heads, as published. That factor cancels for a query, but not for a key: the weight
of a key in one head depends on all heads. The published model adds a learned table of positions to k, which fixes the
resolution; it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import register
from linvit.attention.performer import OwnKernel, ready_made
from linvit.attention.powers import FLOOR
from linvit.kernels.base import FeatureMap, Prepared, Size, positive
from linvit.site import Site

EPS = 1e-6  # of r


class _Focused(FeatureMap):
    signed = False

    @dataclass(frozen=True, kw_only=True)
    class Options:
        p: float = 3.0

    def __init__(self, site: Site, **options: Any):
        super().__init__(site, **options)
        positive("p", self.options.p, at_least=1)
        self.temperature = nn.Parameter(torch.zeros(site.heads, 1, site.head_dim))

    @classmethod
    def size(cls, site: Site, options: Any) -> Size:
        return Size(site.head_dim, 0, site.heads * site.head_dim)

    def phi(self, x: Tensor) -> Tensor:
        """(…, heads, N, d). Powers are relative to the largest r, which keeps them in range; that factor cancels."""
        r, axes = self._rectified(x), (-3, -1)
        top = r.detach().amax(axes, keepdim=True)
        u = r / top
        power = u**self.options.p + FLOOR
        before, after = (torch.linalg.vector_norm(y, dim=axes, keepdim=True) for y in (u, power))
        return power * (top * before / after)

    def _rectified(self, x: Tensor) -> Tensor:
        return (x.relu() + EPS) / F.softplus(self.temperature).to(x)

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        q, k = (x.unflatten(0, (-1, self.site.heads)) for x in (q, k))
        r = self._rectified(q)
        queries = (r / r.detach().amax(-1, keepdim=True)) ** self.options.p + FLOOR
        return Prepared(queries.flatten(0, 1), self.phi(k).flatten(0, 1), ready_made())


@register("focused")
class Focused(OwnKernel):
    """p: the power; with 1 this is linear attention with ReLU. t, one for each channel, is learned."""

    formula = "φ(q) [φ(k)ᵀv] / φ(q) [φ(k)ᵀ1], φ = r^p ‖r‖/‖r^p‖, r = relu(x)/softplus(t)"
    estimates = "itself"
    origin = "FLatten Transformer (ICCV 2023), arXiv:2308.00442"
    invariants = "rows sum to one and are not negative; rank at most d; scaling a query has no effect (up to ε)"
    own, Options = _Focused, _Focused.Options
