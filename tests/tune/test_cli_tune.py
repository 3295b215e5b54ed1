"""`linvit tune` as a user meets it, and `--config` of train and compare."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("optuna")

from searching import DATA, TINY, write_space

from linvit import cli
from linvit.ledger import open_ledger
from linvit.schemas.search import Best
from linvit.schemas.study import Study
from linvit.study import compare

MODEL = ("stem", "patch_size", "dim", "heads", "mlp_dim", "batch_size", "pad_crop")
SET = [word for key in MODEL for word in ("--set", f"{key}={TINY[key]}")]
TUNE = ["tune", DATA, "-a", "softmax", "-a", "performer-relu:m=4", "--threads", "1", "--device", "cpu", *SET]


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_json_lines_and_a_dry_run(capsys, tmp_path):
    words = [
        *TUNE,
        "--jobs",
        1,
        "--epochs",
        1,
        "--trials",
        1,
        "--space",
        write_space(tmp_path),
        "--out",
        tmp_path / "x",
    ]
    code, out, _ = run(capsys, *words, "--dry-run")
    assert code == 0
    assert "1 trials each, 2 in all" in out
    assert not (tmp_path / "x").exists()
    code, out, errors = run(capsys, *words)
    assert code == 0
    assert "softmax trial 0: complete" in errors
    assert f"--config {tmp_path / 'x' / 'best.toml'}" in out
    code, out, errors = run(capsys, *words, "--json")
    shown = [line for line in errors.splitlines() if not line.startswith("writing the report")]  # where it is slow
    assert (code, shown) == (0, [])
    assert json.loads(out)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sampler", "tpee"], "tpe"),
        (["--space", "002-rleu"], "did you mean '002-relu'?"),
        (["--storage", "postgresql://me:secret@127.0.0.1:1/db"], "postgresql://me:***@127.0.0.1:1/db cannot be opened"),
        (["--trials", "2", "--budget", "1h"], "give trials or a budget, not both"),
        (["--set", "lr=0.1"], "lr is set, but space default searches it"),
    ],
)
def test_user_errors_are_one_line_and_leave_nothing(capsys, tmp_path, words, says):
    code, out, errors = run(capsys, *TUNE, "--jobs", 1, *words, "--epochs", 1, "--out", tmp_path / "x")
    assert (code, out) == (2, "")
    assert errors.startswith("linvit: error: ")
    assert says in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_train_and_compare_take_what_was_found(capsys, tuned, tmp_path):
    best, config = Best.read(tuned / "best.toml"), tuned / "best.toml"
    words = ["--config", config, "--device", "cpu", "--threads", 1, "--json", "-q"]
    code, out, _ = run(capsys, "train", DATA, *words, "--out", tmp_path / "a")
    assert code == 0
    assert json.loads(out)["validation_accuracy"] == best.winners[0].validation_accuracy
    options = ["-a", "softmax", "--epochs", 1, "--dim", 12]
    code, out, _ = run(capsys, "train", DATA, *words, *options, "--out", tmp_path / "b")
    assert code == 0
    stored = json.loads((tmp_path / "b" / "experiment.json").read_text())
    assert (stored["model"]["attention"], stored["model"]["dim"], stored["recipe"]["epochs"]) == ("softmax", 12, 1.0)
    short = {"seeds": 1, "controls": False, "measured": False, "jobs": 1, "threads": 1, "device": "cpu"}
    folder = compare(DATA, config=config, out=tmp_path / "c", **short)
    study = Study.read(Study.path(folder))
    assert (study.match, study.model.dim, study.epochs) == (False, 8, 2.0)
    found = {r.tags["attention"]: r.value for r in open_ledger(folder).find("validation_accuracy")}
    assert found == {winner.attention: winner.validation_accuracy for winner in best.winners}


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_bad_config_is_one_line(capsys, tmp_path, verb):
    for text, says in ((None, "does not exist"), ("lr = 0.1", "not a best.toml"), ("lr = [", "not a best.toml")):
        if text is not None:
            (tmp_path / "best.toml").write_text(text)
        code, _, errors = run(capsys, verb, DATA, "--config", tmp_path / "best.toml", "--out", tmp_path / "x")
        assert code == 2
        assert says in errors
        assert errors.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_list_spaces(capsys):
    code, out, _ = run(capsys, "list", "spaces")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert {"default", "002-vit", "002-relu", "002-elu", "002-exp-grid", "002-exp-optuna"} <= set(lines)
    assert "lr 1e-05 … 0.01 (log)" in lines["002-relu"]
