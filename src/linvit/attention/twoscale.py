"""Two-scale attention: near tokens exactly, far tokens as one summary for each cell of the grid, in one softmax.

The grid is cut into cells of c × c tokens. A query sees the tokens of its own band, the c rows that its cell is in, and
of the bands within `reach` of it; the prefix tokens; and of every other cell one key k_c, one value v_c and a bias b_c.
The sum of a cell's scores is convex in q,

    L_c(q) = log Σ_{j∈c} exp(q·k_j/√d)

and `far=tangent` replaces it by its tangent at the mean query q̄ plus the mean of its second-order term over queries:

    w_j = softmax_{j∈c}(q̄·k_j/√d)      k_c = Σ w_j k_j      v_c = Σ w_j v_j
    b_c = L_c(q̄) − q̄·k_c/√d + ½ Σ_i var(q)_i var_w(k)_i / d

`far=bands` does so for the queries of each band, which are more alike. `far=mean` is the tangent at q = 0: means, and
the log of the number of tokens. Each is exact where all keys of a cell are equal, does not change when one vector is
added to all keys, and has rows that sum to one.

A band is a run of tokens, so that its keys are joined with those of the cells above and below by copying, and each band
is one call of fused softmax attention with a bias for each key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.attention.accelerated import transformed
from linvit.attention.base import PRECISE, Attention, Switches, register, softmax_attention
from linvit.kernels.base import positive, tracing
from linvit.site import Cost, Site

LOWEST = -1e30  # bias of a dropped key: its weight is zero, and differences are not NaN
# The time of a band, and the fixed time of an image, in keys of fused softmax: fitted to forward passes on 14 × 14 to
# 42 × 42 tokens (AMD EPYC, one thread). `cell=auto` minimises this forecast; softmax has neither cost.
BAND_KEYS, FIXED_KEYS = 10, 180
SIDES = range(2, 33)  # of a cell, that cell=auto chooses from


class Band(NamedTuple):
    """Queries of rows [first, last) see rows [start, end) exactly, which are those of the cells [above, below)."""

    first: int
    last: int
    start: int
    end: int
    above: int
    below: int


class Cut(NamedTuple):
    """A grid as down × across cells of side × side tokens; the last ones may extend over its edges."""

    rows: int
    columns: int
    side: int
    reach: int

    @property
    def down(self) -> int:
        return -(-self.rows // self.side)

    @property
    def across(self) -> int:
        return -(-self.columns // self.side)

    @property
    def exact(self) -> bool:
        """Whether no cell is summarised, or each is a single token."""
        return self.side == 1 or self.down <= 2 * self.reach + 1

    def bands(self) -> Iterator[Band]:
        """At the edges of the grid, several bands of queries see the same rows."""
        c, first = self.side, 0
        for above in range(self.down - 2 * self.reach):
            below, last = above + 2 * self.reach + 1, above + self.reach + 1
            last = self.rows if below == self.down else last * c
            yield Band(first, last, above * c, min(below * c, self.rows), above, below)
            first = last

    def keys(self) -> float:
        """Of an image token, on average, without the prefix."""
        found = ((b.last - b.first) * self._keys(b) for b in self.bands())
        return self.rows * self.columns if self.exact else sum(found) / self.rows

    def _keys(self, band: Band) -> int:
        cells = self.down - (band.below - band.above)
        return (band.end - band.start) * self.columns + cells * self.across


@register("twoscale")
class TwoScale(Attention):
    """cell: side of a cell, and height of a band, in tokens; auto takes the least time, and is softmax on a small grid.
    reach: how many bands above and below its own a query sees exactly. far: what stands for the tokens of a cell.

    Prefix tokens (CLS) see all tokens and are seen by all.
    """

    formula = "softmax over near tokens and far cells (q·k/√d + b) v"
    estimates = "softmax"
    precision = "half"
    linear = False
    can_be_causal = False
    why_not_causal = "a cell has later tokens in it"
    without_effect = {"exact_cls": "prefix tokens see all tokens already"}  # noqa: RUF012

    def __init__(
        self,
        site: Site,
        switches: Switches = Switches(),  # noqa: B008 (frozen)
        *,
        cell: int | Literal["auto"] = "auto",
        reach: int = 0,
        far: Literal["tangent", "bands", "mean"] = "tangent",
    ):
        super().__init__(site, switches)
        if site.grid is None:
            raise ValueError("cells are squares of image tokens: give grid=(rows, columns)")
        self.cut, self.far = _cut(site.grid, cell, reach), far

    @classmethod
    def own_cost(
        cls, site: Site, *, cell: int | Literal["auto"] = "auto", reach: int = 0, far: str = "tangent"
    ) -> Cost:
        """Without a grid, from the share of keys that a square one of about as many tokens leaves."""
        image, d = site.tokens - site.prefix, site.head_dim
        side = max(1, round(math.sqrt(image)))
        cut = _cut(site.grid or (side, side), cell, reach)
        keys = image * cut.keys() / (cut.rows * cut.columns)
        pairs = image * (keys + site.prefix) + site.prefix * site.tokens
        for_bands = cut.down - 2 * reach if far == "bands" else 1
        summaries = 0 if cut.exact else 4 * image * for_bands
        return Cost(macs=round((2 * pairs + summaries) * d * site.heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        cut, first, n = self.cut, self.site.prefix, q.shape[2]
        places = cut.rows * cut.columns
        if n - first > places:
            raise ValueError(f"{n} tokens do not fit grid={self.site.grid} with prefix={first}")
        if cut.exact:
            return softmax_attention(q, k, v, mask)
        kept = None if mask is None and n - first == places else _kept(mask, q, first + places - n)
        own = [softmax_attention(q[:, :, :first], k, v, mask)] if first else []
        if missing := first + places - n:
            q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
        out = torch.cat([*own, *self._image(q, k, v, kept)], 2)[:, :, :n]
        return out if mask is None else torch.where(mask.any(1)[:, None, None, None], out, 0.0)

    def _image(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None) -> Iterator[Tensor]:
        """The outputs of each band of queries."""
        cut, prefix = self.cut, self.site.prefix
        q, (first_k, k), (first_v, v) = q[:, :, prefix:], *((x[:, :, :prefix], x[:, :, prefix:]) for x in (k, v))
        bias = None if kept is None else torch.where(kept, 0.0, LOWEST)[:, None]  # (B, 1, prefix + tokens)
        keys, values, far_bias = self._far(q, k, v, None if kept is None else kept[:, None, prefix:, None])
        near = q.new_zeros(1, 1, 1, dtype=far_bias.dtype) if bias is None else bias.to(far_bias)
        near = near.expand(*q.shape[:2], prefix + k.shape[2])
        for i, band in enumerate(cut.bands()):
            far_k, far_v, far = (x[:, :, min(i, x.shape[2] - 1)] for x in (keys, values, far_bias))
            above, below = slice(0, band.above * cut.across), slice(band.below * cut.across, None)
            rows, queries = (slice(a * cut.columns, b * cut.columns) for a, b in (band[2:4], band[:2]))
            joined_k = torch.cat([first_k, far_k[:, :, above], k[:, :, rows], far_k[:, :, below]], 2)
            joined_v = torch.cat([first_v, far_v[:, :, above], v[:, :, rows], far_v[:, :, below]], 2)
            parts = near[..., :prefix], far[..., above], near[..., prefix:][..., rows], far[..., below]
            yield _biased(q[:, :, queries], joined_k, joined_v, torch.cat(parts, -1)[:, :, None])

    def _far(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the cells, (B, H, bands, cells, d), and biases, (B, H, bands, cells), for each band or one
        for all. kept: (B, 1, tokens, 1)."""
        dtype, wide, d = v.dtype, k.dtype if k.dtype in PRECISE else torch.float32, k.shape[-1]
        kept = torch.ones(1, 1, k.shape[2], 1, device=k.device, dtype=wide) if kept is None else kept.to(wide)
        dropped = torch.where(self._cells(kept) > 0, 0.0, LOWEST).to(wide)
        cells = self._cells(k, v).to(wide)  # (B, H, cells, c², d + d)
        mean, spread = self._queries(q.to(wide), kept)

        def products(x: Tensor, of_bands: Tensor) -> Tensor:  # (B, H, cells, c², bands)
            return (x.flatten(2, 3) @ of_bands.transpose(2, 3)).unflatten(2, x.shape[2:4])

        keys = cells[..., :d]
        scores = products(keys, mean)
        total = (scores + dropped).logsumexp(3, keepdim=True)
        share = (scores + dropped - total).exp()
        far = share.transpose(3, 4) @ cells  # (B, H, cells, bands, d + d)
        second = (share * (products(keys * keys, spread) / 2 - scores)).sum(3)
        bias = total.squeeze(3) + second - (far[..., :d].square() * (spread / 2)[:, :, None]).sum(-1)
        far, bias = far.to(dtype).transpose(2, 3), bias.clamp_min(LOWEST).transpose(2, 3)
        return far[..., :d], far[..., d:], bias

    def _queries(self, q: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of q/√d, of all queries or in each band, (B, H, bands, d); dropped queries are zero."""
        if self.far == "mean":
            zero = q.new_zeros(*q.shape[:2], 1, q.shape[3])
            return zero, zero
        bands = self.cut.bands() if self.far == "bands" else [Band(0, self.cut.rows, 0, 0, 0, 0)]
        means, spreads = [], []
        for band in bands:
            rows = slice(band.first * self.cut.columns, band.last * self.cut.columns)
            x, count = q[:, :, rows] * q.shape[-1] ** -0.5, kept[:, :, rows].sum(2, keepdim=True).clamp_min(1)
            means.append(x.sum(2, keepdim=True) / count)
            spreads.append((x * x).sum(2, keepdim=True) / count - means[-1].square())
        return torch.cat(means, 2), torch.cat(spreads, 2)

    def _cells(self, *tensors: Tensor) -> Tensor:
        """Image tokens (B, H, rows·columns, e) of each → side by side, (B, H, cells, tokens of one, sum of e), zero
        where there is none."""
        rows, columns, side, _ = cut = self.cut
        found = []
        for x in tensors:
            x = x.unflatten(2, (rows, columns))
            if (cut.down * side, cut.across * side) != (rows, columns):
                x = F.pad(x, (0, 0, 0, cut.across * side - columns, 0, cut.down * side - rows))
            found.append(x.unflatten(3, (-1, side)).unflatten(2, (-1, side)).transpose(3, 4))
        return torch.cat(found, -1).flatten(4, 5).flatten(2, 3)


def _cut(grid: tuple[int, int], cell: int | Literal["auto"], reach: int) -> Cut:
    positive("reach", reach, at_least=0)
    if cell != "auto":
        positive("cell", cell, at_least=1)
        return Cut(*grid, cell, reach)

    def time(cut: Cut) -> float:
        return cut.keys() + (0 if cut.exact else BAND_KEYS * cut.down + FIXED_KEYS)

    return min((Cut(*grid, side, reach) for side in (1, *SIDES)), key=time)


def _kept(mask: Tensor | None, q: Tensor, missing: int) -> Tensor:
    """(B, tokens of the whole grid): where there is a token, and it is kept."""
    kept = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device) if mask is None else mask
    return F.pad(kept, (0, missing), value=False)


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q kᵀ/√d + bias) v with a bias for each key, (B, H, 1, keys)."""
    if bias.requires_grad and q.device.type == "cpu" and not (tracing() or transformed()):
        # The fused kernel has no gradient of a mask: one more channel of k holds the bias, where q has √d.
        scale = q.shape[-1] ** -0.5
        q = torch.cat([q, q.new_full((), 1 / scale).expand(*q.shape[:-1], 1)], -1)
        k = torch.cat([k, bias.to(k).transpose(2, 3)], -1)
        return F.scaled_dot_product_attention(q, k, F.pad(v, (0, 1)), scale=scale)[..., :-1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q).expand(-1, -1, q.shape[2], -1))
