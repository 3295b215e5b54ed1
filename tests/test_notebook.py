"""The notebook runs from top to bottom, and shows what it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

FILE = Path(__file__).parents[1] / "docs/notebooks/linear_vit.py"
pytest.importorskip("marimo")
transformers = pytest.importorskip("transformers")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """What the cells define, with these command-line options."""
    monkeypatch.setattr(sys, "argv", [str(FILE), "--", *words])
    spec = importlib.util.spec_from_file_location("linear_vit", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    outputs, found = module.app.run()
    assert len([output for output in outputs if output is not None]) >= 8
    return dict(found)


def test_it_runs_offline(monkeypatch, tmp_path):
    found = run(monkeypatch, "--out", str(tmp_path))
    assert type(found["linear"]) is type(found["original"])
    assert set(found["report"].distance) == {0, 1, 2}
    assert all(0 < row["error"] < 2 for row in found["rows"])
    assert {row["attention"] for row in found["times"]} == {"softmax", "identity", "performer-exp:m=64"}
    assert found["difference"] < 1e-4
    assert {path.name for path in (tmp_path / "linear-vit").iterdir()} == {"config.json", "model.safetensors"}


def test_a_model_and_images_of_ones_own(monkeypatch, tmp_path):
    sizes = {"hidden_size": 24, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    names = {0: "dark", 1: "light"}
    config = transformers.ViTConfig(**sizes, image_size=24, patch_size=8, id2label=names)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "mine")
    transformers.ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path / "mine")
    for low, name in ((0, "dark"), (100, "light")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(20):
            pixels = np.random.default_rng(i).integers(low, low + 100, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))
    words = (
        "--model",
        str(tmp_path / "mine"),
        "--images",
        str(tmp_path / "photos"),
        "--attention",
        "softmax@1+inline@1",
    )
    found = run(monkeypatch, *words, "--out", str(tmp_path / "out"))
    assert found["report"].attention == "softmax@1+inline@1"
    assert len(found["right"]) == 2
    assert any("Accuracy" in line for line in found["lines"])
    assert found["difference"] < 1e-4
