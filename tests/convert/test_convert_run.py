"""A conversion and what it leaves."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

import linvit
from linvit import metrics
from linvit.convert import measuring, mixing, work
from linvit.convert.measuring import between
from linvit.convert.plan import common_recipe, rate, trained_on
from linvit.convert.search import RISK, Drop, Score
from linvit.convert.student import feature_counts, fitted, images_for, student_of
from linvit.data import load_data
from linvit.data.splits import thin
from linvit.measure.accuracy import evaluate
from linvit.models import model_config
from linvit.registry import parse, parse_layers
from linvit.report import conversion
from linvit.train import load
from linvit.train.checkpoint import read_model
from linvit.train.files import load_tensors
from linvit.train.use import evaluate_folder

SMALL = {
    "stem": "patch", "patch_size": 2, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 16, "limit": 200, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def converted(teacher, tmp_path_factory):
    return linvit.convert(
        teacher, to="performer-hyp", data="digits", out=tmp_path_factory.mktemp("convert") / "one", max_drop=0.15,
        steps=60, device="cpu", report=False,
    )  # fmt: skip


def test_every_stage_has_its_row(converted):
    names = [row.name for row in converted.rows]
    assert names[:7] == ["teacher", "zero-shot", "stage 1", "stage 2", "mix", "mix, stage 2", "stage 3"]
    rows = {row.name: row for row in converted.rows}
    assert rows["teacher"].linear == 0
    assert rows["teacher"].agreement == 1
    assert rows["zero-shot"].linear == 4
    assert rows["zero-shot"].accuracy < rows["stage 1"].accuracy < rows["stage 2"].accuracy
    assert sum(row.steps for row in converted.rows) == 60
    assert converted.chosen in converted.rows[4:]
    assert converted.test_accuracy() >= 0.85 * converted.test_accuracy("teacher")


def test_the_result_is_a_model_like_any_other(converted):
    home = converted.folder
    found = evaluate_folder(home)  # the data are known
    assert found.result.accuracy == converted.test_accuracy()
    assert found.changed is False
    assert load(home).config.attention == converted.chosen.attention
    assert "test accuracy, student" in (home / "best/README.md").read_text()
    again = linvit.train("digits", epochs=1, **small(home), out=home.parent / "more")
    assert again.test_accuracy is not None


def small(home) -> dict:
    config = load(home).config
    return {"attention": config.attention, "stem": "patch", "patch_size": 2, "dim": 24, "depth": 4, "heads": 2,
            "mlp_dim": 32, "device": "cpu"}  # fmt: skip


def test_what_was_lost_has_an_interval_and_speed_is_shown_at_twice_the_side(converted):
    (lost,) = [r for r in converted.records if r.metric == "conversion_lost"]
    assert lost.value == pytest.approx(converted.test_accuracy("teacher") - converted.test_accuracy())
    assert lost.tags["low"] < lost.value < lost.tags["high"]
    assert {r.tags["image_size"] for r in converted.records if r.metric == "conversion_vs_teacher"} == {8, 16}
    evidence = conversion.Evidence({"image_size": 8}, converted.records)
    assert [chart.name for chart in conversion.charts(evidence)["growth"]] == ["growth-speed"]
    share = converted.test_accuracy() / converted.test_accuracy("teacher")
    assert f"{metrics.percent(share) if share < 1 else 'all'} of the accuracy kept" in conversion.headline(evidence)
    assert "points lost (95 %:" in conversion.lost(evidence)


def test_records_are_as_the_table_says(converted):
    assert [problem for record in converted.records for problem in metrics.problems(record)] == []


def test_nothing_is_done_twice(converted, teacher):
    lines = (converted.folder / "records.jsonl").read_bytes()
    weights = (converted.folder / "best/model.safetensors").read_bytes()
    heard = []
    again = linvit.convert(
        teacher, to="performer-hyp", data="digits", out=converted.folder, max_drop=0.15, steps=60, device="cpu",
        report=False, listeners=[heard.append],
    )  # fmt: skip
    assert (converted.folder / "records.jsonl").read_bytes() == lines
    assert (converted.folder / "best/model.safetensors").read_bytes() == weights
    assert again.rows == converted.rows
    assert not [event for event in heard if type(event).__name__ == "Stepped"]
    with pytest.raises(ValueError, match="holds another convert"):
        linvit.convert(teacher, to="performer-relu", data="digits", out=converted.folder, max_drop=0.15, steps=60,
                       report=False)  # fmt: skip


@pytest.mark.parametrize("spec", ["linformer:k=3,sharing=layerwise", "performer-theta:m=5"])
def test_a_mix_is_the_model_that_was_searched(teacher, digits, tmp_path, monkeypatch, spec):
    """With another linear kind to choose from, and weights that layers share."""
    mix, asked = (0, 1, 2, 1), []
    monkeypatch.setattr(mixing, "LOCAL", parse("efficient"))
    monkeypatch.setattr(mixing.Mixing, "candidates", {0: ((0,) * 4, Score(0.0, 1.0)), 3: (mix, Score(0.0, 1.0))})
    monkeypatch.setattr(
        mixing, "passing", lambda found, share, look: asked.append(look(mixing.Candidate("it", mix, 3), 0.05)) or []
    )
    done = linvit.convert(teacher, to=spec, data="digits", out=tmp_path / "mix", stages=(2,), steps=4, max_drop=0.4,
                          device="cpu", report=False)  # fmt: skip
    made = load(tmp_path / "mix/mix")
    assert made.config.attention == f"softmax@1+{spec}@1+efficient@1+{spec}@1"
    assert [row.name for row in done.rows[2:]] == ["stage 2", "mix", "mix, stage 2", "mix, decided"]
    assert done.rows[3].linear == 3
    student, x = load(tmp_path / "mix/stage-2"), torch.randn(7, 1, 8, 8)
    wanted = made.embed(x)
    for i, kind in enumerate(mix):
        wanted = (load(teacher), student, made)[kind].blocks[i](wanted)
    torch.testing.assert_close(made(x), made.classify(wanted))
    decide = images_for(digits, made.about, True, True, 0).decide
    right = [evaluate(model, decide, digits.classes, digits.mean, digits.std).predictions == decide.labels
             for model in (load(teacher), made)]  # fmt: skip
    assert asked == [Drop.of(*right)]
    record = next(r for r in done.records if r.metric == "conversion_drop")
    assert (record.tags["lost"], record.tags["won"]) == (asked[0].lost, asked[0].won)
    assert done.chosen.linear == 0  # nothing passed: it is the teacher
    assert torch.equal(done.model(x), load(teacher)(x))


def test_what_training_made_of_the_mix_shares_the_risk(converted):
    drops = [r for r in converted.records if r.metric == "conversion_drop"]
    names = [str(r.tags["model"]) for r in drops]
    trained = [name for name in names if name.startswith(("mix, stage 2: ", "stage 3: "))]
    assert trained == [f"{name}: {converted.rows[4].attention}" for name in ("stage 3", "mix, stage 2")]
    assert names.index(trained[-1]) + 1 == names.index(converted.rows[4].attention)
    left, share = 0.0, RISK / len(drops)
    for drop in drops:
        left += share
        assert drop.tags["risk"] == pytest.approx(left)
        left = left if drop.tags["passed"] else 0.0


def test_softmax_to_softmax_is_the_teacher(teacher, tmp_path):
    done = linvit.convert(teacher, to="softmax", data="digits", out=tmp_path / "same", stages=(), device="cpu",
                          report=False)  # fmt: skip
    assert [row.name for row in done.rows] == ["teacher", "zero-shot"]
    assert done.rows[1].agreement == 1
    x = torch.randn(7, 1, 8, 8)
    assert torch.equal(done.model(x), load(teacher)(x))


def test_labels_are_learned_by_the_control_too(teacher, tmp_path):
    """What stage 3 brings a linear student is to be held beside what it brings softmax."""
    done = linvit.convert(teacher, to="softmax", data="digits", out=tmp_path / "same", stages=(3,), steps=2,
                          device="cpu", report=False)  # fmt: skip
    assert [row.name for row in done.rows] == ["teacher", "zero-shot", "stage 3"]


def test_the_page_says_what_it_was_decided_on_and_where_it_is_weak(converted):
    evidence = conversion.read(converted.folder)
    assert evidence.plan["trained_on"] == "digits"
    assert "its layers on others of the validation images" in conversion.chosen_on(evidence)
    said = " ".join(conversion.weak(evidence))
    assert "359 test images: each is worth 0.28 points" in said
    assert "from elsewhere" not in said
    other = conversion.Evidence(evidence.plan | {"trained_on": ""}, evidence.records)
    assert "The teacher is from elsewhere" in conversion.weak(other)[0]
    conversion.build(converted.folder, figures=False)
    text = (converted.folder / "report.md").read_text()
    for words in ("Where this is weak", "- Teacher:", "at a risk of", "validation images:"):
        assert words in text
    assert "Where this conversion is weak" in (converted.folder / "report.html").read_text()


def test_a_step_that_was_not_the_last_is_named(converted):
    (row,) = [row for row in conversion.read(converted.folder).rows() if row["model"] == "stage 1"]
    _, facts = load_tensors(converted.folder / "stage-1/best/model.safetensors")
    assert row["kept"] == facts["step"]
    assert conversion._steps(row | {"kept": 7, "steps": 1040}) == "1,040, kept after 7"
    assert conversion._steps(row | {"kept": 40, "steps": 40}) == "40"


def test_results_do_not_go_into_what_is_read(teacher, tmp_path):
    shutil.copytree(teacher / "best", tmp_path / "model")
    with pytest.raises(ValueError, match=r"model is the folder of the model: choose another --out"):
        linvit.convert(tmp_path / "model", to="uniform", data="digits", out=tmp_path / "model", device="cpu")
    images, labels = load_data("digits").test.batch(slice(0, 60))
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = tmp_path / f"photos/{label}/{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(place)
    for verb in (partial(linvit.convert, teacher, to="uniform"), linvit.train, linvit.compare):
        with pytest.raises(ValueError, match=r"is in the folder of the data, .*photos: choose another --out"):
            verb(data=tmp_path / "photos", out=tmp_path / "photos/results", device="cpu")
    assert not (tmp_path / "photos/results").exists()


def test_a_folder_with_the_name_of_a_set_is_not_its_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second finds the folder of the first
        assert linvit.train("digits", attention="softmax", steps=1, out="digits", **SMALL).model is not None


def test_a_conversion_of_an_older_version_still_has_its_page(converted, tmp_path):
    shutil.copytree(converted.folder, tmp_path / "old")
    plan = json.loads((tmp_path / "old/convert.json").read_text())
    del plan["trained_on"], plan["decided_on"]
    (tmp_path / "old/convert.json").write_text(json.dumps(plan))
    conversion.build(tmp_path / "old", figures=False)
    text = (tmp_path / "old/report.html").read_text()
    assert "of the held-out images" in text
    assert "from elsewhere" not in text


def test_the_images_that_decide_are_seen_by_nobody_else(digits, teacher):
    about = read_model(teacher).about
    images = images_for(digits, about, True, False, 3)
    parts = [set(split.rows.tolist()) for split in (images.data.train, images.search, images.decide)]
    assert set().union(*parts) == set(digits.train.rows.tolist())
    assert sum(map(len, parts)) == len(digits.train)
    assert all(parts)
    assert images.data.identity != digits.identity
    assert np.array_equal(images_for(digits, about, True, False, 3).decide.rows, images.decide.rows)
    assert images_for(digits, about, False, False, 3).data.identity == digits.identity
    other = images_for(digits, about | {"mean": [0.25]}, False, False, 3)  # the teacher's normalisation is used
    assert other.data.mean == (0.25,)
    assert other.data.identity != digits.identity


def test_a_teacher_does_not_decide_by_what_it_was_trained_on(digits, teacher):
    images = images_for(digits, read_model(teacher).about, True, True, 3)
    parts = [set(split.rows.tolist()) for split in (images.data.validation, images.search, images.decide)]
    assert set().union(*parts) == set(digits.validation.rows.tolist())
    assert sum(map(len, parts)) == len(digits.validation)
    assert np.array_equal(images.data.train.rows, digits.train.rows)


def test_what_a_teacher_was_trained_on_is_known_wherever_it_lies(digits, teacher, converted, tmp_path):
    shutil.copytree(teacher / "best", tmp_path / "moved")
    for model in (teacher, converted.folder, tmp_path / "moved"):
        assert trained_on(read_model(model), digits)
    stored = read_model(teacher)
    assert trained_on(stored, replace(digits, name="digits:some=part"))
    assert not trained_on(stored, replace(digits, name="others"))
    assert not trained_on(replace(stored, foreign=True), digits)  # whatever its folder is called
    shutil.copytree(teacher, tmp_path / "old", ignore=shutil.ignore_patterns("checkpoints"))
    there = json.loads((teacher / "experiment.json").read_text()) | {"format": 1}
    (tmp_path / "old/experiment.json").write_text(json.dumps(there))
    assert common_recipe(read_model(tmp_path / "old"), digits, 16, {}) == common_recipe(stored, digits, 16, {})


def test_a_teacher_of_one_fold_is_tested_on_that(tmp_path):
    linvit.train("digits", attention="softmax", folds=2, steps=2, out=tmp_path / "folds", **SMALL)
    fold = tmp_path / "folds/fold-1"
    done = linvit.convert(fold, to="uniform", data="digits", limit=200, stages=(), out=tmp_path / "one", device="cpu",
                          report=False)  # fmt: skip
    assert done.test_accuracy("teacher") == evaluate_folder(fold).result.accuracy
    assert evaluate_folder(tmp_path / "one").result.accuracy == done.test_accuracy()
    again = linvit.convert(tmp_path / "one", to="softmax", data="digits", limit=200, stages=(), out=tmp_path / "two",
                           device="cpu", report=False)  # fmt: skip
    assert again.test_accuracy("teacher") == done.test_accuracy()  # of a conversion, too
    tested = next(r for r in done.records if r.tags.get("split") == "test")
    assert tested.n == len(evaluate_folder(fold).result.predictions)
    for start in (linvit.train, linvit.compare):
        with pytest.raises(ValueError, match=r"folds=2 would hold out images that .*best was trained on"):
            start("digits", start=fold, folds=2, limit=200, out=tmp_path / "again")


def test_another_part_of_the_teachers_images_is_said(teacher, digits, tmp_path):
    heard = []
    linvit.convert(teacher, to="uniform", data=replace(digits, name="digits:some=part"), stages=(), device="cpu",
                   out=tmp_path / "part", report=False, listeners=[heard.append])  # fmt: skip
    assert [event.text for event in heard if "digits:some=part may be among those" in getattr(event, "text", "")]


def test_local_softmax_has_the_teachers_convolutions(tmp_path, monkeypatch):
    """And of a teacher that is partly linear, linear layers are counted as everywhere."""
    options = SMALL | {"attention": "softmax:dwc=3@2+uniform@2", "depth": 4}
    linvit.train("digits", out=tmp_path / "teacher", steps=20, **options)
    seen = {}

    class Looked(mixing.Mixing):
        def __init__(self, work, layers, student):
            super().__init__(work, layers, student)
            seen.update(name=self.name((2, 0, 0, 1)), linear=self.linear((2, 0, 0, 1)), local=self.local)

    monkeypatch.setattr(mixing, "LOCAL", parse("window:size=3"))
    monkeypatch.setattr(mixing, "CHEAPER", 9.0)
    monkeypatch.setattr(work, "Mixing", Looked)
    linvit.convert(tmp_path / "teacher", to="performer-relu:m=4,dwc=3", data="digits", max_drop=0.9, stages=(),
                   out=tmp_path / "mix", device="cpu", report=False)  # fmt: skip
    assert seen["name"] == "window:size=3,dwc=3@1+softmax:dwc=3@1+uniform@1+performer-relu:m=4,dwc=3@1"
    assert seen["linear"] == 3
    key = "blocks.1.attn.attention.dwc.weight"
    assert torch.equal(seen["local"].state_dict()[key], load(tmp_path / "teacher").state_dict()[key])


def test_stage_1_leaves_layers_alone_that_stay_softmax(teacher, tmp_path):
    done = linvit.convert(teacher, to="softmax@2+linformer:k=5@2", data="digits", out=tmp_path / "some", stages=(1,),
                          steps=9, device="cpu", report=False)  # fmt: skip
    old, new = load(teacher).state_dict(), load(done.folder / "stage-1/last").state_dict()
    for key, value in old.items():
        changed = key.startswith(("blocks.2.attn", "blocks.3.attn"))
        assert torch.equal(value, new[key]) is not changed


@pytest.mark.parametrize("inherit", ["all", "not-qk", "mlp"])
def test_what_is_inherited(teacher, inherit):
    exact = load(teacher)
    old = exact.state_dict()
    new = student_of(exact, "softmax@1+performer-relu:m=5,dwc=3@3", inherit, 7).state_dict()
    assert not new["blocks.2.attn.attention.dwc.weight"].any()  # adds nothing yet
    for key, value in old.items():
        fresh = key.startswith(("blocks.1", "blocks.2", "blocks.3")) and ".attn." in key
        same = torch.equal(new[key], value)
        if not fresh or inherit == "all":
            assert same, key
        elif "qkv.weight" in key:
            q, k, v = (torch.equal(a, b) for a, b in zip(new[key].chunk(3), value.chunk(3), strict=True))
            assert (q, k, v) == (False, False, inherit == "not-qk"), key
        elif "proj.weight" in key:
            assert same == (inherit == "not-qk"), key


def test_a_linformer_starts_with_pooled_keys(teacher):
    exact = load(teacher)
    made = student_of(exact, "linformer:k=16", "all", 0)
    x = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(made(x), exact(x), atol=1e-4, rtol=1e-4)  # as many keys as tokens
    asked = student_of(exact, "linformer:k=3,init=normal", "all", 0)
    assert (asked.attentions()[0].matrix() < 0).any()


def test_layers_get_as_many_features_as_their_q_and_k_need(teacher, digits):
    model = load(teacher)
    with torch.no_grad():  # no attention to estimate in layer 2: all tokens alike
        model.blocks[2].attn.qkv.weight[:48] *= 0
        model.blocks[2].attn.qkv.bias[:48] *= 0
    found = feature_counts(model, parse("performer-hyp"), digits.train, model.about)
    counts = [spec.options["m"] for spec in found]
    assert set(counts) <= {6, 12, 24, 48}
    assert counts[2] == 6
    assert max(counts) == 48
    assert (
        feature_counts(model, parse("performer-hyp:m=7"), digits.train, model.about) == [parse("performer-hyp:m=7")] * 4
    )
    assert feature_counts(model, parse("uniform"), digits.train, model.about) == parse_layers("uniform", 4)


def test_a_teacher_that_knows_more_classes_answers_among_those_of_the_data(teacher, digits):
    stored = read_model(teacher)
    names = [*digits.classes[::-1], "others"]
    order = [*range(10)][::-1]
    head = {key: torch.cat([value[order], value[:1] * 0]) for key, value in stored.tensors.items() if "head." in key}
    wider = replace(stored, read=lambda: stored.tensors | head, about=stored.about | {"classes": names},
                    config=stored.config.model_copy(update={"classes": 11}))  # fmt: skip
    model = fitted(wider, digits)
    assert model.config.classes == 10
    assert model.about["classes"] == digits.classes
    assert all(torch.equal(value, stored.tensors[key]) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match="has no head, only features: `linvit train DATA --from` it first"):
        fitted(replace(wider, about=stored.about | {"classes": []}), digits)
    with pytest.raises(ValueError, match="has the class '9', which the model does not know"):
        fitted(replace(wider, about=stored.about | {"classes": digits.classes[:9]}), digits)


def test_larger_images(teacher, tmp_path):
    done = linvit.convert(teacher, to="linformer:k=9", data="digits", image_size=16, limit=120, stages=(1, 2), steps=6,
                          out=tmp_path / "large", device="cpu", report=False)  # fmt: skip
    assert done.model.config.image_size == 16
    assert done.model.config.patch_size == 2
    sizes = {r.tags["image_size"] for r in done.records if r.metric == "conversion_speed"}
    assert sizes == {8, 12, 16}
    grown = {(r.tags["model"], r.tags["image_size"]) for r in done.records
             if r.metric == "conversion_accuracy" and r.tags["split"] == "growth"}  # fmt: skip
    assert {(name, size) for name in ("teacher", "student") for size in sizes} == grown


def test_images_that_grow_are_of_all_classes_and_the_same_for_both(teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "GROWN", 20)
    done = linvit.convert(teacher, to="uniform", data="digits", image_size=16, stages=(), out=tmp_path / "large",
                          device="cpu", report=False)  # fmt: skip
    grown = [r for r in done.records if r.tags.get("split") == "growth"]
    assert [r.n for r in grown] == [20] * 6
    data = load_data("digits")
    held = thin(np.arange(len(data.validation)), data.validation.labels, 20, "growth", 0)
    assert np.bincount(data.validation.labels[held]).tolist() == [2] * 10
    right = evaluate(load(teacher), data.validation.some(held), data.classes, data.mean, data.std).accuracy
    assert next(r.value for r in grown if (r.tags["model"], r.tags["image_size"]) == ("teacher", 8)) == right


def test_smaller_patches(teacher, tmp_path):
    done = linvit.convert(teacher, to="linformer:k=9", data="digits", patch_size=1, limit=120, stages=(1,), steps=3,
                          out=tmp_path / "fine", device="cpu", report=False)  # fmt: skip
    assert (done.model.config.image_size, done.model.config.patch_size, done.model.tokens) == (8, 1, 64)
    assert [problem for record in done.records for problem in metrics.problems(record)] == []
    seen = {(r.tags["model"], r.tags["patch_size"]): r.value for r in done.records
            if r.metric == "conversion_accuracy" and r.tags["split"] == "growth"}  # fmt: skip
    assert {(name, patch) for name in ("teacher", "student") for patch in (1, 2)} <= set(seen)
    validation = evaluate_folder(teacher, load_data("digits", limit=120), split="validation")
    assert seen["teacher", 2] == validation.result.accuracy  # as it was, not resized there and back
    assert {r.tags["tokens"] for r in done.records if r.metric == "conversion_speed"} == {16, 64}
    evidence = conversion.Evidence({"image_size": 8}, done.records)
    assert {chart.name for chart in conversion.charts(evidence)["growth"]} == {"growth-accuracy", "growth-speed"}


def test_sizes_between():
    config = model_config(image_size=224, patch_size=16)

    def sizes(**changes):
        return between(config, config.model_copy(update=changes))

    assert sizes() == sizes(image_size=112) == sizes(patch_size=32) == []
    assert sizes(image_size=448) == [(224, 16), (336, 16), (448, 16)]
    assert sizes(patch_size=4) == [(224, 16), (224, 8), (224, 4)]
    assert sizes(patch_size=14) == [(224, 16), (224, 14)]
    assert sizes(image_size=448, patch_size=8) == [(224, 16), (448, 16), (448, 8)]


@pytest.mark.parametrize(("spec", "sizes"), [
    ("linformer:k=37", {16}), ("window:size=9", {12, 16}), ("performer-relu:m=5,dwc=9", {12, 16}),
    ("linformer:k=7,kind=conv", {8, 12, 16}),
])  # fmt: skip
def test_sizes_that_an_attention_cannot_have_are_left_out(teacher, tmp_path, spec, sizes):
    """16 tokens at 8 px, 36 at 12 and 64 at 16: what was trained is not lost for a picture of what is smaller."""
    heard = []
    done = linvit.convert(teacher, to=spec, data="digits", image_size=16, limit=60, stages=(), out=tmp_path / "large",
                          device="cpu", report=False, listeners=[heard.append])  # fmt: skip
    assert {r.tags["image_size"] for r in done.records if r.metric == "conversion_speed"} == sizes
    said = [event.text for event in heard if "not among the sizes shown" in getattr(event, "text", "")]
    assert len(said) == 3 - len(sizes)


def test_models_from_elsewhere_learn_in_small_steps(teacher, tmp_path):
    """Nothing is known of their training: batches by tokens, and a lower rate for those that are small."""
    stored = replace(read_model(teacher), folder=tmp_path / "elsewhere")
    large = load_data("synthetic:size=224,images=12,classes=3")
    assert common_recipe(stored, large, 197, {}).batch_size == 16
    assert common_recipe(stored, large, 785, {}).batch_size == 4
    assert common_recipe(stored, large, 17, {}).batch_size == 64
    assert common_recipe(stored, large, 197, {"batch_size": 7}).batch_size == 7
    assert rate("stage 2", 192, 16) == pytest.approx(0.02 / 192) == rate("stage 2", 192, 64) / 2
    assert rate("stage 2", 192, 128) == rate("stage 2", 192, 64)


def test_a_budget_becomes_steps_once(teacher, tmp_path):
    options = {"to": "performer-relu:m=4", "data": "digits", "limit": 100, "stages": (2,), "device": "cpu"}
    done = linvit.convert(teacher, **options, budget="1s", out=tmp_path / "timed", report=False)
    plan = json.loads((tmp_path / "timed/convert.json").read_text())
    assert list(plan["steps"]) == ["stage 2"]
    assert plan["steps"]["stage 2"] == done.rows[-1].steps >= 1
    again = linvit.convert(teacher, **options, budget="1s", out=tmp_path / "timed", report=False)
    assert again.rows == done.rows


@pytest.mark.parametrize(("options", "message"), [
    ({"to": "performer-nothing"}, "unknown attention 'performer-nothing'"),
    ({"to": "softmax@3+uniform@2"}, "describes 5 layers, but the model has depth=4"),
    ({"stages": (1, 4)}, "stage 4 is not one of 1, 2, 3"),
    ({"inherit": "some"}, "inherit=some must be one of all, not-qk, mlp"),
    ({"max_drop": 0.001}, "shown on no fewer than 3,384 images, but digits leaves 75 of its validation"),
    ({"max_drop": 7}, "max_drop=7 must be a share"),
    ({"max_drop": 0.4, "to": "softmax@2+uniform@2"}, "name linear attentions alone, not softmax@2"),
    ({"amp": "fp16"}, "amp=fp16 needs a CUDA device"),
    ({"steps": 5, "epochs": 1}, "give one of epochs, steps and budget"),
    ({"steps": 1}, "steps=1 are too few for 3 trainings"),
    ({"budget": "soon"}, "budget 'soon' is not a duration"),
    ({"dim": 32}, "a conversion has no option 'dim'"),
    ({"momentum": 0.5}, "momentum=0.5 has no effect"),
    ({"data": "synthetic"}, "which the model does not know|channels"),
    ({"image_size": 9}, "patch_size=2 does not divide image_size=9"),
    ({"patch_size": 3}, "patch_size=3 does not divide image_size=8"),
    ({"patch_size": -2}, "patch_size=-2 must be at least 1"),
])  # fmt: skip
def test_what_cannot_be_is_said_in_one_line_and_nothing_is_written(teacher, tmp_path, options, message):
    wanted = {"to": "performer-relu:m=4", "data": "digits"} | options
    with pytest.raises(ValueError, match=message) as caught:
        linvit.convert(teacher, out=tmp_path / "none", device="cpu", **wanted)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "none").exists()
