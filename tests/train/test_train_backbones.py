"""Backbones: which images start from them, and from which of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import linvit
from linvit.data import Survey, load_data
from linvit.study import compare
from linvit.study.design import Study, Variant
from linvit.study.measuring import Measuring
from linvit.train import backbones, start_from

PHOTOS = Survey("photos", 7, 3, 400, train=300, validation=40, test=60)


def test_those_that_ship_are_small_whole_and_documented():
    assert "softmax" in backbones.shipped()
    assert sum(path.stat().st_size for path in backbones.HOME.rglob("*") if path.is_file()) <= 10 * 2**20
    for spec, folder in backbones.shipped().items():
        model = linvit.load(folder)
        assert (model.config.attention, model.config.image_size) == (spec, 64)
        assert model(torch.rand(2, 3, 64, 64)).isfinite().all()
        card = (folder / "README.md").read_text()
        assert all(word in card for word in (spec, "Data", "terms", "Recipe", "Figures"))


@pytest.mark.parametrize(
    ("changes", "side", "options", "right"),
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
def test_photos_start_from_them(changes, side, options, right):
    assert backbones.suit(replace(PHOTOS, **changes), side, options) == right


def test_every_attention_starts_from_its_own_kind_or_all_from_softmax(tmp_path, monkeypatch):
    home = {spec: _model(tmp_path / name, spec) for spec, name in (("softmax", "a"), ("uniform", "b"))}
    monkeypatch.setattr(backbones, "shipped", lambda: home)
    soft, uniform = (start_from(folder) for folder in home.values())
    both = backbones.chosen(None, ["softmax", "uniform"], PHOTOS, None, {})
    assert both == {"softmax": soft, "uniform": uniform}
    mixed = backbones.chosen("backbones", ["uniform", "linformer:k=4"], PHOTOS, None, {})
    assert mixed == {"uniform": soft, "linformer:k=4": soft}
    assert backbones.chosen("scratch", ["softmax"], PHOTOS, None, {}) == {}
    assert backbones.chosen(None, ["softmax"], PHOTOS, 32, {}) == {}
    assert backbones.chosen(home["uniform"], ["softmax"], PHOTOS, 32, {}) == {"softmax": uniform}
    monkeypatch.setattr(backbones, "shipped", dict)
    with pytest.raises(ValueError, match="ships no backbones"):
        backbones.chosen("backbones", ["softmax"], PHOTOS, None, {})


def test_attentions_that_come_later_do_as_those_before(tmp_path, monkeypatch):
    home = {spec: _model(tmp_path / name, spec) for spec, name in (("softmax", "a"), ("uniform", "b"))}
    monkeypatch.setattr(backbones, "shipped", lambda: home)
    soft, uniform = (start_from(folder) for folder in home.values())
    moved = uniform.model_copy(update={"folder": "/elsewhere"})  # weights tell which it is

    def later(attentions, begun):
        return backbones.chosen("backbones", attentions, PHOTOS, None, {}, begun)

    assert later(["uniform"], [("softmax", soft), ("identity", soft)]) == {"uniform": soft}
    assert later(["uniform"], [("softmax", soft)]) == {"uniform": uniform}
    assert later(["identity"], [("softmax", soft)]) == {"identity": soft}
    assert later(["softmax", "uniform"], [("uniform", moved)]) == {"softmax": soft, "uniform": uniform}
    with pytest.raises(ValueError, match=r"attention 'identity' has no backbone of its own, .* --from scratch$"):
        later(["softmax", "identity"], [("softmax", soft), ("uniform", moved)])


def test_a_study_keeps_its_starts(tmp_path, monkeypatch):
    """Another attention is refused where it would be behind, and starts as the others did where all share one."""
    home = {spec: _model(tmp_path / name, spec) for spec, name in (("softmax", "a"), ("uniform", "b"))}
    monkeypatch.setattr(backbones, "shipped", lambda: home)
    monkeypatch.setattr(Measuring, "all", lambda self: [])
    monkeypatch.setattr("linvit.report.build", lambda folder, figures: None)
    dataset, own, shared = load_data("synthetic:images=60,size=8,classes=2"), tmp_path / "own", tmp_path / "shared"

    def study(attentions, out):
        folder = compare(dataset, attentions=attentions, start="backbones", seeds=1, steps=1, batch_size=8, jobs=1,
                         out=out, device="cpu")  # fmt: skip
        return {v.attention: v.start.sha256 for v in Study.read(folder / "study.json").variants}

    soft, uniform = (start_from(folder).sha256 for folder in home.values())
    assert study(["softmax"], own) == {"softmax": soft, "uniform": uniform}  # the control comes by itself
    before = {path: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="'identity' has no backbone of its own"):
        study(["identity"], own)
    assert {path: path.read_bytes() for path in own.rglob("*") if path.is_file()} == before
    assert study(["identity"], shared) == {"identity": soft}  # a control itself
    assert study(["softmax", "uniform"], shared) == {"identity": soft, "softmax": soft, "uniform": soft}


def test_a_folder_of_ones_own_is_not_taken_for_one_that_ships(tmp_path):
    own = _model(tmp_path / "backbones" / "x", "softmax").rename(tmp_path / "backbones" / "y")
    start = start_from(own)
    assert start.name == "y"
    assert backbones.first({"softmax": start}) == start
    shipped = start_from(backbones.shipped()["uniform"])
    assert shipped.name == "backbones"
    assert backbones.first({"uniform": shipped}) == start_from(backbones.shipped()["softmax"])


def _model(folder: Path, attention: str) -> Path:
    """A tiny trained model's folder."""
    linvit.train("synthetic:images=30,size=8,classes=2", attention=attention, out=folder, steps=1, dim=8, depth=1,
                 heads=1, mlp_dim=8, stem="patch", patch_size=4)  # fmt: skip
    return folder / "best"


def photos(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for kind in range(2):
        (folder / f"kind {kind}").mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(0, 128, (70, 60, 3), dtype=np.uint8) + 127 * np.uint8(kind)
            Image.fromarray(pixels).save(folder / f"kind {kind}" / f"{i}.jpg")
    return folder


def test_variants_of_another_shape_take_none(tmp_path, monkeypatch):
    monkeypatch.setattr(Measuring, "all", lambda self: [])
    monkeypatch.setattr("linvit.report.build", lambda folder, figures: None)
    place = photos(tmp_path / "photos")
    begun = {}
    for name, options in (("usual", {}), ("wide", {"mlp_dim": 24})):
        folder = compare(place, variants=[Variant(options=options)], controls=False, seeds=1, steps=1, jobs=1,
                         image_size=48, out=tmp_path / name, device="cpu")  # fmt: skip
        study = Study.read(folder / "study.json")
        begun[name] = study.start, study.variants[0].start
    assert begun["wide"] == (None, None)
    assert begun["usual"] == (start_from(backbones.shipped()["softmax"]),) * 2


def test_a_folder_of_photos_is_trained_from_one(tmp_path):
    photos(tmp_path / "photos")
    found = linvit.train(tmp_path / "photos", attention="softmax", out=tmp_path / "run", steps=1)
    stored = json.loads((tmp_path / "run" / "experiment.json").read_text())
    assert stored["start"]["sha256"] == start_from(backbones.shipped()["softmax"]).sha256
    assert found.value("start_accuracy") == 1.0  # dark and bright: class means tell them apart
    bare = linvit.train(tmp_path / "photos", attention="softmax", start="scratch", out=tmp_path / "bare", steps=1)
    assert bare.value("start_accuracy") is None
