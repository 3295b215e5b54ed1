"""linvit's attentions in other libraries: by name in transformers, as a class for timm's `attn_layer`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention import Attention, create_attention
from linvit.conversion.adapters import bidirectional, key_mask, places, timm
from linvit.registry import parse


def register_transformers(spec: str) -> str:
    """Register `attn_implementation="linvit-<spec>"` in transformers, masks included, and return that name.

    Only attentions without weights of their own can be registered; for others there is `linearize`. All layers draw the
    same random features, since transformers does not pass the layer; with `linearize` each layer has its own. The grid
    of tokens comes from the configuration of the model, for attentions that need it.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError:
        raise ValueError("transformers 5 is not installed: pip install 'linvit[hf]'") from None
    spec = str(parse(spec))
    probe = create_attention(spec, heads=1, head_dim=8, tokens=4097, grid=(64, 64), prefix=1)
    if names := [name for name, _ in probe.named_parameters()]:
        raise ValueError(f"spec '{spec}' learns {names[0]}, which transformers' registry cannot store: use linearize")
    name = f"linvit-{spec}"
    AttentionInterface.register(name, functools.partial(_attend, spec))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def _attend(
    spec: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: q, k, v (B, H, N, D), q unscaled → (B, N, H, D)."""
    bidirectional(getattr(module, "is_causal", False))
    b, heads, n, d = query.shape
    if scaling is not None and not math.isclose(scaling, d**-0.5):
        query = query * (scaling * math.sqrt(d))
    grid, prefix = places(getattr(module, "config", None)) or (None, 0)
    if grid is not None and prefix + math.prod(grid) != n:  # images of another size, whose grid is not known
        grid = None
    attention = _built(spec, heads, d, n, grid, prefix, query.device)
    return attention(query, key, value, key_mask(attention_mask, b, n)).transpose(1, 2).contiguous(), None


@functools.lru_cache(maxsize=64)
def _built(
    spec: str, heads: int, head_dim: int, tokens: int, grid: tuple[int, int] | None, prefix: int, device: torch.device
) -> Attention:
    """Features depend on the seed alone, not on the number of tokens."""
    made = create_attention(spec, heads=heads, head_dim=head_dim, tokens=tokens, grid=grid, prefix=prefix)
    return made.to(device)


class TimmAttention(nn.Module):
    """Constructor, parameters and forward of timm's `Attention`."""

    create: Callable[..., Attention]
    forward = timm

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        if attn_head_dim is None and dim % num_heads:
            raise ValueError(f"dim={dim} is not a multiple of num_heads={num_heads}: give attn_head_dim")
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ValueError("qk_norm and scale_norm need a norm_layer")
        self.num_heads, self.head_dim = num_heads, attn_head_dim or dim // num_heads
        self.scale = self.head_dim**-0.5
        inner, place = self.num_heads * self.head_dim, {"device": device, "dtype": dtype}

        def norm(wanted: bool, width: int) -> nn.Module:
            return norm_layer(width, **place) if wanted and norm_layer else nn.Identity()

        self.qkv = nn.Linear(dim, 3 * inner, bias=qkv_bias, **place)
        self.q_norm, self.k_norm = norm(qk_norm, self.head_dim), norm(qk_norm, self.head_dim)
        self.attn_drop = nn.Dropout(attn_drop)  # of softmax's weights, which a linear attention does not compute
        self.norm = norm(scale_norm, inner)
        self.proj = nn.Linear(inner, dim_out or dim, bias=proj_bias, **place)
        self.proj_drop = nn.Dropout(proj_drop)
        self.linvit = type(self).create(heads=num_heads, head_dim=self.head_dim).to(device)


def timm_attention(
    spec: str, *, grid: tuple[int, int] | None = None, prefix: int = 1, seed: int = 0
) -> type[TimmAttention]:
    """A class for timm's `VisionTransformer(attn_layer=…)`; make one per model, since it counts the layers.

    timm passes an attention neither its layer nor its tokens. An attention that depends on them, such as linformer,
    needs `grid`, that of the image tokens, and `prefix`, the number of tokens before it (CLS).
    """
    spec = str(parse(spec))
    tokens = None if grid is None else prefix + math.prod(grid)
    if tokens is None:
        few, many = (create_attention(spec, heads=1, head_dim=8, tokens=n).state_dict() for n in (1024, 2048))
        if any(few[key].shape != many[key].shape for key in few):
            raise ValueError(f"spec '{spec}' is made for a number of tokens: give grid=(rows, columns)")
    layers = itertools.count()

    class LinvitAttention(TimmAttention):
        @staticmethod
        def create(heads: int, head_dim: int) -> Attention:
            site = {"tokens": tokens or 1, "grid": grid, "prefix": prefix if grid else 0}
            return create_attention(spec, heads=heads, head_dim=head_dim, layer=next(layers), seed=seed, **site)  # type: ignore[arg-type]

    LinvitAttention.__name__ = LinvitAttention.__qualname__ = f"LinvitAttention[{spec}]"
    return LinvitAttention
