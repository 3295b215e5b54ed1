"""`tune`: equal trials from one space, nothing of the test split, nothing run twice, and what comes of it."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from traces import Forbidden

optuna = pytest.importorskip("optuna")

import searching  # noqa: E402

import linvit  # noqa: E402
from linvit import data, metrics  # noqa: E402
from linvit.records import Records  # noqa: E402
from linvit.report import tuning  # noqa: E402
from linvit.study import jobs  # noqa: E402
from linvit.train.trackers import TRACKERS, Tracker  # noqa: E402
from linvit.tune import search as module  # noqa: E402
from linvit.tune import worker  # noqa: E402
from linvit.tune.best import Best  # noqa: E402
from linvit.tune.design import Search  # noqa: E402
from linvit.tune.storage import open_storage, sqlite  # noqa: E402

DATA = searching.DATA
TINY = searching.TINY


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(tuning, "draw_files", lambda specs, folder: None)
    monkeypatch.setattr(module, "PROBE", 0.02)


@pytest.fixture
def space(tmp_path):
    return searching.space(tmp_path)


def studies(folder: Path) -> dict[str, list[optuna.trial.FrozenTrial]]:
    """Optuna's trials by variant."""
    storage, name = open_storage(sqlite(folder)), folder.name
    every = optuna.get_all_study_names(storage)
    return {
        study.removeprefix(f"{name}: "): optuna.load_study(study_name=study, storage=storage).trials
        for study in every if study != name
    }  # fmt: skip


def rows(folder: Path) -> list[tuple]:
    """What is known of trials, but for times."""
    evidence = tuning.read(folder)
    return [
        (t.variant, t.number, t.how, t.accuracy, t.loss, t.steps, json.dumps(t.options))
        for row in evidence.rows for t in row.trials
    ]  # fmt: skip


def test_every_variant_gets_as_many_trials_and_every_trial_is_a_record(tmp_path, space):
    out = linvit.tune(DATA, trials=5, epochs=2, space=space, pruner="none", out=tmp_path / "x", **TINY)
    found = studies(out)
    assert {name: len(trials) for name, trials in found.items()} == {"softmax": 5, "performer-relu:m=4": 5}
    assert all(trial.state.name == "COMPLETE" for trials in found.values() for trial in trials)
    first, second = ([trial.params for trial in trials] for trials in found.values())
    assert first[:4] == second[:4]  # until the search learns, all variants try the same
    records = list(Records(out / "records.jsonl"))
    assert [problem for record in records for problem in metrics.problems(record)] == []
    accuracies = [r for r in records if r.metric == "trial_accuracy"]
    assert len(accuracies) == 10
    assert len({(r.tags["variant"], r.tags["trial"]) for r in accuracies}) == 10
    for r in accuracies:
        trial = found[str(r.tags["variant"])][int(r.tags["trial"])]
        assert r.value == trial.value == max(trial.intermediate_values.values())
        assert json.loads(r.tags["options"]) == trial.params
        assert (r.n, r.device, r.threads) == (len(data.load_data(DATA).validation), "cpu", 1)
    assert not list(out.glob("*/last"))
    assert len(list(out.glob("*/best/model.safetensors"))) == 10
    assert {path.name for path in out.iterdir()} >= {
        "best.toml",
        "search.json",
        "report.html",
        "results.csv",
        "trials.db",
    }
    search = Search.read(out / "search.json")
    assert (search.trials, search.finished is not None, search.defaults) == (5, True, True)


def test_the_first_trial_is_the_defaults(tmp_path, space):
    out = linvit.tune(DATA, trials=1, epochs=1, space=space, out=tmp_path / "x", **TINY)
    base = Search.read(out / "search.json")
    for trials in studies(out).values():
        assert trials[0].params == {"lr": base.recipe.lr, "depth": base.model.depth, "optimizer": "muon"}


