"""A generated set for tests and smoke runs: each class is a stripe direction, under noise, with a random phase."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from linvit.data.sources import DATASETS, Arrays, check_memory, stack


@DATASETS.register("synthetic")
def synthetic(
    root: Path, *, classes: int = 4, images: int = 256, size: int = 16, channels: int = 3, noise: float = 0.3
) -> Arrays:
    if classes < 2 or images < 3 * classes or size < 4 or channels not in (1, 3):
        raise ValueError("synthetic: needs classes ≥ 2, images ≥ 3 × classes, size ≥ 4 and channels 1 or 3")
    check_memory("synthetic", 16 * images * channels * size**2)  # drawn in float64, with a copy
    y, x = np.mgrid[:size, :size] / size
    rng = np.random.Generator(np.random.Philox(key=classes))

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % classes
        angle = np.pi * labels / classes
        across = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
        phase = rng.random((count, 1, 1)) * 2 * np.pi
        clean = 0.5 + 0.5 * np.sin(4 * np.pi * across + phase)
        noisy = (1 - noise) * clean[:, None] + noise * rng.random((count, channels, size, size))
        return np.rint(255 * noisy).astype(np.uint8), labels

    names = [f"angle {180 * i // classes}" for i in range(classes)]
    return stack({"train": draw(images), "test": draw(images // 2)}, names)
