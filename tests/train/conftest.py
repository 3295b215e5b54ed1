"""One tiny data set and one finished training, shared by the tests of this folder."""

from __future__ import annotations

import killable
import pytest

from linvit.data import Dataset, load_data
from linvit.pipeline.train import Trained, train


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def dataset() -> Dataset:
    return load_data(killable.DATA)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Trained:
    """Two epochs of four steps, never interrupted. Tests that change its files work on a copy."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return train(killable.DATA, out=folder, epochs=2, **killable.TINY)
