"""`tune --folds`: every trial is judged by all images but the test images, each when it was held out."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from traces import Forbidden

optuna = pytest.importorskip("optuna")

import searching  # noqa: E402

import linvit  # noqa: E402
from linvit import cli, data, metrics  # noqa: E402
from linvit.data import Fold, folded  # noqa: E402
from linvit.records import Records  # noqa: E402
from linvit.report import tuning  # noqa: E402
from linvit.study import jobs  # noqa: E402
from linvit.tune import search as module  # noqa: E402
from linvit.tune import worker  # noqa: E402
from linvit.tune.best import Best  # noqa: E402
from linvit.tune.storage import open_storage, sqlite  # noqa: E402

DATA, TINY = searching.DATA, searching.TINY


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(tuning, "draw_files", lambda specs, folder: None)
    monkeypatch.setattr(module, "PROBE", 0.02)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A finished search, to look at only."""
    home = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "draw_files", lambda specs, folder: None)
        return linvit.tune(DATA, folds=3, trials=3, epochs=2, pruner="none", space=searching.space(home),
                           out=home / "x", **TINY)  # fmt: skip


def experiments(folder: Path) -> dict[tuple[str, int, int], dict]:
    """(variant, trial, fold) → its experiment.json, with the folder."""
    found = {}
    for file in folder.glob("*-trial*/experiment.json"):
        variant, _, run = file.parent.name.partition("-trial")
        trial, fold, _ = run.split("-")
        found[variant, int(trial), int(fold.removeprefix("fold"))] = json.loads(file.read_text()) | {
            "folder": file.parent
        }
    return found


def trials(folder: Path, variant: str) -> list[optuna.trial.FrozenTrial]:
    name = f"{folder.name}: {variant}"
    return optuna.load_study(study_name=name, storage=open_storage(sqlite(folder))).trials


def test_accuracy_is_of_all_images_each_when_it_was_held_out(tuned):
    runs, whole = experiments(tuned), data.load_data(DATA, multiple_of=4)
    assert len(runs) == 2 * 3 * 3
    for fold in range(3):  # the same for all
        there = {run["data"]["identity"] for key, run in runs.items() if key[2] == fold}
        assert there == {folded(whole, Fold(fold, 3, 0, spare_test=True)).identity}
    records = list(Records(tuned / "records.jsonl"))
    assert [problem for record in records for problem in metrics.problems(record)] == []
    accuracies = [r for r in records if r.metric == "trial_accuracy"]
    assert len(accuracies) == 6
    for r in accuracies:
        name, number = str(r.tags["variant"]), int(r.tags["trial"])
        folders = [runs[name.replace(":", "-").replace("=", "-"), number, fold]["folder"] for fold in range(3)]
        parts = [np.load(folder / "predictions.npz") for folder in folders]
        right = [part["labels"] == part["predicted"] for part in parts]
        assert sum(map(len, right)) == r.n == len(whole.train) + len(whole.validation) == 96
        assert r.value == np.concatenate(right).mean()
        assert (r.tags["folds"], r.tags["how"], r.experiment) == (3, "complete", "")
        trial = trials(tuned, name)[number]
        so_far = {i + 1: np.concatenate(right[: i + 1]).mean() for i in range(3)}
        assert trial.intermediate_values == so_far
        assert trial.value == r.value == so_far[3]
        logs = [[json.loads(line) for line in (f / "log.jsonl").read_text().splitlines()][-1] for f in folders]
        value = {s.metric: s.value for s in records if (s.tags.get("variant"), s.tags.get("trial")) == (name, number)}
        assert value["trial_steps"] == sum(row["step"] for row in logs) == 3 * 6
        assert value["trial_seconds"] == pytest.approx(sum(row["seconds"] for row in logs))
        losses = [(s.n, s.value) for f in folders for s in Records(f / "records.jsonl")
                  if s.metric == "test_loss" and s.tags["selection"] == "best"]  # fmt: skip
        assert r.tags["loss"] == pytest.approx(sum(n * value for n, value in losses) / 96)


