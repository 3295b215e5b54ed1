"""`linvit convert` as it is typed."""

from __future__ import annotations

import json

import pytest

from linvit.cli import main
from linvit.conversion import candidates, measuring
from linvit.pipeline.train import train
from linvit.report import page


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that has learned nothing yet is enough here."""
    out = tmp_path_factory.mktemp("cli") / "model"
    shape = {"stem": "patch", "patch_size": 4, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 16}
    run = {"attention": "softmax", "steps": 2, "limit": 60, "device": "cpu", "test": False}
    return train("digits", out=out, **run, **shape).folder


def test_from_a_folder_to_a_folder(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(page, "draw_files", lambda specs, folder: None)  # tested with the report
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    out = tmp_path / "linear"
    words = ["convert", str(model), "--to", "performer-relu:m=3", "--data", "digits", "--limit", "60", "--steps", "6"]
    words += ["--out", str(out), "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"] == str(out / "report.html")
    assert [row["model"] for row in found["rows"]] == ["teacher", "zero-shot", "stage 1", "stage 2", "stage 3"]
    assert main([*words, "--quiet"]) == 0
    assert "2 of 2 layers replaced" in capsys.readouterr().out
    assert main(["evaluate", str(out), "--quiet"]) == 0
    assert float(capsys.readouterr().out) == pytest.approx(found["test_accuracy"], abs=1e-4)


def test_without_a_target(model, tmp_path, capsys, monkeypatch):
    """Whatever a race says of so small a model, it is an answer."""
    monkeypatch.setattr(page, "draw_files", lambda specs, folder: None)
    monkeypatch.setattr(candidates, "ROUNDS", 2)
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    words = ["convert", str(model), "--data", "digits", "--max-drop", "60%", "--device", "cpu", "--out"]
    assert main([*words, str(tmp_path / "plan"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "softmax to the fastest within the drop, 2 layers" in said
    assert "candidates: twoscale, " in said
    assert not (tmp_path / "plan").exists()
    assert main([*words, str(tmp_path / "one"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["headline"].startswith("Keep softmax: at 8\xa0px ") is (found["attention"] == "softmax")
    assert (
        "How the attention was chosen" in (tmp_path / "one/report.html").read_text() or found["attention"] == "softmax"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-drop", "much"], "--max-drop much must be a number"),
        (["--max-drop", "0%"], "--max-drop 0% must be more than 0"),
        (["--stages", "1,5"], "--stages 5 must be one of 1, 2 or 3"),
        (["--inherit", "bias"], "--inherit bias must be one of all, not-qk or mlp"),
        (["--set", "depth=3"], "unknown option 'depth'"),
        (["--to", "performer-x"], "unknown attention 'performer-x'"),
        (["--to", "auto", "--inherit", "mlp"], "--inherit mlp needs --to"),
        (["--to", "auto", "--max-drop", "0.1%"], "cannot be shown with fewer than"),
        (["--data", "nowhere/at/all"], "there is no such file or folder"),
        (["--patch-size", "3"], "patch_size=3 does not divide image_size=8"),
    ],
)
def test_bad_input_is_one_line(model, tmp_path, capsys, words, message):
    out = tmp_path / "none"
    given = dict(zip(words[::2], words[1::2], strict=True))
    wanted = {"--to": "uniform", "--data": "digits", "--out": str(out), "--device": "cpu"} | given
    assert main(["convert", str(model), *(word for pair in wanted.items() for word in pair)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not out.exists()


def test_a_folder_without_a_model(tmp_path, capsys):
    assert main(["convert", str(tmp_path), "--to", "uniform", "--data", "digits", "--out", str(tmp_path / "x")]) == 2
    assert "config.json" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
