"""A trained model's weights for images of another size: what belongs to the grid of tokens is interpolated."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.models.config import ModelConfig
from linvit.models.cost import grid
from linvit.registry import parse_layers

Grid = tuple[int, int]


def resized(tensors: Mapping[str, Tensor], config: ModelConfig, image_size: int) -> dict[str, Tensor]:
    """The weights of `config`'s model for images of this size: the same patches or filters on a larger or smaller grid.

    Learned positions are interpolated (bicubic), Linformer's projections and filters too, so that a constant row keeps
    its sum; prefix tokens and everything else stay as they are.
    """
    if config.stem in ("pixel", "length-one") and image_size != config.image_size:
        raise ValueError(f"stem={config.stem} has weights for image_size={config.image_size} alone, not {image_size}")
    old, new = grid(config), grid(config.model_copy(update={"image_size": image_size}))
    prefix, specs = config.prefix_tokens, parse_layers(config.attention, config.depth)
    tokens = prefix + math.prod(new)
    found = dict(tensors)
    for key, value in tensors.items():
        if old == new:
            break
        if key == "position" and value.shape[1] == prefix + math.prod(old):
            found[key] = _moved(value.transpose(1, 2), prefix, old, new, "bicubic").transpose(1, 2).contiguous()
        elif key.endswith(".attention.projection"):
            options = specs[int(key.split(".")[1])].options
            if options.get("kind") == "conv":
                found[key] = _stretched(value, -(-tokens // int(options.get("k") or min(64, tokens))))
            elif value.shape[-1] == prefix + math.prod(old):
                found[key] = _moved(value, prefix, old, new, "bilinear", math.prod(old) / math.prod(new))
    return found


def _stretched(value: Tensor, length: int) -> Tensor:
    """Filters (…, 1, taps) → (…, 1, length), in float32, with the same sums for a constant one."""
    taps = F.interpolate(value.float(), (1, length), mode="bilinear", align_corners=False, antialias=True)
    return (taps * (value.shape[-1] / length)).to(value.dtype)


def _moved(value: Tensor, prefix: int, old: Grid, new: Grid, mode: str, scale: float = 1.0) -> Tensor:
    """(…, prefix + old tokens) → (…, prefix + new tokens), in float32."""
    first, image = value[..., :prefix], value[..., prefix:].float()
    plane = image.reshape(-1, 1, *old)
    moved = F.interpolate(plane, new, mode=mode, align_corners=False, antialias=True) * scale
    return torch.cat([first, moved.reshape(*image.shape[:-1], -1).to(value.dtype)], -1)
