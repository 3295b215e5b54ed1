"""`tune --folds`: every trial is judged by all images except the test images, each when it was held out."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from traces import Forbidden, weights

pytest.importorskip("optuna")

from searching import DATA, TINY, optuna_trials, rows, write_space

from linvit import data, metrics, report
from linvit.data import Fold, folded
from linvit.ledger import open_ledger
from linvit.pipeline.train import train
from linvit.schemas.search import Best
from linvit.tuning import tune

ONE = TINY | {"attentions": ["softmax"], "jobs": 1}


@pytest.fixture(scope="module")
def whole():
    return data.load_data(DATA, multiple_of=4)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, whole):
    """A finished search; its images were given without a test split that could be read."""
    home, hidden = tmp_path_factory.mktemp("folds"), replace(whole, test=Forbidden(len(whole.test)))
    words = {"folds": 3, "trials": 2, "epochs": 2, "pruner": "none", "space": write_space(home)}
    return tune(hidden, out=home / "x", **words, **ONE)


def test_accuracy_is_of_all_images_each_when_it_was_held_out(tuned, whole):
    runs = sorted(tuned.glob("softmax-trial*"))
    assert len(runs) == 2 * 3
    for fold in range(3):  # the same for all
        stored = [json.loads((run / "experiment.json").read_text()) for run in runs if f"fold{fold}-" in run.name]
        expected = folded(whole, Fold(fold, 3, 0, spare_test=True)).identity
        assert {experiment["data"]["identity"] for experiment in stored} == {expected}
    ledger = open_ledger(tuned)
    assert [problem for record in ledger for problem in metrics.problems(record)] == []
    for r in ledger.find("trial_accuracy"):
        number = int(r.tags["trial"])
        mine = [run for run in runs if f"trial{number}-" in run.name]
        correct = [
            part["labels"] == part["predicted"] for part in map(np.load, (run / "predictions.npz" for run in mine))
        ]
        assert sum(map(len, correct)) == r.n == len(whole.train) + len(whole.validation) == 96
        assert r.value == np.concatenate(correct).mean()
        assert (r.tags["folds"], r.tags["how"], r.experiment) == (3, "complete", "")
        so_far = {i + 1: np.concatenate(correct[: i + 1]).mean() for i in range(3)}
        trial = optuna_trials(tuned)["softmax"][number]
        assert trial.intermediate_values == so_far
        assert trial.value == r.value
        logs = [json.loads((run / "log.jsonl").read_text().splitlines()[-1]) for run in mine]
        assert ledger.find("trial_steps", trial=number)[0].value == sum(row["step"] for row in logs) == 3 * 6
        assert ledger.find("trial_seconds", trial=number)[0].value == pytest.approx(sum(r["seconds"] for r in logs))


def test_best_says_so_and_train_repeats_it(tuned, tmp_path, whole):
    best = Best.read(tuned / "best.toml")
    assert best.folds == 3
    assert "by 3-fold cross-validation on 96 images of" in (tuned / "best.toml").read_text().splitlines()[0]
    again = train(whole, config=tuned / "best.toml", folds=3, device="cpu", threads=1, out=tmp_path / "a")
    assert again.test_accuracy == best.winners[0].validation_accuracy


def test_unpromising_trials_end_after_a_fold(tmp_path, invented):
    """Nothing within a fold is compared. Odd trials are worse and worse."""
    numbers: dict[str, int] = {}

    def score(job, epoch):
        number = numbers.setdefault(job.folder.split("-fold")[0], len(numbers))
        return 1 / (2 + number) if number % 2 else 1.0

    invented.score = staticmethod(score)
    words = ONE | {"runner": "invented", "folds": 4, "trials": 8, "epochs": 1, "space": write_space(tmp_path)}
    out = tune(DATA, out=tmp_path / "x", **words)
    assert [row[2] for row in rows(out)] == ["complete"] * 4 + ["complete", "pruned"] * 2
    assert [list(t.intermediate_values) for t in optuna_trials(out)["softmax"][4:6]] == [[1, 2, 3, 4], [1]]
    assert [rows(out)[i][5] for i in (4, 5)] == [96, 24]
    assert len(list(out.glob("softmax-trial5-*"))) == 1
    said: list[str] = []
    tune(DATA, out=tmp_path / "y", dry_run=True, log=said.append, **words)
    one = 4 * (4 / 10 + (6 + 2 * 24) / 100)  # 66 of 72 images train, in 4 steps of 16
    assert f"a trial  4 folds of 1 epochs, about {round(one)}s softmax" in said[4]
    assert f"at most about {round(8 * one)}s; 4-fold cross-validation decides, test images are not read" in said[5]


@pytest.mark.kills
def test_a_fold_that_diverges_ends_its_trial_and_processes_open_the_same_folds(tuned, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "build", lambda folder: None)
    space = write_space(tmp_path, "[options]\nlr = [1e30, 1e31]\n")
    words = ONE | {"optimizer": "sgd", "clip_norm": 0.0, "sampler": "grid", "space": space}
    out = tune(DATA, folds=2, trials=1, epochs=1, out=tmp_path / "x", **words)
    ((_, _, how, accuracy, _, images, *_),) = rows(out)
    assert (how, accuracy, images) == ("diverged", None, 0)
    assert len(list(out.glob("softmax-trial0-fold*"))) == 1
    words = {"folds": 3, "trials": 2, "epochs": 2, "pruner": "none", "space": str(tuned.parent / "mine.toml")}
    out = tune(DATA, out=tmp_path / "y", **words, **ONE | {"jobs": 2})
    mine, other = (sorted(weights(folder, "*/best").values()) for folder in (out, tuned))
    assert len(mine) == 6
    assert mine == other


def test_too_many_folds_are_one_line_and_leave_nothing(tmp_path):
    """Test images do not count."""
    with pytest.raises(ValueError, match=r"^folds=1000 needs as many images of every class, but ") as error:
        tune("digits", folds=1000, out=tmp_path / "x", **TINY)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "x").exists()