def test_the_same_call_again_runs_nothing_and_more_trials_only_what_is_new(tmp_path, space, monkeypatch):
    words = {"epochs": 2, "space": space, "out": tmp_path / "x", **TINY}
    linvit.tune(DATA, trials=3, **words)
    before, done = rows(tmp_path / "x"), []
    real = jobs.Job.do
    monkeypatch.setattr(jobs.Job, "do", lambda self, *more: (done.append(self.number), real(self, *more))[1])
    linvit.tune(DATA, trials=3, **words)
    assert done == []
    assert rows(tmp_path / "x") == before
    linvit.tune(DATA, trials=4, **words)
    assert done == [3, 3]
    linvit.tune(DATA, trials=4, **words | {"attentions": ["softmax", "uniform"]})
    assert done == [3, 3, 0, 1, 2, 3]
    assert [row.id for row in tuning.read(tmp_path / "x").rows] == ["softmax", "performer-relu:m=4", "uniform"]


@pytest.mark.parametrize(("change", "says"), [
    ({"space": "default"}, "holds another search (its space.options."),
    ({"epochs": 3}, "its recipe.epochs is 2.0, not 3.0"),
    ({"sampler": "random"}, "its sampler is tpe, not random"),
    ({"pruner": "hyperband"}, "its pruner is median, not hyperband"),
    ({"seed": 1}, "its seed is 0, not 1"),
])  # fmt: skip
def test_another_search_is_refused_and_nothing_overwritten(tmp_path, space, change, says):
    words = {"trials": 1, "epochs": 2, "space": space, "out": tmp_path / "x", **TINY}
    linvit.tune(DATA, **words)
    before = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir() if path.is_file()}
    with pytest.raises(ValueError) as error:
        linvit.tune(DATA, **words | change)
    assert says in str(error.value)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir() if path.is_file()}


def test_a_storage_that_holds_another_space_is_refused_before_a_folder_is_made(tmp_path, space):
    words = {"trials": 1, "epochs": 1, "storage": str(tmp_path / "all.journal"), **TINY}
    linvit.tune(DATA, space=space, out=tmp_path / "a" / "x", **words)
    with pytest.raises(ValueError, match=r"all.journal holds another search called 'x' \(its space.options"):
        linvit.tune(DATA, space="default", out=tmp_path / "b" / "x", **words)
    assert not (tmp_path / "b").exists()
    linvit.tune(DATA, space=space, out=tmp_path / "b" / "x", **words)  # the same one: its trial is there already
    assert rows(tmp_path / "a" / "x") == rows(tmp_path / "b" / "x")
    assert not list((tmp_path / "b" / "x").glob("softmax-trial*"))


def test_the_test_split_is_never_read(tmp_path, space):
    dataset = data.load_data(DATA)
    hidden = replace(dataset, test=Forbidden(len(dataset.test)))
    with pytest.raises(AssertionError, match="the test split was asked for"):
        linvit.train(hidden, out=tmp_path / "seen", epochs=1, **{k: v for k, v in TINY.items() if k in ("stem", "dim")})
    out = linvit.tune(hidden, trials=2, epochs=1, space=space, out=tmp_path / "x", **TINY)
    assert len(rows(out)) == 4


def test_impossible_points_cost_nothing_and_do_not_count(tmp_path):
    (tmp_path / "mine.toml").write_text("[options]\ndim = [8, 9]\nheads = [2, 3]\nlr = [0.01, 0.02, 0.03]\n")
    words = {name: value for name, value in TINY.items() if name not in ("dim", "heads")}
    out = linvit.tune(
        DATA, trials=6, epochs=1, sampler="random", space=tmp_path / "mine.toml", out=tmp_path / "x", **words
    )
    for trials in studies(out).values():
        void = [trial for trial in trials if "void" in trial.user_attrs]
        assert void
        assert all(trial.state.name == "FAIL" and trial.params["dim"] % trial.params["heads"] for trial in void)
        assert all("is not a multiple of heads" in trial.user_attrs["void"] for trial in void)
        assert sum(trial.state.name == "COMPLETE" for trial in trials) == 6
    assert len(list(out.glob("*-trial*"))) == 12
    assert {row[2] for row in rows(out)} <= {"complete", "pruned"}


