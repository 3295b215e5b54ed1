"""Prepare: the data surveyed and opened once, each start read once, what cannot be done refused before that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from linvit.data import FORMATS, Dataset, load_data
from linvit.pipeline.prepare import Prepared, prepare, result_folder
from linvit.requests import CompareRequest, ConvertRequest, TrainRequest, TuneRequest
from linvit.schemas.experiment import Fold
from linvit.schemas.study import Study, Variant
from linvit.training import backbones, checkpoint
from linvit.training import start as start_module
from linvit.training.files import load_tensors
from linvit.training.start import start_from, started

GREY = "synthetic:images=60,size=8,classes=3,channels=1"
CPU = {"device": "cpu", "epochs": 1}


def comparison(data: Any, attentions: tuple[str, ...] = ("softmax",), **keywords: Any) -> Prepared:
    dataset = data if isinstance(data, Dataset) else None
    request = CompareRequest.of(data=dataset.name if dataset else data, **CPU | keywords)
    return prepare(request, [Variant(attention=spec) for spec in attentions], dataset=dataset)


@pytest.fixture
def listed(monkeypatch) -> list[Path]:
    """The folders whose images were listed."""
    folder_format, found = FORMATS["folder"], []
    monkeypatch.setitem(FORMATS._entries, "folder", lambda path: found.append(path) or folder_format(path))
    return found


@pytest.fixture
def read(monkeypatch) -> list[Path]:
    """The files of weights that were read."""
    found: list[Path] = []
    monkeypatch.setattr(start_module, "_recent", {})
    monkeypatch.setattr(checkpoint, "load_tensors", lambda path: found.append(path) or load_tensors(path))
    return found


@pytest.mark.parametrize("kind", [TrainRequest, CompareRequest, TuneRequest])
def test_images_are_listed_once(kind, photos, listed):
    request = kind.of(data=photos, start="scratch", image_size=16, limit=5, **CPU)
    found = prepare(request, [Variant(), Variant(attention="uniform")])
    assert listed == [photos]
    assert found.survey.listing is None
    assert found.dataset.image_size == found.designer.base.model.image_size == 16
    assert found.source is not None
    assert (found.source.data, found.source.limit) == (str(photos), 5)
    assert found.designer.base.source == found.source


def test_a_dataset_is_taken_as_it_is(tiny):
    found = comparison(tiny)
    assert (found.dataset, found.source) == (tiny, None)
    assert (found.survey.name, found.survey.train) == (tiny.name, len(tiny.train))


def test_a_start_is_read_once_whatever_starts_from_it(tiny, teacher, read):
    found = comparison(tiny, ("softmax", "uniform", "performer-relu:m=4"), start=teacher)
    for variant in found.variants:
        started(found.designer.experiment(variant), tiny)
    assert read == [teacher / "best" / "model.safetensors"]
    assert [v.start for v in found.variants] == 3 * [found.start]
    assert set(found.starts) == {"softmax", "uniform", "performer-relu:m=4"}


def test_every_backbone_is_read_once_and_only_if_it_is_used(photos, read):
    backbones._start_of.cache_clear()
    found = comparison(photos, ("softmax", "uniform"), image_size=48)
    for variant in found.variants:
        started(found.designer.experiment(variant), found.dataset)
    folders = [backbones.shipped()[spec] for spec in ("softmax", "uniform")]
    assert read == [folder / "model.safetensors" for folder in folders]
    assert [v.start for v in found.variants] == [start_from(folder) for folder in folders]
    assert found.start == found.variants[0].start


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "sofmax"}, "unknown attention 'sofmax'; did you mean 'softmax'"),
        ({"attention": "softmax@1+performer-rleu:m=4@1"}, "did you mean 'performer-relu'"),
        ({"task": "last-pixel"}, "unknown task 'last-pixel'"),
    ],
)
def test_unknown_names_are_errors_before_any_image_is_read(changes, message, photos, listed):
    with pytest.raises(ValueError, match=message):
        prepare(TrainRequest.of(data=photos, device="cpu"), [Variant(**changes)])
    assert listed == []


def test_tasks_that_cannot_be_compared_or_planned(tiny):
    both = [Variant(task="classification"), Variant(task="next-pixel")]
    with pytest.raises(ValueError, match="tasks classification and next-pixel cannot be compared"):
        prepare(CompareRequest.of(data=tiny.name), both, dataset=tiny)
    printed = Variant(task="next-pixel", column="published", published={"bits_per_dim": 3.0}, place="a table")
    found = prepare(CompareRequest.of(data=tiny.name, **CPU), [Variant(), printed], dataset=tiny)
    assert len(found.variants) == 2  # numbers that were printed elsewhere are only shown
    for options, message in (({"folds": 2}, "folds=2 cannot"), ({"budget": "1m"}, "budget=1m cannot")):
        with pytest.raises(ValueError, match=f"{message} be combined with task next-pixel"):
            prepare(CompareRequest.of(data=tiny.name, **options), [Variant(task="next-pixel")], dataset=tiny)


def test_every_variant_starts_from_the_model_and_once_more_from_scratch(tiny, teacher, start):
    found = comparison(tiny, ("softmax", "uniform"), start=teacher, with_scratch=True)
    assert [v.label for v in found.variants] == [
        "softmax, from teacher",
        "uniform, from teacher",
        "softmax, from scratch",
        "uniform, from scratch",
    ]
    assert [v.start for v in found.variants] == [start, start, None, None]
    shapes = {found.designer.experiment(v).model.mlp_dim for v in found.variants}
    assert shapes == {24}  # of the start, for all of them
    with pytest.raises(ValueError, match="with_scratch has no effect without a start"):
        comparison(tiny, with_scratch=True)


def test_a_variant_keeps_a_start_of_its_own(tiny, start):
    own = Variant(attention="uniform", start=start)
    found = prepare(CompareRequest.of(data=tiny.name, start="scratch", **CPU), [Variant(), own], dataset=tiny)
    assert [v.start for v in found.variants] == [None, start]
    assert found.start is None


def test_photos_start_from_backbones_unless_their_shape_is_chosen(photos):
    request = CompareRequest.of(data=photos, image_size=48, **CPU)
    softmax = start_from(backbones.shipped()["softmax"])
    assert prepare(request, [Variant()]).start == softmax
    for other in (
        prepare(request, [Variant(options={"mlp_dim": 24})]),
        prepare(request, [Variant()], searched=["lr", "depth"]),
        prepare(request.replaced(start="scratch"), [Variant()]),
    ):
        assert (other.start, other.variants[0].start) == (None, None)
    assert prepare(request, [Variant()], searched=["lr", "dropout"]).start == softmax  # weights keep their shape


def test_later_variants_start_as_those_of_the_earlier_study(photos):
    """An attention without a backbone is refused where the others started from their own."""
    request = CompareRequest.of(data=photos, image_size=48, **CPU)
    first = prepare(request, [Variant(), Variant(attention="uniform")])
    earlier = Study.model_construct(variants=first.variants, budget=None, plan=None)
    again = prepare(request, [Variant(attention="uniform")], earlier=earlier)
    assert again.variants[0].start == first.variants[1].start
    with pytest.raises(ValueError, match="'identity' has no backbone of its own"):
        prepare(request, [Variant(attention="identity")], earlier=earlier)


def test_grey_images_become_colour_for_a_start_that_takes_colour(teacher):
    found = comparison(GREY, start=teacher)
    assert (found.survey.channels, found.dataset.channels, found.designer.base.model.channels) == (3, 3, 3)
    with pytest.raises(ValueError, match="channels=1, but the start takes 3"):
        comparison(load_data(GREY), start=teacher).designer.experiment(Variant())


def test_folds_do_not_hold_out_what_the_start_was_trained_on(tiny, teacher):
    with pytest.raises(ValueError, match=r"folds=3 would hold out images that .*teacher/best was trained on"):
        comparison(tiny, start=teacher, folds=3)
    found = comparison(GREY, start=teacher, folds=3)
    assert found.designer.fold_list() == [Fold(i, 3) for i in range(3)]


def test_a_search_spares_the_test_images_and_matches_parameters_if_asked(tiny):
    found = prepare(TuneRequest.of(data=tiny.name, folds=2, match=False, **CPU), [Variant()], dataset=tiny)
    assert found.designer.fold_list()[0] == Fold(0, 2, 0, spare_test=True)
    assert not found.designer.match
    assert comparison(tiny).designer.match
    assert not prepare(TrainRequest.of(data=tiny.name), [Variant()], dataset=tiny).designer.match


def test_only_a_comparison_without_a_length_has_a_plan(tiny):
    assert comparison(tiny).plan is None
    request = CompareRequest.of(data=tiny.name, budget="2m", device="cpu", seeds=1, **{"dim": 16, "depth": 1})
    found = prepare(request, [Variant()], dataset=tiny)
    assert found.plan is not None
    assert found.planner is not None
    assert (found.plan.seeds, found.plan.image_size) == (1, 8)
    assert found.designer.options["dim"] == 16
    earlier = Study.model_construct(variants=[], budget="2m", plan=found.plan)
    again = prepare(request, [Variant()], dataset=tiny, earlier=earlier)
    assert (again.plan, again.planner) == (found.plan, None)  # nothing is timed again


def test_results_do_not_go_into_the_folder_of_the_images(photos, tiny, tmp_path):
    request = TrainRequest.of(data=photos)
    assert result_folder(request, "my photos/of 2020", None) == Path("runs/my-photos-of-2020")
    assert result_folder(request.replaced(out=tmp_path), "x", None) == tmp_path
    for out in (photos, photos / "kind 0" / "run"):
        inside = request.replaced(out=out)
        with pytest.raises(ValueError, match=r"is in the folder of the data, .*photos: choose another --out"):
            result_folder(inside, "x", None)
        assert result_folder(inside, "x", tiny) == out  # its images are in memory
    convert = ConvertRequest.of(model="m", to="uniform", data=photos, out=photos / "x")
    with pytest.raises(ValueError, match="is in the folder of the data"):
        result_folder(convert, "x", None)
