"""What only PyTorch can check of a ModelConfig: that its attention exists and takes its options, and that it fits."""

from __future__ import annotations

from linvit.attention import attention_options
from linvit.models.cost import check_fits
from linvit.registry import check_options, parse_layers
from linvit.schemas.model import ModelConfig


def checked(config: ModelConfig) -> ModelConfig:
    """The same configuration, or a ValueError."""
    for spec in parse_layers(config.attention, config.depth) or parse_layers(config.attention.split("@")[0], 1):
        check_options(spec, attention_options(spec.name))
    check_fits(config)
    return config