def test_where_nothing_is_possible_nothing_is_begun(tmp_path):
    (tmp_path / "mine.toml").write_text("[options]\ndim = [9, 11]\n")
    words = {name: value for name, value in TINY.items() if name != "dim"}
    with pytest.raises(ValueError, match=r"space mine has no possible point for softmax: dim=.* is not a multiple"):
        linvit.tune(DATA, trials=1, space=tmp_path / "mine.toml", out=tmp_path / "x", **words)
    assert not (tmp_path / "x").exists()


def test_a_grid_is_every_point_once_the_same_for_all(tmp_path):
    (tmp_path / "mine.toml").write_text("[options]\nlr = [0.01, 0.02]\ndropout = [0.0, 0.1, 0.2]\n")
    words = {"epochs": 1, "sampler": "grid", "pruner": "none", "space": tmp_path / "mine.toml", **TINY}
    out = linvit.tune(DATA, out=tmp_path / "x", **words)
    first, second = ([tuple(trial.params.values()) for trial in trials] for trials in studies(out).values())
    assert first == second
    assert sorted(first) == sorted((lr, p) for lr in (0.01, 0.02) for p in (0.0, 0.1, 0.2))
    some = linvit.tune(DATA, trials=4, out=tmp_path / "y", **words)
    assert [len(trials) for trials in studies(some).values()] == [4, 4]
    with pytest.raises(ValueError, match="a grid needs lists"):
        linvit.tune(DATA, out=tmp_path / "z", **words | {"space": "default"})


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_hopeless_trials_are_ended_early(tmp_path, pruner):
    """Nothing is learned with the tiny rates: those trials do not see the last epoch. Digits are real."""
    (tmp_path / "mine.toml").write_text("[options]\nlr = [1e-7, 2e-7, 0.003, 0.005, 0.007, 0.01]\n")
    out = linvit.tune("digits", attentions=["softmax"], trials=12, epochs=5, sampler="random", pruner=pruner, limit=200,
                      space=tmp_path / "mine.toml", out=tmp_path / "x",
                      **{k: v for k, v in TINY.items() if k != "attentions"})  # fmt: skip
    (trials,) = studies(out).values()
    whole = [trial for trial in trials if trial.state.name == "COMPLETE"]
    pruned = [trial for trial in trials if trial.state.name == "PRUNED"]
    assert len(whole) + len(pruned) == 12
    assert pruned
    assert max(trial.params["lr"] for trial in whole) >= 0.003
    assert all(max(trial.intermediate_values) < 5 for trial in pruned)
    assert all(max(trial.intermediate_values) == 5 for trial in whole)
    steps = {(t.number, t.how): t.steps for t in tuning.read(out).rows[0].trials}
    full = max(steps.values())
    assert all((count < full) == (how == "pruned") for (_, how), count in steps.items())
    if pruner == "median":
        assert {trial.number for trial in pruned}.isdisjoint(range(4))  # of the first none is judged


def test_a_diverged_trial_is_listed_and_never_best(tmp_path):
    (tmp_path / "mine.toml").write_text("[options]\nlr = [0.01, 1e30]\nclip_norm = [0.0]\n")
    out = linvit.tune(DATA, trials=2, epochs=2, sampler="grid", space=tmp_path / "mine.toml", optimizer="sgd",
                      out=tmp_path / "x", **TINY)  # fmt: skip
    for row in tuning.read(out).rows:
        assert sorted(trial.how for trial in row.trials) == ["complete", "diverged"]
        assert row.best is not None
        assert row.best.options["lr"] == 0.01
        assert next(trial.why for trial in row.trials if trial.how == "diverged")
        assert all(trial.seconds > 0 for trial in row.trials)


