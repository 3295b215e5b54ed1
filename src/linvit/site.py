"""Where an attention sits in a model (`Site`), and what it costs there (`Cost`). Neither needs torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Site:
    """The place of an attention in a model: shapes, grid, layer and seed."""

    heads: int
    head_dim: int
    tokens: int
    grid: tuple[int, int] | None = None  # the image tokens as rows × columns
    prefix: int = 0  # tokens before them (CLS)
    layer: int = 0
    seed: int = 0
    causal: bool = False

    def __post_init__(self) -> None:
        for name, least in {"heads": 1, "head_dim": 1, "tokens": 1, "prefix": 0, "layer": 0, "seed": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
        if self.grid is not None:
            object.__setattr__(self, "grid", tuple(self.grid))
            if len(self.grid) != 2 or min(self.grid) < 1 or self.prefix + math.prod(self.grid) != self.tokens:
                raise ValueError(
                    f"grid={self.grid} with prefix={self.prefix} does not make tokens={self.tokens}:"
                    " tokens must be prefix + rows × columns"
                )

    def at(self, tokens: int) -> Site:
        """The same site with this many tokens. The image tokens form the grid that is nearest to a square; there is no
        grid if that would be a single row."""
        image = tokens - self.prefix
        if image < 0:
            raise ValueError(f"prefix={self.prefix} is more than tokens={tokens}")
        grid = squarest(image) if image else (0, 0)
        return replace(self, tokens=tokens, grid=grid if grid[0] > 1 or image == 1 else None)


def squarest(tokens: int) -> tuple[int, int]:
    """The grid of this many tokens that is nearest to a square."""
    rows = next(n for n in range(math.isqrt(tokens), 0, -1) if tokens % n == 0)
    return rows, tokens // rows


@dataclass(frozen=True)
class Cost:
    """Cost of a model or a part of it."""

    parameters: int = 0
    macs: int = 0  # multiply–accumulates of one image's forward pass
    alive: int = 0  # peak of temporary numbers while it is built or processes one image
    kept: int = 0  # numbers in buffers
    drawn: int = 0  # of these, random numbers, which `redraw` changes
    shared: int = 0  # parameters shared by all such layers of a model
    features: int = 0  # features per token, or projected keys; the maximum over layers
    overhead: int = 0  # time of copies and the like, expressed in multiply–accumulates; for forecasts

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.parameters + other.parameters - min(self.shared, other.shared),
            self.macs + other.macs,
            max(self.alive, other.alive),
            self.kept + other.kept,
            self.drawn + other.drawn,
            max(self.shared, other.shared),
            max(self.features, other.features),
            self.overhead + other.overhead,
        )

    def __mul__(self, count: int) -> Cost:
        """Of this many layers."""
        if not count:
            return Cost()
        parameters = count * (self.parameters - self.shared) + self.shared
        many = {name: count * getattr(self, name) for name in ("macs", "kept", "drawn", "overhead")}
        return replace(self, parameters=parameters, **many)

    @property
    def memory(self) -> int:
        """Bytes."""
        return 4 * (self.parameters + self.kept + self.alive)
