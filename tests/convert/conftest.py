from __future__ import annotations

from pathlib import Path

import pytest

import linvit
from linvit import data

TEACHER = {
    "attention": "softmax", "stem": "patch", "patch_size": 2, "dim": 24, "depth": 4, "heads": 2, "mlp_dim": 32,
    "batch_size": 32, "pad_crop": 0, "lr": 1e-2, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="session")
def teacher(tmp_path_factory) -> Path:
    """A folder with a small softmax model that knows handwritten digits, trained in a few seconds."""
    trained = linvit.train("digits", out=tmp_path_factory.mktemp("teacher") / "run", epochs=10, **TEACHER)
    assert trained.test_accuracy is not None
    assert trained.test_accuracy > 0.9
    return trained.folder


@pytest.fixture(scope="session")
def digits() -> data.Dataset:
    return data.load_data("digits")