def test_trials_that_diverge_at_once_spend_a_budget_too(tmp_path, monkeypatch):
    """They have no validation whose time could be counted; a search of nothing else must end all the same."""
    monkeypatch.setattr(module, "_expected", lambda *_: {"softmax": 1.0, "performer-relu:m=4": 1.0})
    (tmp_path / "mine.toml").write_text("[options]\nlr = [1e30, 1e31]\nclip_norm = [0.0]\n")
    out = linvit.tune(DATA, budget="5s", epochs=2, sampler="random", space=tmp_path / "mine.toml", optimizer="sgd",
                      out=tmp_path / "x", **TINY)  # fmt: skip
    rows = tuning.read(out).rows
    assert all({trial.how for trial in row.trials} == {"diverged"} for row in rows)


def test_a_trial_that_fails_is_listed_and_the_others_go_on(tmp_path, space, monkeypatch):
    real = jobs.Job.do

    def do(self: jobs.Job, *more):
        if self.number == 1:
            raise MemoryError("no room\nat all")
        return real(self, *more)

    monkeypatch.setattr(jobs.Job, "do", do)
    out = linvit.tune(DATA, trials=3, epochs=1, space=space, out=tmp_path / "x", **TINY)
    assert [row[2] for row in rows(out)] == ["complete", "failed", "complete"] * 2
    assert tuning.read(out).rows[0].trials[1].why == "no room"


def test_a_trial_that_kills_its_workers_is_given_up(tmp_path, space, monkeypatch):
    from linvit.tune import trials

    monkeypatch.setattr(trials, "MOST", 0)
    out = linvit.tune(DATA, trials=1, epochs=1, space=space, out=tmp_path / "x", **TINY)
    assert [(trial.how, trial.why) for row in tuning.read(out).rows for trial in row.trials] == [
        ("failed", "0 workers died at the same place")] * 2  # fmt: skip
    assert not (out / "best.toml").exists()
    assert tuning.answer(tuning.read(out)).headline == "No trial was trained to the end"


def test_a_password_is_written_nowhere(tmp_path, space, postgres):
    url = postgres.replace("linvit@", "linvit:se-cret@")
    out = linvit.tune(DATA, trials=1, epochs=1, space=space, out=tmp_path / "hidden", storage=url,
                      command=f"linvit tune --storage {url}", **TINY)  # fmt: skip
    assert len(rows(out)) == 2
    assert "linvit:***@" in (out / "report.html").read_text()
    assert not [path for path in out.rglob("*") if path.is_file() and b"se-cret" in path.read_bytes()]


def test_a_storage_that_is_lost_on_the_way_is_one_line_and_nothing_is_lost(tmp_path, space, monkeypatch):
    from sqlalchemy.exc import OperationalError

    words = {"trials": 2, "epochs": 2, "space": space, **TINY}
    real, calls = optuna.storages.RDBStorage.set_trial_intermediate_value, []

    def away(self, *more):
        calls.append(more)
        if len(calls) == 3:
            raise optuna.exceptions.StorageInternalError("x") from OperationalError(
                "y", {}, Exception("no route\nto it")
            )
        return real(self, *more)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.storages.RDBStorage, "set_trial_intermediate_value", away)
        with pytest.raises(
            ValueError, match=r"storage sqlite.* was lost \(no route\): the same command goes on"
        ) as error:
            linvit.tune(DATA, out=tmp_path / "x", **words)
    assert "\n" not in str(error.value)
    linvit.tune(DATA, out=tmp_path / "x", **words)
    linvit.tune(DATA, out=tmp_path / "y", **words)
    assert rows(tmp_path / "x") == rows(tmp_path / "y")


