"""Stems: image (B, C, H, W) → a grid of tokens (B, rows·columns, dim).

A convolutional map stays a grid: collapsing it to one token, as one report did, leaves attention nothing to do.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stem(nn.Module):
    grid: tuple[int, int]

    def macs(self) -> int:
        """Multiply–accumulates of one image."""
        raise NotImplementedError


class PatchStem(Stem):
    """Non-overlapping patches and one linear map."""

    def __init__(self, image_size: int, patch_size: int, channels: int, dim: int):
        super().__init__()
        if image_size % patch_size:
            fit = ", ".join(str(p) for p in range(2, image_size) if image_size % p == 0) or "1"
            raise ValueError(
                f"patch_size={patch_size} does not divide image_size={image_size}: choose a patch_size of {fit}, or "
                "another image_size"
            )
        self.patch_size, side = patch_size, image_size // patch_size
        self.grid = (side, side)
        self.embed = nn.Linear(channels * patch_size**2, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.shape
        (rows, columns), p = self.grid, self.patch_size
        patches = x.view(b, c, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5).reshape(b, rows * columns, c * p * p)
        return self.embed(patches)

    def macs(self) -> int:
        return self.grid[0] * self.grid[1] * self.embed.weight.numel()


class _Convolution(nn.Sequential):
    """3 × 3 convolution, batch norm, and ReLU unless a residual is to be added first."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, relu: bool = True):
        layers = [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)]
        super().__init__(*layers, *([nn.ReLU(inplace=True)] if relu else []))


class ConvStem(Stem):
    """3 × 3 convolutions with batch norm and ReLU, the first `pools` of them with max-pooling, then a linear map.

    Pooling comes before batch norm and ReLU: they hardly change which value is the largest, and then see a quarter.
    """

    def __init__(
        self, image_size: int, channels: int, dim: int, widths: tuple[int, ...] = (64, 128, 256), pools: int = 2
    ):
        super().__init__()
        if not 0 <= pools <= len(widths):
            raise ValueError(f"pools={pools} must be between 0 and the number of convolutions, {len(widths)}")
        side = image_size >> pools  # an odd map loses its last row and column to a pool
        if side < 1:
            raise ValueError(f"image_size={image_size} cannot be halved pools={pools} times")
        self.grid, self.pools, self.image_size = (side, side), pools, image_size
        self.layers = nn.ModuleList(_Convolution(a, b) for a, b in zip((channels, *widths), widths, strict=False))
        self.embed = nn.Linear(widths[-1], dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(self.map(x).flatten(2).transpose(1, 2))

    def map(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            x = x.to(memory_format=torch.channels_last)
        for i, (convolution, norm, relu) in enumerate(self.layers):  # type: ignore[misc]
            x = convolution(x)
            if i < self.pools:
                x = F.max_pool2d(x, 2)
            x = relu(norm(x))
        return x

    def macs(self) -> int:
        side, total = self.image_size, 0
        for i, layer in enumerate(self.layers):
            total += layer[0].weight.numel() * side**2  # type: ignore[union-attr]
            side = side // 2 if i < self.pools else side
        return total + side**2 * self.embed.weight.numel()


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.stride = stride
        self.first = _Convolution(inputs, outputs, stride)
        self.second = _Convolution(outputs, outputs, relu=False)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        # the shortcut's stride is a slice: the backward pass of oneDNN's own strided 1 × 1 convolution writes out of
        # bounds on processors with AVX2 alone
        kept = x[:, :, :: self.stride, :: self.stride]
        return F.relu(self.second(self.first(x)) + self.shortcut(kept))


class ResNetStem(Stem):
    """The first stages of a small ResNet: basic blocks of these widths, each stage after the first halving the map."""

    def __init__(self, image_size: int, channels: int, dim: int, widths: tuple[int, ...] = (32, 64, 128)):
        super().__init__()
        side = image_size
        for _ in widths[1:]:
            side = -(-side // 2)
        self.grid, self.image_size = (side, side), image_size
        stages = [
            _Residual(a, b, 1 if i == 0 else 2)
            for i, (a, b) in enumerate(zip((widths[0], *widths), widths, strict=False))
        ]
        self.layers = nn.Sequential(_Convolution(channels, widths[0]), *stages)
        self.embed = nn.Linear(widths[-1], dim)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            x = x.to(memory_format=torch.channels_last)
        return self.embed(self.layers(x).flatten(2).transpose(1, 2))

    def macs(self) -> int:
        side, total = self.image_size, 0
        for layer in self.layers:
            if isinstance(layer, _Residual):
                side = -(-side // layer.stride)
            total += sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Conv2d)) * side**2
        return total + side**2 * self.embed.weight.numel()


class PixelStem(Stem):
    """Every value of every channel is a token (3,072 for CIFAR): a long-sequence task on small images.

    Learned positions are shared by the channels, which have a map of their own each.
    """

    def __init__(self, image_size: int, channels: int, dim: int, positions: bool = True):
        super().__init__()
        self.grid = (channels * image_size, image_size)
        self.weight = nn.Parameter(torch.empty(channels, 1, dim))
        self.bias = nn.Parameter(torch.zeros(channels, 1, dim))
        self.position = nn.Parameter(torch.empty(image_size**2, dim)) if positions else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).unsqueeze(-1) * self.weight + self.bias  # (B, C, H·W, dim)
        return (tokens if self.position is None else tokens + self.position).flatten(1, 2)

    def macs(self) -> int:
        return self.grid[0] * self.grid[1] * self.weight.shape[-1]


class LengthOneStem(ConvStem):
    """One report's model, kept for reproduction: the map becomes a single token, so that attention returns v unchanged
    and no kernel can make a difference."""

    def __init__(self, image_size: int, channels: int, dim: int):
        super().__init__(image_size, channels, dim)
        side = self.grid[0]
        self.embed = nn.Linear(256 * side**2, dim)
        self.grid = (1, 1)
        warnings.warn(
            "stem=length-one makes a sequence of one token: attention then returns v whatever its kernel, and the "
            "comparison is between convolutional trunks; use stem=conv to keep the map as tokens",
            UserWarning,
            stacklevel=6,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(self.map(x).flatten(1)).unsqueeze(1)

    def macs(self) -> int:
        return (
            super().macs()
            - (self.image_size >> self.pools) ** 2 * self.embed.weight.numel()
            + self.embed.weight.numel()
        )
