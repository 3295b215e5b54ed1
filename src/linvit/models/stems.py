"""Stems: image (B, C, H, W) → a grid of tokens (B, rows·columns, dim).

A convolutional map stays a grid: collapsing it to one token, as one report did, leaves attention nothing to do.
"""

from __future__ import annotations

import math
import warnings
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.registry import parse
from linvit.schemas.model import ModelConfig


class Stem(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.grid = config.grid


class PatchStem(Stem):
    """Non-overlapping patches and one linear map."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.patch_size = config.patch_size or 1
        self.embed = nn.Linear(config.channels * self.patch_size**2, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.shape
        (rows, columns), p = self.grid, self.patch_size
        if x.shape[2:] != (rows * p, columns * p):
            x = x[:, :, : rows * p, : columns * p]
        patches = x.reshape(b, c, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5).reshape(b, rows * columns, c * p * p)
        return self.embed(patches)


def _activation(text: str) -> nn.Module:
    spec = parse(text)
    return {"relu": partial(nn.ReLU, inplace=True), "gelu": nn.GELU, "elu": nn.ELU}[spec.name](**spec.options)


class _Convolution(nn.Sequential):
    """3 × 3 convolution, batch norm, and an activation unless a residual is to be added first."""

    def __init__(self, inputs: int, outputs: int, activation: str | None, stride: int = 1):
        layers = [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)]
        super().__init__(*layers, *([_activation(activation)] if activation else []))


class ConvStem(Stem):
    """3 × 3 convolutions with batch norm and activation, the first `pools` of them with max-pooling, then a linear map.

    Pooling comes before norm and activation: they hardly change which value is the largest, and then see a quarter.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.pools, widths = config.pools or 0, config.widths
        self.layers = nn.ModuleList(
            _Convolution(a, b, config.activation) for a, b in pairwise((config.channels, *widths))
        )
        self.embed = nn.Linear(widths[-1], config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(self.map(x).flatten(2).transpose(1, 2))

    def map(self, x: Tensor) -> Tensor:
        if x.device.type in ("cpu", "cuda"):
            x = x.to(memory_format=torch.channels_last)
        for i, (convolution, norm, activation) in enumerate(self.layers):  # type: ignore[misc]
            x = convolution(x)
            if i < self.pools:
                x = F.max_pool2d(x, 2)
            x = activation(norm(x))
        return x


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, activation: str, stride: int):
        super().__init__()
        self.stride = stride
        self.first = _Convolution(inputs, outputs, activation, stride)
        self.second = _Convolution(outputs, outputs, None)
        self.last = _activation(activation)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        # the shortcut's stride is a slice: the backward pass of oneDNN's own strided 1 × 1 convolution writes out of
        # bounds on processors with AVX2 alone
        kept = x[:, :, :: self.stride, :: self.stride]
        return self.last(self.second(self.first(x)) + self.shortcut(kept))


class ResNetStem(Stem):
    """The first stages of a small ResNet: basic blocks of these widths, each stage after the first halving the map."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        widths, f = config.widths, config.activation
        stages = [_Residual(a, b, f, 1 if i == 0 else 2) for i, (a, b) in enumerate(pairwise((widths[0], *widths)))]
        self.layers = nn.Sequential(_Convolution(config.channels, widths[0], f), *stages)
        self.embed = nn.Linear(widths[-1], config.dim)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type in ("cpu", "cuda"):
            x = x.to(memory_format=torch.channels_last)
        return self.embed(self.layers(x).flatten(2).transpose(1, 2))


class PixelStem(Stem):
    """Every value of every channel is a token (3,072 for CIFAR): a long-sequence task on small images.

    Learned positions are shared by the channels, which have a map of their own each.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        channels, dim = config.channels, config.dim
        self.weight = nn.Parameter(torch.empty(channels, 1, dim))
        self.bias = nn.Parameter(torch.zeros(channels, 1, dim))
        learned = config.positions == "learned"
        self.position = nn.Parameter(torch.empty(math.prod(config.image_shape[1:]), dim)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).unsqueeze(-1) * self.weight + self.bias  # (B, C, H·W, dim)
        return (tokens if self.position is None else tokens + self.position).flatten(1, 2)


class LengthOneStem(ConvStem):
    """One report's model, kept for reproduction: the map becomes a single token, embedded with an activation, so that
    attention returns v unchanged and no kernel can make a difference but by its rounding."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        cells = math.prod(side >> self.pools for side in config.image_shape[1:])
        self.embed = nn.Linear(self.embed.in_features * cells, config.dim)
        self.activation = _activation(config.activation)
        warnings.warn(
            "stem=length-one makes a sequence of one token: attention then returns v whatever its kernel, and the "
            "comparison is between convolutional trunks; use stem=conv to keep the map as tokens",
            UserWarning,
            stacklevel=5,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.embed(self.map(x).flatten(1))).unsqueeze(1)


class NextPixelStem(Stem):
    """Every value of every channel is a token, red, green and blue of a pixel after each other. What goes in for one is
    the level of the token before it, so that its own can be predicted; for the first, zero."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.config = config
        self.embed = nn.Embedding(config.outputs, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.embed(to_levels(x, self.config)[:, :-1]), (0, 0, 1, 0))


class MaskedPixelStem(Stem):
    """Every value of every channel is a token, as for next-pixel models; a value below zero is hidden, and has an
    embedding of its own."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.config = config
        self.embed = nn.Embedding(config.outputs + 1, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x < 0).permute(0, 2, 3, 1).flatten(1)
        return self.embed(to_levels(x, self.config).masked_fill(hidden, self.config.outputs))


def hide(x: Tensor, places: Tensor) -> Tensor:
    """Images (B, C, H, W) with the values of the tokens at these places (B, n) below zero."""
    b, c, h, w = x.shape
    hidden = torch.zeros(b, h * w * c, dtype=torch.bool, device=x.device).scatter_(1, places, True)
    return x.masked_fill(hidden.view(b, h, w, c).permute(0, 3, 1, 2), -1.0)


def to_levels(x: Tensor, config: ModelConfig) -> Tensor:
    """Images (B, C, H, W), fractions of white → the levels (B, N) of a model's pixels, in its order."""
    bytes_ = (x * 255).round().long().clamp(0, 255)
    tokens = (bytes_ * config.outputs // 256).permute(0, 2, 3, 1).flatten(1)
    return tokens.flip(1) if config.order == "reversed" else tokens


def from_levels(levels: Tensor, config: ModelConfig) -> Tensor:
    """Levels (B, N) → images uint8 (B, C, H, W) that have them, the first black and the last white."""
    tokens = levels.flip(1) if config.order == "reversed" else levels
    bytes_ = -(-tokens * 255 // (config.outputs - 1))  # rounded up, which stays in the level's bin
    channels, height, width = config.image_shape
    return bytes_.to(torch.uint8).view(-1, height, width, channels).permute(0, 3, 1, 2).contiguous()


STEMS: dict[str, type[Stem]] = {
    "patch": PatchStem,
    "conv": ConvStem,
    "resnet": ResNetStem,
    "pixel": PixelStem,
    "length-one": LengthOneStem,
    "next-pixel": NextPixelStem,
    "masked-pixel": MaskedPixelStem,
}
