"""Starts: trained weights under another attention, head, image size or set of classes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import killable
import numpy as np
import pytest
import torch
from killable import design, read_log

from linvit.data import Dataset, load_data, normalise
from linvit.models import VisionTransformer, model_config
from linvit.models.resize import resized
from linvit.pipeline.train import train
from linvit.records import Records
from linvit.schemas.experiment import Start
from linvit.schemas.study import Variant, name_variants
from linvit.training import checkpoint
from linvit.training.checkpoint import load
from linvit.training.evaluate import evaluate_folder
from linvit.training.events import Began
from linvit.training.files import load_tensors
from linvit.training.heads import mean_head
from linvit.training.run import run
from linvit.training.start import start_from, started

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_data("synthetic:images=300,size=8,classes=3")


@pytest.fixture(scope="module")
def teacher(dataset, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "teacher"
    train(dataset, out=folder, attention="softmax", epochs=2, **killable.TINY)
    return folder


@pytest.fixture
def start(teacher) -> Start:
    return start_from(teacher)


def test_positions_and_projections_follow_the_grid():
    config = model_config(
        image_size=28,
        patch_size=4,
        channels=1,
        classes=3,
        dim=6,
        heads=1,
        depth=1,
        pool="cls",
        attention="linformer:k=5",
    )
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


def test_other_patches_start_with_resized_filters(dataset, teacher, start):
    old = load(teacher)
    model, headless = started(design(dataset, start=start, patch_size=2), dataset)
    assert (old.config.patch_size, model.config.patch_size, headless) == (4, 2, False)
    expected = resized(old.state_dict(), old.config, 8, 2)
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_a_head_keeps_the_rows_of_classes_that_it_knows_by_name(dataset, teacher, start):
    own = load(teacher).state_dict()
    turned = replace(dataset, classes=dataset.classes[::-1])
    model, headless = started(design(turned, start=start), turned)
    assert not headless
    torch.testing.assert_close(model.state_dict()["head.weight"], own["head.weight"].flip(0))
    other = replace(dataset, classes=["x", *dataset.classes[1:]])
    assert started(design(other, start=start), other)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 1}, r"^depth=1, but \S+best has depth=2: "),
        ({"depth": 3}, r"^depth=3, but \S+best has depth=2: "),
        ({"dim": 18}, r"position is \(1, 4, 16\), not \(1, 4, 18\)"),
        ({"qkv_bias": False}, r"does not fit this model, which has no blocks.0.attn.qkv.bias \(48,\)"),
        ({"positions": "sincos"}, r"does not fit this model, which has no position \(1, 4, 16\)"),
    ],
    ids=str,
)
def test_weights_are_neither_left_over_nor_missing(options, message, dataset, start, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(design(dataset, start=start, **options), dataset, tmp_path / "run", device=CPU)
    assert not (tmp_path / "run").exists()


def test_added_options_change_nothing_at_the_start(dataset, start):
    plain, added = (
        started(design(dataset, start=start, attention=spec), dataset)[0].eval()
        for spec in ("softmax", "softmax:gate=silu,cpe=3,dwc=3")
    )
    x = torch.randn(3, *dataset.test.images.shape[1:])
    torch.testing.assert_close(added(x), plain(x))
    assert {"gate.weight", "gate.bias", "cpe.weight"} <= set(added.blocks[0].attn.state_dict())


def test_a_head_of_another_kind_is_new(dataset, start):
    model, headless = started(design(dataset, start=start, head="wide"), dataset)
    assert headless
    assert mean_head(model, dataset, 0, CPU) == {}  # only a linear head can be made from class means


@pytest.mark.parametrize(("attention", "new_classes"), [("performer-theta:m=4", False), ("softmax", True)])
def test_all_shared_weights_are_taken_and_the_head_if_the_classes_are_the_same(
    attention, new_classes, dataset, teacher, start
):
    images = replace(dataset, classes=[name + "!" for name in dataset.classes]) if new_classes else dataset
    model, headless = started(design(images, attention, 5, start), images)
    assert headless == new_classes
    found = model.state_dict()
    for key, value in load(teacher).state_dict().items():
        assert torch.equal(found[key], value) != (new_classes and key == "head.weight") or key == "head.bias", key


def test_a_start_is_part_of_an_experiments_identity_but_its_folder_is_not(dataset, start):
    moved = start.model_copy(update={"folder": "/elsewhere"})
    first = design(dataset, start=start)
    assert first.model_copy(update={"start": None}).id != first.id
    assert first.model_copy(update={"start": moved}).id == first.id


def test_a_start_in_half_precision_is_trained_in_single(dataset, teacher, tmp_path):
    whole = load(teacher)
    checkpoint.save_config(tmp_path, whole.config, replace(dataset, **{k: whole.about[k] for k in ("mean", "std")}))
    checkpoint.save_model(tmp_path, copy.deepcopy(whole).half())
    half = start_from(tmp_path)
    model, headless = started(design(dataset, start=half), dataset)
    assert not headless
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model.state_dict()["head.weight"], whole.head.weight.detach().half().float())
    other = replace(dataset, classes=["a", "b", "c"])
    run(design(other, start=half, steps=1), other, tmp_path / "run", device=CPU, test=False)
    assert load(tmp_path / "run").head.weight.dtype == torch.float32


def test_a_new_head_predicts_the_nearest_class_mean(dataset, teacher):
    model = load(teacher)
    head = mean_head(model, dataset, 0, CPU)
    images, labels = dataset.train.batch(np.arange(len(dataset.train)))
    was, model.head = model.head, torch.nn.Identity()
    with torch.no_grad():
        f = model(normalise(images, dataset.mean, dataset.std)).double()
    model.head = was
    middle = f.mean(0)
    means = torch.stack([torch.cat([f[labels == c], middle[None]]).mean(0) for c in range(3)])
    nearest = torch.cdist(f, means).argmin(1)
    assert ((f @ head["weight"].double().T + head["bias"].double()).argmax(1) == nearest).float().mean() > 0.995


def test_a_start_is_evaluated_before_its_first_step_and_keeps_its_statistics(dataset, teacher, tmp_path):
    shifted, events = replace(dataset, mean=(0.9,) * dataset.channels), []
    found = train(shifted, start=teacher, out=tmp_path / "run", epochs=1, on_event=events.append, **killable.TINY)
    first = read_log(tmp_path / "run")[0]
    assert first["step"] == 0
    assert first["validation_accuracy"] == found.value("start_accuracy")
    recorded = next(r for r in Records(teacher / "records.jsonl") if r.metric == "validation_accuracy")
    assert found.value("start_accuracy") == recorded.value  # it is the teacher, on its own images
    assert load(tmp_path / "run").about["mean"] == pytest.approx(list(dataset.mean))
    assert found.experiment.model.attention == "softmax"
    began = next(event.text for event in events if isinstance(event, Began))
    assert began.endswith("teacher, including its head")


def test_a_linformer_starts_from_averages(dataset, start):
    model, _ = started(design(dataset, "linformer:k=2", start=start), dataset)
    rows = next(v for k, v in model.state_dict().items() if k.endswith("projection"))
    torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:-1]))
    assert ((rows == 0) | (rows == 0.5)).all()


def test_the_id_of_a_variant_does_not_depend_on_the_others(start):
    with_start, without = Variant(attention="softmax", start=start), Variant(attention="softmax")
    names = [v.id for v in name_variants([with_start, without])]
    assert names == [name_variants([with_start])[0].id, name_variants([without])[0].id]


def test_a_start_that_training_makes_worse_is_kept(dataset, teacher, tmp_path):
    worse = train(dataset, start=teacher, lr=50.0, epochs=1, out=tmp_path / "run", **killable.TINY)
    best, start = (load(folder).state_dict() for folder in (worse.folder / "best", teacher / "best"))
    assert load_tensors(worse.folder / "best/model.safetensors")[1]["step"] == 0
    assert all(torch.equal(best[key], value) for key, value in start.items())


def test_grey_images_become_colour_for_a_start_that_takes_colour(teacher, tmp_path):
    grey = "synthetic:images=60,size=8,classes=3,channels=1"
    trained = train(grey, start=teacher, steps=1, out=tmp_path / "run", **killable.TINY)
    assert trained.model is not None
    assert (trained.data.channels, trained.model.config.channels) == (3, 3)
    assert evaluate_folder(trained.folder).changed is False
    with pytest.raises(ValueError, match="channels=1, but the start takes 3"):
        train(load_data(grey), start=teacher, out=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_run_with_a_new_head_is_reproducible(dataset, start, tmp_path):
    other, events = replace(dataset, classes=["a", "b", "c"]), []
    experiment = design(other, "performer-relu:m=4", 3, start, steps=3)
    for name in ("one", "two"):
        run(experiment, other, tmp_path / name, device=CPU, listeners=[events.append])
    killable.same(tmp_path / "one", tmp_path / "two")
    assert next(event.text for event in events if isinstance(event, Began)).endswith("teacher, with a new head")
