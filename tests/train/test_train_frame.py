"""The parts of a training: typed experiments, tasks, events, starts, and a test split that can be left alone."""

from __future__ import annotations

import json
from dataclasses import replace

import killable
import numpy as np
import pytest
import torch

import linvit
from linvit import data, metrics
from linvit.measure.accuracy import Evaluation
from linvit.models import ModelConfig
from linvit.study import ATTENTIONS
from linvit.train import Experiment, Recipe, design, events, run, start_from
from linvit.train.events import Began, Diverged, Noted, Stepped, Validated, from_json, to_json
from linvit.train.experiment import FORMAT
from linvit.train.loop import READ
from linvit.train.tasks import TASKS
from linvit.train.tasks.classification import Classification

CPU = torch.device("cpu")
TINY = {key: value for key, value in killable.TINY.items() if key != "device"}


@pytest.fixture
def dataset(tmp_path, monkeypatch) -> data.Dataset:
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))
    return data.load_data("synthetic:images=72,size=8")


def test_an_experiment_is_read_back_with_its_label_and_everything_resolved(dataset, tmp_path):
    first = design(dataset, "performer-relu:m=8", 3, epochs=2, **TINY).model_copy(update={"label": "mine"})
    first.claim(tmp_path)
    stored = json.loads((tmp_path / "experiment.json").read_text())
    assert Experiment.read(tmp_path / "experiment.json") == first
    assert stored["id"] == first.id
    assert set(stored["model"]) == set(ModelConfig.model_fields)
    assert set(stored["recipe"]) == set(Recipe.model_fields)


def test_an_option_that_is_new_does_not_disown_an_old_folder(dataset, tmp_path):
    """A folder written before `dropout` existed is still this experiment's, and its id is the same."""
    experiment = design(dataset, "softmax", epochs=2, **TINY)
    experiment.claim(tmp_path)
    old = json.loads((tmp_path / "experiment.json").read_text())
    del old["model"]["dropout"], old["recipe"]["ema"], old["task"]
    (tmp_path / "experiment.json").write_text(json.dumps(old))
    experiment.claim(tmp_path)
    assert Experiment.read(tmp_path / "experiment.json").id == experiment.id == old["id"]
    assert "dropout" not in experiment.settings(defaults=False)["model"]
    assert design(dataset, "softmax", epochs=2, **TINY | {"dropout": 0.1}).id != experiment.id


def test_an_experiment_of_another_format_is_refused(dataset, tmp_path):
    experiment = design(dataset, "softmax", epochs=2, **TINY)
    experiment.model_copy(update={"format": FORMAT - 1}).claim(tmp_path)
    with pytest.raises(ValueError, match=f"has format {FORMAT - 1}, but this linvit reads {FORMAT}"):
        experiment.claim(tmp_path)


class Forbidden:
    """A split that nobody may look at."""

    def __getattr__(self, name):
        raise AssertionError(f"the test split's {name} was read")

    def __len__(self):
        raise AssertionError("the test split's length was read")


def test_a_run_may_be_asked_never_to_touch_the_test_split(dataset, tmp_path):
    experiment = design(dataset, "softmax", epochs=2, **TINY)
    blind = replace(dataset, test=Forbidden())  # type: ignore[arg-type]
    found = {record.metric for record in run(experiment, blind, tmp_path / "run", device=CPU, test=False)}
    assert "validation_accuracy" in found
    assert not [metric for metric in found if metric.startswith("test")]
    later = run(experiment, dataset, tmp_path / "run", device=CPU)  # nothing is trained again, and test is read now
    whole = run(experiment, dataset, tmp_path / "whole", device=CPU)
    accuracy = [[r.value for r in records if r.metric == "test_accuracy"] for records in (later, whole)]
    assert accuracy[0] == accuracy[1]
    with pytest.raises(AssertionError, match="was read"):
        run(experiment, blind, tmp_path / "other", device=CPU)


def test_every_record_of_a_training_is_as_the_table_of_metrics_says(dataset, tmp_path):
    records = run(design(dataset, "softmax", epochs=1, **TINY), dataset, tmp_path / "run", device=CPU)
    assert [problem for record in records for problem in metrics.problems(record)] == []
    assert {"test_accuracy", "f1", "macs", "confusion"} <= {record.metric for record in records}


def test_which_test_images_were_right_is_stored(dataset, tmp_path):
    records = run(design(dataset, "softmax", epochs=1, **TINY), dataset, tmp_path, device=CPU)
    value = {r.metric: r.value for r in records if r.tags.get("selection") == "best" and "class" not in r.tags}
    with np.load(tmp_path / "predictions.npz") as file:
        predicted, labels = file["predicted"], file["labels"]
    assert (labels == dataset.test.labels).all()
    assert np.mean(predicted == labels) == value["test_accuracy"]
    recalls = [r.value for r in records if r.metric == "recall"]
    assert value["balanced_accuracy"] == pytest.approx(np.mean(recalls))


@pytest.mark.parametrize("event", [
    Began("a", 0, 8), Noted("b"), Stepped(1, 8, 0.5, 0.25, 7.0, 3.5, 0.1, 2.0),
    Validated(1, 8, 0.5, 0.25, 7.0, 3.5, 0.1, 2.0, {"step": 1}), Diverged(3, "head"),
    events.Tested(7, {"test_accuracy": 0.5}),
])  # fmt: skip
def test_events_cross_a_pipe(event):
    assert from_json(json.loads(json.dumps(to_json(event)))) == event


