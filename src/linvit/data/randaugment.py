"""RandAugment's fourteen operations on a batch of bytes.

Whole-number arithmetic and plain elementwise floats only: an image's result does not depend on its neighbours in the
batch, which a batched matrix product or a floating-point sum would not promise. Magnitudes follow the usual table
(0 to 30 of rotation 30°, shear 0.3, a translation of 150/331 of the side, enhancement 0.9).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.devices import to_device

LUMA = (19595, 38470, 7471)  # ITU-R 601 in 1/65536, as Pillow has it


def randaugment(images: Tensor, operation: Tensor, negative: Tensor, magnitude: int) -> Tensor:
    """One operation on each image. images: uint8 (B, C, H, W); operation: [0, 1) (B,); negative: bool (B,).
    The last two are on the host, which thereby knows the size of each group."""
    kind = (operation * len(OPERATIONS)).long()
    out = images.clone()
    for number, apply in enumerate(OPERATIONS):
        rows = (kind == number).nonzero().squeeze(1)
        if apply is not None and len(rows):
            chosen = to_device(rows, images.device)
            sign = to_device(torch.where(negative[rows], -1.0, 1.0), images.device)
            out[chosen] = apply(images[chosen], sign, magnitude / 30)
    return out


def grey(x: Tensor) -> Tensor:
    """int64 (B, 1, H, W)."""
    if x.shape[1] != 3:
        return x.long()
    red, green, blue = x.long().split(1, 1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue + 32768) >> 16


def affine(x: Tensor, **map: Tensor | float) -> Tensor:
    """Nearest-neighbour sampling at (a·y + b·x + dy, c·y + d·x + dx) from the centre; outside is black."""
    height, width = x.shape[2:]
    y = torch.arange(height, device=x.device).view(1, -1, 1) - (height - 1) / 2
    z = torch.arange(width, device=x.device).view(1, 1, -1) - (width - 1) / 2
    values = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 1.0, "dy": 0.0, "dx": 0.0} | map
    a, b, c, d, dy, dx = (
        value.view(-1, 1, 1) if isinstance(value, Tensor) else torch.full((1, 1, 1), value, device=x.device)
        for value in values.values()
    )
    row = ((a * y + b * z + dy) + (height - 1) / 2).round().long()
    column = ((c * y + d * z + dx) + (width - 1) / 2).round().long()
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    flat = (row * width + column).masked_fill_(~inside, 0).flatten(1)[:, None].expand(-1, x.shape[1], -1)
    return x.flatten(2).gather(2, flat).view_as(x) * inside[:, None]


def rotate(x: Tensor, sign: Tensor, strength: float) -> Tensor:
    sine, cosine = math.sin(math.radians(30 * strength)), math.cos(math.radians(30 * strength))
    return affine(x, a=cosine, b=sign * sine, c=-sign * sine, d=cosine)


def shear_x(x: Tensor, sign: Tensor, strength: float) -> Tensor:
    return affine(x, c=sign * (0.3 * strength))


def shear_y(x: Tensor, sign: Tensor, strength: float) -> Tensor:
    return affine(x, b=sign * (0.3 * strength))


def translate_x(x: Tensor, sign: Tensor, strength: float) -> Tensor:
    return affine(x, dx=sign * round(150 / 331 * x.shape[3] * strength))


def translate_y(x: Tensor, sign: Tensor, strength: float) -> Tensor:
    return affine(x, dy=sign * round(150 / 331 * x.shape[2] * strength))


def _blend(x: Tensor, towards: Tensor, sign: Tensor, strength: float) -> Tensor:
    """x moved away from or towards another image by 0.9·strength."""
    base = towards.to(torch.float32)
    factor = (1 + sign * (0.9 * strength)).view(-1, 1, 1, 1)
    return (base + factor * (x.to(torch.float32) - base)).clamp_(0, 255).round_().to(torch.uint8)


def brightness(x: Tensor, sign: Tensor, strength: float) -> Tensor:
    return _blend(x, torch.zeros_like(x), sign, strength)


def colour(x: Tensor, sign: Tensor, strength: float) -> Tensor:
    return _blend(x, grey(x), sign, strength)


def contrast(x: Tensor, sign: Tensor, strength: float) -> Tensor:
    lightness = grey(x)
    return _blend(x, lightness.sum((1, 2, 3), keepdim=True) // lightness[0].numel(), sign, strength)


def sharpness(x: Tensor, sign: Tensor, strength: float) -> Tensor:
    """The blurred image is a 3 × 3 average with five-fold centre; the border stays as it is."""
    wide = x.to(torch.int32)
    height, width = x.shape[2:]
    parts = [wide[..., i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3)]
    blurred = wide.clone()
    blurred[..., 1:-1, 1:-1] = (torch.stack(parts).sum(0) + 4 * parts[4] + 6) // 13
    return _blend(x, blurred, sign, strength)


def posterize(x: Tensor, sign: Tensor, strength: float) -> Tensor:
    dropped = round(4 * strength)
    return x & (0xFF << dropped & 0xFF)


def solarize(x: Tensor, sign: Tensor, strength: float) -> Tensor:
    return torch.where(x.long() >= 256 - 256 * strength, 255 - x, x)


def autocontrast(x: Tensor, sign: Tensor, strength: float) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True).float(), x.amax((2, 3), keepdim=True).float()
    stretched = ((x.float() - low) * (255 / (high - low).clamp_min(1))).clamp_(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, x)


def equalize(x: Tensor, sign: Tensor, strength: float) -> Tensor:
    """Per channel: a table from the cumulated histogram, as Pillow's ImageOps."""
    flat = x.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.long, device=x.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - last) // 255
    below = F.pad(counts.cumsum(2)[..., :-1], (1, 0))
    table = ((below + step // 2) // step.clamp_min(1)).clamp_(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=x.device))
    return table.gather(2, flat).to(torch.uint8).view_as(x)


# None is the identity
OPERATIONS: tuple[Callable[[Tensor, Tensor, float], Tensor] | None, ...] = (
    None,
    shear_x,
    shear_y,
    translate_x,
    translate_y,
    rotate,
    brightness,
    colour,
    contrast,
    sharpness,
    posterize,
    solarize,
    autocontrast,
    equalize,
)
