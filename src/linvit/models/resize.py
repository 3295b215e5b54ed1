"""A trained model's weights for images or patches of another size: what belongs to the grid is interpolated."""

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


def resized(
    tensors: Mapping[str, Tensor], config: ModelConfig, image_size: int, patch_size: int | None = None
) -> dict[str, Tensor]:
    """The weights of `config`'s model for images of this size: the same patches or filters on a larger or smaller grid;
    or for patches of another size, see `_resized_patches`.

    Learned positions are interpolated (bicubic), Linformer's projections and filters too, so that a constant row keeps
    its sum; prefix tokens and everything else stay as they are.
    """
    if config.stem in ("pixel", "length-one", "next-pixel") and image_size != config.image_size:
        raise ValueError(f"stem={config.stem} has weights for image_size={config.image_size} alone, not {image_size}")
    patch = patch_size or config.patch_size
    if patch != config.patch_size and config.stem != "patch":
        raise ValueError(f"patch_size={patch} has no effect: stem={config.stem} has no patches: leave it out")
    old, new = grid(config), grid(config.model_copy(update={"image_size": image_size, "patch_size": patch}))
    prefix = config.prefix_tokens
    tokens = prefix + math.prod(new)
    found = dict(tensors)
    if patch is not None and patch != config.patch_size:
        found["stem.embed.weight"] = _resized_patches(tensors["stem.embed.weight"], config.channels, patch)
    for key, value in tensors.items():
        if old == new:
            break
        if key == "position" and value.shape[1] == prefix + math.prod(old):
            found[key] = _moved(value.transpose(1, 2), prefix, old, new, "bicubic").transpose(1, 2).contiguous()
        elif key.endswith(".attention.projection"):
            options = parse_layers(config.attention, config.depth)[int(key.split(".")[1])].options
            if options.get("kind") == "conv":
                found[key] = _stretched(value, -(-tokens // int(options.get("k") or min(64, tokens))))
            elif value.shape[-1] == prefix + math.prod(old):
                found[key] = _moved(value, prefix, old, new, "bilinear", math.prod(old) / math.prod(new))
    return found


def _resized_patches(value: Tensor, channels: int, side: int) -> Tensor:
    """Filters of patches (dim, channels·p·p) → (dim, channels·side·side), in value's dtype.

    With B the matrix of bilinear resizing from p × p to side × side pixels, w' = (Bᵀ)⁺ w is the filter with the least
    mean (⟨Bx, w'⟩ − ⟨x, w⟩)² over white patches x: a patch that is resized gives the token that it gave, exactly where
    it grows and for what survives the resizing where it shrinks (FlexiViT, arXiv 2212.08013).
    """
    old = math.isqrt(value.shape[1] // channels)
    each = torch.eye(old**2, dtype=torch.float64).view(-1, 1, old, old)
    turned = F.interpolate(each, (side, side), mode="bilinear", align_corners=False, antialias=True).flatten(1)  # Bᵀ
    filters = value.double().cpu().reshape(-1, old**2) @ torch.linalg.pinv(turned).T
    return filters.view(len(value), -1).to(value)


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
