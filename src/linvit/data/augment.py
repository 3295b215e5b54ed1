"""Batched augmentation on tensors: bytes in, normalised floats out.

Every random choice is a hash of (seed, epoch, sample index, which choice), never a draw from a generator. A sample is
therefore augmented the same, bit for bit, in whatever batch, process or order it comes, and a resumed run needs no
random state. Choices are made on the host, a few numbers for each sample, so that nothing synchronises with a GPU.
Only mixup and CutMix look at the batch: a sample's partner is the one before it, which may be the last of another
process's part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from scipy.special import betaincinv
from torch import Tensor

from linvit import ranks
from linvit.data.randaugment import OPERATIONS, randaugment
from linvit.devices import to_device


@dataclass(frozen=True)
class Augment:
    """What happens to a training batch, in this order: RandAugment, crop, flip, normalise, cutout, mixup or CutMix."""

    pad_crop: int = 4  # pixels the crop may move in each direction
    padding: Literal["zero", "reflect"] = "zero"
    flip: Literal["none", "random", "alternating"] = "none"  # alternating: every second epoch, from a random start
    cutout: int = 0  # side of the square that is blanked
    mixup: float = 0.0  # α of the Beta(α, α) mixing weight
    cutmix: float = 0.0  # α of the Beta(α, α) area; with both, each sample gets one or the other
    randaugment: int = 0  # operations per image, at most as many as there are
    magnitude: int = 9  # of RandAugment, 0 to 30
    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.5,)
    classes: int = 0  # needed to mix targets

    def __post_init__(self) -> None:
        for name in ("pad_crop", "cutout", "mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"augmentation: {name}={getattr(self, name)} must not be negative")
        for name, words in (("flip", ("none", "random", "alternating")), ("padding", ("zero", "reflect"))):
            if getattr(self, name) not in words:
                raise ValueError(f"augmentation: {name}={getattr(self, name)} must be {' or '.join(words)}")
        for name, most in (("randaugment", len(OPERATIONS)), ("magnitude", 30)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"augmentation: {name}={getattr(self, name)} must be 0 to {most}")
        if self.mixes and self.classes < 2:
            raise ValueError("augmentation: mixup and cutmix need the number of classes")

    @property
    def mixes(self) -> bool:
        """Targets are then probabilities (B, classes) instead of labels (B,)."""
        return self.mixup > 0 or self.cutmix > 0

    def __call__(self, images: Tensor, labels: Tensor, indices: Tensor, epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        """uint8 (B, C, H, W), int64 (B,), int64 (B,) → float32 (B, C, H, W) and labels (B,) or float (B, classes);
        labels may also be (B, classes).
        Indices belong on the host."""
        indices = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        draw = Draw(seed, epoch, indices, images.device)
        for layer in range(self.randaugment):
            images = randaugment(images, draw.here("op", layer), draw.here("sign", layer) < 0.5, self.magnitude)
        if self.pad_crop:
            images = shifted(images, draw, self.pad_crop, self.padding)
        if self.flip != "none":
            first = draw("flip") if self.flip == "random" else Draw(seed, 0, indices, images.device)("flip")
            mirrored = (first < 0.5) ^ (self.flip == "alternating" and epoch % 2 == 1)
            images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(3), images)
        x = normalise(images, self.mean, self.std)
        if self.cutout:
            side = torch.full((len(x),), float(self.cutout), device=x.device)
            x = x.masked_fill_(_box(x, draw("cut y"), draw("cut x"), side, side), 0.0)
        return self._mixed(x, labels, draw) if self.mixes else (x, labels)

    def _mixed(self, x: Tensor, labels: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        hot = labels if labels.ndim == 2 else F.one_hot(labels, self.classes)
        other, target = ranks.rolled(x), hot.to(x.dtype)
        weight = torch.ones(len(x), device=x.device)  # of the sample itself
        use_cutmix = draw("which") < self.cutmix / (self.mixup + self.cutmix)
        mixed = x
        if self.mixup:
            weight = torch.where(use_cutmix, weight, draw.beta("mixup", self.mixup))
            w = weight.view(-1, 1, 1, 1)
            mixed = x * w + other * (1 - w)
        if self.cutmix:
            side = (1 - draw.beta("cutmix", self.cutmix)).sqrt()
            box = _box(x, draw("mix y"), draw("mix x"), side * x.shape[2], side * x.shape[3])
            box &= use_cutmix.view(-1, 1, 1, 1)
            mixed = torch.where(box, other, mixed)
            share = 1 - box.sum((1, 2, 3)).to(x.dtype) / (x.shape[2] * x.shape[3])
            weight = torch.where(use_cutmix, share, weight)
        w = weight.view(-1, 1)
        return mixed, target * w + ranks.rolled(target) * (1 - w)


class Draw:
    """Uniform numbers as a hash: `draw(name)` is float32 in [0, 1), (B,), one for each sample, on the device."""

    def __init__(self, seed: int, epoch: int, indices: Tensor, device: torch.device | str = "cpu"):
        run = _mix(torch.tensor(_signed(seed)))  # mixed first: seed 1 is not seed 0 moved by one
        self.base, self.device = _mix(indices + _mix(run + epoch)), device

    def __call__(self, name: str, number: int = 0) -> Tensor:
        return to_device(self.here(name, number), self.device)

    def here(self, name: str, number: int = 0) -> Tensor:
        """The same on the host. `name` has at most eight letters; `number` counts draws of the same name."""
        return self.several(name, torch.tensor([number]))[:, 0]

    def several(self, name: str, numbers: Tensor) -> Tensor:
        """The draws (B, n) of one name with these numbers (n,), on the host."""
        own = _mix(self.base + _signed(int.from_bytes(name.encode(), "little")))
        bits = _mix(own[:, None] + numbers)
        return (bits >> 40 & 0xFFFFFF).to(torch.float32) / 2**24

    def choice(self, name: str, of: int, count: int) -> Tensor:
        """`count` different places below `of` for each sample, int64 (B, count), on the device."""
        return to_device(self.several(name, torch.arange(of)).argsort(dim=1, stable=True)[:, :count], self.device)

    def beta(self, name: str, alpha: float) -> Tensor:
        values = betaincinv(alpha, alpha, self.here(name).double().numpy())
        return to_device(torch.as_tensor(values, dtype=torch.float32), self.device)


def _signed(value: int) -> int:
    """Any integer as a signed 64-bit one."""
    return (value + 2**63) % 2**64 - 2**63


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 after one golden-ratio step; int64 products wrap as it needs."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (B, C, H, W) → float32 with mean 0 and standard deviation 1 per channel; mean and std in [0, 1] units."""
    constants = _scale_and_bias.__wrapped__ if torch.compiler.is_compiling() else _scale_and_bias
    scale, bias = constants(tuple(mean), tuple(std), images.device)
    return images.to(torch.float32).mul_(scale).add_(bias)


