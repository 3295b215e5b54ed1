"""The task `next-pixel`: bits per dimension, its records, resuming, and what does not go with it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

import linvit
from linvit import cli, data, metrics
from linvit.measure.likelihood import likelihood
from linvit.models.stems import to_levels
from linvit.records import Records
from linvit.train.use import evaluate_folder

DATA = "synthetic:images=72,size=6,channels=1"
TINY = {"task": "next-pixel", "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24, "levels": 8, "batch_size": 8,
        "device": "cpu"}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("levels", [2, 7, 256])
def test_a_model_that_knows_nothing_needs_log2_of_the_levels(levels):
    dataset = data.load_data(DATA)
    model = linvit.create_model(stem="next-pixel", image_size=6, channels=1, levels=levels, dim=8, depth=1, heads=2)
    torch.nn.init.zeros_(model.head.weight)
    found = likelihood(model, model.config, dataset.test, batch=5)
    assert found.bits == pytest.approx(math.log2(levels), abs=1e-6)
    assert found.loss == pytest.approx(math.log(levels), abs=1e-6)
    assert len(found.bits) == len(dataset.test)


def test_bits_are_the_mean_of_what_the_logits_say():
    dataset = data.load_data(DATA)
    model = linvit.create_model(stem="next-pixel", image_size=6, channels=1, levels=5, dim=8, depth=1, heads=2).double()
    x = torch.from_numpy(dataset.test.images) / 255
    p, levels = model(x).softmax(-1).tolist(), to_levels(x, model.config).tolist()
    wanted = [[-math.log2(p[i][t][level]) for t, level in enumerate(levels[i])] for i in range(len(x))]
    assert likelihood(model, model.config, dataset.test, batch=7).bits == pytest.approx(np.mean(wanted, 1), abs=1e-6)


@pytest.mark.parametrize("order", ["raster", "reversed"])
def test_it_learns_and_every_number_has_its_place(tmp_path, order):
    options = TINY | {"levels": 16, "order": order, "lr": 0.01, "epochs": 4}
    trained = linvit.train("digits", attention="performer-relu:m=8", limit=200, out=tmp_path / "run", **options)
    assert [problem for record in trained.records for problem in metrics.problems(record)] == []
    best = trained.value("bits_per_dim", "best")
    assert best is not None
    assert best < 3  # of log2(16) = 4
    assert trained.test_accuracy is None
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert min(row["validation_bits_per_dim"] for row in log) == trained.value("validation_bits_per_dim")
    assert log[-1]["validation_loss"] == pytest.approx(log[-1]["validation_bits_per_dim"] * math.log(2))
    with np.load(tmp_path / "run" / "bits.npz") as file:
        assert file["bits"].mean() == pytest.approx(best, abs=1e-5)
    again = evaluate_folder(tmp_path / "run")
    assert again.result.bits_per_dim == pytest.approx(best, abs=1e-6)  # type: ignore[union-attr]
    card = (tmp_path / "run" / "best" / "README.md").read_text()
    assert "next-pixel model with performer-relu:m=8" in card
    assert "test bits per dim" in card


def test_gradient_norms_are_logged_and_recorded(tmp_path):
    trained = linvit.train(DATA, attention="performer-elu1", epochs=3, out=tmp_path / "run", **TINY)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert all(0 < row["gradient_norm"] <= row["gradient_norm_max"] for row in log)
    assert trained.value("gradient_norm") == log[-1]["gradient_norm_max"]


@pytest.mark.parametrize(("kernel", "names"), [
    ("theta-mixture", {"alpha", "tau", "eps"}), ("theta:m=8", {"gate", "tau", "alpha"}),
])  # fmt: skip
def test_what_attentions_learn_is_logged_and_recorded(tmp_path, kernel, names):
    options = {"attention": f"softmax@1+performer-{kernel}@1", "epochs": 2, "lr": 0.01}
    trained = linvit.train(DATA, out=tmp_path / "run", **TINY | options)
    assert [problem for record in trained.records for problem in metrics.problems(record)] == []
    found = {(r.tags["layer"], r.tags["name"]): r.value for r in trained.records if r.metric == "learned_parameter"}
    assert set(found) == {(1, name) for name in names}
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert {(1, name): log[-1][f"learned.1.{name}"] for name in names} == found
    assert any(log[0][f"learned.1.{name}"] != log[1][f"learned.1.{name}"] for name in names)
    model = linvit.load(tmp_path / "run" / "last")
    assert model.learned() == found


def test_stopped_and_continued_it_ends_with_the_same_weights(tmp_path):
    options = {"attention": "performer-exp:m=8", "epochs": 2} | TINY
    linvit.train(DATA, out=tmp_path / "whole", **options)

    def stop(event):
        if getattr(event, "step", 0) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        linvit.train(DATA, out=tmp_path / "parts", listeners=[stop], checkpoint_seconds=0.0, **options)
    linvit.train(DATA, out=tmp_path / "parts", **options)
    for name in ("best", "last"):
        one, other = (linvit.load(tmp_path / folder / name).state_dict() for folder in ("whole", "parts"))
        assert all(torch.equal(value, other[key]) for key, value in one.items())
    records = [[(r.metric, r.value) for r in Records(tmp_path / folder / "records.jsonl") if "seconds" not in r.metric]
               for folder in ("whole", "parts")]  # fmt: skip
    assert records[0] == records[1]


def test_the_command_line_trains_draws_and_evaluates(tmp_path, capsys):
    folder, sheet = tmp_path / "run", tmp_path / "sheet.png"
    sizes = [
        word for pair in ("dim=16", "depth=1", "heads=2", "levels=4", "order=reversed") for word in ("--set", pair)
    ]
    words = ["train", DATA, "--task", "next-pixel", "-a", "performer-relu:m=8", "--steps", "3", "--out", str(folder)]
    assert cli.main([*words, *sizes, "-q", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bits_per_dim"] > 0
    assert "test_accuracy" not in said
    assert cli.main(["sample", str(folder), "--images", "5", "--out", str(sheet)]) == 0
    with Image.open(sheet) as image:
        assert image.size == (18, 12)
        assert image.mode == "L"
    capsys.readouterr()
    assert cli.main(["evaluate", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_dim"] == pytest.approx(said["bits_per_dim"], abs=1e-6)
    assert cli.main(["predict", str(sheet), "--model", str(folder)]) == 2
    assert "next-pixel model, which knows no classes" in capsys.readouterr().err
    assert cli.main(["sample", str(folder), "--out", str(tmp_path / "sheet.gif")]) == 2
    assert "must end in .png" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "message"), [
    ({"stem": "pixel", "levels": None}, "stem=pixel does not go with task next-pixel, which needs stem=next-pixel"),
    ({"attention": "linformer:k=5"}, "linformer cannot be causal"),
    ({"label_smoothing": 0.1}, "label_smoothing=0.1 does not go with task next-pixel"),
    ({"mixup": 0.2}, "mixup=0.2 does not go with task next-pixel"),
    ({"folds": 2}, "folds=2 does not go with task next-pixel"),
    ({"task": "classification", "stem": "next-pixel"}, "stem=next-pixel does not go with task classification"),
    ({"task": "last-pixel"}, "unknown task 'last-pixel'"),
])  # fmt: skip
def test_what_does_not_go_together(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        linvit.train(DATA, out=tmp_path / "run", **TINY | {"epochs": 1} | options)
    assert not (tmp_path / "run").exists()


def test_a_size_by_name_keeps_the_stem(tmp_path):
    trained = linvit.train(DATA, size="nano", dry_run=True, out=tmp_path / "run", task="next-pixel", levels=8)
    assert trained.experiment.model.causal
    assert trained.experiment.model.dim == 64


def test_linearized_it_stays_causal():
    model = linvit.create_model(stem="next-pixel", image_size=6, channels=1, levels=5, dim=8, depth=2, heads=2).double()
    x = torch.rand(2, 1, 6, 6).double()
    model, _ = linvit.linearize(model, "performer-relu:m=8")
    before = model(x)
    x[:, 0, 3, 3] = 1 - x[:, 0, 3, 3]
    assert (model(x) - before)[:, : 3 * 6 + 4].abs().max() < 1e-9