def test_best_is_what_train_and_compare_repeat(tmp_path, space):
    """To the bit: the same seed, images and options, the width that parameters were matched by included."""
    out = linvit.tune(DATA, trials=4, epochs=2, space=space, out=tmp_path / "x", **TINY)
    best = Best.read(out / "best.toml")
    assert {winner.variant for winner in best.winners} == set(TINY["attentions"])
    assert best.winners[0].validation_accuracy == max(winner.validation_accuracy for winner in best.winners)
    for winner in best.winners:
        trained = linvit.train(DATA, out=tmp_path / winner.variant[:4], device="cpu", test=False,
                               **best.chosen(winner.variant, {}))  # fmt: skip
        assert trained.value("validation_accuracy") == winner.validation_accuracy
        (there,) = out.glob(f"{winner.variant.replace(':', '-').replace('=', '-')}-trial{winner.trial}-*")
        mine = (trained.folder / "best" / "model.safetensors").read_bytes()
        assert mine == (there / "best" / "model.safetensors").read_bytes()
    shared, own = best.shared(None, {})
    assert {"dim", "heads", "stem", "patch_size", "batch_size", "pad_crop"} <= set(shared)
    assert [spec for spec, _ in own] == [winner.attention for winner in best.winners]
    assert all("epochs" not in options for _, options in own)
    shared, own = best.shared(["softmax"], {"lr": 0.5, "dim": 12})
    assert not {"lr", "dim"} & set(shared)
    assert [spec for spec, _ in own] == ["softmax"]
    with pytest.raises(ValueError, match=r"attention 'sofmax' was not searched; did you mean 'softmax'\?"):
        best.of("sofmax")


def test_options_of_attentions_are_found_too(tmp_path):
    (tmp_path / "mine.toml").write_text("[attention]\nm = [3, 5]\n[options]\nlr = [0.01, 0.02]\n")
    words = TINY | {"attentions": ["softmax", "performer-relu"]}
    out = linvit.tune(DATA, trials=3, epochs=1, space=tmp_path / "mine.toml", out=tmp_path / "x", **words)
    assert {frozenset(trial.params) for trial in studies(out)["softmax"]} == {frozenset(["lr"])}
    best = Best.read(out / "best.toml")
    (performer,) = [winner for winner in best.winners if winner.variant == "performer-relu"]
    assert performer.attention in ("performer-relu:m=3", "performer-relu:m=5")
    assert best.of("performer-relu") == best.of(performer.attention) == performer


def test_a_budget_is_shared_equally(tmp_path, space, monkeypatch):
    """Seconds are made up: what counts is that the next trial is of whoever has had least, until all had theirs."""
    monkeypatch.setattr(module, "_expected", lambda *_: {"softmax": 1.0, "performer-relu:m=4": 1.0})
    cost = {"softmax": 1.0, "performer-relu:m=4": 3.0}
    real = worker.Trial.records

    def records(self, *more):
        found = real(self, *more)
        found[1] = replace(found[1], value=cost[self.claim.variant.id])
        return found

    monkeypatch.setattr(worker.Trial, "records", records)
    said: list[str] = []
    out = linvit.tune(DATA, budget="20s", epochs=1, space=space, out=tmp_path / "x", say=said.append, **TINY)
    counts = {name: len(trials) for name, trials in studies(out).items()}
    assert counts == {"softmax": 9, "performer-relu:m=4": 3}  # of 9.5 s each
    assert "of training each, that is 9 whole trials or more" in "\n".join(said)
    with pytest.raises(ValueError, match="budget 1s is too small for a trial of each variant: 3s would do"):
        linvit.tune(DATA, budget="1s", epochs=1, space=space, out=tmp_path / "y", **TINY)


def test_a_dry_run_says_what_would_be_and_writes_nothing(tmp_path, space):
    said: list[str] = []
    linvit.tune(DATA, trials=7, epochs=2, space=space, out=tmp_path / "x", dry_run=True, say=said.append, **TINY)
    assert not (tmp_path / "x").exists()
    text = "\n".join(said)
    assert "7 trials each, 14 in all" in text
    assert "space    mine: lr, depth, optimizer" in text
    assert "at most about" in text


