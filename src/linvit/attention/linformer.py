"""Linformer: softmax over k projected keys, softmax(q (E K)ᵀ/√d) (F V), with E, F of k × tokens.

Prefix and image tokens are columns of E alike. With fewer tokens than the attention was built for, the first columns
are used; `regridded` interpolates E and F to another grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import PRECISE, Attention, Switches, interpolated, register
from linvit.attention.halves import softmax_over_computed, sums, wide
from linvit.kernels.base import NOT_BY_CONTENT, positive
from linvit.randomness import generator
from linvit.site import Cost, Site


@register("linformer")
class Linformer(Attention):
    """sharing: none = E and F per head; headwise = one E and one F; key-value = E = F; layerwise = E = F in all layers.

    kind: learned = free matrices; pool = fixed averages of neighbouring tokens; conv = a learned filter with stride.
    """

    formula = "softmax(q (E k)ᵀ/√d) (F v)"
    estimates = "softmax of rank k"
    origin = "Linformer, arXiv:2006.04768"
    caution = NOT_BY_CONTENT
    invariants = "rank at most k; rows sum to one only with kind=pool"
    size_option = "k"
    precision = "half"
    shared: Sequence[Linformer] = ()
    can_be_causal = False
    why_not_causal = "each projected key is a mixture of all tokens, later ones too"

    @dataclass(frozen=True, kw_only=True)
    class Options:
        k: int | None = None  # projected keys; without it 64, or all tokens where they are fewer
        sharing: Literal["none", "headwise", "key-value", "layerwise"] = "headwise"
        kind: Literal["learned", "pool", "conv"] = "learned"
        init: Literal["normal", "pool", "identity"] | None = None

        def shape(self, site: Site) -> tuple[int, int, int, int]:
            """Of E and F as stored: (1 or 2, 1 or heads, k, tokens); of filters (1 or 2, 1 or heads, 1, taps)."""
            heads = site.heads if self.sharing == "none" else 1
            sides = 1 if self.sharing in ("key-value", "layerwise") else 2
            k = self.keys(site)
            return (sides, heads, 1, -(-site.tokens // k)) if self.kind == "conv" else (sides, heads, k, site.tokens)

        def keys(self, site: Site) -> int:
            return min(64, site.tokens) if self.k is None else self.k

    def __init__(self, site: Site, switches: Switches = Switches(), **options: Any):  # noqa: B008 (frozen)
        super().__init__(site, switches)
        given = self.Options(**options)
        k, sharing, kind, init = given.keys(site), given.sharing, given.kind, given.init
        positive("k", k, at_least=1)
        if k > site.tokens:
            raise ValueError(f"k={k} is more than tokens={site.tokens}")
        if kind != "learned" and init is not None:
            raise ValueError(f"init={init} has no effect: kind={kind} has its own initialisation")
        if kind == "pool" and sharing not in ("headwise", "layerwise"):
            raise ValueError(f"sharing={sharing} has no effect: kind=pool uses the same averages everywhere")
        self.k, self.kind, self.init, self.layerwise = k, kind, init, sharing == "layerwise"
        shape = given.shape(site)
        if kind == "pool":
            self.register_buffer("projection", _pooling(k, site.tokens).expand(shape).clone())
            return
        source = generator("linformer", site.seed, 0 if self.layerwise else site.layer)
        value = torch.randn(shape, generator=source) / math.sqrt(k)
        if kind == "conv":
            value = torch.full(shape, 1 / shape[-1]) + 0.02 * torch.randn(shape, generator=source)
        elif init not in (None, "normal"):
            value = (_pooling(k, site.tokens) if init == "pool" else torch.eye(k, site.tokens)).expand(shape).clone()
        self.projection = nn.Parameter(value)

    @classmethod
    def own_cost(cls, site: Site, **options: Any) -> Cost:
        given, d = cls.Options(**options), site.head_dim
        numbers, k = math.prod(given.shape(site)), given.keys(site)
        learned = 0 if given.kind == "pool" else numbers
        shared = learned if given.sharing == "layerwise" else 0
        macs = 4 * site.tokens * k * d * site.heads
        return Cost(learned, macs, 2 * numbers, numbers - learned, shared=shared, features=k)

    @classmethod
    def regridded(cls, weights: Mapping[str, Tensor], old: Site, new: Site, **options: Any) -> dict[str, Tensor]:
        """Projections are interpolated, and filters, so that a constant row keeps its sum."""
        given, value = cls.Options(**options), weights.get("projection")
        if value is None or (given.kind != "conv" and value.shape[-1] != old.tokens):  # another layer's
            return dict(weights)
        if given.kind == "conv":
            taps = given.shape(new)[-1]
            longer = F.interpolate(value.float(), (1, taps), mode="bilinear", align_corners=False, antialias=True)
            return {**weights, "projection": (longer * (value.shape[-1] / taps)).to(value.dtype)}
        scale = (old.tokens - old.prefix) / (new.tokens - new.prefix)
        return {**weights, "projection": interpolated(value, old, new, "bilinear", scale)}

    def share(self, owner: Attention) -> None:
        alike = isinstance(owner, Linformer) and owner.layerwise
        theirs = owner.matrix().shape if alike else None  # type: ignore[operator]
        if not self.layerwise or theirs != self.matrix().shape:
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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        n = k.shape[2]
        matrix = self.matrix().to(q.device, wide(q))
        if n > matrix.shape[-1]:
            raise ValueError(
                f"{n} tokens, but linformer's projections were made for {matrix.shape[-1]}: build it for {n} tokens, "
                "with projections from linvit.attention.regridded"
            )
        if mask is not None:  # k is zero there already; v = I, for the attention's matrix, is not
            v = v.masked_fill(~mask[:, None, :, None], 0.0)
        project_k, project_v = matrix[0, ..., :n], matrix[-1, ..., :n]
        keys, values = sums(project_k, k), sums(project_v, v)
        attend = F.scaled_dot_product_attention if q.dtype in PRECISE else softmax_over_computed
        return attend(q, keys, values)


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
