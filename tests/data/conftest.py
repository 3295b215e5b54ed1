"""Small image folders on disk, and a cache and data root that belong to the test alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def image_folder(tmp_path: Path):
    """make(name, {class: count}, size, mode) → a folder of PNGs whose pixels tell class and number."""

    def make(name: str = "images", classes: dict[str, int] | None = None, size: int = 11, mode: str = "RGB") -> Path:
        folder = tmp_path / name
        for label, (title, count) in enumerate((classes or {"cat": 10, "dog": 10}).items()):
            (folder / title).mkdir(parents=True)
            for number in range(count):
                pixels = np.full((size, size, 3), 50 * label, np.uint8)
                pixels[..., 1] = number
                Image.fromarray(pixels).convert(mode).save(folder / title / f"{number:03}.png")
        return folder

    return make