@pytest.mark.parametrize(("words", "says"), [
    ({"trials": 2, "budget": "1m"}, "give trials or a budget, not both"),
    ({"trials": 0}, "trials=0 must be at least 1"),
    ({"budget": "soon"}, "budget 'soon' is not a duration"),
    ({"jobs": 0}, "jobs=0 must be at least 1"),
    ({"steps": 10, "epochs": None}, "give epochs, not steps"),
    ({"lr": 0.1}, "lr is set, but space mine searches it"),
    ({"dropuot": 0.1}, "unknown option 'dropuot'; did you mean 'dropout'?"),
    ({"attentions": ["sofmax"]}, "unknown attention 'sofmax'; did you mean 'softmax'?"),
    ({"space": "defualt"}, "space 'defualt' is no file and no name; did you mean 'default'?"),
    ({"sampler": "grid"}, "space mine: a grid needs lists, but lr is a range: list its values"),
    ({"storage": "sqlite:////no/such/folder/x.db"}, "storage sqlite:////no/such/folder/x.db cannot be reached"),
])  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, space, words, says):
    with pytest.raises(ValueError) as error:
        linvit.tune(DATA, **{"space": space, "epochs": 1, "out": tmp_path / "x", **TINY} | words)
    assert says in str(error.value)
    assert not (tmp_path / "x").exists()


def test_without_optuna_it_says_what_to_install(tmp_path, monkeypatch):
    from linvit.tune import storage

    storage.needed.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ValueError, match=r"pip install 'linvit\[tune\]'"):
        linvit.tune(DATA, out=tmp_path / "x")
    storage.needed.cache_clear()


def test_images_given_as_they_are_take_one_process(tmp_path, space):
    dataset = data.load_data(DATA)
    out = linvit.tune(dataset, trials=1, epochs=1, space=space, out=tmp_path / "x", **{**TINY, "jobs": None})
    assert len(rows(out)) == 2
    with pytest.raises(ValueError, match="jobs=2 needs images that workers can find"):
        linvit.tune(dataset, trials=1, space=space, out=tmp_path / "y", **{**TINY, "jobs": 2})


def test_trackers_hear_of_every_trial(tmp_path, space, monkeypatch):
    told: list[tuple[str, str]] = []

    class Heard(Tracker):
        package = "json"

        def begin(self, step):
            told.append(("begin", self.folder.name))

        def log(self, step, row):
            told.append(("log", self.folder.name))

        def end(self, diverged):
            told.append(("end", self.folder.name))

    TRACKERS.discover()
    monkeypatch.setattr(TRACKERS, "_entries", TRACKERS._entries | {"heard": Heard})
    out = linvit.tune(DATA, trials=1, epochs=2, space=space, out=tmp_path / "x", track=["heard"], **TINY)
    for folder in out.glob("*-trial0-*"):
        assert [what for what, name in told if name == folder.name] == ["begin", "log", "log", "end"]
    assert len({name for _, name in told}) == 2
    with pytest.raises(ValueError, match="unknown tracker 'nothing'"):
        linvit.tune(DATA, trials=1, epochs=2, space=space, out=tmp_path / "y", track=["nothing"], **TINY)
    assert not (tmp_path / "y").exists()


def test_the_whole_configuration_is_toml_and_nothing_is_written(tmp_path, space):
    said: list[str] = []
    linvit.tune(DATA, trials=3, epochs=2, space=space, out=tmp_path / "x", print_config=True, say=said.append, **TINY)
    found = tomllib.loads("\n".join(said))
    assert (found["trials"], found["recipe"]["epochs"], found["space"]["name"]) == (3, 2.0, "mine")
    assert not (tmp_path / "x").exists()


def test_importance_is_told_where_there_are_enough_trials(tmp_path, space):
    out = linvit.tune(DATA, attentions=["softmax"], trials=9, epochs=1, space=space, pruner="none", out=tmp_path / "x",
                      **{k: v for k, v in TINY.items() if k != "attentions"})  # fmt: skip
    values = {trial.value for trial in studies(out)["softmax"]}
    found = {r.tags["option"]: r.value for r in Records(out / "records.jsonl") if r.metric == "option_importance"}
    if len(values) > 1:
        assert set(found) == {"lr", "depth", "optimizer"}
        assert sum(found.values()) == pytest.approx(1)
    assert np.isfinite(list(found.values())).all()
