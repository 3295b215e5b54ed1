"""The task `next-pixel`: bits per dimension, its records, resuming, and what it cannot be combined with."""

from __future__ import annotations

import math

import killable
import numpy as np
import pytest
import torch
from killable import read_log
from PIL import Image

from linvit import create_model, data, metrics
from linvit.conversion.linearize import linearize
from linvit.measure.likelihood import likelihood
from linvit.models.sampling import draw_images
from linvit.models.stems import to_levels
from linvit.pipeline.train import train
from linvit.records import Records
from linvit.training.checkpoint import load
from linvit.training.evaluate import evaluate_folder
from linvit.training.predict import predict

DATA = "synthetic:images=72,size=6,channels=1"
SMALL = {"stem": "next-pixel", "image_size": 6, "channels": 1, "dim": 8, "heads": 2}
TINY = {
    "task": "next-pixel",
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 24,
    "levels": 8,
    "batch_size": 8,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def images() -> data.Split:
    return data.load_data(DATA).test


@pytest.mark.parametrize("levels", [2, 7, 256])
def test_a_uniform_prediction_needs_log2_of_the_levels(levels, images):
    model = create_model(levels=levels, depth=1, **SMALL)
    torch.nn.init.zeros_(model.head.weight)
    found = likelihood(model, model.config, images, batch=5)
    assert found.bits == pytest.approx(math.log2(levels), abs=1e-6)
    assert found.loss == pytest.approx(math.log(levels), abs=1e-6)
    assert len(found.bits) == len(images)


def test_bits_are_the_mean_of_what_the_logits_say(images):
    model = create_model(levels=5, depth=1, **SMALL).double()
    x = torch.from_numpy(images.images) / 255
    p, levels = model(x).softmax(-1).tolist(), to_levels(x, model.config).tolist()
    expected = [[-math.log2(p[i][t][level]) for t, level in enumerate(levels[i])] for i in range(len(x))]
    assert likelihood(model, model.config, images, batch=7).bits == pytest.approx(np.mean(expected, 1), abs=1e-6)


@pytest.mark.parametrize("order", ["raster", "reversed"])
def test_it_learns_and_every_number_has_its_place(tmp_path, order):
    options = TINY | {"levels": 16, "order": order, "lr": 0.01, "epochs": 3}
    trained = train("digits", attention="performer-relu:m=8", limit=150, out=tmp_path / "run", **options)
    assert [problem for record in trained.records for problem in metrics.problems(record)] == []
    best, log = trained.value("bits_per_dim", "best"), read_log(tmp_path / "run")
    assert best is not None
    assert best < 3.2  # of log2(16) = 4
    assert trained.test_accuracy is None
    assert min(row["validation_bits_per_dim"] for row in log) == trained.value("validation_bits_per_dim")
    assert log[-1]["validation_loss"] == pytest.approx(log[-1]["validation_bits_per_dim"] * math.log(2))
    with np.load(tmp_path / "run" / "bits.npz") as file:
        assert file["bits"].mean() == pytest.approx(best, abs=1e-5)
    again = evaluate_folder(tmp_path / "run")
    assert again.result.bits_per_dim == pytest.approx(best, abs=1e-6)  # type: ignore[union-attr]
    card = (tmp_path / "run" / "best" / "README.md").read_text()
    assert "next-pixel model with performer-relu:m=8" in card
    assert "test bits per dim" in card


def test_a_trained_model_draws_images_and_predicts_no_classes(tmp_path):
    options = TINY | {"levels": 4, "order": "reversed", "depth": 1, "steps": 3}
    trained = train(DATA, attention="performer-relu:m=8", out=tmp_path / "run", **options)
    draw_images(trained.model, tmp_path / "sheet.png", 5)
    with Image.open(tmp_path / "sheet.png") as image:
        assert (image.size, image.mode) == ((18, 12), "L")
    with pytest.raises(ValueError, match="next-pixel model without classes"):
        next(predict(trained.model, [tmp_path / "sheet.png"]))


@pytest.mark.parametrize(
    ("kernel", "names"),
    [("theta-mixture", {"alpha", "tau", "eps"}), ("theta:m=8", {"gate", "tau", "alpha"})],
)
def test_learned_parameters_and_gradient_norms_are_logged_and_recorded(tmp_path, kernel, names):
    options = {"attention": f"softmax@1+performer-{kernel}@1", "epochs": 2, "lr": 0.01}
    trained = train(DATA, out=tmp_path / "run", **TINY | options)
    assert [problem for record in trained.records for problem in metrics.problems(record)] == []
    found = {(r.tags["layer"], r.tags["name"]): r.value for r in trained.records if r.metric == "learned_parameter"}
    assert set(found) == {(1, name) for name in names}
    log = read_log(tmp_path / "run")
    assert {(1, name): log[-1][f"learned.1.{name}"] for name in names} == found
    assert any(log[0][f"learned.1.{name}"] != log[1][f"learned.1.{name}"] for name in names)
    assert load(tmp_path / "run" / "last").learned() == found
    assert all(0 < row["gradient_norm"] <= row["gradient_norm_max"] for row in log)
    assert trained.value("gradient_norm") == log[-1]["gradient_norm_max"]


def test_a_resumed_training_ends_with_the_same_weights(tmp_path):
    options = {"attention": "performer-exp:m=8", "epochs": 2} | TINY
    train(DATA, out=tmp_path / "whole", **options)
    with pytest.raises(killable.Killed):
        train(DATA, out=tmp_path / "parts", on_event=killable.kill_after(3), checkpoint_seconds=0.0, **options)
    train(DATA, out=tmp_path / "parts", **options)
    for name in ("best", "last"):
        one, other = (tmp_path / folder / name / "model.safetensors" for folder in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes()
    records = [
        [(r.metric, r.value) for r in Records(tmp_path / folder / "records.jsonl") if "seconds" not in r.metric]
        for folder in ("whole", "parts")
    ]
    assert records[0] == records[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stem": "pixel", "levels": None},
            "stem=pixel cannot be combined with task next-pixel, which needs stem=next-pixel",
        ),
        ({"attention": "linformer:k=5"}, "linformer cannot be causal"),
        ({"label_smoothing": 0.1}, "label_smoothing=0.1 cannot be combined with task next-pixel"),
        ({"mixup": 0.2}, "mixup=0.2 cannot be combined with task next-pixel"),
        ({"folds": 2}, "folds=2 cannot be combined with task next-pixel"),
        (
            {"task": "classification", "stem": "next-pixel"},
            "stem=next-pixel cannot be combined with task classification",
        ),
        ({"task": "last-pixel"}, "unknown task 'last-pixel'"),
    ],
)
def test_what_cannot_be_combined(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(DATA, out=tmp_path / "run", **TINY | {"epochs": 1} | options)
    assert not (tmp_path / "run").exists()


def test_a_linearized_model_stays_causal():
    model, _ = linearize(create_model(levels=5, depth=2, **SMALL).double(), "performer-relu:m=8")
    black = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    black[:, 0, 3, 3] = 0.0
    white = black.clone()
    white[:, 0, 3, 3] = 1.0
    change = (model(black) - model(white)).abs().amax((0, 2))
    pixel = 3 * 6 + 3
    assert change[: pixel + 1].max() < 1e-9
    assert change[pixel + 1 :].min() > 1e-6
