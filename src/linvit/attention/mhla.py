"""MHLA: linear attention in blocks of the grid; the queries of each block weight the sums of all blocks.

    S_b = Σ_{j∈b} φ(k_j) v_jᵀ      z_b = Σ_{j∈b} φ(k_j)      φ = relu + 10⁻⁶

A query of block i gives block b the weight M_ib > 0, learned and common to all heads:

    out = φ(q) Σ_b M_ib S_b / φ(q)·Σ_b M_ib z_b

M = 11ᵀ is plain linear attention, M = I linear attention inside blocks. As in the paper, M starts from the distances of
the blocks. The paper divides columns by their sums, here they are divided by their means; that factor cancels. Prefix
tokens are the first block, with M = 1 at the start, the mean over image blocks. M is a softplus of the weights:
negative entries, which the authors' code allows, could make a denominator vanish.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import PRECISE, Attention, Switches, interpolated, register
from linvit.attention.halves import average, sums, wide
from linvit.attention.pieces import inverse
from linvit.kernels.base import positive
from linvit.site import Cost, Site

FLOOR = 1e-6  # of φ
LEAST = 1e-2  # of M at the start: `linear` has 0 for the farthest blocks, where softplus would have no gradient


class Cut(NamedTuple):
    """A grid as down × across blocks of tall × wide tokens; the last ones may extend over its edges."""

    down: int
    across: int
    tall: int
    wide: int

    @property
    def blocks(self) -> int:
        return self.down * self.across


@register("mhla")
class Mhla(Attention):
    """blocks: the largest number along each side of the grid; without it √side, where mixing takes half as many
    multiply–accumulates as the sums. Without a grid, blocks are runs of tokens.

    normaliser: paper = as above; released = the denominators of the authors' code, Σ_b M_ib φ(q_b)·z_b with q_b the
    query at the same place in block b: rows do not sum to one. Queries of prefix tokens have the paper's.

    init: M at the start as a function of the distance D between blocks, cos(π/4·D/D_max), 1 − D/D_max or e^{−D/3}.
    """

    formula = "φ(q) Σ_b M_ib S_b / φ(q) Σ_b M_ib z_b, S_b = Σ_{j∈b} φ(k)vᵀ, z_b = Σ_{j∈b} φ(k), φ = relu + 10⁻⁶"
    estimates = "itself"
    origin = "MHLA (ICLR 2026), arXiv:2601.07832"
    invariants = "rows sum to one (not with normaliser=released) and are not negative; rank at most blocks × d"
    precision = "half"
    can_be_causal = False
    why_not_causal = "a block of tokens has later ones in it"

    def __init__(
        self,
        site: Site,
        switches: Switches = Switches(),  # noqa: B008 (frozen)
        *,
        blocks: int | None = None,
        normaliser: Literal["paper", "released"] = "paper",
        init: Literal["cos", "linear", "exp"] = "cos",
    ):
        super().__init__(site, switches)
        if blocks is not None:
            positive("blocks", blocks, at_least=1)
        self.cut, self.grid, self.released = _cut(site, blocks), _grid(site), normaliser == "released"
        start = F.pad(_start(self.cut, init), (_lead(site), 0, _lead(site), 0), value=1.0)
        self.mix = nn.Parameter(start.expm1().log())  # softplus of it is M

    @classmethod
    def own_cost(cls, site: Site, *, blocks: int | None = None, **options: Any) -> Cost:
        """Of padded blocks; without a grid and a number of blocks, of √N blocks."""
        cut, d = _cut(site, blocks), site.head_dim
        macs = 3 * site.tokens * d
        if site.grid is not None or blocks is not None:
            padded = cut.blocks * cut.tall * cut.wide
            macs = (2 * padded + cut.blocks**2) * d + 2 * site.prefix * (2 * padded + site.prefix)
        return Cost((_lead(site) + cut.blocks) ** 2, macs * d * site.heads)

    @classmethod
    def regridded(
        cls, weights: Mapping[str, Tensor], old: Site, new: Site, *, blocks: int | None = None, **options: Any
    ) -> dict[str, Tensor]:
        """The weights of pairs of blocks are interpolated where the number of blocks changes."""
        before, after = (_of_blocks(site, blocks) for site in (old, new))
        value = weights.get("mix")
        if value is None or before.grid == after.grid:
            return dict(weights)
        keys = interpolated(value, before, after, "bilinear")
        return {**weights, "mix": interpolated(keys.t(), before, after, "bilinear").t().contiguous()}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        (n, d), first, lead = q.shape[2:], self.site.prefix, _lead(self.site)
        if n - first > math.prod(self.grid):
            raise ValueError(f"{n} tokens do not fit grid={self.grid} with prefix={first}")
        half = v.dtype not in PRECISE
        f_q, f_k = (x.to(wide(x)).relu() + FLOOR for x in (q, k))
        if mask is not None:
            f_k = f_k.masked_fill(~mask[:, None, :, None], 0.0)
        queries, keys, values = (self._cut_up(x) for x in (f_q, f_k, v))
        weights = F.softplus(self.mix.to(f_k))
        m, z = weights[lead:, lead:], keys.sum(3)  # z (B, H, blocks, d)
        total, near = self._denominators(queries, z, m, mask), None
        if first:  # weights of the prefix for image queries, (B, H, blocks · tokens of one, prefix)
            near = self._by_token(weights[1:, 0])[:, None] * (queries.flatten(2, 3) @ f_k[:, :, :first].transpose(2, 3))
            total = total + near.sum(-1).view_as(total[..., 0]).unsqueeze(-1)
        over, scaled = inverse(total, 0.0), keys
        if half:  # sums of φ(k) c are √(n/d), those of φ(q)/c about its inverse: all in the range of float16
            c = math.sqrt(n / d) / z.detach().sum(2).clamp_min(torch.finfo(z.dtype).tiny)[:, :, None, None]
            scaled, queries = keys * c, queries / c
        of_blocks = sums(scaled.transpose(3, 4), values)
        flat = of_blocks.flatten(3).flatten(0, 1)  # @ would transpose it, since all have the same m
        mixed = torch.bmm(m.expand(flat.shape[0], -1, -1), flat).view_as(of_blocks)
        queries = queries * over
        if near is None:
            return self._join(average(queries, mixed, v.dtype))[:, :, :n]
        first_v = v[:, :, :first]
        if half:  # one product: a sum of two would be rounded three times
            near = near.unflatten(2, queries.shape[2:4]) * over
            more = first_v[:, :, None].expand(-1, -1, mixed.shape[2], -1, -1)
            image = average(torch.cat([queries, near], -1), torch.cat([mixed, more], -2), v.dtype)
        else:
            image = queries @ mixed
            image = image + ((near * over.flatten(2, 3)) @ first_v).view_as(image)
        image = self._join(image)[:, :, : max(0, n - first)]
        far = f_q[:, :, :first] @ keys.flatten(2, 3).transpose(2, 3) * self._by_token(weights[0, 1:])
        own = f_q[:, :, :first] @ f_k[:, :, :first].transpose(2, 3) * weights[0, 0]
        over = inverse(far.sum(-1, keepdim=True) + own.sum(-1, keepdim=True), 0.0)
        of_prefix = sums(far * over, values.flatten(2, 3)) + sums(own * over, first_v)
        return torch.cat([of_prefix.to(v.dtype), image], 2)

    def _denominators(self, queries: Tensor, z: Tensor, m: Tensor, mask: Tensor | None) -> Tensor:
        """Of image queries and image keys, (B, H, blocks, tokens of one, 1)."""
        if not self.released:
            return _dot(queries, m @ z)
        own = _dot(queries, z)
        if mask is not None:  # where there is no query, there is no denominator to mix
            own = own * self._cut_up(mask[:, None, :, None].to(z))
        return (m @ own.squeeze(-1)).unsqueeze(-1)

    def _by_token(self, of_blocks: Tensor) -> Tensor:
        return of_blocks[:, None].expand(-1, self.cut.tall * self.cut.wide).reshape(-1)

    def _cut_up(self, x: Tensor) -> Tensor:
        """(B, H, N, e) → image tokens as (B, H, blocks, tokens of one, e), zero where there is none."""
        (rows, columns), (down, across, tall, wide) = self.grid, self.cut
        x = x[:, :, self.site.prefix :]
        x = F.pad(x, (0, 0, 0, rows * columns - x.shape[2])).unflatten(2, self.grid)
        x = F.pad(x, (0, 0, 0, across * wide - columns, 0, down * tall - rows))
        x = x.unflatten(3, (across, wide)).unflatten(2, (down, tall)).transpose(3, 4)
        return x.flatten(4, 5).flatten(2, 3)

    def _join(self, x: Tensor) -> Tensor:
        """(B, H, blocks, tokens of one, e) → (B, H, rows·columns, e)."""
        (rows, columns), (down, across, tall, wide) = self.grid, self.cut
        x = x.unflatten(3, (tall, wide)).unflatten(2, (down, across)).transpose(3, 4)
        return x.flatten(4, 5).flatten(2, 3)[:, :, :rows, :columns].flatten(2, 3)


def _dot(queries: Tensor, z: Tensor) -> Tensor:
    """φ(q)·z of each block, as z φ(q)ᵀ: a product with one row is faster than one with one column."""
    return (z.unsqueeze(3) @ queries.transpose(3, 4)).transpose(3, 4)


def _grid(site: Site) -> tuple[int, int]:
    return site.grid or (1, max(1, site.tokens - site.prefix))


def _lead(site: Site) -> int:
    """The number of blocks of prefix tokens: one, where there are any."""
    return min(1, site.prefix)


def _of_blocks(site: Site, blocks: int | None) -> Site:
    """With blocks as its tokens."""
    cut, lead = _cut(site, blocks), _lead(site)
    return replace(site, tokens=lead + cut.blocks, grid=cut[:2], prefix=lead)


def _cut(site: Site, blocks: int | None) -> Cut:
    grid = _grid(site)
    tall, wide = (-(-side // (round(math.sqrt(side)) if blocks is None else blocks)) for side in grid)
    return Cut(-(-grid[0] // tall), -(-grid[1] // wide), tall, wide)


def _start(cut: Cut, init: str) -> Tensor:
    """M (blocks, blocks), columns of mean one."""
    rows, columns = torch.arange(cut.down), torch.arange(cut.across)
    places = torch.cartesian_prod(rows, columns).view(-1, 2).float()
    distance = torch.cdist(places, places)
    relative = distance / distance.max().clamp_min(1)
    decay = {"cos": (relative * math.pi / 4).cos(), "linear": 1 - relative, "exp": (-distance / 3).exp()}[init]
    return (decay / decay.mean(0)).clamp_min(LEAST)
