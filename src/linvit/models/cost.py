"""What a model takes, by arithmetic alone: one that cannot be is refused before anything is built."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from linvit.errors import MEMORY
from linvit.registry import Spec, parse, parse_layers

if TYPE_CHECKING:
    from linvit.models.config import ModelConfig

BLOCK = 32 * 1024 // 4  # the Python objects of one block, as many float32 numbers


@dataclass(frozen=True)
class Cost:
    parameters: int = 0
    macs: int = 0  # multiply–accumulates of one image's forward pass
    alive: int = 0  # the most numbers at once beside those that stay, while it is built or sees one image
    kept: int = 0  # numbers that stay and are no parameters

    def __add__(self, other: Cost) -> Cost:
        alive = max(self.alive, other.alive)
        return Cost(self.parameters + other.parameters, self.macs + other.macs, alive, self.kept + other.kept)

    def __mul__(self, count: int) -> Cost:
        return Cost(self.parameters * count, self.macs * count, self.alive if count else 0, self.kept * count)

    @property
    def memory(self) -> int:
        """Bytes."""
        return 4 * (self.parameters + self.kept + self.alive)


def check_fits(config: ModelConfig) -> None:
    cost = estimate(config)
    if cost.memory > MEMORY:
        raise ValueError(
            f"this model takes {cost.memory // 10**9:,} GB with its {cost.parameters:,} parameters and one image, but "
            f"the machine has {MEMORY // 10**9:,} GB: make image_size, dim, depth, classes or the attention smaller"
        )


def estimate(config: ModelConfig) -> Cost:
    """Of the whole model. An attention that is not known here counts as one without weights and work of its own."""
    total = frame(config)
    for text, count in Counter(map(str, parse_layers(config.attention, config.depth))).items():
        total += _attention(parse(text), config) + _attention(parse(text), config, first=False) * (count - 1)
    return total


def frame(config: ModelConfig) -> Cost:
    """Of all but the attentions; exact but for `alive` and `kept`."""
    dim, inner = config.dim, config.heads * (config.head_dim or config.dim // config.heads)
    tokens = config.prefix_tokens + math.prod(grid(config))
    positions = tokens if config.positions == "learned" and config.stem != "pixel" else 0
    scales = 0 if config.layer_scale is None else 2 * dim
    block = Cost(4 * dim + scales, kept=BLOCK) + _linear(dim, 3 * inner, tokens, config.qkv_bias)
    for a, b in ((inner, dim), (dim, config.mlp_dim), (config.mlp_dim, dim)):
        block += _linear(a, b, tokens)
    hidden = (2048, 1024) if config.head == "wide" else ()
    widths = (config.features, *hidden, config.outputs) if config.outputs else ()
    head = sum((_linear(a, b, tokens if config.causal else 1) for a, b in pairwise(widths)), Cost())
    rest = Cost((config.prefix_tokens + positions + 2) * dim, alive=2 * tokens * dim)
    return _stem(config) + rest + block * config.depth + head


def grid(config: ModelConfig) -> tuple[int, int]:
    """Rows and columns of the image tokens."""
    size, patch, convolutions, pools = config.image_size, config.patch_size, len(config.widths), config.pools or 0
    if patch and size % patch:
        fit = ", ".join(str(p) for p in range(2, size) if size % p == 0) or "1"
        raise ValueError(
            f"patch_size={patch} does not divide image_size={size}: choose a patch_size of {fit}, or another image_size"
        )
    if pools > convolutions:
        raise ValueError(f"pools={pools} must be between 0 and the number of convolutions, {convolutions}")
    if not size >> pools:
        raise ValueError(f"image_size={size} cannot be halved pools={pools} times")
    match config.stem:
        case "pixel":
            return config.channels * size, size
        case "next-pixel":
            return size, config.channels * size
        case "length-one":
            return 1, 1
        case "resnet":
            side = -(-size >> convolutions - 1)  # each stage after the first halves it, rounding up
        case "conv":
            side = size >> pools  # an odd map loses its last row and column to a pool
        case "patch":
            side = size // (patch or 1)
    return side, side


def _linear(inputs: int, outputs: int, rows: int = 1, bias: bool = True) -> Cost:
    weights = inputs * outputs  # whose first values are drawn and scaled beside them
    return Cost(weights + bias * outputs, rows * weights, max(2 * weights, rows * (inputs + outputs)))


def _convolution(inputs: int, outputs: int, side: int, kernel: int = 3) -> Cost:
    """With its batch norm; `side` is that of its output."""
    weights = kernel**2 * inputs * outputs
    return Cost(weights + 2 * outputs, side**2 * weights, max(2 * weights, side**2 * (inputs + outputs)), 2 * outputs)


def _stem(config: ModelConfig) -> Cost:
    (rows, columns), side, channels, dim = grid(config), config.image_size, config.channels, config.dim
    if config.stem == "patch":
        return _linear(channels * (side // rows) ** 2, dim, rows * columns)
    if config.stem == "pixel":
        positions = side**2 * dim if config.positions == "learned" else 0
        return Cost(2 * channels * dim + positions, rows * columns * dim, 2 * rows * columns * dim)
    if config.stem == "next-pixel":
        return Cost(config.outputs * dim, alive=2 * max(config.outputs, rows * columns) * dim)
    widths, total = config.widths, Cost()
    if config.stem == "resnet":
        total, channels = _convolution(channels, widths[0], side), widths[0]
    for i, (a, b) in enumerate(pairwise((channels, *widths))):
        if config.stem == "resnet":
            side = -(-side // 2) if i else side
            total += _convolution(a, b, side) + _convolution(b, b, side)
            total += _convolution(a, b, side, kernel=1) if i or a != b else Cost()
        else:
            total += _convolution(a, b, side)
            side = side // 2 if i < (config.pools or 0) else side
    one = config.stem == "length-one"  # the whole map is one token
    return total + _linear(widths[-1] * (side**2 if one else 1), dim, 1 if one else side**2)


def _attention(spec: Spec, config: ModelConfig, first: bool = True) -> Cost:
    """Its weights, its random features and its work; the first layer owns what layers share."""
    heads, d = config.heads, config.head_dim or config.dim // config.heads
    tokens = config.prefix_tokens + math.prod(grid(config))
    options: dict[str, Any] = {key: value for key, value in spec.options.items() if value != "none"}
    switches = Cost(2 * d * bool(options.get("qk_norm")) + heads * d * options.get("dwc", 0) ** 2)
    if spec.name == "softmax":
        return switches + Cost(macs=2 * tokens**2 * d * heads)
    if spec.name == "window":
        size = options.get("size", min(7, 2 * max(grid(config)) - 1))
        keys = math.prod(min(side, 2 * size) for side in grid(config)) + 2 * config.prefix_tokens
        return switches + Cost(macs=2 * tokens * keys * d * heads)
    if spec.name == "linformer":
        sharing, kind, k = spec.options.get("sharing"), options.get("kind"), options.get("k", min(64, tokens))
        copies = (heads if sharing == "none" else 1) * (1 if sharing in ("key-value", "layerwise") else 2)
        numbers = copies * (first or sharing != "layerwise") * (-(-tokens // k) if kind == "conv" else k * tokens)
        held = Cost(kept=numbers) if kind == "pool" else Cost(numbers)
        return switches + held + Cost(macs=4 * tokens * k * d * heads, alive=2 * numbers)
    if not spec.name.startswith("performer-"):
        return switches
    kernel, drawn = spec.name.removeprefix("performer-"), spec.options.get("projection") != "none"
    m = options.get("m", 64) if drawn else d
    learned = {
        "theta-linear": m * m, "theta-mlp": d * m + m * m + 2 * m, "theta-mixture": 4 * d * d + 7 * d + 3,
        "theta": m * d + 2 * d * d + 2 * d + 2 * d * m + 2 * m + 2, "hedgehog": heads * d * d,
    }  # fmt: skip
    rows = m * d if drawn and (kernel == "theta-linear" or kernel not in learned) else 0
    weights = learned.get(kernel, 0)
    work = 6 * d if kernel == "hedgehog" else 4 * m
    return switches + Cost(weights, heads * tokens * work * d, 2 * weights, rows)