def test_no_step_waits_for_the_device(dataset, tmp_path, monkeypatch):
    """Numbers are read every READ steps and when a validation or a checkpoint needs them, never in between."""
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
    experiment = design(dataset, "performer-relu:m=8", steps=steps, **TINY | {"batch_size": 2, "clip_norm": 1.0})
    assert experiment.length(len(dataset.train)).per_epoch >= steps
    for optimizer in ("muon", "sgd"):
        seen.clear()
        options = {"recipe": experiment.recipe.model_copy(update={"optimizer": optimizer})}
        run(experiment.model_copy(update=options), dataset, tmp_path / optimizer, device=CPU, listeners=[listener],
            checkpoint_seconds=1e9)  # fmt: skip
        calls = {step: count - before for (step, count), (_, before) in zip(seen[1:], seen, strict=False)}
        assert {step for step, count in calls.items() if count} == {READ, 2 * READ, steps}, optimizer
        assert calls[READ] == 1


def test_a_batch_is_prepared_before_the_last_one_is_used():
    made: list[int] = []

    def items():
        for number in range(3):
            made.append(number)
            yield number

    from linvit.train.loop import one_ahead

    seen = [(number, list(made)) for number in one_ahead(items())]  # type: ignore[arg-type]
    assert seen == [(0, [0, 1]), (1, [0, 1, 2]), (2, [0, 1, 2])]


def test_a_start_gives_all_shared_weights_and_a_new_head_for_other_classes(dataset, tmp_path):
    linvit.train(dataset, out=tmp_path / "teacher", attention="softmax", epochs=1, **killable.TINY)
    start = start_from(tmp_path / "teacher")
    teacher = linvit.load(tmp_path / "teacher").state_dict()
    for attention, others in (("performer-theta:m=4", False), ("softmax", True)):
        data_ = replace(dataset, classes=[name + "!" for name in dataset.classes]) if others else dataset
        experiment = design(data_, attention, 5, start=start, steps=1, lr=1e-12, **TINY)
        run(experiment, data_, tmp_path / attention[:4], device=CPU)
        found = linvit.load(tmp_path / attention[:4] / "last").state_dict()
        for key, value in teacher.items():
            same = torch.allclose(found[key], value, atol=1e-6)
            assert same != (others and key == "head.weight") or key == "head.bias", key
    assert design(dataset, "softmax", start=start, **TINY).id != design(dataset, "softmax", **TINY).id
    moved = start.model_copy(update={"folder": "/elsewhere"})
    assert design(dataset, "softmax", start=moved, **TINY).id == design(dataset, "softmax", start=start, **TINY).id
    with pytest.raises(ValueError, match=r"position is \(1, 4, 16\) there, not \(1, 4, 18\)"):
        run(design(dataset, "softmax", start=start, **TINY | {"dim": 18}), dataset, tmp_path / "x", device=CPU)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_demos_variants_learn_digits(tmp_path, attention):
    """Six epochs instead of the demo's fourteen."""
    trained = linvit.train("digits", attention=attention, epochs=6, out=tmp_path / "run", device="cpu")
    assert (trained.test_accuracy or 0) >= 0.95


def test_of_models_that_cannot_be_told_apart_the_last_is_kept(dataset, tmp_path):
    """Within chance of the highest score so far, which is not that of the model kept last."""
    scores = iter([0.5, 0.7, 0.66, 0.65, 0.6, 0.63])

    class Scripted(Classification):
        def select(self, found):
            return next(scores), 0.06

    TASKS.register("scripted")(Scripted)
    try:
        experiment = design(dataset, "softmax", epochs=6, **TINY).model_copy(update={"task": "scripted"})
        run(experiment, dataset, tmp_path / "run", device=CPU)
    finally:
        del TASKS._entries["scripted"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert f"| step | {rows[3]['step']} |" in (tmp_path / "run" / "best" / "README.md").read_text()


def test_the_chance_in_an_accuracy_is_its_standard_error(dataset):
    task = Classification(design(dataset, "softmax", **TINY), dataset, CPU)
    labels, said = np.arange(50) % 2, np.zeros(50, np.int64)
    found = Evaluation(0.3, labels, said, np.ones(50), ["a", "b"])
    assert task.select(found) == (0.5, pytest.approx(0.5 / 50**0.5))


def test_a_task_is_one_class(dataset, tmp_path):
    """Selection by loss alone, registered under a name of its own, is all it takes."""

    class ByLoss(Classification):
        def select(self, found):
            return -found.loss, 0.0

    TASKS.register("by-loss")(ByLoss)
    try:
        experiment = design(dataset, "softmax", epochs=4, **TINY | {"lr": 0.02})
        run(experiment.model_copy(update={"task": "by-loss"}), dataset, tmp_path / "run", device=CPU)
    finally:
        del TASKS._entries["by-loss"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    best = min(rows, key=lambda row: row["validation_loss"])
    assert f"| step | {best['step']} |" in (tmp_path / "run" / "best" / "README.md").read_text()
