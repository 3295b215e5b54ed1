"""Ω: the random rows ω_f behind a kernel's features.

`orthogonal` draws Haar-distributed blocks: QR of a Gaussian with the signs of R's diagonal moved into Q. Without that
step LAPACK's convention fixes the sign of each reflection and positive features are biased by tens of percent.
Everything comes from a generator seeded by (seed, layer, step), so that ranks and resumed runs draw the same rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from linvit.devices import to_device
from linvit.kernels.base import FeatureMap, Features, Size, tracing
from linvit.randomness import generator
from linvit.site import Site

Projection = Literal["orthogonal", "iid", "hadamard", "none"]
Norms = Literal["chi", "sqrt"]


def _haar(d: int, source: torch.Generator) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(d, d, generator=source, dtype=torch.float64))
    return q * r.diagonal().sign()


def _hadamard(d: int, source: torch.Generator) -> Tensor:
    """Three rounds of H·diag(±1): d rows, approximately Gaussian after scaling; d is a power of two."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < d:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    block = torch.eye(d, dtype=torch.float64)
    for _ in range(3):
        block = h @ (block * (torch.randint(0, 2, (d, 1), generator=source) * 2 - 1)) / math.sqrt(d)
    return block


def draw(m: int, d: int, projection: Projection, norms: Norms, source: torch.Generator) -> Tensor:
    """(m, d) rows, each marginally N(0, I) for `chi` norms and of length √d for `sqrt`; float64."""
    if projection == "iid":
        rows = torch.randn(m, d, generator=source, dtype=torch.float64)
        return rows if norms == "chi" else rows * (math.sqrt(d) / rows.norm(dim=1, keepdim=True))
    size = d if projection == "orthogonal" else 1 << (d - 1).bit_length()  # hadamard pads d to a power of two
    make = _haar if projection == "orthogonal" else _hadamard

    def block() -> Tensor:
        rows = make(size, source)[:, :d]
        return rows if rows.any(1).all() else block()  # a padded row may lie in the padding alone

    rows = torch.cat([block() for _ in range(-(-m // size))])[:m]
    if norms == "sqrt":
        return rows * (math.sqrt(d) / rows.norm(dim=1, keepdim=True))
    return rows * torch.randn(m, size, generator=source, dtype=torch.float64).norm(dim=1, keepdim=True)


class Omega(nn.Module):
    """A buffer of random rows, shared by a layer's heads, that changes only in `redraw`."""

    rows: Tensor

    def __init__(self, m: int, d: int, projection: Projection, norms: Norms, seed: int, layer: int):
        super().__init__()
        self.kind: Projection = projection
        self.norms: Norms = norms
        self.key = seed, layer
        self.register_buffer("rows", torch.empty(m, d))
        self.redraw(0)

    @torch.no_grad()
    def redraw(self, step: int) -> None:
        m, d = self.rows.shape
        rows = draw(m, d, self.kind, self.norms, generator("omega", *self.key, int(step)))
        self.rows.copy_(to_device(rows.to(self.rows.dtype), self.rows.device))


class Projected(FeatureMap):
    """A kernel of Ωx or, with projection=none, of x itself."""

    size_option = "m"
    deterministic: ClassVar[bool] = True  # whether projection=none makes sense
    _made: tuple | None = None  # for which Ω and inputs, and what

    @dataclass(frozen=True, kw_only=True)
    class Options(FeatureMap.Options):
        m: int = 64  # rows of Ω
        projection: Projection = "orthogonal"  # how the rows of Ω are drawn

    def __init__(self, site: Site, **options):
        super().__init__(site, **options)
        m, projection, d = self.options.m, self.options.projection, site.head_dim
        self.omega = None
        if projection != "none":
            self.affordable(m * d, f"Ω ({m} × {d})")
            norms: Norms = getattr(self.options, "norms", "chi")
            self.omega = Omega(m, d, projection, norms, site.seed, site.layer)
        elif not self.deterministic:
            raise ValueError(f"projection=none is not defined for {type(self).__name__.lower()}: its Ω must be random")
        else:
            self.no_effect("projection=none has no Ω", "m", "norms")

    @classmethod
    def size(cls, site: Site, options: Options) -> Size:
        rows, d = 0 if options.projection == "none" else options.m, site.head_dim
        return Size(rows or d, rows * d, drawn=rows * d)

    def matrix(self) -> Tensor | None:
        """Ω as the features use it."""
        return None if self.omega is None else self.omega.rows

    def make_features(self, x: Tensor) -> Features:
        """What is done with Ωx, in x's precision and on its device."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Features:
        """`make_features`, made once while Ω stays as it is: a small call has no time to scale Ω, or to look for it."""
        if self._made is not None and not tracing():
            buffers, rows, version, dtype, device, inference, φ = self._made
            if (
                buffers.get("rows") is rows
                and rows._version == version
                and x.dtype is dtype
                and x.device == device
                and torch.is_inference_mode_enabled() is inference
            ):
                return φ
        φ = self.make_features(x)
        if self.omega is not None and not tracing():
            rows = self.omega.rows
            if not (rows.requires_grad or rows.is_inference()):  # else no version would tell of a change
                inference = torch.is_inference_mode_enabled()
                self._made = self.omega._buffers, rows, rows._version, x.dtype, x.device, inference, φ
        return φ

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_made": None}  # copies have an Ω of their own

    def redraw(self, step: int) -> None:
        if self.omega is not None:
            self.omega.redraw(step)