def test_page_and_best_say_so(tuned):
    words = (tuned / "report.md").read_text()
    assert "One seed per trial and 96 images in 3-fold cross-validation, by which the search has chosen" in words
    assert "- A trial: 3 folds of 2 epochs" in words
    assert "96 images in 3 folds" in words
    assert "Accuracies are of 3-fold cross-validation" in (tuned / "report.html").read_text()
    assert '"Out-of-fold accuracy"' in (tuned / "report.html").read_text()
    assert "by 3-fold cross-validation on 96 images of synthetic" in (tuned / "best.toml").read_text().splitlines()[0]
    best = Best.read(tuned / "best.toml")
    rows = {row.id: row.best for row in tuning.read(tuned).rows}
    assert best.folds == 3
    assert {w.variant: w.validation_accuracy for w in best.winners} == {n: t.accuracy for n, t in rows.items()}
    assert (tuned / "results.csv").read_text().splitlines()[0].startswith("variant,trial,how,validation_accuracy")


def test_train_repeats_the_best_with_folds_and_takes_it_without(tuned, tmp_path, capsys):
    """The set has test images of its own, so that the folds of `train` are those of the search."""
    best = Best.read(tuned / "best.toml")
    words = ["train", DATA, "--config", str(tuned / "best.toml"), "--device", "cpu", "--threads", "1", "--json", "-q"]
    assert cli.main([*words, "--folds", "3", "--out", str(tmp_path / "a")]) == 0
    assert json.loads(capsys.readouterr().out)["test_accuracy"] == best.winners[0].validation_accuracy
    assert cli.main([*words, "--out", str(tmp_path / "b")]) == 0
    assert json.loads((tmp_path / "b" / "experiment.json").read_text())["recipe"]["epochs"] == 2.0


@pytest.mark.parametrize("own", [True, False])
def test_the_test_split_is_never_read(tmp_path, own):
    """Neither one that the set brought, nor one that was taken from its training images."""
    dataset = data.load_data(DATA)
    hidden = replace(dataset, test=Forbidden(len(dataset.test)), own_test=own)
    out = linvit.tune(hidden, folds=2, trials=1, epochs=1, space=searching.space(tmp_path), out=tmp_path / "x", **TINY)
    assert [trial.images for row in tuning.read(out).rows for trial in row.trials] == [96, 96]


def test_hopeless_trials_end_after_a_fold(tmp_path, monkeypatch):
    """Nothing within a fold is compared. Accuracies are made up: those of odd trials get worse and worse."""
    real = worker._together

    def together(scores):
        return real(scores)._replace(accuracy=1 / (2 + trial.number if trial.number % 2 else 1))

    trial, course = SimpleNamespace(number=0), worker.Trial.course

    def noted(self):
        trial.number = self.claim.number
        return course(self)

    monkeypatch.setattr(worker, "_together", together)
    monkeypatch.setattr(worker.Trial, "course", noted)
    words = TINY | {"attentions": ["softmax"]}
    out = linvit.tune(DATA, folds=4, trials=8, epochs=1, space=searching.space(tmp_path), out=tmp_path / "x", **words)
    (row,) = tuning.read(out).rows
    assert [t.how for t in row.trials] == ["complete"] * 4 + ["complete", "pruned"] * 2
    assert [list(t.intermediate_values) for t in trials(out, "softmax")[4:6]] == [[1, 2, 3, 4], [1]]
    assert [row.trials[i].images for i in (4, 5)] == [96, 24]
    assert len(list(out.glob("softmax-trial5-*"))) == 1
    assert not list(out.glob("softmax-trial5-*/best"))
    assert len(list(out.glob("softmax-trial4-*/best/model.safetensors"))) == 4


def test_a_fold_that_diverges_ends_its_trial(tmp_path):
    (tmp_path / "mine.toml").write_text("[options]\nlr = [1e30, 1e31]\n")
    words = TINY | {"attentions": ["softmax"], "optimizer": "sgd", "clip_norm": 0.0}
    out = linvit.tune(DATA, folds=2, trials=1, epochs=1, sampler="grid", space=tmp_path / "mine.toml",
                      out=tmp_path / "x", **words)  # fmt: skip
    ((trial,),) = (row.trials for row in tuning.read(out).rows)
    assert (trial.how, trial.accuracy, trial.images) == ("diverged", None, 0)
    assert len(list(out.glob("softmax-trial0-fold*"))) == 1
    assert not (out / "best.toml").exists()


