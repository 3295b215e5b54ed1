"""Images that are not square, from the command line: trained, resumed, evaluated, exported, converted and compared."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import linvit
from linvit import cli

SIZE = ["--image-size", "12x20", "--device", "cpu"]
TINY = ["--stem", "patch", "--patch-size", "4", "--dim", "16", "--depth", "2", "--heads", "2", "--set", "mlp_dim=16"]
TINY += ["--batch-size", "16", "--lr", "0.01", "--set", "flip=none"]


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    return code, *capsys.readouterr()


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "shapes"))
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Wide and tall photos with a bright column at the left, or at the right, of their centre of 3 : 5."""
    folder, noise = tmp_path_factory.mktemp("photos") / "columns", np.random.default_rng(0)
    for name, place in (("left", 0.15), ("right", 0.85)):
        (folder / name).mkdir(parents=True)
        for i in range(24):
            height, width = ((30, 70), (60, 40), (18, 30))[i % 3]
            shown = min(width, height * 5 // 3)
            pixels = noise.integers(0, 60, (height, width), np.uint8)
            middle = round((width - shown) / 2 + place * shown)
            pixels[:, max(0, middle - shown // 8) : middle + shown // 8] += 180
            Image.fromarray(pixels).save(folder / name / f"{i:02}.png")
    return folder


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "columns"
    words = ["train", photos, *SIZE, *TINY, "-a", "softmax", "--epochs", "20", "--out", out, "-q"]
    assert cli.main([str(word) for word in words]) == 0
    return out


def test_a_training_and_what_uses_it(capsys, photos, trained):
    config = json.loads((trained / "best" / "config.json").read_text())
    assert config["model"]["image_size"] == "12x20"
    assert "Input: 1 × 12 × 20" in (trained / "best" / "README.md").read_text()
    code, out, err = run(capsys, "evaluate", trained, "--json")
    assert (code, err.strip()) == (0, "")
    assert json.loads(out)["accuracy"] > 0.9  # what is left and right is in the crop
    assert "15 × 16" in run(capsys, "evaluate", trained, "--summary")[1]
    code, out, _ = run(capsys, "predict", photos / "right" / "00.png", "--model", trained)
    assert (code, "right 9" in out or "right 100" in out) == (0, True)
    model = linvit.load(trained, image_size=(20, 12))
    assert (model.config.image_size, model(torch.randn(2, 1, 20, 12)).shape) == ("20x12", (2, 2))


def test_the_same_command_resumes(capsys, photos, tmp_path):
    words = ["train", photos, *SIZE, *TINY, "--epochs", 2, "--out", tmp_path / "run"]
    assert run(capsys, *words)[0] == 0
    code, out, err = run(capsys, *words, "--dry-run")
    assert (code, "1 × 12 × 20" in out, "finished" in out) == (0, True, True)
    code, out, err = run(capsys, *words)
    assert (code, "epoch 1" in err) == (0, False)
    code, _, err = run(capsys, *[word if word != "12x20" else 12 for word in words])
    assert (code, "error" in err) == (2, True)


def test_export_to_onnx(capsys, trained, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    code, out, _ = run(capsys, "export", trained, "--out", tmp_path / "model.onnx")
    assert (code, "(batch, 1, 12, 20)" in out) == (0, True)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    said = session.get_modelmeta().custom_metadata_map
    assert (json.loads(said["image_size"]), "12, 20" in said["pixels"]) == ("12x20", True)
    assert session.get_inputs()[0].shape[1:] == [1, 12, 20]


def test_export_to_transformers(capsys, photos, tmp_path):
    transformers = pytest.importorskip("transformers")
    words = [*SIZE, *TINY, "--set", "pool=cls", "--resize", "squeeze", "-a", "softmax", "--epochs", 1]
    assert run(capsys, "train", photos, *words, "--out", tmp_path / "run", "-q")[0] == 0
    assert run(capsys, "export", tmp_path / "run", "-f", "hf", "--out", tmp_path / "hf")[0] == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    pixels = json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text())
    assert (config["image_size"], pixels["size"]) == ([12, 20], {"height": 12, "width": 20})
    theirs, ours = transformers.ViTForImageClassification.from_pretrained(tmp_path / "hf"), linvit.load(tmp_path / "hf")
    x = torch.randn(3, 1, 12, 20)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs.eval()(x).logits, atol=1e-5, rtol=1e-5)
    assert (ours.config.image_size, ours.about["resize"]) == ("12x20", "squeeze")


@pytest.mark.parametrize("size", ["12x20", "24x40", "16x16"])
def test_a_conversion(capsys, photos, trained, tmp_path, size):
    words = ["convert", trained, "--data", photos, "--to", "linformer:k=5", "--steps", 3, "--image-size", size]
    code, out, _ = run(capsys, *words, "--out", tmp_path / "run", "--device", "cpu", "-q")
    assert (code, f"{size} px" in out or size == "16x16") == (0, True)
    assert linvit.load(tmp_path / "run").config.image_size == (16 if size == "16x16" else size)
    page = (tmp_path / "run" / "report.html").read_text()
    assert ("Height of the images in pixels" in page) == (size != "16x16")
    assert run(capsys, "report", tmp_path / "run")[0] == 0


def test_a_comparison_starts_from_a_model_at_another_size(capsys, photos, trained, tmp_path):
    words = ["compare", photos, "--from", trained, "--image-size", "16x24", "-a", "softmax", "-a", "performer-relu:m=5"]
    words += ["--set", "steps=2", "--seeds", 1, "--jobs", 1, "--device", "cpu", "--out", tmp_path / "study", "-q"]
    assert run(capsys, *words)[::2] == (0, "")
    study = json.loads((tmp_path / "study" / "study.json").read_text())
    assert study["dataset"]["image_size"] == study["source"]["image_size"] == study["model"]["image_size"] == "16x24"
    assert "16×24 px" in (tmp_path / "study" / "report.html").read_text()
    command = study["requests"][0]
    assert command["image_size"] == "16x24"


def test_advice(capsys, photos):
    words = ["advise", photos, "--image-size", "96x160", "--for", "h100", "-a", "performer-relu:m=32"]
    code, out, _ = run(capsys, *words)
    assert (code, "96x160 px" in out) == (0, True)
    ((height, width),) = (map(int, pair) for pair in set(re.findall(r"--image-size (\d+)x(\d+)", out)))
    assert width > 160
    assert abs(height / width - 96 / 160) < 0.02


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--image-size", "224x"], "--image-size 224x must be a side in pixels, e.g. 224, or HEIGHTxWIDTH"),
        (["--image-size", "0x3"], "--image-size 0x3 must be a side in pixels"),
        (["--image-size", "3x4x5"], "--image-size 3x4x5 must be a side in pixels"),
        (["--image-size", "2x12"], "image_size=2x12 must be between 4 and 8192"),
        (["--image-size", "10x14", "--set", "patch_size=4"], "patch_size=4 does not divide image_size=10x14"),
        (
            ["--image-size", "4x64", "--set", "stem=conv", "--set", "pools=3"],
            "image_size=4x64 cannot be halved pools=3",
        ),
    ],
)
def test_bad_sizes(capsys, photos, tmp_path, words, says):
    if "patch_size=4" in words:
        words = [*words, "--set", "stem=patch"]
    code, out, err = run(capsys, "train", photos, *words, "--out", tmp_path / "run", "--device", "cpu")
    assert (code, out, says in err, err.count("\n")) == (2, "", True, 1)
