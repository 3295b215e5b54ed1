"""Linformer: softmax over k projected keys, softmax(q (E K)ᵀ/√d) (F V), with E, F of k × tokens.

Prefix and image tokens are columns of E alike. Fewer tokens than the attention was built for use the first columns;
another resolution is a new grid, to which `regrid` interpolates them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import Attention, Switches, register
from linvit.kernels.base import Site, positive
from linvit.randomness import generator

Sharing = Literal["none", "headwise", "key-value", "layerwise"]


@register("linformer")
class Linformer(Attention):
    """k: projected keys; without it 64, or all tokens where they are fewer.
    sharing: none = E and F per head; headwise = one E and one F; key-value = E = F; layerwise = E = F in all layers.

    kind: learned = free matrices; pool = fixed averages of neighbouring tokens; conv = a learned filter with stride.
    """

    formula = "softmax(q (E k)ᵀ/√d) (F v)"
    estimates = "softmax of rank k"
    can_be_causal = False
    why_not_causal = "each projected key is a mixture of all tokens, later ones too"

    def __init__(
        self,
        site: Site,
        switches: Switches = Switches(),  # noqa: B008 (frozen)
        *,
        k: int | None = None,
        sharing: Sharing = "headwise",
        kind: Literal["learned", "pool", "conv"] = "learned",
        init: Literal["normal", "pool", "identity"] | None = None,
    ):
        super().__init__(site, switches)
        k = min(64, site.tokens) if k is None else k
        positive("k", k, at_least=1)
        if k > site.tokens:
            raise ValueError(f"k={k} is more than the {site.tokens} tokens there are to project")
        if kind != "learned" and init is not None:
            raise ValueError(f"init={init} has no effect: kind={kind} has a start of its own")
        if kind == "pool" and sharing not in ("headwise", "layerwise"):
            raise ValueError(f"sharing={sharing} has no effect: kind=pool takes the same averages everywhere")
        self.k, self.sharing, self.kind, self.init = k, sharing, kind, init
        self.stride = -(-site.tokens // k)
        self.shared: list[Linformer] = []  # a list hides the owner of layerwise projections from this module's state
        heads = site.heads if sharing == "none" else 1
        sides = 1 if sharing in ("key-value", "layerwise") else 2
        if kind == "pool":
            self.register_buffer("projection", _pooling(k, site.tokens).expand(sides, heads, -1, -1).clone())
            return
        shape = (sides, heads, k, site.tokens) if kind == "learned" else (sides, heads, 1, self.stride)
        source = generator("linformer", site.seed, 0 if sharing == "layerwise" else site.layer)
        value = torch.randn(shape, generator=source) / math.sqrt(k)
        if kind == "conv":
            value = torch.full(shape, 1 / self.stride) + 0.02 * torch.randn(shape, generator=source)
        elif init not in (None, "normal"):
            value = (_pooling(k, site.tokens) if init == "pool" else torch.eye(k, site.tokens)).expand(shape).clone()
        self.projection = nn.Parameter(value)

    def share(self, owner: Linformer) -> None:
        """Use the owner's projections instead of one's own; they are stored once, with the owner."""
        if self.sharing != "layerwise" or owner.sharing != "layerwise" or owner.matrix().shape != self.matrix().shape:
            raise ValueError("only linformers with sharing=layerwise, the same k and the same tokens share projections")
        if self in (owner, *owner.shared):
            raise ValueError("a linformer cannot share the projections of one that shares its own")
        if not self.shared:
            del self.projection
        self.shared = [owner]

    def matrix(self) -> Tensor:
        """E and F as (1 or 2, 1 or heads, k, tokens)."""
        if self.shared:
            return self.shared[0].matrix()
        if self.kind != "conv":
            return self.projection
        each = torch.eye(self.k, dtype=self.projection.dtype, device=self.projection.device)[None, None]
        return torch.kron(each, self.projection)[..., : self.site.tokens]

    @torch.no_grad()
    def pool(self) -> None:
        """Make learned projections average blocks of the grid. With the weights of a trained softmax attention this is
        softmax over coarser keys. Prefix tokens belong to the first block: one with a key of its own would weigh as
        much as a whole block does."""
        site = self.site
        if self.kind != "learned" or self.shared:
            raise ValueError("only an attention with learned projections of its own can be pooled")
        if site.grid is None or site.tokens != site.prefix + math.prod(site.grid):
            self.projection.copy_(_pooling(self.k, site.tokens))
            return
        alone = max(0, self.k - math.prod(site.grid))  # keys that are left when every place has one
        group = torch.cat(
            [torch.arange(site.prefix).clamp_max(alone), alone + _blocks(self.k - alone, site.grid).flatten()]
        )
        self.projection.copy_(_averages(group, self.k))

    def near_softmax(self) -> None:
        super().near_softmax()
        if self.kind == "learned" and self.init is None and not self.shared:
            self.pool()

    @torch.no_grad()
    def regrid(self, grid: tuple[int, int]) -> None:
        """Interpolate projections to another grid of image tokens, scaled so that a constant row keeps its sum."""
        old = self.site
        if old.grid is None:
            raise ValueError("regrid needs an attention built with grid=(rows, columns)")
        if self.kind == "conv" or self.shared:
            raise ValueError("only an attention with learned or pooled projections of its own can be regridded")
        matrix = self.projection
        prefix, image = matrix[..., : old.prefix], matrix[..., old.prefix :]
        image = image.flatten(0, 1).unflatten(-1, old.grid)
        scaled = F.interpolate(image, grid, mode="bilinear", align_corners=False, antialias=True)
        scaled = scaled.flatten(-2).view(*matrix.shape[:3], -1) * (math.prod(old.grid) / math.prod(grid))
        value = torch.cat([prefix, scaled], -1)
        self.site = replace(old, tokens=value.shape[-1], grid=grid)
        if self.dwc is not None:
            self.dwc.site = self.site
        self.projection = nn.Parameter(value) if isinstance(matrix, nn.Parameter) else value

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        n = k.shape[2]
        matrix = self.matrix().to(q)
        if n > matrix.shape[-1]:
            raise ValueError(
                f"{n} tokens, but linformer's projections were made for {matrix.shape[-1]}: call regrid() first"
            )
        if mask is not None:  # k is zero there already; v = I, for the attention's matrix, is not
            v = v.masked_fill(~mask[:, None, :, None], 0.0)
        project_k, project_v = matrix[0, ..., :n], matrix[-1, ..., :n]
        return F.scaled_dot_product_attention(q, project_k @ k, project_v @ v)

    def macs(self, tokens: int) -> int:
        return 4 * tokens * self.k * self.site.head_dim * self.site.heads


def share_layerwise(attentions: Iterable[Attention]) -> None:
    """Layerwise projections belong to the model: the first layer that has them owns them."""
    linformers: list[Linformer] = [a for a in attentions if isinstance(a, Linformer)]
    layerwise = [a for a in linformers if a.sharing == "layerwise"]
    for other in layerwise[1:]:
        other.share(layerwise[0])


def _pooling(k: int, tokens: int) -> Tensor:
    """(k, tokens): row i averages the i-th of k nearly equal runs of tokens."""
    return _averages(torch.arange(tokens) * k // tokens, k)


def _averages(group: Tensor, k: int) -> Tensor:
    """(k, tokens): row i averages the tokens of group i."""
    member = (group == torch.arange(k)[:, None]).float()
    return member / member.sum(1, keepdim=True)


def _blocks(k: int, grid: tuple[int, int]) -> Tensor:
    """(rows, columns): to which of k nearly equal, nearly square blocks each place belongs. Rows are cut into bands,
    and each band into its share of the k."""
    rows, columns = grid
    bands = min(max(round(math.sqrt(k * rows / columns)), -(-k // columns), 1), rows, k)
    band = torch.arange(rows) * bands // rows
    first, after = band * k // bands, (band + 1) * k // bands
    return first[:, None] + torch.arange(columns) * (after - first)[:, None] // columns
