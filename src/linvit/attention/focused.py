"""Focused linear attention (FLatten): a power makes the directions of q and k differ more, and keeps their lengths.

    r = (relu(x) + ε)/softplus(t)      φ(x) = r^p ‖r‖/‖r^p‖      out = φ(q) [φ(k)ᵀv] / φ(q) [φ(k)ᵀ1]

Norms are over the channels of all heads, as published: a factor of the query cancels, one of the key does not, so that
heads weigh keys together. The published table of positions, which is added to k, is left out: it fixes the resolution.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import Switches, register
from linvit.attention.performer import Performer
from linvit.attention.powers import FLOOR, as_given
from linvit.kernels.base import FeatureMap, Prepared, Size, positive
from linvit.site import Cost, Site

EPS = 1e-6  # of r


@register("focused")
class Focused(Performer):
    """p: the power, with 1 for linear attention with ReLU. t, one for each channel, is learned."""

    formula = "φ(q) [φ(k)ᵀv] / φ(q) [φ(k)ᵀ1], φ = r^p ‖r‖/‖r^p‖, r = relu(x)/softplus(t)"
    estimates = "itself"

    def __init__(self, site: Site, switches: Switches = Switches(), *, p: float = 3.0):  # noqa: B008 (frozen)
        positive("p", p, at_least=1)
        super().__init__(site, _Focused(site, p), switches)

    @classmethod
    def build(cls, site: Site, switches: Switches, **options: Any) -> Self:
        return cls(site, switches, **options)

    @classmethod
    def own_cost(cls, site: Site, *, p: float = 3.0) -> Cost:
        d = site.head_dim
        return Cost(site.heads * d, 2 * site.tokens * d**2 * site.heads, features=d)


class _Focused(FeatureMap):
    formula = "r^p ‖r‖/‖r^p‖"
    estimates = "itself"
    signed = False

    def __init__(self, site: Site, p: float):
        super().__init__(site)
        self.p = p
        self.temperature = nn.Parameter(torch.zeros(site.heads, 1, site.head_dim))

    @classmethod
    def size(cls, site: Site, options: Any) -> Size:
        return Size(site.head_dim, 0, site.heads * site.head_dim)

    def phi(self, x: Tensor) -> Tensor:
        """(…, heads, N, d). Powers are relative to the largest, so that none is out of range; that cancels."""
        r, axes = self._rectified(x), (-3, -1)
        top = r.detach().amax(axes, keepdim=True)
        u = r / top
        power = u**self.p + FLOOR
        before, after = (torch.linalg.vector_norm(y, dim=axes, keepdim=True) for y in (u, power))
        return power * (top * before / after)

    def _rectified(self, x: Tensor) -> Tensor:
        return (x.relu() + EPS) / F.softplus(self.temperature).to(x)

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        q, k = (x.unflatten(0, (-1, self.site.heads)) for x in (q, k))
        r = self._rectified(q)
        queries = (r / r.detach().amax(-1, keepdim=True)) ** self.p + FLOOR
        return Prepared(queries.flatten(0, 1), self.phi(k).flatten(0, 1), as_given())
