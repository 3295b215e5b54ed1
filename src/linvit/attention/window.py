"""Local softmax: each image token attends to the size × size tokens around it on the grid, and to the prefix.

The grid is cut into tiles. The queries of a tile attend to the keys of the tile and of a border of size // 2 around it,
with those too far away masked, so that the cost is linear in the number of tokens. A grid no larger than a tile with
its border is one tile.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.attention.base import Attention, Switches, register, softmax_attention
from linvit.site import Cost, Site

WIDE = 7  # the side of a neighbourhood, where the grid is as wide


@register("window")
class Window(Attention):
    """size: side of the neighbourhood, odd; by default 7, or less if that covers the whole grid.

    Prefix tokens (CLS) see all tokens and are seen by all.
    """

    formula = "softmax over j near i (q·k/√d) v"
    estimates = "softmax of neighbours"
    origin = "Local attention, arXiv:1906.05909"
    invariants = "rows sum to one and are not negative; at most size² + prefix entries of an image row are not zero"
    precision = "half"
    can_be_causal = False
    why_not_causal = "a neighbourhood on the grid has later tokens in it"
    without_effect = {"exact_cls": "prefix tokens see all tokens already"}  # noqa: RUF012
    near: Tensor  # (queries of a tile, prefix and keys of a tile)

    def __init__(self, site: Site, switches: Switches = Switches(), *, size: int | None = None):  # noqa: B008 (frozen)
        super().__init__(site, switches)
        if site.grid is None:
            raise ValueError("a window is a neighbourhood of image tokens: give grid=(rows, columns)")
        most = 2 * max(site.grid) - 1
        size = min(WIDE, most) if size is None else size
        if size < 1 or size % 2 == 0:
            raise ValueError(f"size={size} must be an odd size, e.g. size=7")
        if size > most:
            raise ValueError(f"size={size} is more than {most}, which covers all of grid={site.grid}")
        self.size, self.grid = size, site.grid
        # Of 2 … 12 tokens with size = 7, tiles of 8 are the fastest or near it from 8 × 8 to 64 × 64 tokens.
        tile, border = size + 1, size // 2
        self.tiles = [(side, 0) if tile + 2 * border >= side else (tile, border) for side in site.grid]
        rows, columns = (
            (torch.arange(tile)[:, None] + border - torch.arange(tile + 2 * border)).abs() <= size // 2
            for tile, border in self.tiles
        )
        near = (rows[:, None, :, None] & columns[None, :, None, :]).flatten(2).flatten(0, 1)
        self.register_buffer("near", F.pad(near, (site.prefix, 0), value=True), persistent=False)

    @classmethod
    def own_cost(cls, site: Site, *, size: int | None = None) -> Cost:
        """Of all keys of a tile, masked ones too; queries of the prefix count as those of the image do, and more.
        Without a grid, as on one that is larger than a tile."""
        grid = site.grid or (2 * (size or WIDE),) * 2
        size = min(WIDE, 2 * max(grid) - 1) if size is None else size
        keys = math.prod(min(side, 2 * size) for side in grid)  # of a tile and its borders
        return Cost(macs=2 * site.tokens * (keys + 2 * site.prefix) * site.head_dim * site.heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        (_, h, n, _), first, (rows, columns) = q.shape, self.site.prefix, self.grid
        if n - first > rows * columns:
            raise ValueError(f"{n} tokens do not fit grid={self.grid} with prefix={first}")
        kept = q.new_ones(1, n, 1) if mask is None else mask[:, :, None].to(q)
        keep = (self._keys(kept) > 0).transpose(2, 3) & self.near  # (1 or B, tiles, queries, keys)
        if mask is not None:
            keep = keep[:, None].expand(-1, h, -1, -1, -1).flatten(0, 1)
        q_tiles = self._cut(q.flatten(0, 1)[:, first:], border=False)
        k_tiles, v_tiles = (self._keys(x.flatten(0, 1)) for x in (k, v))
        out = F.scaled_dot_product_attention(q_tiles, k_tiles, v_tiles, attn_mask=keep)
        out = torch.where(keep.any(-1, keepdim=True), out, 0.0)
        image = self._join(out)[:, : max(0, n - first)].unflatten(0, (-1, h))
        return torch.cat([softmax_attention(q[:, :, :first], k, v, mask), image], 2) if first else image

    def _keys(self, x: Tensor) -> Tensor:
        """(G, N, e) → (G, tiles, prefix and tile with its border, e)."""
        first = self.site.prefix
        tiles = self._cut(x[:, first:], border=True)
        return torch.cat([x[:, None, :first].expand(-1, tiles.shape[1], -1, -1), tiles], 2) if first else tiles

    def _cut(self, x: Tensor, border: bool) -> Tensor:
        """Image tokens (G, n, e) → (G, tiles, tokens of one, e), zero where there is none."""
        (rows, columns), ((tall, above), (wide, left)) = self.grid, self.tiles
        above, left = (above, left) if border else (0, 0)
        x = F.pad(x, (0, 0, 0, rows * columns - x.shape[1])).unflatten(1, (rows, columns))
        x = F.pad(x, (0, 0, left, left + -columns % wide, above, above + -rows % tall))
        x = x.unfold(1, tall + 2 * above, tall).unfold(2, wide + 2 * left, wide)  # (G, down, across, e, row, column)
        return x.permute(0, 1, 2, 4, 5, 3).flatten(3, 4).flatten(1, 2)

    def _join(self, tiles: Tensor) -> Tensor:
        """(G, tiles, tokens of one, e) → (G, rows·columns, e)."""
        (rows, columns), ((tall, _), (wide, _)) = self.grid, self.tiles
        x = tiles.unflatten(1, (-1, -(-columns // wide))).unflatten(3, (tall, wide)).transpose(2, 3)
        return x.flatten(3, 4).flatten(1, 2)[:, :rows, :columns].flatten(1, 2)
