"""PolaFormer's attention: channels of q and k with equal signs mix one half of v, opposite ones the other half.

    x± = relu(±x/softplus(t))^p      k' = [k⁺, k⁻]
    out = [LA([q⁺, q⁻], k', v₁), LA([q⁻, q⁺], k', v₂)]      LA = linear attention with these features

The power p = 1 + α σ(π) and the temperature t are learned for each channel of each head. The published model also adds
a table of positions to k, which fixes the resolution, and gates the output; those are not part of the attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import full_precision, kept, precise, register
from linvit.attention.performer import OwnKernel, ready_made
from linvit.attention.plain import plain_causal
from linvit.attention.powers import by_sign, log_size, signed_power
from linvit.kernels.base import FeatureMap, Prepared, Size
from linvit.site import Site


class _Polar(FeatureMap):
    signed = False

    @dataclass(frozen=True, kw_only=True)
    class Options:
        alpha: float = 4.0

    def __init__(self, site: Site, **options: Any):
        super().__init__(site, **options)
        self.temperature, self.power = (nn.Parameter(torch.zeros(site.heads, 1, site.head_dim)) for _ in "tπ")

    @classmethod
    def size(cls, site: Site, options: Any) -> Size:
        return Size(2 * site.head_dim, 0, 2 * site.heads * site.head_dim)

    def phi(self, x: Tensor) -> Tensor:
        """(…, heads, N, d)."""
        power, temperature = 1 + self.options.alpha * self.power.sigmoid(), F.softplus(self.temperature)
        return by_sign(signed_power(x, log_size(x) - temperature.log().to(x), power.to(x)))

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        q, k = (self.phi(x.unflatten(0, (-1, self.site.heads))).flatten(0, 1) for x in (q, k))
        return Prepared(q, k, ready_made())


@register("pola")
class Pola(OwnKernel):
    """alpha: powers are between 1 and 1 + alpha, and start in the middle."""

    formula = "[(q⁺k⁺ + q⁻k⁻) v₁, (q⁻k⁺ + q⁺k⁻) v₂], rows normalised, x± = relu(±x/softplus(t))^p"
    estimates = "itself"
    origin = "PolaFormer (ICLR 2025), arXiv:2501.15061"
    invariants = (
        "two matrices, one for each half of v; their rows sum to one and are not negative; rank at most 2d each"
    )
    own, Options = _Polar, _Polar.Options

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        path, halves = self._path(q.device.type), zip(_both(self.prepare(q, k, mask)), _halves(v), strict=True)
        return torch.cat([path(prepared, half) for prepared, half in halves], -1).view_as(v)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> tuple[Tensor, Any]:
        """At a cost, and with a state, independent of how many tokens came before."""
        parts = zip(_both(self.prepare(q, k)), _halves(v), state or (None, None), strict=True)
        outs, states = zip(*(plain_causal(*part) for part in parts), strict=True)
        return torch.cat(outs, -1).view_as(v), states

    def attention_matrix(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, H, N, N): the mean of the two matrices, of which each multiplies one half of v."""
        return torch.stack(self.attention_matrices(q, k, mask)).mean(0)

    def attention_matrices(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of equal and of opposite signs, (B, H, N, N): both halves of v are I."""
        self._check(q, k, q, mask)
        with full_precision(q):
            q, k = kept(mask, *precise(q, k))
            halves = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).repeat(1, 2).expand(*q.shape[:2], -1, -1)
            equal, opposite = self._mix(q, k, halves, mask).chunk(2, -1)
        return equal, opposite


def _both(prepared: Prepared) -> tuple[Prepared, Prepared]:
    """For equal signs, and for opposite ones."""
    q = prepared.q
    return prepared, prepared._replace(q=q.roll(q.shape[-1] // 2, -1))


def _halves(v: Tensor) -> tuple[Tensor, ...]:
    flat = v.flatten(0, 1)
    return flat.tensor_split([-(-v.shape[-1] // 2)], -1)
