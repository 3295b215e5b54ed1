"""Options of every attention that need the grid of image tokens: depthwise convolutions and rotary positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.randomness import generator
from linvit.site import Site

BASE = 100.0  # of the frequencies, as is usual for images; texts, which are longer than a grid's side, take 10,000


class DepthwiseConvolution(nn.Module):
    """size × size over the grid of image tokens, one filter for each channel of each head; zero for prefix tokens.
    Fewer tokens are the first of the grid."""

    def __init__(self, site: Site, size: int, option: str = "dwc"):
        super().__init__()
        if size < 1 or size % 2 == 0:
            raise ValueError(f"{option}={size} must be an odd size, e.g. {option}=5")
        if site.grid is None:
            raise ValueError(f"{option}={size} is a convolution over image tokens: give grid=(rows, columns)")
        if size > 2 * max(site.grid) - 1:
            raise ValueError(
                f"{option}={size} is more than {2 * max(site.grid) - 1}, which covers all of grid={site.grid}"
            )
        if site.causal:
            raise ValueError(f"{option}={size} looks at later tokens, which a causal attention may not")
        self.site, self.size = site, size
        channels = site.heads * site.head_dim
        source = generator(option, site.seed, site.layer)
        self.weight = nn.Parameter(torch.empty(channels, 1, size, size).uniform_(-1, 1, generator=source) / size)

    def forward(self, v: Tensor) -> Tensor:
        b, h, n, d = v.shape
        assert self.site.grid is not None
        rows, columns = self.site.grid
        image = v[:, :, self.site.prefix :].transpose(1, 2).reshape(b, -1, h * d)
        missing = rows * columns - image.shape[1]
        if missing < 0:
            raise ValueError(f"{n} tokens do not fit grid={self.site.grid} with prefix={self.site.prefix}")
        if missing:
            image = F.pad(image, (0, 0, 0, missing))
        image = image.view(b, rows, columns, h * d).permute(0, 3, 1, 2)  # channels last, the faster layout on a CPU
        weight = self.weight.to(v).contiguous(memory_format=torch.channels_last)
        out = F.conv2d(image, weight, padding=self.size // 2, groups=h * d)
        out = out.permute(0, 2, 3, 1).reshape(b, rows * columns, h, d)[:, : rows * columns - missing].transpose(1, 2)
        return F.pad(out, (0, 0, self.site.prefix, 0)) if self.site.prefix else out


class Convention(NamedTuple):
    """How rotary positions turn places into angles, and which channels of a head they turn together."""

    base: float  # of the frequencies
    coordinates: Callable[[int], Tensor]  # of the rows, or columns, of a grid with this many
    pairs: Literal["quarters", "halves", "neighbours"]


def _integers(side: int) -> Tensor:
    return torch.arange(side).double()


def _centres(side: int) -> Tensor:
    """Of patches, between −1 and 1, as angles."""
    return 2 * math.pi * (2 * (_integers(side) + 0.5) / side - 1)


def _sixteenths(side: int) -> Tensor:
    """As on a grid of 16 × 16, with which EVA-02 is pretrained."""
    return _integers(side) * (16 / side)


CONVENTIONS = {
    "2d": Convention(BASE, _integers, "quarters"),
    "dinov3": Convention(100.0, _centres, "halves"),
    "eva02": Convention(10_000.0, _sixteenths, "neighbours"),
}


class Rotation(nn.Module):
    """Rotary positions in two dimensions: half of the channel pairs are rotated by their token's row, half by its
    column, so that q·k depends on places only by their difference. Prefix tokens are not rotated."""

    cosine: Tensor  # (tokens, head_dim)
    sine: Tensor

    def __init__(self, site: Site, rope: str = "2d"):
        super().__init__()
        if site.grid is None:
            raise ValueError(f"rope={rope} rotates by the place on a grid: give grid=(rows, columns)")
        if site.causal:
            raise ValueError(f"rope={rope} is for bidirectional attentions: decoding does not know a token's place")
        if site.head_dim % 4:
            raise ValueError(f"rope={rope} needs a head_dim that is a multiple of 4, not {site.head_dim}")
        base, coordinates, pairs = CONVENTIONS[rope]
        self.rope, self.groups = rope, {"quarters": 2, "halves": 1, "neighbours": site.head_dim // 2}[pairs]
        count = site.head_dim // 4
        frequency = base ** (-torch.arange(count, dtype=torch.float64) / count)
        places = torch.meshgrid(*map(coordinates, site.grid), indexing="ij")
        angle = torch.cat([place[..., None] * frequency for place in places], -1).flatten(0, 1)
        angle = angle.unflatten(-1, (self.groups, 1, -1)).expand(-1, -1, 2, -1).flatten(1)
        angle = F.pad(angle, (0, 0, site.prefix, 0))
        for name, table in (("cosine", angle.cos()), ("sine", angle.sin())):
            self.register_buffer(name, table.float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, N, D) → the same, rotated."""
        n = x.shape[2]
        if n > len(self.cosine):
            raise ValueError(f"{n} tokens do not fit the {len(self.cosine)} places of rope={self.rope}")
        return rotated(x, self.cosine[:n], self.sine[:n], self.groups)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor, groups: int = 1) -> Tensor:
    """(…, N, D) by angles (N, D): in each of these groups of channels, the first half is paired with the second."""
    a, b = x.unflatten(-1, (groups, 2, -1)).unbind(-2)
    turned = torch.stack([-b, a], -2).flatten(-3)
    return (x * cosine + turned * sine).to(x.dtype)
