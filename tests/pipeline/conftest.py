"""Tiny images and an untrained model's folder to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from linvit.data import Dataset, load_data
from linvit.models import create_model
from linvit.schemas.experiment import Start
from linvit.training.checkpoint import save_config, save_model
from linvit.training.start import start_from

SHAPE: dict[str, Any] = {"stem": "patch", "patch_size": 4, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def tiny() -> Dataset:
    return load_data("synthetic:images=60,size=8,classes=3")


@pytest.fixture(scope="session")
def teacher(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "teacher" / "best"
    model = create_model(image_size=8, classes=3, **SHAPE, dropout=0.125, attention="uniform", seed=7)
    save_config(folder, model.config, tiny)
    save_model(folder, model)
    return folder.parent


@pytest.fixture
def start(teacher) -> Start:
    return start_from(teacher)


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """Two classes of twelve JPEG files."""
    folder, source = tmp_path_factory.mktemp("data") / "photos", np.random.default_rng(0)
    for kind in range(2):
        (folder / f"kind {kind}").mkdir(parents=True)
        for i in range(12):
            pixels = source.integers(0, 128, (70, 60, 3), dtype=np.uint8) + 127 * np.uint8(kind)
            Image.fromarray(pixels).save(folder / f"kind {kind}" / f"{i}.jpg")
    return folder
