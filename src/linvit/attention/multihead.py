"""MultiHead owns the projections `qkv` and `proj`, under the same names for every attention.

Converting a model is therefore copying shared keys and initialising the rest.
"""

from __future__ import annotations

from torch import Tensor, nn

from linvit.attention import create_attention
from linvit.attention.base import Attention
from linvit.kernels.base import positive
from linvit.registry import Spec


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
        qkv_bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        positive("dim", dim, at_least=1)
        positive("heads", heads, at_least=1)
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim={dim} is not a multiple of heads={heads}: give head_dim")
            head_dim = dim // heads
        self.heads, self.head_dim = heads, head_dim
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=qkv_bias)
        if isinstance(attention, Attention):
            self.attention = attention
        else:
            self.attention = create_attention(
                attention, heads=heads, head_dim=head_dim, tokens=tokens, grid=grid, prefix=prefix, layer=layer,
                seed=seed, causal=causal,
            )  # fmt: skip
        self.proj = nn.Linear(heads * head_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N, dim) → (B, N, dim)."""
        out = self.attention(*self.split(x), mask=mask)
        return self.dropout(self.proj(out.transpose(1, 2).flatten(2)))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as (B, H, N, D)."""
        if x.ndim != 3 or x.shape[2] != self.qkv.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}: it must be (batch, tokens, {self.qkv.in_features})")
        b, n, _ = x.shape
        return self.qkv(x).view(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