@lru_cache
def _scale_and_bias(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(C, 1, 1), on the device once and for all."""
    with torch.inference_mode(False):  # they outlive this call
        scale = torch.tensor([1 / (255 * s) for s in std], dtype=torch.float32)
        bias = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=torch.float32)
        return scale.view(-1, 1, 1).to(device), bias.view(-1, 1, 1).to(device)


def shifted(images: Tensor, draw: Draw, pad: int, padding: str) -> Tensor:
    """Each image moved by −pad … pad pixels in both directions."""
    if pad >= min(images.shape[2:]):
        height, width = images.shape[2:]
        raise ValueError(f"augmentation: pad_crop={pad} does not fit images of {height} × {width} pixels")
    if padding == "zero":
        padded = F.pad(images, (pad, pad, pad, pad))
    else:
        padded = F.pad(images.to(torch.float32), (pad, pad, pad, pad), mode="reflect").to(images.dtype)
    windows = padded.unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)
    sample = torch.arange(len(images), device=images.device)
    down, right = ((draw(name) * (2 * pad + 1)).long() for name in ("crop y", "crop x"))
    return windows[sample, :, down, right]


def _box(x: Tensor, at_y: Tensor, at_x: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """bool (B, 1, H, W): a rectangle around a random centre, cut off at the border."""

    def span(at: Tensor, length: Tensor, size: int) -> Tensor:
        centre, place = (at * size).floor().view(-1, 1), torch.arange(size, device=x.device)
        half = length.view(-1, 1) / 2
        return (place >= (centre - half).round()) & (place < (centre + half).round())

    rows, columns = span(at_y, height, x.shape[2]), span(at_x, width, x.shape[3])
    return rows[:, None, :, None] & columns[:, None, None, :]
