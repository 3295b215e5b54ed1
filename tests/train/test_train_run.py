"""The parts of a training: stored experiments, events, tasks, precision, and a test split that is read once."""

from __future__ import annotations

import json
from dataclasses import replace

import killable
import numpy as np
import pytest
import torch
from killable import design, read_log
from traces import Forbidden

from linvit import metrics
from linvit.data.feed import ahead
from linvit.measure.accuracy import Evaluation
from linvit.pipeline.train import train
from linvit.schemas.experiment import Experiment
from linvit.schemas.model import ModelConfig
from linvit.schemas.recipe import Recipe
from linvit.training import events
from linvit.training.defaults import ATTENTION, ATTENTIONS
from linvit.training.events import Began, Diverged, Noted, Progressed, Stepped, Validated, from_json, to_json
from linvit.training.experiment import claim
from linvit.training.loop import READ
from linvit.training.run import run, status
from linvit.training.tasks import TASKS
from linvit.training.tasks.classification import Classification

CPU = torch.device("cpu")


def test_an_experiment_is_read_back_with_its_label_and_everything_resolved(dataset, tmp_path):
    first = design(dataset, "performer-relu:m=8", 3, epochs=2).model_copy(update={"label": "mine"})
    claim(first, tmp_path)
    stored = json.loads((tmp_path / "experiment.json").read_text())
    assert Experiment.read(tmp_path / "experiment.json") == first
    assert stored["id"] == first.id
    assert set(stored["model"]) == set(ModelConfig.model_fields)
    assert set(stored["recipe"]) == set(Recipe.model_fields)


def test_a_folder_written_before_an_option_existed_keeps_its_id(dataset, tmp_path):
    experiment = design(dataset, epochs=2)
    claim(experiment, tmp_path)
    old = json.loads((tmp_path / "experiment.json").read_text())
    del old["model"]["dropout"], old["recipe"]["ema"], old["task"]
    (tmp_path / "experiment.json").write_text(json.dumps(old))
    claim(experiment, tmp_path)
    assert Experiment.read(tmp_path / "experiment.json").id == experiment.id == old["id"]
    assert "dropout" not in experiment.settings(defaults=False)["model"]
    assert design(dataset, epochs=2, dropout=0.1).id != experiment.id


def test_an_experiment_of_another_format_is_refused(dataset, tmp_path):
    experiment, ours = design(dataset, epochs=2), Experiment.current_format
    claim(experiment.model_copy(update={"format": ours - 1}), tmp_path)
    with pytest.raises(ValueError, match=f"has format {ours - 1}, but this version of linvit reads format {ours}"):
        claim(experiment, tmp_path)


def test_the_test_split_is_read_only_if_asked(finished, tmp_path):
    blind = replace(finished.data, test=Forbidden(len(finished.data.test)))
    found = {r.metric for r in run(finished.experiment, blind, tmp_path / "run", device=CPU, test=False)}
    assert "validation_accuracy" in found
    assert not [metric for metric in found if metric.startswith("test")]
    trained = (tmp_path / "run" / "last" / "model.safetensors").stat().st_mtime_ns
    run(finished.experiment, finished.data, tmp_path / "run", device=CPU)
    assert (tmp_path / "run" / "last" / "model.safetensors").stat().st_mtime_ns == trained
    killable.same(tmp_path / "run", finished.folder)
    with pytest.raises(AssertionError, match="the test split was asked"):
        run(finished.experiment, blind, tmp_path / "other", device=CPU)


def test_status(finished, tmp_path):
    assert status(finished.experiment, tmp_path) == "not started"
    assert status(finished.experiment, finished.folder) == "finished"
    with pytest.raises(killable.Killed):
        run(
            finished.experiment,
            finished.data,
            tmp_path,
            device=CPU,
            listeners=[killable.kill_after(3)],
            checkpoint_seconds=0.0,
        )
    assert status(finished.experiment, tmp_path) == "resumes at step 3"
    with pytest.raises(ValueError, match="holds another experiment"):
        status(finished.experiment.model_copy(update={"seed": 9}), tmp_path)


def test_records_conform_to_the_table_of_metrics(finished):
    assert [problem for record in finished.records for problem in metrics.problems(record)] == []
    assert {"test_accuracy", "f1", "macs", "confusion"} <= {record.metric for record in finished.records}


def test_predictions_of_test_images_are_stored(finished):
    with np.load(finished.folder / "predictions.npz") as file:
        predicted, labels = file["predicted"], file["labels"]
    assert (labels == finished.data.test.labels).all()
    assert np.mean(predicted == labels) == finished.test_accuracy
    recalls = [r.value for r in finished.records if r.metric == "recall"]
    assert finished.value("balanced_accuracy") == pytest.approx(np.mean(recalls))