@pytest.mark.kills
def test_a_killed_trial_goes_on_in_its_fold(begin, tmp_path):
    """Finished folds are not done again, and what is found is what a search finds that nobody disturbed."""
    options = {"trials": 1, "epochs": 3, "folds": 3, "space": searching.space(tmp_path)}
    process = begin(tmp_path / "whole" / "x", options, tmp_path / "whole.steps")
    process.join(120)
    assert process.exitcode == 0
    steps, deadline = tmp_path / "steps", time.monotonic() + 120
    for kill in (14, 33):  # of 2 × 3 × 9 steps: in the second fold of the first trial, in the first of the second
        process = begin(tmp_path / "x", options, steps)
        while process.is_alive() and len(searching.taken(steps)) < kill:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert process.is_alive()
        process.kill()
        process.join(60)
    process = begin(tmp_path / "x", options, steps)
    process.join(120)
    assert process.exitcode == 0
    once = [(Path(row["trial"]).name, row["step"]) for row in searching.taken(steps)]
    assert len(once) == len(set(once))
    assert {name for name, _ in once} == {Path(row["trial"]).name for row in searching.taken(tmp_path / "whole.steps")}
    found = [
        [(t.variant, t.number, t.how, t.accuracy, t.loss, t.steps) for row in tuning.read(x).rows for t in row.trials]
        for x in (tmp_path / "x", tmp_path / "whole" / "x")
    ]
    assert found[0] == found[1]
    for path in (tmp_path / "whole" / "x").glob("*/best/model.safetensors"):
        assert (tmp_path / "x" / path.relative_to(tmp_path / "whole" / "x")).read_bytes() == path.read_bytes()


def test_the_same_call_again_runs_nothing_and_other_folds_are_another_search(tuned, monkeypatch):
    words = {"trials": 3, "epochs": 2, "pruner": "none", "space": str(tuned.parent / "mine.toml"), "out": tuned}
    monkeypatch.setattr(jobs.Job, "do", lambda *_: pytest.fail("something was trained"))
    linvit.tune(DATA, folds=3, **words, **TINY)
    for folds, says in ((None, "its folds is 3, not None"), (2, "its folds is 3, not 2")):
        with pytest.raises(ValueError, match=says):
            linvit.tune(DATA, folds=folds, **words, **TINY)


def test_workers_open_the_same_folds(tuned, tmp_path):
    out = linvit.tune(DATA, folds=3, trials=1, epochs=2, pruner="none", space=str(tuned.parent / "mine.toml"),
                      out=tmp_path / "x", **TINY | {"jobs": 2})  # fmt: skip
    first = [[row.trials[0].accuracy for row in tuning.read(folder).rows] for folder in (out, tuned)]
    assert first[0] == first[1]


def test_time_counts_every_fold(tmp_path, monkeypatch):
    """Rates are made up: 10 steps and 100 images a second."""
    monkeypatch.setattr(jobs.Job, "rate", lambda self, *_: jobs.Rate(10.0, 100.0))
    said: list[str] = []
    words = {"epochs": 2, "space": searching.space(tmp_path), "out": tmp_path / "x", **TINY}
    linvit.tune(DATA, folds=4, trials=5, dry_run=True, say=said.append, **words)
    one = 4 * (2 * 4 / 10 + (2 * 6 + 2 * 24) / 100)  # 66 of 72 images train, in 4 steps of 16
    assert f"a trial  4 folds of 2 epochs, about {round(one)}s softmax" in said[4]
    assert f"at most about {round(10 * one)}s; 4-fold cross-validation decides, test images are not read" in said[5]
    with pytest.raises(ValueError, match="budget 5s is too small for a trial of each variant: 12s would do"):
        linvit.tune(DATA, folds=4, budget="5s", **words)
    assert not (tmp_path / "x").exists()


def test_too_many_folds_are_one_line_and_leave_nothing(tmp_path, capsys):
    """Test images do not count."""
    assert cli.main(["tune", "digits", "--folds", "1000", "--out", str(tmp_path / "x")]) == 2
    counts = np.bincount(np.concatenate([getattr(data.load_data("digits"), part).labels
                                         for part in ("train", "validation")]))  # fmt: skip
    said = capsys.readouterr().err.strip()
    assert said.startswith("linvit: error: folds=1000 needs as many images of every class, but ")
    assert f"give at most {counts.min()}, or add images" in said
    assert "\n" not in said
    assert not (tmp_path / "x").exists()
