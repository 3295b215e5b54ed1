"""What the stages minimise, against a few lines of reference code; and which weights learn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from linvit.data import normalise
from linvit.models import VisionTransformer
from linvit.schemas.experiment import DatasetRef, Experiment
from linvit.training import checkpoint
from linvit.training import start as starts
from linvit.training.checkpoint import load
from linvit.training.files import load_tensors
from linvit.training.recipe import create_recipe
from linvit.training.start import start_from
from linvit.training.tasks import TASKS
from linvit.training.tasks.matching import TEMPERATURE

CPU = torch.device("cpu")


def experiment(digits, teacher, task, attention) -> Experiment:
    start = start_from(teacher)
    return Experiment(
        data=DatasetRef(name=digits.name, identity=digits.identity),
        model=load(teacher).config.model_copy(update={"attention": attention}),
        recipe=create_recipe(epochs=1),
        task=task,
        start=start,
        teacher=start,
    )


def student(digits, teacher, attention) -> VisionTransformer:
    made = VisionTransformer(load(teacher).config.model_copy(update={"attention": attention}))
    made.load_state_dict(made.state_dict() | load(teacher).state_dict())
    return made.train()


@pytest.fixture
def some(digits):
    images, labels = digits.train.batch(slice(0, 23))
    return images, labels, torch.arange(23)


@pytest.mark.parametrize("task", ["attention-matching", "distillation"])
def test_a_student_that_is_its_teacher_loses_nothing(digits, teacher, some, task):
    made = TASKS[task](experiment(digits, teacher, task, "softmax"), digits, CPU)
    loss, _ = made.loss(student(digits, teacher, "softmax"), *some, 0)
    assert loss.item() < 1e-9
    found = made.evaluate(student(digits, teacher, "softmax"), digits.validation)
    assert found.loss < 1e-9
    assert found.agreement == 1


def test_attention_matching_is_the_mean_error_of_the_layers_on_the_teachers_inputs(digits, teacher, some):
    made = TASKS["attention-matching"](
        experiment(digits, teacher, "attention-matching", "performer-relu:m=7"), digits, CPU
    )
    model, exact = student(digits, teacher, "performer-relu:m=7"), load(teacher)
    loss, _ = made.loss(model, *some, 0)
    x, errors = exact.embed(normalise(some[0], digits.mean, digits.std)), []
    for mine, theirs in zip(model.blocks, exact.blocks, strict=True):
        out = theirs.attn(theirs.norm1(x))
        errors.append((((mine.attn(theirs.norm1(x)) - out) ** 2).sum() / (out**2).sum()).item())
        x = theirs(x)
    assert loss.item() == pytest.approx(sum(errors) / len(errors), rel=1e-5)


def test_distillation_compares_all_tokens_and_the_classes(digits, teacher, some):
    spec = "linformer:k=3,init=pool"
    made = TASKS["distillation"](experiment(digits, teacher, "distillation", spec), digits, CPU)
    model, exact = student(digits, teacher, spec), load(teacher)
    loss, right = made.loss(model, *some, 0)
    x = normalise(some[0], digits.mean, digits.std)
    tokens = {}
    for name, one in (("mine", model), ("theirs", exact)):
        t = one.embed(x)
        for block in one.blocks:
            t = block(t)
        tokens[name] = one.norm(t)
    mine, theirs = model(x), exact(x)
    p, q = (torch.softmax(z.double() / TEMPERATURE, -1) for z in (theirs, mine))
    divergence = (p * (p / q).log()).sum(1).mean() * TEMPERATURE**2
    wanted = ((tokens["mine"] - tokens["theirs"]) ** 2).sum() / (tokens["theirs"] ** 2).sum() + divergence
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-4)
    assert right.item() == (mine.argmax(1) == theirs.argmax(1)).sum().item()


@pytest.mark.parametrize(("task", "learn"), [("attention-matching", ".attn."), ("distillation", "blocks.")])
def test_only_the_parts_that_a_stage_is_about_get_gradients(digits, teacher, some, task, learn):
    made = TASKS[task](experiment(digits, teacher, task, "performer-theta:m=5"), digits, CPU)
    model = student(digits, teacher, "performer-theta:m=5")
    made.loss(model, *some, 0)[0].backward()
    got = {name for name, p in model.named_parameters() if p.grad is not None}
    assert got == {name for name, _ in model.named_parameters() if learn in name}
    assert all(p.grad is None for p in made.teacher.parameters())


def test_a_stage_needs_a_teacher(digits, teacher):
    alone = experiment(digits, teacher, "distillation", "softmax").model_copy(update={"teacher": None})
    with pytest.raises(ValueError, match="task distillation needs a teacher"):
        TASKS["distillation"](alone, digits, CPU)


def test_the_teacher_is_part_of_an_experiment_by_its_weights_alone(digits, teacher):
    one = experiment(digits, teacher, "distillation", "softmax")
    assert one.teacher is not None
    moved = one.model_copy(update={"teacher": one.teacher.model_copy(update={"folder": "/elsewhere"})})
    other = one.model_copy(update={"teacher": one.teacher.model_copy(update={"sha256": "0"})})
    alone = one.model_copy(update={"teacher": None})
    assert one.id == moved.id
    assert len({one.id, other.id, alone.id}) == 3
    assert "teacher" not in alone.settings(False)  # folders from before there were teachers keep their id


def test_a_start_is_read_once(digits, teacher, monkeypatch):
    """Its shape and statistics without its weights."""
    asked, one = [], experiment(digits, teacher, "classification", "softmax")
    monkeypatch.setattr(starts, "_recent", {})
    monkeypatch.setattr(checkpoint, "load_tensors", lambda path: asked.append(path) or load_tensors(path))
    assert starts.architecture(one.start) == one.model
    assert starts.normalised(replace(digits, mean=(0.9,)), one).mean == pytest.approx(digits.mean)
    assert asked == []
    for _ in range(3):
        starts.started(one, digits)
    assert len(asked) == 1
    assert start_from(teacher) == one.start
    starts.started(one, digits)
    assert len(asked) == 2
    for i in range(9):  # few models stay in memory
        starts.stored_of(one.start.model_copy(update={"sha256": str(i)}))
    assert len(starts._recent) == starts.MAX_REMEMBERED
    with pytest.raises(ValueError, match="holds other weights than this experiment was started from"):
        starts.load_start(one.start.model_copy(update={"sha256": "0"}))
