"""MultiHead owns the projections `qkv` and `proj`, under the same names for every attention.

Converting a model is therefore copying shared keys and initialising the rest. With fused=False there are `q_proj`,
`k_proj` and `v_proj` instead of `qkv`, as in Hugging Face's models; `fuse` and `separate` convert the weights of one
form to those of the other, exactly. Options that work on tokens (`gate`, `cpe`) are parts of it, next to the attention.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention import build_attention
from linvit.attention.base import Attention
from linvit.attention.grid import DepthwiseConvolution, Rotation
from linvit.kernels.base import positive
from linvit.registry import Spec
from linvit.site import Site

OF_SPEC = re.compile(r"\.(attention|gate|cpe)\.")  # names of weights that depend on the attention's spec
SILU_ONE = 1.2784645427610738  # where SiLU is 1


class MultiHead(nn.Module):
    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        tokens: int,
        head_dim: int | None = None,
        attention: str | Spec | Attention = "softmax",
        grid: tuple[int, int] | None = None,
        prefix: int = 0,
        layer: int = 0,
        seed: int = 0,
        causal: bool = False,
        rope: str | None = None,
        qkv_bias: bool = True,
        fused: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        positive("dim", dim, at_least=1)
        positive("heads", heads, at_least=1)
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim={dim} is not a multiple of heads={heads}: give head_dim")
            head_dim = dim // heads
        self.dim, self.heads, self.head_dim, self.fused = dim, heads, head_dim, fused
        if fused:
            self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=qkv_bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, heads * head_dim, bias=qkv_bias) for _ in "qkv")
        if isinstance(attention, Attention):
            self.attention = attention
        else:
            site = Site(heads, head_dim, tokens, grid, prefix, layer, seed, causal)
            self.attention = build_attention(attention, site, inside=True)
        switches, site = self.attention.switches, self.attention.site
        self.gate_kind = switches.gate
        self.gate = nn.Linear(dim, heads * head_dim) if switches.gate else None
        if rope and switches.rope:
            raise ValueError(f"rope={switches.rope} of the attention: the model already has rotary positions ({rope})")
        self.rope = Rotation(site, rope) if rope else None
        tokens_site = replace(site, heads=1, head_dim=dim)
        self.cpe = DepthwiseConvolution(tokens_site, switches.cpe, "cpe") if switches.cpe else None
        self.proj = nn.Linear(heads * head_dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.open_gate()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N, dim) → (B, N, dim)."""
        return self._joined(self.attention(*self.split(x), mask=mask), x)

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Decode one or a few tokens (B, t, dim) that follow those of `state` → outputs, new state."""
        out, state = self.attention.step(*self.split(x), state)
        return self._joined(out, x), state

    def positioned(self, x: Tensor) -> Tensor:
        """The block's input: with `cpe`, a depthwise convolution of the image tokens is added."""
        return x if self.cpe is None else x + self.cpe(x[:, None])[:, 0]

    def open_gate(self) -> None:
        """Set the bias of the gate such that the gate is one for zero weights."""
        if self.gate is not None:
            nn.init.constant_(self.gate.bias, SILU_ONE if self.gate_kind == "silu" else 1.0)

    @torch.no_grad()
    def near_softmax(self) -> None:
        """Initialise as close as possible to softmax attention with the same weights: gates of one, no cpe."""
        self.attention.near_softmax()
        self.open_gate()
        for part in (self.gate, self.cpe):
            if part is not None:
                part.weight.zero_()

    def _joined(self, out: Tensor, x: Tensor) -> Tensor:
        out = out.transpose(1, 2).flatten(2)
        if self.gate is not None:
            gate = self.gate(x)
            out = out * (F.silu(gate) if self.gate_kind == "silu" else gate)
        return self.dropout(self.proj(out))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as (B, H, N, D), q and k rotated if the model has rotary positions."""
        if x.ndim != 3 or x.shape[2] != self.dim:
            raise ValueError(f"x has shape {tuple(x.shape)}: it must be (batch, tokens, {self.dim})")
        if self.fused:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind()
        else:
            parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            q, k, v = (part.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2) for part in parts)
        return (q, k, v) if self.rope is None else (self.rope(q), self.rope(k), v)


def fuse(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with each `q_proj`, `k_proj` and `v_proj`, in any order, joined to a `qkv`; the rest unchanged."""
    names = [[re.sub(r"\b[qkv]_proj\b", name, key) for name in ("qkv", "q_proj", "k_proj", "v_proj")] for key in state]
    return {qkv: state[qkv] if qkv == parts[0] else torch.cat([state[key] for key in parts]) for qkv, *parts in names}


def separate(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with each `qkv` split into `q_proj`, `k_proj` and `v_proj`; the rest unchanged."""
    cut = {}
    for key, value in state.items():
        names = [re.sub(r"\bqkv\b", name, key) for name in ("q_proj", "k_proj", "v_proj")]
        cut |= {key: value} if key in names else dict(zip(names, value.chunk(3), strict=True))
    return cut
