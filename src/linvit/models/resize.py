"""Weights for another image size: positions and projections over tokens follow the grid, all else stays."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.attention.linformer import regridded
from linvit.models.config import ModelConfig
from linvit.models.cost import grid


def resized(tensors: Mapping[str, Tensor], config: ModelConfig, image_size: int) -> dict[str, Tensor]:
    """The state dict of `config`'s model for images of another size, with its prefix tokens as they are.

    Positions are interpolated (bicubic, as is usual for vision transformers), and so are a Linformer's projections
    (bilinear), which are scaled too: a row that averaged tokens still does.
    """
    old, new = grid(config), grid(config.model_copy(update={"image_size": image_size}))
    found = dict(tensors)
    if old == new:
        return found
    for key, value in tensors.items():
        if key == "position":
            found[key] = _positions(value, config.prefix_tokens, old, new)
        elif key == "stem.position":  # of pixels, which the channels share
            side = config.image_size
            found[key] = _positions(value[None], 0, (side, side), (image_size, image_size))[0]
        elif key.endswith(".attention.projection") and value.ndim == 4 and value.shape[-1] == _tokens(config, old):
            found[key] = regridded(value, config.prefix_tokens, old, new)
    return found


def _tokens(config: ModelConfig, size: tuple[int, int]) -> int:
    return config.prefix_tokens + math.prod(size)


def _positions(value: Tensor, prefix: int, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """(1, prefix + tokens, dim) for another grid."""
    image = value[:, prefix:].unflatten(1, old).permute(0, 3, 1, 2)
    image = F.interpolate(image.float(), new, mode="bicubic", align_corners=False, antialias=True)
    return torch.cat([value[:, :prefix], image.permute(0, 2, 3, 1).flatten(1, 2).to(value)], 1)
