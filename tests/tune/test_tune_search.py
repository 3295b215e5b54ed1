"""`tune`: equal trials from one space, nothing of the test split, nothing run twice, and what it writes."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import pytest
from traces import Forbidden

pytest.importorskip("optuna")

from searching import DATA, TINY, optuna_trials, rows, write_space

from linvit import data, metrics, report
from linvit.execute import EXECUTORS, Job
from linvit.ledger import open_ledger
from linvit.schemas.search import Best, Search
from linvit.training.trackers import TRACKERS, Tracker
from linvit.tuning import storage, tune

ONE = TINY | {"attentions": ["softmax"]}
MADE = {"epochs": 1, "runner": "invented", "jobs": 1}


def test_every_variant_gets_as_many_trials_and_every_trial_is_a_record(tuned):
    found = optuna_trials(tuned)
    assert {name: len(trials) for name, trials in found.items()} == {"softmax": 5, "performer-relu:m=4": 5}
    assert all(trial.state.name == "COMPLETE" for trials in found.values() for trial in trials)
    first, second = ([trial.params for trial in trials] for trials in found.values())
    assert first[:4] == second[:4]  # until the sampler learns, all variants try the same points
    ledger = open_ledger(tuned)
    assert [problem for record in ledger for problem in metrics.problems(record)] == []
    accuracies = ledger.find("trial_accuracy")
    assert len({(r.tags["variant"], r.tags["trial"]) for r in accuracies}) == len(accuracies) == 10
    for r in accuracies:
        trial = found[str(r.tags["variant"])][int(r.tags["trial"])]
        assert r.value == trial.value == max(trial.intermediate_values.values())
        assert json.loads(r.tags["options"]) == trial.params
        assert (r.n, r.device, r.threads) == (len(data.load_data(DATA).validation), "cpu", 1)
    assert not list(tuned.glob("*/last"))
    assert len(list(tuned.glob("*/best/model.safetensors"))) == 10
    assert {"best.toml", "search.json", "report.html", "results.csv", "trials.db"} <= {p.name for p in tuned.iterdir()}
    search = Search.read(Search.path(tuned))
    assert (search.trials, search.finished is not None, search.defaults) == (5, True, True)
    defaults = {"lr": search.recipe.lr, "depth": search.model.depth, "optimizer": "muon"}
    assert first[0] == second[0] == defaults


def test_the_best_trial_of_each_variant_is_what_train_and_compare_take(tuned):
    best = Best.read(tuned / "best.toml")
    assert (best.data, best.epochs, best.trials, best.folds) == (DATA, 2.0, 5, None)
    for winner in best.winners:
        every = optuna_trials(tuned)[winner.variant]
        top = max(every, key=lambda trial: trial.value)
        assert winner.validation_accuracy == top.value
        options = json.loads(next(row[-1] for row in rows(tuned) if row[:2] == (winner.variant, winner.trial)))
        assert {name: winner.options[name] for name in options} == options
        assert winner.options["dim"] == 8
    assert best.winners[0].validation_accuracy == max(winner.validation_accuracy for winner in best.winners)


def test_the_same_call_again_runs_nothing_and_more_trials_only_what_is_new(tmp_path, invented):
    words = {"space": write_space(tmp_path), "out": tmp_path / "x", **MADE, **TINY}
    tune(DATA, trials=3, **words)
    before = rows(tmp_path / "x")
    assert len(before) == len(invented.jobs) == 6
    tune(DATA, trials=3, **words)
    assert len(invented.jobs) == 6
    assert rows(tmp_path / "x") == before
    tune(DATA, trials=4, **words)
    assert len(invented.jobs) == 8
    tune(DATA, trials=4, **words | {"attentions": ["softmax", "uniform"]})
    assert len(invented.jobs) == 12
    assert [v.id for v in Search.read(tmp_path / "x" / "search.json").variants] == [
        "softmax", "performer-relu:m=4", "uniform"
    ]  # fmt: skip
    assert len(Search.read(tmp_path / "x" / "search.json").requests) == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"space": "default"}, "holds another search (its space.options."),
        ({"epochs": 3}, "its recipe.epochs is 2.0, not 3.0"),
        ({"sampler": "random"}, "its sampler is tpe, not random"),
        ({"pruner": "hyperband"}, "its pruner is none, not hyperband"),
        ({"seed": 1}, "its seed is 0, not 1"),
        ({"folds": 2}, "its folds is None, not 2"),
    ],
)
def test_another_search_is_refused_and_nothing_overwritten(tuned, change, says):
    before = {path.name: path.read_bytes() for path in tuned.iterdir() if path.is_file()}
    words = {"trials": 1, "epochs": 2, "space": str(tuned.parent / "mine.toml"), "pruner": "none", "out": tuned}
    with pytest.raises(ValueError) as error:
        tune(DATA, **words | TINY | change)
    assert says in str(error.value)
    assert before == {path.name: path.read_bytes() for path in tuned.iterdir() if path.is_file()}


def test_a_storage_that_holds_another_search_is_refused_before_a_folder_is_made(tmp_path, invented):
    space, words = write_space(tmp_path), {"trials": 1, "storage": str(tmp_path / "all.journal"), **MADE, **TINY}
    tune(DATA, space=space, out=tmp_path / "a" / "x", **words)
    with pytest.raises(ValueError, match=r"all.journal holds another search called 'x' \(its space.options"):
        tune(DATA, space="default", out=tmp_path / "b" / "x", **words)
    with pytest.raises(ValueError, match=r"holds another search called 'x' \(its folder is "):
        tune(DATA, space=space, out=tmp_path / "b" / "x", **words)
    assert not (tmp_path / "b").exists()
    (tmp_path / "a").rename(tmp_path / "b")  # moved, it is the same search
    tune(DATA, space=space, out=tmp_path / "b" / "x", **words)
    assert len(invented.jobs) == 2


def test_the_test_split_is_never_read(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "build", lambda folder: None)
    dataset = data.load_data(DATA)
    hidden = replace(dataset, test=Forbidden(len(dataset.test)))
    out = tune(hidden, trials=1, epochs=1, space=write_space(tmp_path), out=tmp_path / "x", **TINY)
    assert len(rows(out)) == 2  # one training at a time, here: others could not find these images
    with pytest.raises(ValueError, match="the executor 'processes' needs images that workers can open"):
        tune(hidden, trials=1, epochs=1, space=write_space(tmp_path), out=tmp_path / "y", jobs=2, **TINY)
    with pytest.raises(ValueError, match="jobs=2: the executor 'here' runs one training at a time"):
        tune(DATA, trials=1, epochs=1, out=tmp_path / "y", runner="here", jobs=2, **TINY)
    assert not (tmp_path / "y").exists()


def test_impossible_points_cost_nothing_and_do_not_count(tmp_path, invented):
    space = write_space(tmp_path, "[options]\ndim = [8, 9]\nheads = [2, 3]\nlr = [0.01, 0.02, 0.03]\n")
    words = {name: value for name, value in TINY.items() if name not in ("dim", "heads")}
    out = tune(DATA, trials=6, sampler="random", space=space, out=tmp_path / "x", **MADE, **words)
    for trials in optuna_trials(out).values():
        void = [trial for trial in trials if "void" in trial.user_attrs]
        assert void
        assert all(trial.state.name == "FAIL" and trial.params["dim"] % trial.params["heads"] for trial in void)
        assert all("is not a multiple of heads" in trial.user_attrs["void"] for trial in void)
        assert sum(trial.state.name == "COMPLETE" for trial in trials) == 6
    assert len(invented.jobs) == 12
    write_space(tmp_path, "[options]\ndim = [9, 11]\n")
    with pytest.raises(ValueError, match=r"space mine has no possible point for softmax: dim=.* is not a multiple"):
        tune(DATA, trials=1, space=space, out=tmp_path / "y", **MADE, **words)
    assert not (tmp_path / "y").exists()


def test_a_grid_is_every_point_once_the_same_for_all(tmp_path, invented):
    space = write_space(tmp_path, "[options]\nlr = [0.01, 0.02]\ndropout = [0.0, 0.1, 0.2]\n")
    words = {"sampler": "grid", "pruner": "none", "space": space, **MADE, **TINY}
    first, second = (
        [tuple(trial.params.values()) for trial in trials]
        for trials in optuna_trials(tune(DATA, out=tmp_path / "x", **words)).values()
    )
    assert first == second
    assert sorted(first) == sorted((lr, p) for lr in (0.01, 0.02) for p in (0.0, 0.1, 0.2))
    some = tune(DATA, trials=4, out=tmp_path / "y", **words)
    assert [len(trials) for trials in optuna_trials(some).values()] == [4, 4]
    with pytest.raises(ValueError, match="a grid needs lists"):
        tune(DATA, out=tmp_path / "z", **words | {"space": "default"})


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_unpromising_trials_are_stopped_early(tmp_path, invented, pruner):
    """Trials of odd number are worse and worse."""
    numbers = {}

    def score(job, epoch):
        number = numbers.setdefault(job.folder, len(numbers))
        return 0.9 if number % 2 == 0 else 0.1 - 0.001 * number

    invented.score = staticmethod(score)
    words = ONE | MADE | {"epochs": 6, "space": write_space(tmp_path), "out": tmp_path / "x"}
    out = tune(DATA, trials=12, pruner=pruner, sampler="random", **words)
    every = optuna_trials(out)["softmax"]
    pruned = [trial for trial in every if trial.state.name == "PRUNED"]
    assert pruned
    assert all(trial.number % 2 for trial in pruned)
    assert all(len(trial.intermediate_values) < 6 for trial in pruned)
    for variant, number, how, accuracy, _, _, steps, _ in rows(out):
        trial = every[number]
        assert how == ("pruned" if trial in pruned else "complete"), variant
        assert steps == 6 * len(trial.intermediate_values)
        assert accuracy == trial.value
    if pruner == "median":
        assert [trial.number for trial in pruned] == [5, 7, 9, 11]  # the first four show what is usual


def test_results_do_not_depend_on_the_number_of_slots(tmp_path, invented):
    invented.score = staticmethod(lambda job, epoch: 0.5 + job.experiment.recipe.lr)
    space, found = write_space(tmp_path), {}
    for jobs in (1, 3):
        words = {"trials": 6, "sampler": "random", "pruner": "none", "space": space, **MADE, **TINY}
        found[jobs] = rows(tune(DATA, out=tmp_path / str(jobs), **words | {"jobs": jobs}))
    assert len(found[1]) == 12
    assert found[1] == found[3]


def test_options_of_attentions_are_searched_too(tmp_path, invented):
    space = write_space(tmp_path, "[attention]\nm = [3, 5]\n[options]\nlr = [0.01, 0.02]\n")
    words = TINY | MADE | {"attentions": ["softmax", "performer-relu"]}
    out = tune(DATA, trials=3, space=space, out=tmp_path / "x", **words)
    assert {frozenset(trial.params) for trial in optuna_trials(out)["softmax"]} == {frozenset(["lr"])}
    best = Best.read(out / "best.toml")
    performer = best.winner_of("performer-relu")
    assert performer.attention in ("performer-relu:m=3", "performer-relu:m=5")
    assert best.winner_of(performer.attention) == performer


def test_a_budget_is_shared_equally(tmp_path, invented, monkeypatch):
    """The next trial is of whoever has had least, until all had theirs. Rates are 10 steps and 100 images a second."""
    invented.seconds = property(lambda self: 3.0 if "performer" in self.jobs[-1].experiment.model.attention else 1.0)
    words, said = {"space": write_space(tmp_path), **MADE, **TINY}, []
    out = tune(DATA, budget="20s", out=tmp_path / "x", log=said.append, **words)
    counts = {name: len(trials) for name, trials in optuna_trials(out).items()}
    assert counts == {"softmax": 9, "performer-relu:m=4": 3}  # of 9.5 s each
    assert "of training each, enough for 16 full trials or more" in "\n".join(said)
    with pytest.raises(ValueError, match="budget 1s is too small for one trial of each variant: it takes about 2s"):
        tune(DATA, budget="1s", out=tmp_path / "y", **words)
    assert not (tmp_path / "y").exists()


def test_a_dry_run_and_print_config_write_nothing(tmp_path, invented):
    said, words = [], {"trials": 7, "space": write_space(tmp_path), "out": tmp_path / "x", **MADE, **TINY}
    tune(DATA, dry_run=True, log=said.append, **words)
    text = "\n".join(said)
    assert "7 trials each, 14 in all" in text
    assert "space    mine: lr, depth, optimizer" in text
    assert "at most about 8s; validation images decide, test images are not read" in text
    said.clear()
    tune(DATA, print_config=True, log=said.append, **words)
    found = tomllib.loads("\n".join(said))
    assert (found["trials"], found["recipe"]["epochs"], found["space"]["name"]) == (7, 1.0, "mine")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"trials": 2, "budget": "1m"}, "give trials or a budget, not both"),
        ({"trials": 0}, "trials=0 must be at least 1"),
        ({"budget": "soon"}, "budget 'soon' is not a duration"),
        ({"jobs": 0}, "jobs=0 must be at least 1"),
        ({"steps": 10, "epochs": None}, "give epochs, not steps"),
        ({"lr": 0.1}, "lr is set, but space mine searches it"),
        ({"dropuot": 0.1}, "unknown option 'dropuot'; did you mean 'dropout'?"),
        ({"attentions": ["sofmax"]}, "unknown attention 'sofmax'; did you mean 'softmax'?"),
        ({"space": "defualt"}, "space 'defualt' is neither a file nor a known name; did you mean 'default'?"),
        ({"sampler": "grid"}, "space mine: a grid needs lists, but lr is a range: list its values"),
        ({"sampler": "tpee"}, "sampler=tpee must be one of tpe, random or grid"),
        ({"config": "best.toml"}, "config=best.toml: a search takes options from its space"),
        ({"storage": "sqlite:////no/such/folder/x.db"}, "storage sqlite:////no/such/folder/x.db cannot be opened"),
        ({"track": ["nothing"]}, "unknown tracker 'nothing'"),
        ({"runner": "ther"}, "unknown executor 'ther'; did you mean 'here'?"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, words, says):
    space = write_space(tmp_path)
    with pytest.raises(ValueError) as error:
        tune(DATA, **{"space": space, "epochs": 1, "jobs": 1, "out": tmp_path / "x", **TINY} | words)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "x").exists()


def test_without_optuna_it_says_what_to_install(tmp_path, monkeypatch):
    storage.import_optuna.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ValueError, match=r"pip install 'linvit\[tune\]'"):
        tune(DATA, out=tmp_path / "x")
    storage.import_optuna.cache_clear()


def test_trackers_get_the_events_of_every_trial(tmp_path, invented, monkeypatch):
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
    words = TINY | MADE | {"epochs": 2}
    out = tune(DATA, trials=1, space=write_space(tmp_path), out=tmp_path / "x", track=["heard"], **words)
    for folder in out.glob("*-trial0-*"):
        assert [what for what, name in told if name == folder.name] == ["begin", "log", "log", "end"]
    assert len({name for _, name in told}) == 2


def test_importance_is_recorded_where_there_are_enough_trials(tmp_path, invented):
    invented.score = staticmethod(lambda job, epoch: job.experiment.recipe.lr)
    out = tune(DATA, trials=9, space=write_space(tmp_path), out=tmp_path / "x", **MADE, **ONE)
    found = {r.tags["option"]: r.value for r in open_ledger(out).find("option_importance")}
    assert set(found) == {"lr", "depth", "optimizer"}
    assert sum(found.values()) == pytest.approx(1)
    assert max(found, key=found.__getitem__) == "lr"


def test_a_training_that_fails_or_diverges_is_a_trial_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "build", lambda folder: None)
    space = write_space(tmp_path, "[options]\nlr = [1e30, 1e31]\n")
    words = ONE | {"optimizer": "sgd", "clip_norm": 0.0, "epochs": 1, "sampler": "grid", "space": space, "jobs": 1}
    out = tune(DATA, trials=1, out=tmp_path / "x", **words)
    ((_, _, how, accuracy, *_),) = rows(out)
    assert (how, accuracy) == ("diverged", None)
    assert not (out / "best.toml").exists()

    def run(self, *arguments):
        raise MemoryError("too large")

    monkeypatch.setattr(Job, "run", run)
    out = tune(DATA, trials=2, out=tmp_path / "x", **words)
    assert [row[2] for row in rows(out)] == ["diverged", "failed"]
    assert [trial.state.name for trial in optuna_trials(out)["softmax"]] == ["PRUNED", "FAIL"]
    assert open_ledger(out).find("trial_accuracy", how="failed")[0].tags["why"] == "too large"
    tune(DATA, trials=2, out=tmp_path / "x", **words)  # it is not tried again
    assert len(rows(out)) == 2


class Killed(BaseException):
    """In place of a signal that cannot be caught."""


@pytest.mark.kills
@pytest.mark.parametrize("moment", ["enqueued", "asked", "half drawn", "reported", "told"])
@pytest.mark.parametrize("sampler", ["tpe", "grid"])
def test_a_search_killed_at_any_moment_ends_as_an_undisturbed_one(tmp_path, invented, monkeypatch, moment, sampler):
    import optuna

    invented.score = staticmethod(lambda job, epoch: 0.3 + job.experiment.recipe.lr + 0.01 * epoch)
    space = write_space(tmp_path, "[options]\nlr = [0.01, 0.02, 0.03]\ndepth = [1, 2]\nwarmup = [0.1, 0.2]\n")
    words = ONE | MADE | {"epochs": 3, "trials": 7, "sampler": sampler, "space": space}
    whole = rows(tune(DATA, out=tmp_path / "whole", **words))
    owner, name, count = {
        "enqueued": (optuna.Study, "enqueue_trial", 6),
        "asked": (optuna.Study, "ask", 6),
        "half drawn": (optuna.trial.Trial, "suggest_categorical", 17),
        "reported": (optuna.trial.Trial, "report", 17),
        "told": (optuna.Study, "tell", 6),
    }[moment]
    real, calls = getattr(owner, name), []

    def deadly(self, *arguments, **options):
        found = real(self, *arguments, **options)
        calls.append(name)
        if len(calls) == count:
            raise Killed
        return found

    monkeypatch.setattr(owner, name, deadly)
    with pytest.raises(Killed):
        tune(DATA, out=tmp_path / "x", **words)
    monkeypatch.setattr(owner, name, real)
    tune(DATA, out=tmp_path / "x", **words)
    assert rows(tmp_path / "x") == whole
    states = [trial.state.name for trial in optuna_trials(tmp_path / "x")["softmax"]]
    assert states.count("RUNNING") == states.count("WAITING") == 0
    assert states.count("COMPLETE") + states.count("PRUNED") == 7


@pytest.mark.kills
def test_what_only_this_process_knows_is_trained_here(tmp_path, monkeypatch):
    from linvit.attention import ATTENTIONS
    from linvit.attention.exact import Identity
    from linvit.tuning import search as module

    ATTENTIONS.discover()
    monkeypatch.setattr(ATTENTIONS, "_entries", ATTENTIONS._entries | {"half-of-it": Identity})
    monkeypatch.setattr(report, "build", lambda folder: None)
    monkeypatch.setattr(module, "cpu_count", lambda: 2)
    words = TINY | {"attentions": ["half-of-it"], "trials": 2, "epochs": 1, "space": write_space(tmp_path)}
    with pytest.raises(ValueError, match="unknown attention 'half-of-it': a worker knows only what linvit"):
        tune(DATA, out=tmp_path / "x", jobs=2, **words)
    assert not (tmp_path / "x").exists()
    assert len(rows(tune(DATA, out=tmp_path / "x", **words))) == 2


@pytest.mark.kills
def test_processes_give_the_weights_of_one_process(tuned, tmp_path, monkeypatch):
    from traces import weights

    monkeypatch.setattr(report, "build", lambda folder: None)
    words = {"trials": 2, "epochs": 2, "space": str(tuned.parent / "mine.toml"), "pruner": "none"}
    out = tune(DATA, out=tmp_path / "x", jobs=2, **words, **TINY)
    mine, other = weights(out, "*/best"), weights(tuned, "*/best")
    assert len(mine) == 4
    assert mine == {name: other[name] for name in mine}
    assert rows(out) == [row for row in rows(tuned) if row[1] < 2]
    assert EXECUTORS["processes"].opens_data
