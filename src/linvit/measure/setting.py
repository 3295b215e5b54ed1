"""Where attentions are called to be timed or weighed: all but the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linvit.attention import Attention
from linvit.measure.cost import squarest
from linvit.measure.peers import create
from linvit.measure.provenance import check_bfloat16
from linvit.measure.race import ROUNDS
from linvit.randomness import generator
from linvit.records import Tag

MODES = ("forward", "both")  # both: forward and backward
SHAPE = ("heads", "head_dim", "prefix", "batch", "seed")


@dataclass(frozen=True, kw_only=True)
class Setting:
    heads: int = 8
    head_dim: int = 64
    prefix: int = 0  # how many of the tokens come before the image's
    causal: bool = False
    batch: int = 1
    rounds: int = ROUNDS
    seed: int = 0
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name, least in {"heads": 1, "head_dim": 1, "prefix": 0, "batch": 1, "rounds": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.dtype == torch.bfloat16:
            check_bfloat16("dtype=bfloat16", self.device)

    def site(self, tokens: int) -> dict[str, Any]:
        """With the grid that is nearest to a square, if the tokens after the prefix make one of several rows."""
        image = tokens - self.prefix
        if image < 0:
            raise ValueError(f"prefix={self.prefix} is more than the {tokens} tokens there are")
        rows, columns = squarest(image) if image > 0 else (0, 0)
        grid = (rows, columns) if rows > 1 or image == 1 else None
        return {"heads": self.heads, "head_dim": self.head_dim, "tokens": tokens, "grid": grid, "prefix": self.prefix,
                "seed": self.seed, "causal": self.causal}  # fmt: skip

    def attention(self, spec: str, tokens: int) -> Attention:
        return create(spec, **self.site(tokens)).to(self.device)

    def inputs(self, tokens: int) -> Tensor:
        """q, k, v and a gradient of the output, (4, B, H, N, D)."""
        shape = 4, self.batch, self.heads, tokens, self.head_dim
        made = torch.randn(shape, generator=generator("speed", self.seed, tokens))
        return made.to(self.device, self.dtype)

    def input_bytes(self, tokens: int) -> int:
        """That they take."""
        return 4 * self.batch * self.heads * tokens * self.head_dim * self.dtype.itemsize

    def shape(self) -> dict[str, Tag]:
        return {name: getattr(self, name) for name in SHAPE}

    def as_text(self) -> dict[str, Any]:
        """For another process; `of_text` reads it."""
        where = {"device": str(self.device), "dtype": str(self.dtype).removeprefix("torch.")}
        return {**self.shape(), "causal": self.causal, **where}

    @classmethod
    def of_text(cls, text: Mapping[str, Any]) -> Setting:
        return cls(**{**text, "dtype": getattr(torch, text["dtype"])})
