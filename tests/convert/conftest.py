from __future__ import annotations

from pathlib import Path

import pytest
from converting import SEARCHED, SHAPE

from linvit import data
from linvit.conversion.run import Converted
from linvit.pipeline.convert import convert
from linvit.pipeline.train import train


@pytest.fixture(scope="session")
def teacher(tmp_path_factory) -> Path:
    """The folder of a small softmax model for handwritten digits, trained in a few seconds."""
    recipe = {"batch_size": 32, "pad_crop": 0, "lr": 1e-2, "epochs": 8}
    folder = tmp_path_factory.mktemp("teacher") / "run"
    trained = train("digits", attention="softmax", out=folder, device="cpu", **SHAPE, **recipe)
    assert (trained.test_accuracy or 0) > 0.9
    return trained.folder


@pytest.fixture(scope="session")
def converted(teacher, tmp_path_factory) -> Converted:
    """A finished conversion with a search and all stages."""
    return convert(teacher, out=tmp_path_factory.mktemp("convert") / "one", **SEARCHED)


@pytest.fixture(scope="session")
def digits() -> data.Dataset:
    return data.load_data("digits")
