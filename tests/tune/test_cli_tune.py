"""`linvit tune` as a user meets it, and `--config` of train and compare."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("optuna")

import searching

from linvit import cli
from linvit.records import Record, Records
from linvit.report import page, tuning
from linvit.study import Study, measuring

WORDS = ["--set", "stem=patch", "--set", "patch_size=4", "--set", "dim=8", "--set", "heads=2", "--set", "mlp_dim=11",
         "--set", "batch_size=16", "--set", "pad_crop=0", "--device", "cpu"]  # fmt: skip
TUNE = ["tune", searching.DATA, "-a", "softmax", "-a", "performer-relu:m=4", "--jobs", "1", "--threads", "1", *WORDS]


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    return code, *capsys.readouterr()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(tuning, "draw_files", lambda specs, folder: None)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    home = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "draw_files", lambda specs, folder: None)
        words = [
            *TUNE,
            "--trials",
            "3",
            "--epochs",
            "2",
            "--space",
            searching.space(home),
            "--out",
            str(home / "x"),
            "-q",
        ]
        assert cli.main(words) == 0
    return home / "x"


def test_it_says_what_it_found(capsys, tuned):
    code, out, _ = run(capsys, "report", tuned)
    assert code == 0
    assert "defaults" in out.splitlines()[0]
    assert "One seed per trial" in out
    assert f"--config {tuned / 'best.toml'}" in out
    assert f"Report: {tuned / 'report.html'}" in out


def test_json_and_progress(capsys, tmp_path):
    words = [*TUNE, "--trials", 1, "--epochs", 1, "--space", searching.space(tmp_path), "--out", tmp_path / "x"]
    code, out, err = run(capsys, *words, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert [row["variant"] for row in found["variants"]] == ["softmax", "performer-relu:m=4"]
    assert found["variants"][0]["best_options"]["optimizer"] == "muon"
    code, out, err = run(capsys, *[*words[:-1], tmp_path / "y"])
    assert code == 0
    assert "softmax trial 0: complete" in err
    assert json.loads((tmp_path / "y" / "search.json").read_text())["commands"][0].startswith("linvit tune ")


def test_dry_run(capsys, tmp_path):
    code, out, _ = run(capsys, *TUNE, "--trials", 2, "--epochs", 1, "--out", tmp_path / "x", "--dry-run")
    assert code == 0
    assert "2 trials each, 4 in all" in out
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("words", "says"), [
    (["--sampler", "tpee"], "unknown sampler 'tpee'; did you mean 'tpe'?"),
    (["--pruner", "medain"], "unknown pruner 'medain'; did you mean 'median'?"),
    (["--space", "002-rleu"], "did you mean '002-relu'?"),
    (["--storage", "postgresql://me:secret@127.0.0.1:1/db"], "postgresql://me:***@127.0.0.1:1/db cannot be reached"),
    (["--trials", "2", "--budget", "1h"], "give trials or a budget, not both"),
    (["--set", "trials=3"], "unknown option 'trials'"),
    (["--set", "lr=0.1"], "lr is set, but space default searches it"),
    (["--budget", "sometime"], "budget 'sometime' is not a duration"),
])  # fmt: skip
def test_user_errors_are_one_line_and_leave_nothing(capsys, tmp_path, words, says):
    code, out, err = run(capsys, *TUNE, *words, "--epochs", 1, "--out", tmp_path / "x")
    assert (code, out) == (2, "")
    assert err.startswith("linvit: error: ")
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_train_takes_what_was_found(capsys, tuned, tmp_path):
    code, out, _ = run(capsys, "train", searching.DATA, "--config", tuned / "best.toml", "--device", "cpu",
                       "--threads", 1, "--out", tmp_path / "a", "--json", "-q")  # fmt: skip
    assert code == 0
    best = json.loads(run(capsys, "report", tuned, "--json")[1])["variants"]
    assert json.loads(out)["validation_accuracy"] == max(row["best_accuracy"] for row in best)
    code, out, _ = run(capsys, "train", searching.DATA, "--config", tuned / "best.toml", "-a", "softmax", "--epochs", 1,
                       "--dim", 12, "--device", "cpu", "--out", tmp_path / "b", "--json", "-q")  # fmt: skip
    assert code == 0
    stored = json.loads((tmp_path / "b" / "experiment.json").read_text())
    assert (stored["model"]["attention"], stored["model"]["dim"], stored["recipe"]["epochs"]) == ("softmax", 12, 1.0)


def test_compare_takes_what_was_found(tuned, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "LENGTHS", (16,))
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    monkeypatch.setattr(page, "draw_files", lambda specs, folder: None)
    monkeypatch.setattr(measuring, "peak_memory", lambda *_: Record("peak_memory", 7, "bytes", tags={"batch": 16}))
    words = ["compare", searching.DATA, "--config", str(tuned / "best.toml"), "--seeds", "1", "--no-controls", "--jobs",
             "1", "--threads", "1", "--device", "cpu", "--out", str(tmp_path / "x"), "-q"]  # fmt: skip
    assert cli.main(words) == 0
    study = Study.read(tmp_path / "x" / "study.json")
    assert {variant.attention for variant in study.variants} == {"softmax", "performer-relu:m=4"}
    assert (study.match, study.model.dim, study.epochs) == (False, 8, 2.0)
    found = {r.tags["attention"]: r.value for r in Records(tmp_path / "x" / "records.jsonl")
             if r.metric == "validation_accuracy"}  # fmt: skip
    evidence = tuning.read(tuned)
    assert found == {row.id: row.best.accuracy for row in evidence.rows if row.best}


@pytest.mark.parametrize(("text", "says"), [
    (None, "there is no such file: `linvit tune` writes a best.toml"),
    ("lr = 0.1", "is not a best.toml of linvit tune"),
    ("lr = [", "is not a best.toml of linvit tune"),
])  # fmt: skip
@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_bad_config_is_one_line(capsys, tmp_path, verb, text, says):
    if text is not None:
        (tmp_path / "best.toml").write_text(text)
    code, _, err = run(capsys, verb, searching.DATA, "--config", tmp_path / "best.toml", "--out", tmp_path / "x")
    assert code == 2
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_list_spaces(capsys):
    code, out, _ = run(capsys, "list", "spaces")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert {"default", "002-vit", "002-relu", "002-elu", "002-exp-grid", "002-exp-optuna"} <= set(lines)
    assert "lr 1e-05 … 0.01 (log)" in lines["002-relu"]


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path):
    import optuna

    from linvit.tune.storage import open_storage, sqlite

    out = tmp_path / "x"
    words = [sys.executable, "-m", "linvit", *TUNE, "--trials", "1", "--epochs", "12", "--space",
             searching.space(tmp_path), "--out", str(out)]  # fmt: skip
    words[words.index("--jobs") + 1], words[words.index(searching.DATA)] = "2", searching.LONG
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while not list(out.glob("*/best/model.safetensors")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "nothing that was trained is lost; go on with: linvit tune" in err.splitlines()[-1]
    assert list(out.glob("*/last/step-*"))
    storage = open_storage(sqlite(out))
    names = [name for name in optuna.get_all_study_names(storage) if name != "x"]
    states = [t.state.name for name in names for t in optuna.load_study(study_name=name, storage=storage).trials]
    assert "RUNNING" not in states
    assert "WAITING" in states
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0
    assert [len(row.trials) for row in tuning.read(out).rows] == [1, 1]
