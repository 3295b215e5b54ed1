"""Attention modules of other libraries: where their q, k and v come from, and a forward that uses linvit's attention.

A module keeps its class, parameters and keys. It gets a submodule `linvit`, the attention, and a `forward` with the
signature of its class. Both are removed when softmax is restored.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention import Attention
from linvit.attention.grid import rotated
from linvit.attention.multihead import MultiHead
from linvit.kernels.base import tracing

PREFIX = {  # tokens, by transformers' model_type
    "vit": 1,
    "deit": 2,
    "dinov2": 1,
    "dinov2_with_registers": 1,
    "dinov3_vit": 1,
    "siglip_vision_model": 0,
}


def places(config: Any) -> tuple[tuple[int, int], int] | None:
    """The grid of image tokens and the number of tokens before them, from a configuration of transformers; None if it
    is not that of a supported vision transformer."""
    config = getattr(config, "vision_config", config)  # of a model with texts
    if getattr(config, "model_type", None) not in PREFIX:
        return None
    prefix = PREFIX[config.model_type] + getattr(config, "num_register_tokens", 0)
    return grid_of(config.image_size, config.patch_size), prefix


def grid_of(size: Any, patch: Any) -> tuple[int, int]:
    (rows, columns), (height, width) = ((x, x) if isinstance(x, int) else x for x in (size, patch))
    return rows // height, columns // width


def key_mask(mask: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """Which keys are kept, (B, N) bool, from a mask over scores (…, queries, keys): bool, or added to them. It must be
    the same for all queries: linear attention sums over the keys before it sees a query."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        if not tracing() and ((mask > torch.finfo(mask.dtype).min / 2) & (mask != 0)).any():
            raise ValueError("attention mask: a linear attention has no scores that a bias could be added to")
        mask = mask == 0
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    mask = mask.expand(batch, mask.shape[1], mask.shape[2], tokens)
    rows = mask[:, 0, 0]
    if not tracing() and not torch.equal(mask, rows[:, None, None].expand_as(mask)):
        raise ValueError(f"attention mask {tuple(mask.shape)}: a linear attention masks keys, the same for all queries")
    return rows


def bidirectional(causal: bool) -> None:
    if causal:
        raise ValueError("is_causal=True: this attention is for images, where every token attends to every other")


Rotary = tuple[Tensor, Tensor]  # cosine and sine (image tokens, head_dim)


def _mixed(self: Any, hidden_states: Tensor, attention_mask: Tensor | None, rotary: Rotary | None = None) -> Tensor:
    """(B, N, dim) → what the module of transformers passes to its output projection. Image tokens come last."""
    b, n, _ = hidden_states.shape
    parts = (part(hidden_states).view(b, n, -1, self.head_dim) for part in (self.q_proj, self.k_proj, self.v_proj))
    q, k, v = (part.transpose(1, 2) for part in parts)
    if rotary is not None:
        first = n - rotary[0].shape[-2]
        q, k = (torch.cat([x[:, :, :first], rotated(x[:, :, first:], *rotary)], 2) for x in (q, k))
    return self.linvit(q, k, v, key_mask(attention_mask, b, n)).transpose(1, 2).reshape(b, n, -1)


