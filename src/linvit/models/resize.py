"""A trained model's weights for images or patches of another size: what belongs to the grid is interpolated."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.attention import regridded
from linvit.attention.base import interpolated
from linvit.registry import parse_layers
from linvit.schemas.model import ModelConfig
from linvit.schemas.pixels import ImageSize


def resized(
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    image_size: ImageSize,
    patch_size: int | None = None,
    antialias: bool = True,
) -> dict[str, Tensor]:
    """The weights of `config`'s model for images of this size: the same patches or filters on a larger or smaller grid;
    or for patches of another size, see `_resized_patches`.

    Learned positions are interpolated (bicubic; antialias: as timm does, not as most models of transformers do), and
    what else an attention has for each token, as it says itself; prefix tokens and everything else stay as they are.
    """
    if config.stem in ("pixel", "length-one", "next-pixel", "masked-pixel") and image_size != config.image_size:
        raise ValueError(f"stem={config.stem} has weights for image_size={config.image_size} alone, not {image_size}")
    patch = patch_size or config.patch_size
    if patch != config.patch_size and config.stem != "patch":
        raise ValueError(f"patch_size={patch} has no effect: stem={config.stem} has no patches: leave it out")
    old, new = config.site, config.model_copy(update={"image_size": image_size, "patch_size": patch}).site
    found = dict(tensors)
    if patch is not None and patch != config.patch_size:
        found["stem.embed.weight"] = _resized_patches(tensors["stem.embed.weight"], config.channels, patch)
    if old.grid == new.grid:
        return found
    if "position" in tensors and tensors["position"].shape[1] == old.tokens:
        moved = interpolated(tensors["position"].transpose(1, 2), old, new, "bicubic", antialias=antialias)
        found["position"] = moved.transpose(1, 2).contiguous()
    for i, spec in enumerate(parse_layers(config.attention, config.depth)):
        home = f"blocks.{i}.attn.attention."
        own = {key.removeprefix(home): value for key, value in tensors.items() if key.startswith(home)}
        found |= {home + key: value for key, value in regridded(spec, own, old, new).items()}
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
    filters = value.cpu().double().reshape(-1, old**2) @ torch.linalg.pinv(turned).T
    return filters.view(len(value), -1).to(value)
