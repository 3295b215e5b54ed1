"""ViT³: test-time training. One step of gradient descent on the keys and values of an image trains a small inner model,
whose outputs for the queries are the output of the attention.

The inner model of each head is f(x) = (x W₁) ⊙ silu(x W₂) with learned W₁, W₂ (d × d). Its loss is
−(s/N) Σ_j f(k_j)·v_j with s = ⅓, so that with z₁ = k W₁, z₂ = k W₂ and e = −s v/N

    g₁ = kᵀ(e ⊙ silu(z₂))      g₂ = kᵀ(e ⊙ z₁ ⊙ silu'(z₂))      g ← g / (‖g‖ + 1) by columns      W' = W − g

and out = (q W₁') ⊙ silu(q W₂'). That is not linear in v, so there is no attention matrix. V = 0 leaves W unchanged.

The published model has an additional head, whose inner model is a 3 × 3 depthwise convolution over the grid, with the
same loss and the same step.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import Attention, Switches, register
from linvit.randomness import generator
from linvit.site import Cost, Site

RATE = 9**-0.5  # s, with which the loss is scaled
STD = 0.02  # of the weights at the start


@register("vit3")
class Vit3(Attention):
    """conv: the inner model of the last head is a convolution; prefix tokens have no neighbours in it. The published
    model with H heads is one of H + 1 heads with conv=true."""

    formula = "(q W₁') ⊙ silu(q W₂'), W' = W − g/(‖g‖ + 1), g = ∇_W −⅓ mean_j (k W₁ ⊙ silu(k W₂))·v"
    estimates = "itself"
    origin = "ViT³ (CVPR 2026), arXiv:2512.01643"
    invariants = "not linear in v, so there is no matrix; v = 0 leaves W unchanged"
    can_be_causal = False
    why_not_causal = "its inner model is trained on all tokens, later ones too"
    no_matrix = "its output is not linear in v"

    def __init__(self, site: Site, switches: Switches = Switches(), *, conv: bool = False):  # noqa: B008 (frozen)
        super().__init__(site, switches)
        if conv and site.grid is None:
            raise ValueError("conv=true is a convolution over image tokens: give grid=(rows, columns)")
        if conv and site.heads < 2:
            raise ValueError("conv=true is for the last of several heads, but there is only one")
        self.conv, d = conv, site.head_dim
        draw = partial(nn.init.trunc_normal_, std=STD, generator=generator("vit3", site.seed, site.layer))
        self.inner = nn.Parameter(draw(torch.empty(site.heads - conv, d, 2 * d)))  # W₁ and W₂ side by side
        self.filters = nn.Parameter(draw(torch.empty(d, 3, 3))) if conv else None

    @classmethod
    def own_cost(cls, site: Site, *, conv: bool = False) -> Cost:
        d, heads = site.head_dim, site.heads - conv
        macs = 6 * site.tokens * d**2 * heads + 18 * site.tokens * d * conv
        return Cost(2 * d**2 * heads + 9 * d * conv, macs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Masked tokens are zero in q, k and v, and add nothing to a gradient."""
        count = q.shape[2] if mask is None else mask.sum(1).clamp_min(1).to(v)[:, None, None, None]
        error = v * (-RATE / count)
        if not self.conv:
            return self._products(q, k, error)
        first = self._products(q[:, :-1], k[:, :-1], error[:, :-1])
        return torch.cat([first, self._convolution(q[:, -1], k[:, -1], error[:, -1]).unsqueeze(1)], 1)

    def _products(self, q: Tensor, k: Tensor, error: Tensor) -> Tensor:
        weights = self.inner.to(q)
        z_1, z_2 = (k @ weights).chunk(2, -1)
        gate = z_2.sigmoid()
        slope = gate + z_2 * gate * (1 - gate)
        gradient = k.transpose(2, 3) @ torch.cat([error * z_2 * gate, error * z_1 * slope], -1)
        y_1, y_2 = (q @ (weights - _clipped(gradient, 2))).chunk(2, -1)
        return y_1 * F.silu(y_2)

    def _convolution(self, q: Tensor, k: Tensor, error: Tensor) -> Tensor:
        """(B, N, d). Every image has filters of its own, so shifted images are summed. The fifth is not shifted; it is
        the only one for a prefix token."""
        assert self.filters is not None
        (n, d), first = q.shape[1:], self.site.prefix
        errors = self._image(error)[:, 1:-1, 1:-1]
        taps = [(keys * errors).sum((1, 2)) for keys in _shifted(self._image(k))]
        taps[4] = taps[4] + (k[:, :first] * error[:, :first]).sum(1)
        filters = self.filters.to(q).view(d, 9).t() - _clipped(torch.stack(taps, 1), 1)  # (B, 9, d)
        image = torch.zeros_like(errors)
        for i, queries in enumerate(_shifted(self._image(q))):
            image = image + filters[:, i, None, None] * queries
        image = image.flatten(1, 2)[:, : max(0, n - first)]
        return torch.cat([q[:, :first] * filters[:, 4:5], image], 1) if first else image

    def _image(self, x: Tensor) -> Tensor:
        """(B, N, d) → (B, rows + 2, columns + 2, d), zero where there is no token."""
        assert self.site.grid is not None
        (rows, columns), x = self.site.grid, x[:, self.site.prefix :]
        if x.shape[1] > rows * columns:
            raise ValueError(f"{x.shape[1]} image tokens do not fit grid={self.site.grid}")
        x = F.pad(x, (0, 0, 0, rows * columns - x.shape[1])).unflatten(1, (rows, columns))
        return F.pad(x, (0, 0, 1, 1, 1, 1))


def _shifted(image: Tensor) -> list[Tensor]:
    """The 3 × 3 places around each, (B, rows, columns, d)."""
    rows, columns = image.shape[1] - 2, image.shape[2] - 2
    return [image[:, i : i + rows, j : j + columns] for i in range(3) for j in range(3)]


def _clipped(gradient: Tensor, axis: int) -> Tensor:
    return gradient / (torch.linalg.vector_norm(gradient, dim=axis, keepdim=True) + 1)
