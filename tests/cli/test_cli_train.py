"""`linvit train`, `evaluate` and `predict` as a user meets them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from linvit import cli

TINY = ["--stem", "patch", "--patch-size", "4", "--dim", "16", "--depth", "1", "--heads", "2", "--set", "mlp_dim=16"]
TINY += ["--batch-size", "16", "--device", "cpu"]
DATA = "synthetic:images=72,size=8"
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
NO_MPS = pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is an MPS device")


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    return code, *capsys.readouterr()


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of images: black, grey and white, each with an own shade per image."""
    folder = tmp_path_factory.mktemp("photos") / "shades"
    for name, level in (("black", 10), ("grey", 120), ("white", 240)):
        (folder / name).mkdir(parents=True)
        for i in range(12):
            Image.fromarray(np.full((8, 8, 3), level - i % 5, np.uint8)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "shades"
    os.environ["LINVIT_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")
    assert cli.main(["train", str(photos), *TINY, "--epochs", "30", "--lr", "0.01", "--out", str(out), "-q"]) == 0
    return out


def test_train_shows_epochs_and_sums_up(capsys, tmp_path):
    words = ["train", DATA, *TINY, "--epochs", 3, "--out", tmp_path / "run"]
    code, out, err = run(capsys, *words)
    assert code == 0
    what, *lines = err.splitlines()
    assert "4 tokens" in what
    assert "12 steps of" in what
    assert [line.split(",")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert all(word in lines[0] for word in ("4/12", "loss", "acc", "val", "img/s", "left"))
    assert "test accuracy" in out
    assert "n = 36" in out
    assert f"linvit predict IMAGE --model {tmp_path / 'run'}" in out
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert "this experiment was already finished" in out


def test_train_json_and_quiet(capsys, tmp_path):
    code, out, _ = run(capsys, "train", DATA, *TINY, "--steps", 3, "--out", tmp_path / "a", "--json", "-q")
    found = json.loads(out)
    assert code == 0
    assert found["folder"] == str(tmp_path / "a")
    assert 0 <= found["test_accuracy"] <= 1
    assert {r["metric"] for r in found["records"]} >= {"test_accuracy", "parameters", "macs", "learning_curve", "f1"}
    assert run(capsys, "train", DATA, *TINY, "--steps", 3, "--out", tmp_path / "b", "-q") == (0, "", "")


def test_train_names_its_folder_after_the_data(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "train", DATA, *TINY, "--steps", 1, "-q")[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("synthetic-images-72-size-8-")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cifarr10"], "did you mean 'cifar10'"),
        (["no/such/folder"], "no/such/folder: there is no such file or folder"),
        ([DATA, "--epochs", "1", "--steps", "1"], "give epochs or steps, not both"),
        ([DATA, "--set", "dropout"], "--set dropout: write KEY=VALUE"),
        ([DATA, "--set", "droput=0.1"], "unknown option 'droput'; did you mean 'dropout'?"),
        ([DATA, "--set", "dropout=much"], "dropout=much must be a number"),
        ([DATA, "--lr", "0.1", "--set", "lr=0.2"], "lr is given twice"),
        ([DATA, "--set", "seed=1"], "use --seed"),
        ([DATA, "--set", "task=other"], "--set task: use --task"),
        ([DATA, "--set", "dataset=x"], "unknown option 'dataset'"),
        ([DATA, "--set", "optimizer=adam,sgd"], "--optimizer"),
        ([DATA, "--set", "classes=3"], "classes comes from the data"),
        ([DATA, "--lr", "-1"], "--lr -1 must be more than 0"),
        ([DATA, "--optimizer", "lion"], "unknown optimizer 'lion'"),
        ([DATA, "--size", "hugee"], "unknown size 'hugee'"),
        ([DATA, "-a", "sofmax"], "did you mean 'softmax'"),
        ([DATA, "-a", "softmax@3", "--depth", "2"], "describes 3 layers, but the model has depth=2"),
        ([DATA, "--stem", "patch", "--patch-size", "3"], "patch_size=3 does not divide image_size=8"),
        ([DATA, "--device", "abacus"], "device 'abacus' cannot be used here"),
        ([DATA, "--device", "xpu"], "device 'xpu' cannot be used here (only cpu, cuda and mps are supported)"),
        ([DATA, "--device", "meta"], "device 'meta' cannot be used here (only cpu, cuda and mps are supported)"),
        pytest.param([DATA, "--device", "cuda"], "device 'cuda' cannot be used here", marks=NO_CUDA),
        pytest.param([DATA, "--device", "mps"], "device 'mps' cannot be used here", marks=NO_MPS),
        ([DATA, "--amp", "fp16", "--device", "cpu"], "amp=fp16 needs a CUDA device"),
        ([DATA, "--limit", "2"], "limit=2 is too few"),
        ([DATA, "--image-size", "3"], "image_size=3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_user_errors_are_one_line_and_leave_nothing(capsys, tmp_path, words, says):
    code, out, err = run(capsys, "train", *words, "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    assert err.startswith("linvit: error: ")
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_another_experiment_is_not_overwritten(capsys, trained, photos):
    code, _, err = run(capsys, "train", photos, *TINY, "--epochs", 2, "--out", trained)
    assert code == 2
    assert "holds another experiment" in err


def test_divergence_says_which_layer_and_what_to_try(capsys, tmp_path):
    words = ["train", DATA, *TINY, "--lr", "1e30", "--optimizer", "sgd", "--set", "clip_norm=0", "--epochs", 5]
    for _ in range(2):  # and again, from the records
        code, _, err = run(capsys, *words, "--out", tmp_path / "run")
        assert code == 1
        last = err.splitlines()[-1]
        assert last.startswith("linvit: diverged at step")
        assert "is not finite" in last
        assert "lower --lr" in last


@pytest.mark.kills
def test_ctrl_c_saves_and_says_how_to_resume(tmp_path):
    out = tmp_path / "a run"
    words = [sys.executable, "-m", "linvit", "train", DATA, *TINY, "--epochs", "2000", "--out", str(out)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not (out / "best" / "model.safetensors").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    last = err.splitlines()[-1]
    assert last.startswith("linvit: interrupted: saved at step")
    command = last.partition("; resume with: ")[2]
    assert command.startswith(f"linvit train {DATA} ")
    assert "--epochs 2000 " in command
    assert f"--out '{out}'" in command
    assert list((out / "last").glob("step-*"))


def test_a_preset_that_warns_does_so_in_one_line(capsys, tmp_path):
    words = ["--stem", "length-one", "--dim", 8, "--depth", 1, "--heads", 2, "--steps", 1, "--batch-size", 8]
    code, _, err = run(capsys, "train", DATA, *words, "--device", "cpu", "--out", tmp_path / "run")
    assert code == 0
    assert sum(line.startswith("linvit: warning: stem=length-one") for line in err.splitlines()) == 1
    assert "stems.py" not in err


def test_evaluate_repeats_the_reported_accuracy(capsys, trained):
    reported = [json.loads(line) for line in (trained / "records.jsonl").read_text().splitlines()]
    for place, selection in ((trained, "best"), (trained / "best", "best"), (trained / "last", "final")):
        code, out, _ = run(capsys, "evaluate", place, "--json", "--confusion", "--device", "cpu")
        found = json.loads(out)
        wanted = [r for r in reported if r["metric"] == "test_accuracy" and r["selection"] == selection]
        assert code == 0
        assert (found["accuracy"], found["n"]) == (wanted[0]["value"], wanted[0]["n"])
        assert found["same_data"]
        assert np.trace(found["confusion"]) / found["n"] == pytest.approx(found["accuracy"])
        assert [row["class"] for row in found["classes"]] == ["black", "grey", "white"]


def test_evaluate_shows_a_table(capsys, trained, photos):
    code, out, err = run(capsys, "evaluate", trained, photos, "--split", "validation", "--confusion")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split() == ["class", "images", "precision", "recall", "f1"]
    assert "validation images of shades" in out
    assert "true \\ predicted" in out
    assert run(capsys, "evaluate", trained, "-q")[1].strip().replace(".", "").isdigit()


def test_evaluate_finds_classes_by_name(capsys, trained, photos, tmp_path):
    """Other data may lack classes and sort them otherwise; a class the model does not know is an error."""
    (tmp_path / "two").mkdir()
    for name in ("white", "grey"):
        (tmp_path / "two" / name).symlink_to(photos / name)
    code, out, _ = run(capsys, "evaluate", trained, tmp_path / "two", "--json")
    whole = json.loads(run(capsys, "evaluate", trained, "--json")[1])
    assert code == 0
    assert [row["images"] > 0 for row in json.loads(out)["classes"]] == [False, True, True]
    assert json.loads(out)["accuracy"] == whole["accuracy"] == 1  # such different shades are easy
    (tmp_path / "two" / "red").symlink_to(photos / "black")
    code, _, err = run(capsys, "evaluate", trained, tmp_path / "two")
    assert code == 2
    assert "the class 'red', which the model does not know" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["evaluate", "nowhere"], "nowhere does not exist"),
        (["evaluate", "."], "holds no model"),
        (["predict", "x.png", "--model", "nowhere"], "x.png: there is no such file"),
    ],
    ids=str,
)
def test_errors_of_evaluate_and_predict(capsys, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_evaluate_without_known_data(capsys, trained, tmp_path):
    import shutil

    shutil.copytree(trained / "best", tmp_path / "model")
    code, _, err = run(capsys, "evaluate", tmp_path / "model")
    assert code == 2
    assert "give a name or a path" in err
    assert run(capsys, "evaluate", tmp_path / "model", "shades-that-are-not-there")[0] == 2


def test_predict(capsys, trained, photos):
    code, out, _ = run(capsys, "predict", photos / "black" / "0.png", photos / "white", "--model", trained, "--json")
    found = json.loads(out)
    assert code == 0
    assert [one["image"] for one in found] == [str(photos / "black" / "0.png")] + [
        str(path) for path in sorted((photos / "white").iterdir())
    ]
    assert found[0]["top"][0]["class"] == "black"
    assert all(one["top"][0]["class"] == "white" for one in found[1:])
    assert sum(one["probability"] for one in found[0]["top"]) == pytest.approx(1)
    code, out, _ = run(capsys, "predict", photos / "grey" / "3.png", "--model", trained / "best", "--top", 1)
    assert code == 0
    assert out.split()[:2] == ["image", "1."]
    assert "grey" in out


def test_predict_names_the_unreadable_image(capsys, trained, photos, tmp_path):
    (tmp_path / "bad.png").write_text("no image")
    code, out, err = run(capsys, "predict", photos / "grey", tmp_path / "bad.png", "--model", trained)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(tmp_path / "bad.png") in err
    code, out, err = run(capsys, "predict", photos / "grey", tmp_path / "bad.png", "--model", trained, "--skip-bad")
    assert code == 0
    assert err.startswith("linvit: skipped: ")
    assert out.count("\n") == 13
    (tmp_path / "empty").mkdir()
    assert "there are no images" in run(capsys, "predict", tmp_path / "empty", "--model", trained)[2]


def test_the_live_display(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    code, out, _ = run(capsys, "train", DATA, *TINY, "--epochs", 2, "--out", tmp_path / "run")
    assert code == 0
    assert "test accuracy" in out
    assert "epoch" not in out
