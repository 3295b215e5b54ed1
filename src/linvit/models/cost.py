"""What a model takes, by arithmetic alone: one that cannot be is refused before anything is built."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from linvit.attention import attention_cost
from linvit.machine import MEMORY
from linvit.registry import parse_layers
from linvit.site import Cost

if TYPE_CHECKING:
    from linvit.schemas.model import ModelConfig

BLOCK = 32 * 1024 // 4  # the Python objects of one block, as many float32 numbers


def check_fits(config: ModelConfig) -> None:
    cost = estimate(config)
    if cost.memory > MEMORY:
        raise ValueError(
            f"this model takes {cost.memory // 10**9:,} GB with its {cost.parameters:,} parameters and one image, but "
            f"the machine has {MEMORY // 10**9:,} GB: reduce image_size, dim, depth, classes or the attention"
        )


def estimate(config: ModelConfig) -> Cost:
    """Cost of the whole model: exact parameters and MACs, estimated memory."""
    total, site = frame(config), config.site
    for text, count in Counter(map(str, parse_layers(config.attention, config.depth))).items():
        total += attention_cost(text, site, config.dim) * count
    return total


def frame(config: ModelConfig) -> Cost:
    """Of all but the attentions."""
    dim, site = config.dim, config.site
    inner, tokens = site.heads * site.head_dim, site.tokens
    positions = tokens if config.positions == "learned" and config.stem != "pixel" else 0
    scales = 0 if config.layer_scale is None else 2 * dim
    block = Cost(4 * dim + scales, kept=BLOCK) + _linear(dim, 3 * inner, tokens, config.qkv_bias)
    block += _linear(inner, dim, tokens) + (_mlp(config, tokens) if config.block == "standard" else Cost())
    block += Cost(kept=2 * tokens * site.head_dim if config.rope else 0)
    hidden = (2048, 1024) if config.head == "wide" else ()
    widths = (config.features, *hidden, config.outputs) if config.outputs else ()
    head = sum((_linear(a, b, tokens if config.pixels else 1) for a, b in pairwise(widths)), Cost())
    rest = Cost((config.prefix_tokens + positions + 2) * dim, alive=2 * tokens * dim)
    return _stem(config) + rest + block * config.depth + _pooling(config) + head


def _mlp(config: ModelConfig, rows: int) -> Cost:
    norm = 2 * config.mlp_dim if config.mlp == "swiglu-norm" else 0
    return _linear(config.dim, config.mlp_inner, rows) + _linear(config.mlp_dim, config.dim, rows) + Cost(norm)


def _pooling(config: ModelConfig) -> Cost:
    """Of a learned query, which attends to all tokens."""
    if config.pool != "attention":
        return Cost()
    dim, tokens = config.dim, config.tokens
    projections = _linear(dim, dim) + _linear(dim, 2 * dim, tokens) + _linear(dim, dim)
    return Cost(3 * dim, 2 * tokens * dim) + projections + _mlp(config, 1)


def _linear(inputs: int, outputs: int, rows: int = 1, bias: bool = True) -> Cost:
    weights = inputs * outputs  # whose initial values need as much again
    return Cost(weights + bias * outputs, rows * weights, max(2 * weights, rows * (inputs + outputs)))


def _convolution(inputs: int, outputs: int, cells: int, kernel: int = 3) -> Cost:
    """With its batch norm; `cells` are those of its output."""
    weights = kernel**2 * inputs * outputs
    return Cost(weights + 2 * outputs, cells * weights, max(2 * weights, cells * (inputs + outputs)), 2 * outputs)


def _stem(config: ModelConfig) -> Cost:
    (rows, columns), (channels, height, width), dim = config.grid, config.image_shape, config.dim
    if config.stem == "patch":
        return _linear(channels * (config.patch_size or 1) ** 2, dim, rows * columns)
    if config.stem == "pixel":
        positions = height * width * dim if config.positions == "learned" else 0
        return Cost(2 * channels * dim + positions, rows * columns * dim, 2 * rows * columns * dim)
    if config.pixels:
        rows_of_table = config.outputs + (config.stem == "masked-pixel")  # one for hidden values
        return Cost(rows_of_table * dim, alive=2 * max(rows_of_table, rows * columns) * dim)
    widths, total = config.widths, Cost()
    if config.stem == "resnet":
        total, channels = _convolution(channels, widths[0], height * width), widths[0]
    for i, (a, b) in enumerate(pairwise((channels, *widths))):
        if config.stem == "resnet":
            height, width = (-(-height // 2), -(-width // 2)) if i else (height, width)
            total += _convolution(a, b, height * width) + _convolution(b, b, height * width)
            total += _convolution(a, b, height * width, kernel=1) if i or a != b else Cost()
        else:
            total += _convolution(a, b, height * width)
            height, width = (height // 2, width // 2) if i < (config.pools or 0) else (height, width)
    one = config.stem == "length-one"  # the whole map is one token
    return total + _linear(widths[-1] * (height * width if one else 1), dim, 1 if one else height * width)
