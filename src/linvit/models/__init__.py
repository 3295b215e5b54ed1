"""Models: one vision transformer with any stem, any attention per layer, and sizes in one table."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from linvit.errors import choices, clear
from linvit.models.config import checked
from linvit.models.cost import estimate
from linvit.models.vit import VisionTransformer
from linvit.schemas.model import ModelConfig, without_effect
from linvit.schemas.sizes import SIZES
from linvit.site import Cost

__all__ = [
    "SIZES",
    "Cost",
    "ModelConfig",
    "VisionTransformer",
    "create_model",
    "estimate",
    "match_parameters",
    "model_config",
    "without_effect",
]


def model_config(size: str | None = None, **options: Any) -> ModelConfig:
    """The named size with these options over it, checked."""
    if size is not None and size not in SIZES:
        raise ValueError(f"unknown size '{size}'" + choices(size, SIZES))
    if unknown := sorted(set(options) - set(ModelConfig.model_fields)):
        raise ValueError(f"a model has no option '{unknown[0]}'" + choices(unknown[0], ModelConfig.model_fields))
    base = {} if size is None else SIZES[size]
    idle = without_effect(base | options)  # nobody asked for what a size brings and another stem has no use for
    try:
        return checked(ModelConfig(**{key: value for key, value in base.items() if key not in idle} | options))
    except ValidationError as error:
        raise clear(error) from None


def create_model(size: str | None = None, **options: Any) -> VisionTransformer:
    """A vision transformer: `create_model(image_size=32, patch_size=4, classes=10, attention="performer-exp:m=64")`."""
    return VisionTransformer(model_config(size, **options))


def match_parameters(config: ModelConfig, target: int) -> ModelConfig:
    """The same model with its MLP widened or narrowed so that it has `target` parameters, as nearly as that can do."""
    have = estimate(config).parameters
    if not config.depth or config.block != "standard":  # nothing to widen
        return config
    per_unit = estimate(config.model_copy(update={"mlp_dim": config.mlp_dim + 1})).parameters - have
    return config.model_copy(update={"mlp_dim": max(1, config.mlp_dim + round((target - have) / per_unit))})