@pytest.mark.parametrize(
    "event",
    [
        Began("a", 0, 8),
        Noted("b"),
        Progressed(3, 7, "images"),
        Stepped(1, 8, 0.5, 0.25, 7.0, 3.5, 0.1, 2.0),
        Validated(1, 8, 0.5, 0.25, 7.0, 3.5, 0.1, 2.0, {"step": 1}),
        Diverged(3, "head"),
        events.Tested(7, {"test_accuracy": 0.5}),
    ],
)
def test_events_cross_a_pipe(event):
    assert from_json(json.loads(json.dumps(to_json(event)))) == event


def test_no_step_synchronises_with_the_device(dataset, tmp_path, monkeypatch):
    """Numbers are read every READ steps and when a validation or a checkpoint needs them."""
    asked: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        real = getattr(torch.Tensor, name)

        def counted(self, *args, real=real, name=name):
            asked.append(name)
            return real(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    seen: list[tuple[int, int]] = []

    def listener(event):
        if isinstance(event, Stepped):
            seen.append((event.step, len(asked)))

    steps = 3 * READ
    for optimizer in ("muon", "sgd"):
        seen.clear()
        options = {"steps": steps, "batch_size": 2, "clip_norm": 1.0, "optimizer": optimizer}
        experiment = design(dataset, "performer-relu:m=8", **options)
        assert experiment.length(len(dataset.train)).per_epoch >= steps
        run(experiment, dataset, tmp_path / optimizer, device=CPU, listeners=[listener], checkpoint_seconds=1e9)
        calls = {step: count - before for (step, count), (_, before) in zip(seen[1:], seen, strict=False)}
        assert {step for step, count in calls.items() if count} == {READ, 2 * READ, steps}, optimizer
        assert calls[READ] == 1


@pytest.mark.parametrize("count", [0, 1, 3])
def test_items_come_in_order_and_an_error_in_its_turn(count):
    def items():
        yield from range(5)
        raise ValueError("gone")

    seen = []
    with pytest.raises(ValueError, match="gone"):
        seen.extend(ahead(items(), count))
    assert seen == list(range(5))


@pytest.mark.parametrize(
    "attention", [ATTENTION, *(pytest.param(s, marks=pytest.mark.slow) for s in ATTENTIONS if s != ATTENTION)]
)
def test_the_default_variants_learn_digits(tmp_path, attention):
    """Three epochs instead of the recipe's twenty."""
    trained = train("digits", attention=attention, epochs=3, out=tmp_path / "run", device="cpu")
    assert (trained.test_accuracy or 0) >= 0.9


def test_a_task_selects_and_the_last_of_equally_good_models_is_kept(dataset, tmp_path, monkeypatch):
    """Within the given uncertainty of the highest score so far, which is not that of the model kept last."""
    scores = iter([0.5, 0.7, 0.66, 0.65, 0.6, 0.63])

    class Scripted(Classification):
        def select(self, found):
            return next(scores), 0.06

    monkeypatch.setitem(TASKS._entries, "scripted", Scripted)
    experiment = design(dataset, epochs=6).model_copy(update={"task": "scripted"})
    run(experiment, dataset, tmp_path / "run", device=CPU)
    rows = read_log(tmp_path / "run")
    assert len(rows) == 6
    assert f"| step | {rows[3]['step']} |" in (tmp_path / "run" / "best" / "README.md").read_text()


def test_the_uncertainty_of_an_accuracy_is_its_standard_error(dataset):
    task = Classification(design(dataset), dataset, CPU)
    labels, said = np.arange(50) % 2, np.zeros(50, np.int64)
    found = Evaluation(0.3, labels, said, np.ones(50), ["a", "b"])
    assert task.select(found) == (0.5, pytest.approx(0.5 / 50**0.5))


def losses(folder, **options) -> list[float]:
    train(killable.DATA, out=folder, epochs=2, **killable.TINY | options)
    return [row["train_loss"] for row in read_log(folder)]


@pytest.mark.parametrize("attention", ["performer-exp:m=8", "performer-relu:m=8,dwc=3"])
def test_bfloat16(tmp_path, monkeypatch, attention):
    capable = {"architecture": "x86_64", "avx512_bf16": True}  # slow without hardware for it, but correct
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capable)
    plain = losses(tmp_path / "plain", attention=attention, amp="off")
    half = losses(tmp_path / "half", attention=attention, amp="bf16")
    assert half != plain
    assert half == pytest.approx(plain, rel=0.03)


@pytest.mark.slow  # the compiler takes a minute
def test_compile(tmp_path):
    plain = losses(tmp_path / "plain", attention="performer-relu:m=8")
    assert losses(tmp_path / "compiled", attention="performer-relu:m=8", compile=True) == pytest.approx(plain, rel=1e-3)
