"""Agent attention: a few agents, which are means of image queries, attend to all tokens, and all tokens to the agents.

    out = softmax(q aᵀ/√d + B₂) [softmax(a kᵀ/√d + B₁) v]      a = q averaged over n cells of the grid

Two softmaxes by PyTorch's fused kernel, O(Nn); of inputs in half precision the first is in float32, with biases both.
Prefix tokens take part in both, but belong to no cell. Fewer tokens than the attention was built for are the first of
the grid; a cell without tokens has no agent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import PRECISE, Attention, Switches, precise, register, softmax_attention
from linvit.attention.halves import softmax_over_computed, sums, wide
from linvit.kernels.base import positive, tracing
from linvit.randomness import generator
from linvit.site import Cost, Site

TABLE = 7  # side of the table of each agent's biases, which is interpolated to the grid


@register("agent")
class Agent(Attention):
    """n: maximum number of agents, arranged in about as many rows as columns.

    bias=learned: B₁ and B₂ have, for each head and agent, a 7 × 7 table interpolated to the grid, plus one number for
    each row, column and prefix token.
    """

    formula = "softmax(q aᵀ/√d) [softmax(a kᵀ/√d) v], a = q averaged over n cells"
    estimates = "itself"
    origin = "Agent Attention (ECCV 2024), arXiv:2312.08874"
    invariants = "rows sum to one and are not negative; rank at most n"
    size_option = "n"
    precision = "half"
    can_be_causal = False
    why_not_causal = "an agent is a mean of queries, later ones too"
    rows: Tensor  # (agents down, rows of the grid): 1 where a row belongs to a cell
    columns: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Options:
        n: int = 49
        bias: Literal["none", "learned"] = "none"

        def agents(self, site: Site) -> tuple[int, int]:
            """Their number down and across, at most that of rows and columns."""
            rows, columns = _grid(site)
            down = max(1, min(math.isqrt(self.n), rows))
            across = max(1, min(self.n // down, columns))
            return max(down, min(self.n // across, rows)), across

        def shapes(self, site: Site) -> dict[str, tuple[int, ...]]:
            """Of the biases."""
            if self.bias == "none":
                return {}
            rows, columns = _grid(site)
            sizes = {"table": (TABLE, TABLE), "row": (rows,), "column": (columns,), "prefix": (site.prefix,)}
            shapes = {name: (2, site.heads, *self.agents(site), *size) for name, size in sizes.items()}
            return {f"bias_{name}": shape for name, shape in shapes.items() if shape[-1]}

    def __init__(self, site: Site, switches: Switches = Switches(), **options: Any):  # noqa: B008 (frozen)
        super().__init__(site, switches)
        given = self.Options(**options)
        positive("n", given.n, at_least=1)
        self.grid = _grid(site)
        if not self.grid[1]:
            raise ValueError(f"agents are means of image tokens, but all {site.tokens} tokens are prefix={site.prefix}")
        for name, cells, size in zip(("rows", "columns"), given.agents(site), self.grid, strict=True):
            self.register_buffer(name, _members(cells, size), persistent=False)
        source = generator("agent", site.seed, site.layer)
        for name, shape in given.shapes(site).items():
            start = nn.init.trunc_normal_(torch.empty(shape), std=0.02, generator=source)
            self.register_parameter(name, nn.Parameter(start))
        self.biases = list(given.shapes(site))

    @classmethod
    def own_cost(cls, site: Site, **options: Any) -> Cost:
        """Without a grid, means over cells are left out: on a large square grid they take little."""
        given = cls.Options(**options)
        (rows, columns), (down, across) = _grid(site), given.agents(site)
        agents = down * across
        pooling = (down * rows * columns if down < rows else 0) + (agents * columns if across < columns else 0)
        pooling = 0 if site.grid is None else pooling
        biases = 2 * agents * site.tokens * site.heads if given.bias != "none" else 0
        return Cost(
            sum(map(math.prod, given.shapes(site).values())),
            (4 * site.tokens * agents + pooling) * site.head_dim * site.heads,
            biases,
            down * rows + across * columns,
            features=agents,
        )

    @classmethod
    def regridded(cls, weights: Mapping[str, Tensor], old: Site, new: Site, **options: Any) -> dict[str, Tensor]:
        """Biases are interpolated along the grid, and along the agents where their number changes."""
        shapes = cls.Options(**options).shapes(new)
        return {name: _resized(value, shapes[name]) if name in shapes else value for name, value in weights.items()}

    @torch.no_grad()
    def near_softmax(self) -> None:
        super().near_softmax()
        for name in self.biases:
            getattr(self, name).zero_()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        first, n, places = self.site.prefix, q.shape[2], math.prod(self.grid)
        if n - first > places:
            raise ValueError(f"{n} tokens do not fit grid={self.grid} with prefix={first}")
        agents, own = self._pooled(q[:, :, first:]), None
        if mask is not None or n - first < places:
            kept = q.new_ones(1, n) if mask is None else mask.to(q)
            mass = self._pooled(kept[:, None, first:, None])  # (B or 1, 1, agents, 1)
            agents, own = agents / mass.where(mass > 0, 1.0), mass[..., 0] > 0
            own = (own | ~own.any(-1, keepdim=True)).flatten(1)  # without any agent, all stand for the mean of v
            own = own.expand(q.shape[0], -1)
        agents, wide_k, wide_v = precise(agents, k, v)
        if not self.biases:
            gathered = softmax_attention(agents, wide_k, wide_v, mask)
            attend = softmax_attention if q.dtype in PRECISE else softmax_over_computed
            return attend(q, agents, gathered, own)
        ask, answer = self._bias(n, agents)
        gathered = _biased(agents, wide_k, wide_v, ask, mask)
        return _biased(q.to(agents), agents, gathered, answer.transpose(1, 2), own).to(v.dtype)

    def _pooled(self, image: Tensor) -> Tensor:
        """(B, H, image tokens, e) → means over the cells, (B, H, agents, e); places without a token count as zeros."""
        (b, h, n, e), (rows, columns), down, across = image.shape, self.grid, len(self.rows), len(self.columns)
        x = F.pad(image, (0, 0, 0, rows * columns - n)) if n < rows * columns else image
        if down < rows:
            x = _means(self.rows, x.reshape(b, h, rows, columns * e))
        if across < columns:
            x = _means(self.columns, x.reshape(b, h, down, columns, e))
        return x.reshape(b, h, down * across, e)

    def _bias(self, tokens: int, like: Tensor) -> Tensor:
        """B₁ and B₂ᵀ, (2, heads, agents, tokens)."""
        table, row, column, *prefix = (getattr(self, name).flatten(2, 3) for name in self.biases)
        lines = row[..., :, None] + column[..., None, :]
        table = F.interpolate(table.flatten(0, 1), self.grid, mode="bilinear", align_corners=False)
        image = (table.view_as(lines) + lines).flatten(3)
        return torch.cat([*prefix, image], -1)[..., :tokens].to(like)


def _grid(site: Site) -> tuple[int, int]:
    return site.grid or (1, site.tokens - site.prefix)


def _members(cells: int, size: int) -> Tensor:
    """(cells, size): 1 from ⌊i·size/cells⌋ up to ⌈(i + 1)·size/cells⌉ for cell i, as in adaptive pooling."""
    at, cell = torch.arange(size), torch.arange(cells)[:, None]
    return ((at >= cell * size // cells) & (at < -(-(cell + 1) * size // cells))).float()


def _means(members: Tensor, x: Tensor) -> Tensor:
    """(…, size, e) → (…, cells, e), in float32 or better."""
    members = members.to(x.device, wide(x))
    return sums(members, x) / members.sum(1, keepdim=True)


def _resized(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Linear interpolation along every axis of another size."""
    for axis, size in enumerate(shape):
        if value.shape[axis] != size:
            lines = value.movedim(axis, -1)
            flat = lines.reshape(-1, 1, 1, lines.shape[-1]).float()
            flat = F.interpolate(flat, (1, size), mode="bilinear", align_corners=False, antialias=True)
            value = flat.reshape(*lines.shape[:-1], size).movedim(-1, axis).to(value.dtype)
    return value.contiguous()


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q kᵀ/√d + bias) v with bias (H, queries, keys); a row with no key left gives zero."""
    if mask is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        # An exported graph has other strides than the fused kernel, and ONNX's exporter drops what only copies.
        return torch.cat([out], -1) if tracing() else out
    keep = mask[:, None, None, :]
    some = keep.any(-1, keepdim=True)
    bias = torch.where(keep | ~some, bias, -torch.inf)
    return torch.where(some, F.scaled_dot_product_attention(q, k, v, attn_mask=bias), 0.0)
