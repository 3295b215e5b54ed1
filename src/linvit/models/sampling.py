"""Images from a next-pixel model, token by token: with linear attention each step costs the same, however many came
before, since all that it remembers of them is a state of fixed size; softmax keeps all keys and values."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linvit.files import write_atomically
from linvit.models.stems import from_levels
from linvit.models.vit import VisionTransformer
from linvit.progress import Progress, ignore
from linvit.randomness import generator


@torch.inference_mode()
def sample(
    model: VisionTransformer, images: int = 16, seed: int = 0, temperature: float = 1.0, progress: Progress = ignore
) -> Tensor:
    """Draw uint8 images (images, C, H, W). The random numbers depend on the seed alone; a temperature below 1 favours
    likely values."""
    if not model.config.causal:
        raise ValueError(f"stem={model.config.stem} cannot draw images: train one with --task next-pixel")
    if images < 1:
        raise ValueError(f"images={images} must be at least 1")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be above 0")
    device = next(model.parameters()).device
    draws = torch.rand(model.tokens, images, 1, generator=generator("sample", seed), dtype=torch.float64)
    levels = torch.zeros(images, model.tokens, dtype=torch.int64)
    last, states = levels[:, 0], None
    was_training = model.training
    model.eval()
    for place, draw in enumerate(draws):
        logits, states = model.step(last.to(device), place, states)
        below: Any = (logits.cpu().double() / temperature).softmax(-1).cumsum(-1)
        last = torch.searchsorted(below, draw * below[:, -1:], right=True).squeeze(1).clamp_max(below.shape[1] - 1)
        levels[:, place] = last
        progress(place + 1, model.tokens, "drawing pixels")
    model.train(was_training)
    return from_levels(levels, model.config)


def draw_images(
    model: VisionTransformer,
    path: Path,
    images: int = 16,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    progress: Progress = ignore,
) -> None:
    """Write one PNG with N sampled images in a nearly square arrangement."""
    from PIL import Image

    found = sample(model, images, seed, temperature, progress).numpy()
    columns = math.isqrt(images - 1) + 1
    found = np.concatenate([found, np.zeros((-images % columns, *found.shape[1:]), found.dtype)])
    n, channels, height, width = found.shape
    rows = found.reshape(n // columns, columns, channels, height, width).transpose(0, 3, 1, 4, 2)
    sheet = rows.reshape(n // columns * height, columns * width, channels)
    file = io.BytesIO()
    Image.fromarray(sheet[..., 0] if channels == 1 else sheet).save(file, "png")
    write_atomically(path, file.getvalue())
