"""A conversion from beginning to end, and what it writes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from converting import SEARCHED, SHAPE
from PIL import Image

import linvit
from linvit import metrics, report
from linvit.conversion.search import RISK
from linvit.conversion.teacher import trained_on
from linvit.data import load_data
from linvit.pipeline.convert import ConversionRun, convert
from linvit.pipeline.train import train
from linvit.requests import ConvertRequest
from linvit.schemas.conversion import Conversion
from linvit.training.checkpoint import load, read_model
from linvit.training.evaluate import evaluate_folder

QUICK = {"data": "digits", "limit": 60, "device": "cpu", "report": False}


def find(done, metric, **tags):
    return [r for r in done.records if r.metric == metric and all(r.tags.get(k) == v for k, v in tags.items())]


def notes(events) -> str:
    return "\n".join(getattr(event, "text", "") for event in events)


def test_every_stage_has_a_result(converted):
    names = [stage.name for stage in converted.stages]
    assert names[:7] == ["teacher", "zero-shot", "stage 1", "stage 2", "mix", "mix, stage 2", "stage 3"]
    stages = {stage.name: stage for stage in converted.stages}
    assert (stages["teacher"].replaced, stages["teacher"].agreement) == (0, 1)
    assert stages["zero-shot"].replaced == 4
    assert stages["zero-shot"].accuracy < stages["stage 2"].accuracy
    assert sum(stage.steps for stage in converted.stages) == 60
    assert converted.chosen in converted.stages[4:]
    assert converted.test_accuracy() >= 0.85 * converted.test_accuracy("teacher")


def test_records_are_as_the_table_says(converted):
    assert [problem for record in converted.records for problem in metrics.problems(record)] == []
    (lost,) = find(converted, "conversion_lost")
    assert lost.value == pytest.approx(converted.test_accuracy("teacher") - converted.test_accuracy())
    assert lost.tags["low"] < lost.value < lost.tags["high"]
    assert {r.tags["image_size"] for r in find(converted, "conversion_vs_teacher")} == {8, 16}


def test_the_result_is_a_model_like_any_other(converted):
    found = evaluate_folder(converted.folder)  # the data are stored with it
    assert (found.result.accuracy, found.changed) == (converted.test_accuracy(), False)
    assert load(converted.folder).config.attention == converted.chosen.attention
    card = (converted.folder / "best/README.md").read_text()
    assert "test accuracy, student" in card
    assert "agreement with the teacher" in card


def test_a_finished_conversion_is_not_repeated(converted, teacher):
    files = [converted.folder / name for name in ("records.jsonl", "best/model.safetensors", "best/README.md")]
    before, events = [file.read_bytes() for file in files], []
    again = convert(teacher, out=converted.folder, on_event=events.append, **SEARCHED)
    assert [file.read_bytes() for file in files] == before
    assert again.stages == converted.stages
    assert {type(event).__name__ for event in events} == {"Noted"}
    with pytest.raises(ValueError, match="holds another convert"):
        convert(teacher, out=converted.folder, **SEARCHED | {"to": "performer-relu"})


def test_stages_share_the_risk_with_the_mixes(converted):
    drops, mix = find(converted, "conversion_drop"), converted.stages[4]
    names = [str(record.tags["model"]) for record in drops]
    trained = [f"{name}: {mix.attention}" for name in ("stage 3", "mix, stage 2")]
    first = names.index(trained[0])
    assert names[first : first + 3] == [*trained, mix.attention]
    left = 0.0
    for drop in drops:
        left += RISK / len(drops)
        assert drop.tags["risk"] == pytest.approx(left)
        left = left if drop.tags["passed"] else 0.0


def test_the_report_reads_what_was_recorded(converted):
    result = report.build(converted.folder, figures=False)
    assert result.headline.startswith(f"{converted.chosen.replaced} of 4 layers replaced")
    rows = result.json()["rows"]
    assert [row["model"] for row in rows] == [stage.name for stage in converted.stages]
    assert [row["validation_accuracy"] for row in rows] == [stage.accuracy for stage in converted.stages]
    assert (converted.folder / "report.html").exists()


def test_trackers_log_every_stage(teacher, tmp_path):
    pytest.importorskip("tensorboard")
    convert(teacher, to="uniform", stages=(2,), steps=2, out=tmp_path / "one", track=("tensorboard",), **QUICK)
    assert list((tmp_path / "one/stage-2").rglob("events.out*"))


def test_what_is_asked_is_stored(converted, teacher):
    stored = Conversion.read(converted.folder / "convert.json")
    assert (stored.trained_on, stored.decided_on) == ("digits", "validation")
    assert stored.request["verb"] == "convert"
    assert stored.request["max_drop"] == 0.15
    assert sum(stored.steps.values()) == 60


def test_a_plan_writes_nothing(teacher, tmp_path):
    for asked, text in (
        ({"dry_run": True}, "stage 1: 5 steps, not finished"),
        ({"print_config": True}, '"uniform"'),
    ):
        lines: list[str] = []
        request = ConvertRequest.of(model=teacher, to="uniform", steps=20, out=tmp_path / "no", **QUICK, **asked)
        assert ConversionRun(request, log=lines.append).run() is None
        assert text in "\n".join(lines)
        with pytest.raises(ValueError, match="on the command line"):
            convert(teacher, to="uniform", **QUICK, **asked)
    assert not (tmp_path / "no").exists()


def test_softmax_to_softmax_is_the_teacher_and_labels_are_learned_alike(teacher, tmp_path):
    done = convert(teacher, to="softmax", stages=(3,), steps=2, out=tmp_path / "same", **QUICK)
    assert [stage.name for stage in done.stages] == ["teacher", "zero-shot", "stage 3"]
    assert done.stages[1].agreement == 1
    x = torch.randn(7, 1, 8, 8)
    assert torch.equal(load(tmp_path / "same/zero-shot")(x), load(teacher)(x))


def test_stage_1_does_not_change_layers_that_stay_softmax(teacher, tmp_path):
    spec = "softmax@2+linformer:k=5@2"
    done = convert(teacher, to=spec, stages=(1,), steps=3, out=tmp_path / "some", **QUICK)
    old, new = load(teacher).state_dict(), load(done.folder / "stage-1/last").state_dict()
    for key, value in old.items():
        assert torch.equal(value, new[key]) is not key.startswith(("blocks.2.attn", "blocks.3.attn"))


@pytest.mark.parametrize(("inherit", "fitted"), [("all", True), ("not-qk", False)])
def test_learned_kernels_are_fitted_where_q_and_k_are_the_teachers(teacher, tmp_path, inherit, fitted):
    convert(teacher, to="performer-hedgehog", stages=(), inherit=inherit, out=tmp_path / "one", **QUICK)
    weight = load(tmp_path / "one/zero-shot").attentions()[1].kernel.weight
    assert torch.equal(weight, torch.eye(12).repeat(2, 1, 1)) != fitted


def test_a_budget_becomes_steps_once(teacher, tmp_path):
    options = {"to": "performer-relu:m=4", "stages": (2,), "budget": "1s", "out": tmp_path / "timed", **QUICK}
    done = convert(teacher, **options)
    steps = Conversion.read(tmp_path / "timed/convert.json").steps
    assert steps == {"stage 2": done.stages[-1].steps}
    assert convert(teacher, **options).stages == done.stages


def test_larger_images(teacher, tmp_path):
    """16 tokens at 8 px, 36 at 12 px and 64 at 16 px: sizes that the attention cannot have are left out."""
    done = convert(teacher, to="linformer:k=20", image_size=16, stages=(2,), steps=2, out=tmp_path / "large", **QUICK)
    assert (done.model.config.image_size, done.model.config.patch_size) == (16, 2)
    assert {r.tags["image_size"] for r in find(done, "conversion_speed")} == {12, 16}
    grown = {(r.tags["model"], r.tags["image_size"]) for r in find(done, "conversion_accuracy", split="growth")}
    assert grown == {(name, size) for name in ("teacher", "student") for size in (12, 16)}
    assert [problem for record in done.records for problem in metrics.problems(record)] == []


def test_smaller_patches(teacher, tmp_path):
    events = []
    done = convert(
        teacher, to="linformer:k=17", patch_size=1, stages=(), out=tmp_path / "fine", on_event=events.append, **QUICK
    )
    assert (done.model.config.image_size, done.model.config.patch_size, done.model.tokens) == (8, 1, 64)
    assert {r.tags["tokens"] for r in find(done, "conversion_speed")} == {64}
    assert "not measured at 8 px with patches of 2 px: spec 'linformer:k=17'" in notes(events)


def test_growth_starts_from_the_teacher_as_it_was_trained(teacher, tmp_path):
    done = convert(teacher, to="uniform", patch_size=1, stages=(), out=tmp_path / "fine", **QUICK)
    (before,) = find(done, "conversion_accuracy", split="growth", model="teacher", patch_size=2)
    data = load_data("digits", limit=60)
    assert before.value == evaluate_folder(teacher, data, split="validation").result.accuracy


def test_a_teacher_of_one_fold_is_tested_on_that_fold(tmp_path):
    options = SHAPE | {"limit": 200, "device": "cpu"}
    train("digits", attention="softmax", folds=2, steps=2, out=tmp_path / "folds", **options)
    fold, quick = tmp_path / "folds/fold-1", QUICK | {"limit": 200}
    done = convert(fold, to="uniform", stages=(), out=tmp_path / "one", **quick)
    expected = evaluate_folder(fold).result
    assert done.test_accuracy("teacher") == expected.accuracy
    assert find(done, "conversion_accuracy", split="test")[0].n == len(expected.predictions)
    again = convert(tmp_path / "one", to="softmax", stages=(), out=tmp_path / "two", **quick)
    assert again.test_accuracy("teacher") == done.test_accuracy()  # a conversion remembers its fold, too


def test_what_the_teacher_was_trained_on(teacher, converted, digits, tmp_path):
    shutil.copytree(teacher / "best", tmp_path / "moved")
    for model in (teacher, converted.folder, tmp_path / "moved"):
        assert trained_on(read_model(model), digits)
    stored, other = read_model(teacher), replace(digits, name="digits:some=part")
    assert trained_on(stored, other)
    assert not trained_on(stored, replace(digits, name="others"))
    assert not trained_on(replace(stored, foreign=True), digits)
    events = []
    options = {"to": "uniform", "stages": (), "out": tmp_path / "part", "on_event": events.append}
    convert(teacher, **QUICK | options | {"data": other, "limit": None})
    assert "the teacher was trained on digits, which may include images of digits:some=part" in notes(events)


def test_results_are_not_written_among_what_is_read(teacher, tmp_path):
    with pytest.raises(ValueError, match="is the folder of the model: choose another --out"):
        convert(teacher, to="uniform", **QUICK | {"out": teacher / "best"})
    images, labels = load_data("digits").test.batch(slice(0, 60))
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = tmp_path / f"photos/{label}/{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(path)
    with pytest.raises(ValueError, match=r"is in the folder of the data, .*photos: choose another --out"):
        convert(teacher, to="uniform", data=tmp_path / "photos", out=tmp_path / "photos/results", device="cpu")
    assert not (tmp_path / "photos/results").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "performer-nothing"}, "unknown attention 'performer-nothing'"),
        ({"to": "softmax@3+uniform@2"}, "describes 5 layers, but the model has depth=4"),
        ({"stages": (1, 4)}, "stages.1=4 must be one of 1, 2 or 3"),
        ({"inherit": "some"}, "inherit=some must be one of all, not-qk or mlp"),
        (
            {"max_drop": 0.001},
            "cannot be shown with fewer than 3,384 images, and digits has 75 of its validation images",
        ),
        ({"max_drop": 7}, "max_drop=7 must be less than 1"),
        ({"max_drop": 0.4, "to": "softmax@2+uniform@2"}, "give it other attentions than softmax@2"),
        ({"amp": "fp16"}, "amp=fp16 needs a CUDA device"),
        ({"steps": 5, "epochs": 1}, "give epochs or steps, not both"),
        ({"steps": 1}, "steps=1 are too few for 3 trainings"),
        ({"epochs": -1}, "epochs=-1 must be more than 0"),
        ({"budget": "soon"}, "budget 'soon' is not a duration"),
        ({"dim": 32}, "unknown option 'dim'"),
        ({"momentum": 0.5}, "momentum=0.5 has no effect"),
        ({"track": ("nothing",)}, "unknown tracker 'nothing'"),
        ({"data": "synthetic:size=8,images=60"}, "has the class"),
        ({"data": "synthetic:size=8,images=60", "max_drop": 0.001}, "has the class"),
        ({"image_size": 9}, "patch_size=2 does not divide image_size=9"),
        ({"patch_size": 3}, "patch_size=3 does not divide image_size=8"),
        ({"patch_size": -2}, "patch_size=-2 must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(teacher, tmp_path, options, message):
    asked = {"to": "performer-relu:m=4", "data": "digits"} | options
    with pytest.raises(ValueError, match=message) as caught:
        convert(teacher, out=tmp_path / "none", device="cpu", **asked)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_a_stage_that_diverges_says_what_to_do(teacher, tmp_path):
    with pytest.raises(ValueError, match=r"stage 3 diverged at step .*: choose a lower lr than 1e\+30"):
        convert(teacher, to="performer-relu:m=4", stages=(3,), steps=9, lr=1e30, out=tmp_path / "wild", **QUICK)


def test_linvit_convert_is_a_function_and_a_package(teacher, tmp_path):
    done = linvit.convert(teacher, to="uniform", stages=(), out=tmp_path / "one", **QUICK)
    assert Path(done.folder, "best/model.safetensors").exists()
    assert json.loads((done.folder / "convert.json").read_text())["to"] == ["uniform"]


def test_images_are_decoded_when_they_are_read(teacher, digits, tmp_path, monkeypatch):
    """A conversion stores no decoded images, and its folder is evaluated on the same ones."""
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))
    for row, (image, label) in enumerate(zip(digits.train.images[:200, 0], digits.train.labels[:200], strict=True)):
        (tmp_path / "photos" / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "photos" / str(label) / f"{row}.png")
    options = {"data": tmp_path / "photos", "to": "uniform", "stages": (), "image_size": 16, "out": tmp_path / "one"}
    done = convert(teacher, device="cpu", report=False, **options)
    assert not list((tmp_path / "cache").rglob("images.u8"))
    found = evaluate_folder(done.folder)
    assert (found.result.accuracy, found.changed) == (done.test_accuracy(), False)
