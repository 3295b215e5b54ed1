"""Trackers get what the log says, once, however often a training was interrupted; read back by their own readers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import killable
import pytest
from killable import Killed, read_log

from linvit.pipeline.train import train as train_public
from linvit.training.trackers import TRACKERS, Tracker, tracking


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)  # nothing may be written here


def train(out: Path, stop_at: int = 0, **options: Any) -> Any:
    options = killable.TINY | {"epochs": 3, "checkpoint_seconds": 0.0} | options
    return train_public(killable.DATA, out=out, on_event=killable.kill_after(stop_at), **options)


def interrupted_and_resumed(out: Path, tracker: str) -> Any:
    """The second epoch ends before the interruption and again after it."""
    with pytest.raises(Killed):
        train(out, stop_at=9, checkpoint_seconds=1e9, track=[tracker])
    return train(out, track=[tracker])


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_has_the_log_and_the_test(tmp_path):
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    trained = interrupted_and_resumed(run, "tensorboard")
    found, rows = scalars(run / "tensorboard"), read_log(run)
    assert len(rows) == 3
    for key in ("train_loss", "validation_accuracy", "learning_rate"):
        assert found[key] == [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in rows], key
    ((step, accuracy),) = found["test_accuracy"]
    assert step in [row["step"] for row in rows]
    assert accuracy == pytest.approx(trained.test_accuracy)


def test_mlflow_has_one_run_with_parameters_and_one_value_per_validation(tmp_path):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    run = tmp_path / "run"
    trained = interrupted_and_resumed(run, "mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name.startswith("linvit")]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["model.dim"] == "16"
    assert found.data.params["recipe.epochs"] == "3.0"
    assert found.data.metrics["test_accuracy"] == trained.test_accuracy
    rows = read_log(run)
    for key in ("train_loss", "validation_loss"):
        history = sorted((m.step, m.value) for m in client.get_metric_history(found.info.run_id, key))
        assert history == [(row["step"], row[key]) for row in rows]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # no other store was made


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", None])
def test_mlflow_uses_the_server_of_the_environment(tmp_path, monkeypatch, uri):
    mlflow = pytest.importorskip("mlflow")
    asked: list[str] = []

    class Unreachable:
        def __init__(self, tracking_uri):
            asked.append(tracking_uri)

        def get_experiment_by_name(self, name):
            raise ConnectionError("connection refused\nby the server")

    monkeypatch.setattr(mlflow, "MlflowClient", Unreachable)
    if uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ValueError, match=r"^mlflow cannot be used \(connection refused\)$"):
        train(tmp_path / "run", track=["mlflow"])
    assert asked == [uri or f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}"]


class Recording(Tracker):
    """Remembers its calls; `fails_at` is a step at which its server is gone."""

    package, fails_at = "json", 10**9
    calls: list[tuple[str, Any]] = []  # noqa: RUF012
    made: list[Tracker] = []  # noqa: RUF012

    def begin(self, step):
        self.made.append(self)
        self.calls.append(("begin", step))

    def log(self, step, row):
        if step >= self.fails_at:
            raise ConnectionError("the server is gone\nwith its data")
        self.calls.append(("log", step))

    def end(self, diverged):
        self.calls.append(("end", diverged))


@pytest.fixture
def recording(monkeypatch):
    TRACKERS.discover()
    monkeypatch.setitem(TRACKERS._entries, "recording", Recording)
    monkeypatch.setattr(Recording, "calls", [])
    monkeypatch.setattr(Recording, "made", [])
    return Recording


def test_a_tracker_that_fails_does_not_end_the_training(tmp_path, recording, monkeypatch):
    train(tmp_path / "a", track=["recording"])
    *calls, (last, _), end = recording.calls
    assert (calls, last, end) == ([("begin", 0), ("log", 4), ("log", 8), ("log", 12)], "log", ("end", False))
    recording.calls.clear()
    monkeypatch.setattr(Recording, "fails_at", 8)
    with pytest.warns(UserWarning, match="json no longer logs this training .the server is gone.$"):
        trained = train(tmp_path / "b", track=["recording"])
    assert trained.test_accuracy is not None
    assert recording.calls == [("begin", 0), ("log", 4)]


def test_every_fold_has_its_own_tracker_and_one_store(tmp_path, recording):
    trained = train(tmp_path / "x", folds=2, epochs=1, track=["recording"])
    assert [what for what, _ in recording.calls] == 2 * ["begin", "log", "log", "end"]
    assert [(tracker.folder, tracker.home) for tracker in recording.made] == [
        (fold.folder, tmp_path / "x") for fold in trained.folds
    ]


def test_a_missing_tracker_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="unknown tracker 'wandb'; choose from: mlflow, tensorboard"):
        train(tmp_path / "run", track=["wandb"])
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "mlflow" else real(name, *more)
    )
    for call in (lambda: train(tmp_path / "run", track=["mlflow"]), lambda: tracking(["mlflow"])):
        with pytest.raises(ValueError, match=r"track=mlflow needs a package .*pip install 'linvit\[track\]'"):
            call()
    assert not (tmp_path / "run").exists()
