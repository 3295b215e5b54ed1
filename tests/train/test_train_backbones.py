"""Backbones: which images start from them, and from which of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import killable
import pytest
import torch

from linvit.data import Survey
from linvit.models import create_model
from linvit.pipeline.train import train
from linvit.training import backbones
from linvit.training.checkpoint import load, save_config, save_model
from linvit.training.start import start_from

PHOTOS = Survey("photos", 7, 3, 400, train=300, validation=40, test=60)


def test_shipped_backbones_are_small_complete_and_documented():
    assert "softmax" in backbones.shipped()
    assert sum(path.stat().st_size for path in backbones.HOME.rglob("*") if path.is_file()) <= 10 * 2**20
    for spec, folder in backbones.shipped().items():
        model = load(folder)
        assert (model.config.attention, model.config.image_size) == (spec, 64)
        assert model(torch.rand(2, 3, 64, 64)).isfinite().all()
        card = (folder / "README.md").read_text()
        assert all(word in card for word in (spec, "Data", "terms", "Recipe", "Figures"))


@pytest.mark.parametrize(
    ("changes", "side", "options", "expected"),
    [
        ({}, 400, {}, True),
        ({}, 48, {"lr": 1e-3, "dim": None}, True),
        ({}, 47, {}, False),
        ({"channels": 1}, 400, {}, False),
        ({"train": 50_000}, 400, {}, False),
        ({"name": "cifar10"}, 400, {}, False),
        ({"name": "tiny-imagenet:part=fifth"}, 64, {}, False),
        ({}, 400, {"dim": 64}, False),
        ({}, 400, {"size": "nano"}, False),
    ],
)
def test_photos_start_from_them(changes, side, options, expected):
    assert backbones.suit(replace(PHOTOS, **changes), side, options) == expected


def make_model(folder: Path, attention: str, dataset) -> Path:
    """A tiny model's folder; two attentions have different weights."""
    seed = sum(map(ord, attention))
    model = create_model(image_size=8, classes=2, attention=attention, **killable.SHAPE, seed=seed)
    save_config(folder, model.config, dataset)
    save_model(folder, model)
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch, dataset) -> dict[str, Path]:
    """Backbones of softmax and uniform alone."""
    found = {spec: make_model(tmp_path / name, spec, dataset) for spec, name in (("softmax", "a"), ("uniform", "b"))}
    monkeypatch.setattr(backbones, "shipped", lambda: found)
    return found


def test_every_attention_starts_from_its_own_or_all_from_softmax(home, monkeypatch):
    soft, uniform = (start_from(folder) for folder in home.values())
    both = backbones.chosen(None, ["softmax", "uniform"], PHOTOS, None, {})
    assert both == {"softmax": soft, "uniform": uniform}
    mixed = backbones.chosen("backbones", ["uniform", "linformer:k=4"], PHOTOS, None, {})
    assert mixed == {"uniform": soft, "linformer:k=4": soft}
    assert backbones.chosen("scratch", ["softmax"], PHOTOS, None, {}) == {}
    assert backbones.chosen(None, ["softmax"], PHOTOS, 32, {}) == {}
    assert backbones.chosen(home["uniform"], ["softmax"], PHOTOS, 32, {}) == {"softmax": uniform}
    monkeypatch.setattr(backbones, "shipped", dict)
    with pytest.raises(ValueError, match="no backbones are installed"):
        backbones.chosen("backbones", ["softmax"], PHOTOS, None, {})


def test_later_attentions_start_as_earlier_ones_did(home):
    soft, uniform = (start_from(folder) for folder in home.values())
    moved = uniform.model_copy(update={"folder": "/elsewhere"})  # it is identified by its weights

    def later(attentions, earlier):
        return backbones.chosen("backbones", attentions, PHOTOS, None, {}, earlier)

    assert later(["uniform"], [("softmax", soft), ("identity", soft)]) == {"uniform": soft}
    assert later(["uniform"], [("softmax", soft)]) == {"uniform": uniform}
    assert later(["identity"], [("softmax", soft)]) == {"identity": soft}
    assert later(["softmax", "uniform"], [("uniform", moved)]) == {"softmax": soft, "uniform": uniform}
    with pytest.raises(ValueError, match=r"attention 'identity' has no backbone of its own, .* --from scratch$"):
        later(["softmax", "identity"], [("softmax", soft), ("uniform", moved)])


def test_a_users_folder_named_backbones_is_not_a_shipped_one(tmp_path, dataset):
    start = start_from(make_model(tmp_path / "backbones" / "y", "softmax", dataset))
    assert start.name == "y"
    assert backbones.first({"softmax": start}) == start
    shipped = start_from(backbones.shipped()["uniform"])
    assert shipped.name == "backbones"
    assert backbones.first({"uniform": shipped}) == start_from(backbones.shipped()["softmax"])


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return killable.make_folder(tmp_path_factory.mktemp("photos") / "photos", 24, 64)


def test_a_folder_of_photos_is_trained_from_one(photos, tmp_path):
    found = train(photos, attention="softmax", out=tmp_path / "run", steps=1)
    assert found.experiment.start == start_from(backbones.shipped()["softmax"])
    assert found.value("start_accuracy") == 1.0  # dark and light: class means separate them
    bare = train(photos, attention="softmax", start="scratch", out=tmp_path / "bare", steps=1)
    assert bare.experiment.start is None
    assert bare.value("start_accuracy") is None
