"""`--print-config` and `--dry-run`: what would be done, without doing it."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from linvit import cli
from linvit.pipeline import plan
from linvit.requests import CompareRequest, read_request
from linvit.schemas.study import Study

DATA = "synthetic:classes=3,images=96,size=8,channels=1"
SMALL = {"stem": "patch", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 32, "batch_size": 16}
SETS = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def without_nothing(tree: Any) -> Any:
    """As TOML has it: what is None is not there."""
    if isinstance(tree, dict):
        return {key: without_nothing(value) for key, value in tree.items() if value is not None}
    return tree


def test_a_training_prints_what_it_will_store(capsys, tmp_path):
    words = ["train", DATA, *SETS, "--epochs", "1", "--device", "cpu", "--seed", "3", "--out", str(tmp_path / "run")]
    assert cli.main([*words, "--print-config"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert not (tmp_path / "run").exists()
    assert cli.main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert cli.main([*words, "-q"]) == 0
    stored = without_nothing(json.loads((tmp_path / "run" / "experiment.json").read_text()))
    assert read_request(printed.pop("request")).seed == 3
    assert printed == {key: value for key, value in stored.items() if key != "format"}
    assert printed["recipe"]["optimizer"] == "muon"  # a default
    first, *lines = out.splitlines()
    assert first == f"experiment {printed['id']} in {tmp_path / 'run'}: not started"
    assert [line.split()[0] for line in lines] == ["images", "model", "start", "steps"]
    assert "performer-relu:m=32" in lines[1]
    assert cli.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(": finished")
    words[words.index("3")] = "4"
    assert cli.main([*words, "--dry-run"]) == 2
    assert "holds another experiment (its model.seed is 3, not 4)" in capsys.readouterr().err


def test_a_study_prints_what_it_will_be(capsys, tmp_path):
    words = ["compare", DATA, *SETS, "-a", "softmax", "-a", "performer-theta:m=8", "--epochs", "2", "--seeds", "2"]
    words += ["--device", "cpu", "--out", str(tmp_path / "x")]
    assert cli.main([*words, "--print-config"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert [row["attention"] for row in printed["variants"]] == ["softmax", "performer-theta:m=8", "uniform"]
    assert printed["seeds"]["softmax"] == [0, 1]
    assert printed["recipe"]["epochs"] == 2.0
    mlp = [row["experiment"]["model"]["mlp_dim"] for row in printed["variants"]]
    assert mlp[0] == 32
    assert mlp[1] < 32  # its parameters are matched
    assert not (tmp_path / "x").exists()
    assert cli.main([*words, "--jobs-file"]) == 0
    assert f"{tmp_path / 'x' / 'jobs.jsonl'}: 9 jobs; `linvit job {tmp_path / 'x'} N`" in capsys.readouterr().out
    study = Study.read(tmp_path / "x" / "study.json")
    assert printed["model"] == without_nothing(study.model.model_dump(mode="json"))
    (request,) = study.requests
    assert request == printed["request"]
    assert "jobs_file" not in request  # the same request without it completes the study
    assert isinstance(read_request(request), CompareRequest)
    assert cli.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "job 1 of 9: softmax, seed 0: not started"


def test_a_budget_prints_toml_and_nothing_else(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "MAX_TIMING", 0.2)
    words = ["compare", DATA, *SETS, "-a", "softmax", "--no-controls", "--budget", "2m", "--seeds", "1"]
    words += ["--threads", "1"]
    assert cli.main([*words, "--device", "cpu", "--out", str(tmp_path / "x"), "--print-config"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["plan"]["steps"] == printed["steps"]
    assert not (tmp_path / "x").exists()


def test_folds_print_each_of_theirs(capsys, tmp_path):
    words = ["train", DATA, *SETS, "--epochs", "1", "--device", "cpu", "--folds", "3", "--out", str(tmp_path / "x")]
    assert cli.main([*words, "--print-config"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)["folds"]
    assert cli.main([*words, "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("experiment")]
    assert not (tmp_path / "x").exists()
    assert lines == [
        f"experiment {row['id']} in {tmp_path / 'x' / f'fold-{i}'}: not started" for i, row in enumerate(printed)
    ]
    assert cli.main([*words, "-q"]) == 0
    for i, row in enumerate(printed):
        stored = without_nothing(json.loads((tmp_path / "x" / f"fold-{i}" / "experiment.json").read_text()))
        assert row == {key: value for key, value in stored.items() if key != "format"}
        assert row["source"]["fold"]["index"] == i
    assert cli.main([*words, "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("experiment")]
    assert [line.rpartition(": ")[2] for line in lines] == ["finished"] * 3
