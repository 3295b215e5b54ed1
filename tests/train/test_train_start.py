"""Starts: trained weights under another attention, head, image size or set of classes."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace

import killable
import numpy as np
import pytest
import torch

import linvit
from linvit.data import load_data, normalise
from linvit.models import VisionTransformer, model_config
from linvit.models.resize import resized
from linvit.records import Records
from linvit.study import compare
from linvit.study.design import Study, Variant, named
from linvit.study.measuring import Measuring
from linvit.train import architecture, checkpoint, design, run, start_from
from linvit.train.events import Began
from linvit.train.files import load_tensors
from linvit.train.start import class_means, normalised, started
from linvit.train.use import evaluate_folder

CPU = torch.device("cpu")
TINY = {key: value for key, value in killable.TINY.items() if key != "device"}


@pytest.fixture(scope="module")
def dataset():
    return load_data("synthetic:images=300,size=8,classes=3")


@pytest.fixture(scope="module")
def teacher(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("start") / "teacher"
    linvit.train(dataset, out=folder, attention="softmax", epochs=2, **TINY)
    return folder


def test_positions_and_projections_follow_the_grid():
    config = model_config(image_size=28, patch_size=4, channels=1, classes=3, dim=6, heads=1, depth=1, pool="cls",
                          attention="linformer:k=5")  # fmt: skip
    tensors = VisionTransformer(config).state_dict()
    ramp = torch.arange(7.0).expand(7, 7).T  # rows numbered from the top
    tensors["position"][0, 1:, 0] = ramp.flatten()
    tensors["position"][0, 1:, 1] = 2.5
    found = resized(tensors, config, 56)
    assert found["position"].shape == (1, 1 + 14 * 14, 6)
    torch.testing.assert_close(found["position"][0, 0], tensors["position"][0, 0])
    image = found["position"][0, 1:].view(14, 14, 6)
    torch.testing.assert_close(image[..., 1], torch.full((14, 14), 2.5))
    middle = (torch.arange(14.0) + 0.5) / 2 - 0.5  # where the new rows' centres lie among the old
    torch.testing.assert_close(image[4:-4, 3, 0], middle[4:-4], atol=1e-5, rtol=0)
    key = next(k for k in tensors if k.endswith("attention.projection"))
    whole, old = found[key], tensors[key]
    assert whole.shape[-1] == 197
    torch.testing.assert_close(whole[..., 1:].sum(-1), old[..., 1:].sum(-1), atol=0.2, rtol=0.1)
    assert all(found[k] is v for k, v in tensors.items() if k not in ("position", key))
    VisionTransformer(config.model_copy(update={"image_size": 56})).load_state_dict(found)
    assert all(resized(tensors, config, 28)[k] is v for k, v in tensors.items())


def test_other_patches_start_with_filters_of_their_size(dataset, teacher):
    was = linvit.load(teacher).config
    experiment = design(dataset, "softmax", start=start_from(teacher), like=was, patch_size=2)
    model, headless = started(experiment, dataset)
    assert (was.patch_size, model.config.patch_size, headless) == (4, 2, False)
    wanted = resized(linvit.load(teacher).state_dict(), was, 8, 2)
    assert all(torch.equal(value, wanted[key]) for key, value in model.state_dict().items())


def test_a_head_keeps_the_rows_of_classes_that_it_knows_by_name(dataset, teacher):
    own = linvit.load(teacher).state_dict()
    turned = replace(dataset, classes=dataset.classes[::-1])
    start = start_from(teacher)
    model, headless = started(design(turned, "softmax", start=start, **TINY), turned)
    assert not headless
    torch.testing.assert_close(model.state_dict()["head.weight"], own["head.weight"].flip(0))
    other = replace(dataset, classes=["x", *dataset.classes[1:]])
    assert started(design(other, "softmax", start=start, **TINY), other)[1]


@pytest.mark.parametrize("depth", [1, 3])
def test_layers_are_neither_thrown_away_nor_added(depth, dataset, teacher):
    start = start_from(teacher)
    experiment = design(dataset, "softmax", start=start, like=architecture(start), depth=depth)
    with pytest.raises(ValueError, match=rf"^depth={depth}, but \S+best has depth=2: "):
        started(experiment, dataset)


@pytest.mark.parametrize(
    ("options", "key"),
    [({"qkv_bias": False}, r"blocks.0.attn.qkv.bias \(48,\)"), ({"positions": "sincos"}, r"position \(1, 4, 16\)")],
)
def test_weights_that_the_model_has_no_place_for_are_refused(options, key, dataset, teacher):
    start = start_from(teacher)
    experiment = design(dataset, "softmax", start=start, like=architecture(start), **options)
    with pytest.raises(ValueError, match=f"does not fit this model, which has no place for {key}"):
        started(experiment, dataset)


def test_a_head_of_another_kind_is_new(dataset, teacher):
    start = start_from(teacher)
    like = architecture(start)
    model, headless = started(design(dataset, "softmax", start=start, like=like, head="wide"), dataset)
    assert headless
    assert class_means(model, dataset, 0, CPU) == {}  # which is for one layer


def test_a_start_in_half_precision_is_trained_in_single(dataset, teacher, tmp_path):
    whole = linvit.load(teacher)
    checkpoint.save_config(tmp_path, whole.config, replace(dataset, **{k: whole.about[k] for k in ("mean", "std")}))
    checkpoint.save_model(tmp_path, copy.deepcopy(whole).half())
    start = start_from(tmp_path)
    model, headless = started(design(dataset, "softmax", start=start, like=whole.config), dataset)
    assert not headless
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model.state_dict()["head.weight"], whole.head.weight.detach().half().float())
    other = replace(dataset, classes=["a", "b", "c"])
    experiment = design(other, "softmax", start=start, like=whole.config, steps=1)
    run(experiment, other, tmp_path / "run", device=CPU, test=False)
    assert linvit.load(tmp_path / "run").head.weight.dtype == torch.float32


def test_a_new_head_says_whose_mean_is_nearest(dataset, teacher):
    model = linvit.load(teacher)
    head = class_means(model, dataset, 0, CPU)
    images, labels = dataset.train.batch(np.arange(len(dataset.train)))
    was, model.head = model.head, torch.nn.Identity()
    with torch.no_grad():
        f = model(normalise(images, dataset.mean, dataset.std)).double()
    model.head = was
    middle = f.mean(0)
    means = torch.stack([torch.cat([f[labels == c], middle[None]]).mean(0) for c in range(3)])
    nearest = torch.cdist(f, means).argmin(1)
    assert ((f @ head["weight"].double().T + head["bias"].double()).argmax(1) == nearest).float().mean() > 0.995


def test_a_start_is_seen_before_its_first_step_and_keeps_its_statistics(dataset, teacher, tmp_path):
    shifted = replace(dataset, mean=(0.9,) * dataset.channels)
    found = linvit.train(shifted, start=teacher, out=tmp_path / "run", epochs=1, **TINY)
    first = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0
    assert first["validation_accuracy"] == found.value("start_accuracy")
    said = next(r for r in Records(teacher / "records.jsonl") if r.metric == "validation_accuracy")
    assert found.value("start_accuracy") == said.value  # it is the teacher, on its own images
    about = json.loads((tmp_path / "run" / "best" / "config.json").read_text())
    assert about["data"]["mean"] == pytest.approx(list(dataset.mean))
    assert about["model"]["attention"] == "softmax"


def test_a_training_says_what_it_begins_with(dataset, teacher, tmp_path):
    other = load_data("synthetic:images=300,size=8,classes=4")
    said = {}
    for name, images in (("known", dataset), ("new", other)):
        events = []
        linvit.train(images, out=tmp_path / name, start=teacher, steps=1, listeners=[events.append], **TINY)
        said[name] = next(event.text for event in events if isinstance(event, Began))
    assert said["known"].endswith("; begins with teacher, its head too")
    assert said["new"].endswith("; begins with teacher, with a new head")


def test_shape_and_statistics_of_a_start_are_read_without_its_weights(dataset, teacher, monkeypatch):
    start, asked = start_from(teacher), []
    monkeypatch.setattr(checkpoint, "load_tensors", lambda path: asked.append(path) or load_tensors(path))
    like = architecture(start)
    assert like.depth == 2
    experiment = design(dataset, "softmax", start=start, like=like)
    assert normalised(replace(dataset, mean=(0.9,) * dataset.channels), experiment).mean == pytest.approx(dataset.mean)
    assert asked == []
    started(experiment, dataset)
    assert len(asked) == 1


def test_a_linformer_starts_from_averages(dataset, teacher, tmp_path):
    start = start_from(teacher)
    model, _ = started(design(dataset, "linformer:k=2", start=start, **TINY), dataset)
    rows = next(v for k, v in model.state_dict().items() if k.endswith("projection"))
    torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:-1]))
    assert ((rows == 0) | (rows == 0.5)).all()


def test_every_variant_starts_from_the_same_weights_and_once_more_from_nothing(dataset, teacher, tmp_path):
    folder = compare(dataset, attentions=["softmax", "performer-relu:m=4"], controls=False, start=teacher,
                     with_scratch=True, seeds=1, epochs=1, out=tmp_path / "study", jobs=1, **TINY)  # fmt: skip
    study = Study.read(folder / "study.json")
    assert [v.label for v in study.variants] == [
        "softmax, from teacher", "performer-relu:m=4, from teacher", "softmax, from scratch",
        "performer-relu:m=4, from scratch",
    ]  # fmt: skip
    assert study.start == start_from(teacher)
    text = (folder / "results.csv").read_text()
    assert "start_accuracy" in text
    with pytest.raises(ValueError, match="start"):
        compare(dataset, attentions=["softmax"], seeds=1, epochs=1, out=folder, jobs=1, **TINY)
    with pytest.raises(ValueError, match="with_scratch has no effect"):
        compare(dataset, attentions=["softmax"], with_scratch=True, out=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_start_that_was_moved_is_known_by_its_weights(dataset, teacher, tmp_path, monkeypatch):
    """Another variant comes into a study whose start lies elsewhere now."""
    monkeypatch.setattr(Measuring, "all", lambda self: [])
    monkeypatch.setattr("linvit.report.build", lambda folder, figures: None)
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(teacher, before)
    options = {"controls": False, "seeds": 1, "steps": 1, "jobs": 1, "out": tmp_path / "study", "device": "cpu"}
    compare(dataset, attentions=["softmax"], start=before, **options)
    first = {path: path.read_bytes() for path in (tmp_path / "study").rglob("model.safetensors")}
    before.rename(after)
    folder = compare(dataset, attentions=["uniform"], start=after, **options)
    study = Study.read(folder / "study.json")
    assert [v.attention for v in study.variants] == ["softmax", "uniform"]
    assert {v.start.folder for v in study.variants} == {study.start.folder} == {str(after.resolve() / "best")}
    assert all(path.read_bytes() == content for path, content in first.items())
    compare(dataset, attentions=["softmax", "uniform"], start=after, **options)  # names no other variant
    assert len(Study.read(folder / "study.json").variants) == 2


def test_a_variants_id_does_not_depend_on_the_others():
    start = linvit.train.Start(folder="/a/teacher/best", sha256="c" * 64)
    begun, bare = Variant(attention="softmax", start=start), Variant(attention="softmax")
    assert [v.id for v in named([begun, bare])] == [named([begun])[0].id, named([bare])[0].id]


def test_a_start_that_training_spoils_is_kept(dataset, teacher, tmp_path):
    spoiled = linvit.train(dataset, start=teacher, lr=50.0, epochs=1, out=tmp_path / "run", **TINY)
    best, start = (checkpoint.load(folder).state_dict() for folder in (spoiled.folder / "best", teacher / "best"))
    assert load_tensors(spoiled.folder / "best/model.safetensors")[1]["step"] == 0
    assert all(torch.equal(best[key], value) for key, value in start.items())


def test_grey_images_are_shown_in_colour_to_a_model_that_is_used_to_it(teacher, tmp_path):
    grey = "synthetic:images=60,size=8,classes=3,channels=1"
    alone = linvit.train(grey, start=teacher, epochs=1, out=tmp_path / "run", **TINY)
    assert (alone.data.channels, alone.model.config.channels) == (3, 3)
    assert evaluate_folder(alone.folder).changed is False
    folder = compare(grey, attentions=["softmax"], start=teacher, epochs=1, out=tmp_path / "study", seeds=1,
                     controls=False, measured=False, **TINY)  # fmt: skip
    study = Study.read(folder / "study.json")
    assert (study.dataset.channels, study.model.channels) == (3, 3)


def test_arrays_of_other_channels_are_refused(teacher, tmp_path):
    grey = load_data("synthetic:images=60,size=8,classes=3,channels=1")
    with pytest.raises(ValueError, match="channels=1, but the start takes 3"):
        linvit.train(grey, start=teacher, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_from_a_start_is_the_same_again(dataset, teacher, tmp_path):
    other = replace(dataset, classes=["a", "b", "c"])
    experiment = design(other, "performer-relu:m=4", 3, start=start_from(teacher), epochs=1, **TINY)
    weights = []
    for name in ("one", "two"):
        run(experiment, other, tmp_path / name, device=CPU)
        weights.append((tmp_path / name / "last" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("optimizer", [None, "adamw", "sgd"])
def test_trained_weights_are_trained_more_gently(dataset, teacher, optimizer):
    rates = [design(dataset, "softmax", start=start, optimizer=optimizer, **TINY).recipe.lr
             for start in (None, start_from(teacher))]  # fmt: skip
    assert rates[1] < rates[0]
