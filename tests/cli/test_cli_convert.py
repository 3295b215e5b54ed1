"""`linvit convert` as it is typed."""

from __future__ import annotations

import json

import pytest

import linvit
from linvit.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that has learned nothing yet is enough here."""
    out = tmp_path_factory.mktemp("cli") / "model"
    return linvit.train(
        "digits", out=out, attention="softmax", stem="patch", patch_size=4, dim=16, depth=2, heads=2, mlp_dim=16,
        steps=2, limit=60, device="cpu", test=False,
    ).folder  # fmt: skip


def test_from_a_folder_to_a_folder(model, tmp_path, capsys):
    out = tmp_path / "linear"
    words = ["convert", str(model), "--to", "performer-relu:m=3", "--data", "digits", "--limit", "60", "--steps", "6",
             "--out", str(out), "--device", "cpu"]  # fmt: skip
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["folder"] == str(out)
    assert [row["model"] for row in said["rows"]] == ["teacher", "zero-shot", "stage 1", "stage 2", "stage 3"]
    assert main([*words, "--quiet"]) == 0
    assert "2 of 2 layers linear" in capsys.readouterr().out
    assert main(["evaluate", str(out), "--quiet"]) == 0
    assert float(capsys.readouterr().out) == pytest.approx(said["test_accuracy"], abs=1e-4)


@pytest.mark.parametrize(("words", "message"), [
    (["--max-drop", "much"], "--max-drop much: write a share"),
    (["--max-drop", "0%"], "--max-drop 0%: write a share"),
    (["--stages", "1,5"], "--stages 1,5: '5' is not one of 1, 2, 3"),
    (["--inherit", "bias"], "Invalid value for '--inherit'"),
    (["--set", "depth=3"], "a conversion has no option 'depth'"),
    (["--to", "performer-x"], "unknown attention 'performer-x'"),
    (["--data", "nowhere/at/all"], "there is no such file or folder"),
    (["--patch-size", "3"], "patch_size=3 does not divide image_size=8"),
])  # fmt: skip
def test_bad_input_is_one_line(model, tmp_path, capsys, words, message):
    out = tmp_path / "none"
    given = dict(zip(words[::2], words[1::2], strict=True))
    wanted = {"--to": "uniform", "--data": "digits", "--out": str(out), "--device": "cpu"} | given
    assert main(["convert", str(model), *(word for pair in wanted.items() for word in pair)]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert message in said[0]
    assert not out.exists()


def test_a_folder_without_a_model(tmp_path, capsys):
    assert main(["convert", str(tmp_path), "--to", "uniform", "--data", "digits", "--out", str(tmp_path / "x")]) == 2
    assert "config.json" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
