"""Trackers are told what the log says, once, however often a training was torn; read back by their own readers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import killable
import pytest

import linvit
from linvit.study import compare
from linvit.train import Event
from linvit.train.events import Began, Stepped, Validated
from linvit.train.trackers import TRACKERS, Tracker, tracking

DATA = "synthetic:images=72,size=8"


class Killed(BaseException):
    pass


@pytest.fixture(autouse=True)
def _place(tmp_path_factory, tmp_path, monkeypatch):
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)  # nothing may be written here


def train(out: Path, stop_at: int = 0, **options: Any) -> Any:
    def listener(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == stop_at:
            raise Killed

    words = killable.TINY | {"epochs": 3, "checkpoint_seconds": 0.0} | options
    return linvit.train(DATA, out=out, listeners=[listener], **words)


def log(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_has_the_log_and_the_test(tmp_path):
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    with pytest.raises(Killed):
        train(run, stop_at=9, checkpoint_seconds=1e9, track=["tensorboard"])  # two epochs that will be done again
    trained = train(run, track=["tensorboard"])
    found, rows = scalars(run / "tensorboard"), log(run)
    assert len(rows) == 3
    for key in ("train_loss", "validation_accuracy", "learning_rate"):
        assert found[key] == [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in rows], key
    assert found["test_accuracy"] == [
        (pytest.approx(found["test_accuracy"][0][0]), pytest.approx(trained.test_accuracy))
    ]


def test_mlflow_has_one_run_with_parameters_and_one_value_per_validation(tmp_path):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    run = tmp_path / "run"
    with pytest.raises(Killed):
        train(run, stop_at=9, checkpoint_seconds=1e9, track=["mlflow"])
    trained = train(run, track=["mlflow"])
    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name.startswith("linvit")]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["model.dim"] == "16"
    assert found.data.params["recipe.epochs"] == "3.0"
    assert found.data.metrics["test_accuracy"] == trained.test_accuracy
    rows = log(run)
    for key in ("train_loss", "validation_loss"):
        history = sorted((m.step, m.value) for m in client.get_metric_history(found.info.run_id, key))
        assert history == [(row["step"], row[key]) for row in rows]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # no store beside it


def test_mlflow_goes_where_the_environment_says(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    train(tmp_path / "run", track=["mlflow"], epochs=1)
    assert not (tmp_path / "run" / "mlflow.db").exists()
    client = MlflowClient(tracking_uri=uri)
    assert sum(len(client.search_runs([e.experiment_id])) for e in client.search_experiments()) == 1
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(ValueError, match="mlflow cannot be used"):
        train(tmp_path / "other", track=["mlflow"], epochs=1)


class Wanted(Tracker):
    """Remembers; `fails_at` is a step at which its server is gone."""

    package, fails_at = "json", 10**9
    told: list[tuple[str, Any]] = []  # noqa: RUF012
    places: list[Tracker] = []  # noqa: RUF012

    def begin(self, step):
        self.places.append(self)
        self.told.append(("begin", step))

    def log(self, step, row):
        if step >= self.fails_at:
            raise ConnectionError("the server is gone\nwith its data")
        self.told.append(("log", step))

    def end(self, diverged):
        self.told.append(("end", diverged))


@pytest.fixture
def wanted(monkeypatch):
    TRACKERS.discover()
    monkeypatch.setattr(TRACKERS, "_entries", TRACKERS._entries | {"wanted": Wanted})
    monkeypatch.setattr(Wanted, "told", [])
    monkeypatch.setattr(Wanted, "places", [])
    return Wanted


def test_a_tracker_is_lost_the_training_is_not(tmp_path, wanted, monkeypatch):
    train(tmp_path / "a", track=["wanted"])
    *told, (last, _), end = wanted.told
    assert (told, last, end) == ([("begin", 0), ("log", 4), ("log", 8), ("log", 12)], "log", ("end", False))
    wanted.told.clear()
    monkeypatch.setattr(Wanted, "fails_at", 8)
    with pytest.warns(UserWarning, match="json is told no more of this training .the server is gone.$"):
        trained = train(tmp_path / "b", track=["wanted"])
    assert trained.test_accuracy is not None
    assert wanted.told == [("begin", 0), ("log", 4)]


def test_every_fold_has_its_own_and_one_store_for_all(tmp_path, wanted):
    trained = train(tmp_path / "x", folds=2, epochs=1, track=["wanted"])
    assert [what for what, _ in wanted.told] == 2 * ["begin", "log", "log", "end"]
    assert [(place.folder, place.home) for place in wanted.places] == [
        (one.folder, tmp_path / "x") for one in trained.folds
    ]


def test_every_job_of_a_study_has_its_own(tmp_path, wanted, monkeypatch):
    from linvit.study.jobs import Job, tracked

    heard: list[Event] = []
    tell = tracked(lambda job, event: heard.append(event), [Wanted], tmp_path)
    experiment = linvit.train(DATA, out=tmp_path / "x", dry_run=True, **killable.TINY).experiment
    for number in (0, 1):
        job = Job(number=number, jobs=2, variant="a", experiment=experiment, folder=str(tmp_path / str(number)))
        for event in (Began("", 0, 8), Validated(4, 8, 0.5, 0.25, 7.0, 3.5, 0.1, 2.0, {"step": 4, "train_loss": 1.0})):
            tell(job, event)
    assert wanted.told == 2 * [("begin", 0), ("log", 4)]
    assert len(heard) == 4
    assert not (tmp_path / "x").exists()  # a dry run


def test_what_is_not_there_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="unknown tracker 'wandb'; choose from: mlflow, tensorboard"):
        train(tmp_path / "run", track=["wandb"])
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "mlflow" else real(name, *more)
    )
    for call in (lambda: train(tmp_path / "run", track=["mlflow"]), lambda: compare(DATA, track=["mlflow"]),
                 lambda: tracking(["mlflow"])):  # fmt: skip
        with pytest.raises(ValueError, match=r"track=mlflow needs a package .*pip install 'linvit\[track\]'"):
            call()
    assert not (tmp_path / "run").exists()