def hugging_face(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers passes its own keyword arguments to every layer; those that matter to images are named."""
    return self.o_proj(_mixed(self, hidden_states, attention_mask)), None


def dinov3(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: Rotary | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    return self.o_proj(_mixed(self, hidden_states, attention_mask, position_embeddings)), None


def siglip(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    return self.out_proj(_mixed(self, hidden_states, attention_mask)), None


def timm(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    bidirectional(is_causal)
    b, n, _ = x.shape
    q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
    out = self.linvit(self.q_norm(q), self.k_norm(k), v, key_mask(attn_mask, b, n))
    out = out.transpose(1, 2).reshape(b, n, -1)
    if (norm := getattr(self, "norm", None)) is not None:  # older timm has none
        out = norm(out)
    return self.proj_drop(self.proj(out))


def torchvision(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """As nn.MultiheadAttention, without weights to return. True in its padding mask means drop."""
    bidirectional(is_causal)
    if not (query is key is value):
        raise ValueError("query, key and value are not the same: only self-attention is replaced")
    if attn_mask is not None:
        raise ValueError("attn_mask: a linear attention masks keys: give key_padding_mask")
    x = query if self.batch_first else query.transpose(0, 1)
    b, n, _ = x.shape
    parts = F.linear(x, self.in_proj_weight, self.in_proj_bias)
    q, k, v = parts.view(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
    out = self.linvit(q, k, v, None if key_padding_mask is None else ~key_padding_mask.bool())
    out = self.out_proj(out.transpose(1, 2).reshape(b, n, -1))
    return out if self.batch_first else out.transpose(0, 1), None


@dataclass(frozen=True)
class AttentionModule:
    """One library's attention module."""

    heads: str  # the attribute with their number
    slot: str = "linvit"  # the attribute that holds the attention
    forward: Callable[..., Any] | None = None  # None: the class's own uses the slot
    rotary: bool = False  # whether q and k come with rotary positions

    def put(self, module: nn.Module, attention: Attention) -> None:
        device = next(module.parameters()).device
        setattr(module, self.slot, attention.to(device).train(module.training))
        if self.forward is not None:
            module.forward = functools.partial(self.forward, module)  # can be copied and pickled, unlike a method

    def restore(self, module: nn.Module) -> None:
        """The module's own softmax."""
        if hasattr(module, self.slot):
            delattr(module, self.slot)
            del module.forward


LINVIT = AttentionModule("heads", "attention")
HUGGING_FACE = AttentionModule("num_attention_heads", forward=hugging_face)
TIMM = AttentionModule("num_heads", forward=timm)
TORCHVISION = AttentionModule("num_heads", forward=torchvision)
CLASSES = dict.fromkeys(
    ("ViTAttention", "DeiTAttention", "Dinov2Attention", "Dinov2WithRegistersAttention"), HUGGING_FACE
) | {
    "DINOv3ViTAttention": AttentionModule("num_heads", forward=dinov3, rotary=True),
    "SiglipAttention": AttentionModule("num_heads", forward=siglip),
}


def find(model: nn.Module) -> list[tuple[AttentionModule, nn.Module]]:
    """Every attention module that can be replaced, in order."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            raise ValueError(f"{name}: nn.TransformerEncoderLayer has a fast path that bypasses its attention")
        if (kind := _kind(name, module)) is not None:
            scale = getattr(module, "scaling", getattr(module, "scale", None))
            head_dim: Any = module.head_dim
            if scale is not None and not math.isclose(scale, head_dim**-0.5):
                raise ValueError(f"{name}: scores are scaled by {scale:g}, not by head_dim^-½ = {head_dim**-0.5:g}")
            found.append((kind, module))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention that linvit can replace: it supports the vision transformers of "
            "transformers (ViT, DeiT, DINOv2, DINOv3, SigLIP), timm, torchvision and linvit"
        )
    return found


def _kind(name: str, module: nn.Module) -> AttentionModule | None:
    if isinstance(module, MultiHead):
        return LINVIT
    if (kind := CLASSES.get(type(module).__name__)) is not None:
        if not hasattr(module, "head_dim"):
            raise ValueError(f"{name}: attention of transformers 4 is not supported, only that of transformers 5")
        return None if getattr(module.config, "model_type", "") == "siglip_text_model" else kind
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise ValueError(
                f"{name}: nn.MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn cannot be replaced"
            )
        return TORCHVISION if name.endswith("self_attention") else None
    names = ("qkv", "proj", "num_heads", "head_dim", "scale", "q_norm", "k_norm", "attn_drop", "proj_drop")
    plain = all(hasattr(module, name) for name in names)
    return TIMM if plain and "rope" not in inspect.signature(module.forward).parameters else None
