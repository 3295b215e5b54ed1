"""Folds: every image is held out once, every class in every fold, and no pixel of what is held out is learned from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linvit import data
from linvit.data import Fold, folded, splits
from linvit.schemas.experiment import Source
from linvit.training.source import open_source, source_of

PARTS = ("train", "validation", "test")


def every(dataset: data.Dataset, of: int, seed: int = 0) -> list[data.Dataset]:
    return [folded(dataset, Fold(index, of, seed)) for index in range(of)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(7, 31), min_size=2, max_size=5), st.integers(2, 7), st.integers(0, 9))
def test_every_image_is_held_out_once_and_every_class_in_every_fold(counts, of, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    classes = [f"class {i}" for i in range(len(counts))]
    parts = [splits.fold(labels, classes, Fold(index, of, seed)) for index in range(of)]
    assert sorted(np.concatenate([part["test"] for part in parts])) == list(range(len(labels)))
    for part in parts:
        assert sorted(np.concatenate([part[name] for name in PARTS])) == list(range(len(labels)))
        assert set(labels[part["train"]]) == set(range(len(counts)))
    held = np.array([np.bincount(labels[part["test"]], minlength=len(counts)) for part in parts])
    assert (held.max(axis=0) - held.min(axis=0)).max() <= 1  # of each class
    assert np.ptp(held.sum(axis=1)) <= 1
    assert held.min() >= 1


def test_all_images_of_a_set_without_test_images_are_dealt_out():
    digits = data.load_data("digits")
    assert not digits.own_test
    parts = every(digits, 5)
    assert sorted(np.concatenate([part.test.rows for part in parts])) == list(range(1797))
    for part in parts:
        assert not set(part.test.rows) & {*part.train.rows, *part.validation.rows}
        share = len(part.validation) / (len(part.validation) + len(part.train))
        assert share == pytest.approx(0.1, abs=0.01)
        for split in (part.train, part.validation, part.test):
            whole = np.concatenate([getattr(digits, name).labels for name in PARTS])
            rows = np.concatenate([getattr(digits, name).rows for name in PARTS])
            assert (split.labels == whole[np.argsort(rows)][split.rows]).all()
        assert part.train.store is digits.train.store  # nothing is copied


def test_test_images_of_the_sets_own_are_left_alone():
    whole = data.load_data("synthetic:classes=3,images=96,size=8,channels=1")
    assert whole.own_test
    held = set(whole.test.rows.tolist())
    for part in every(whole, 3):
        assert not held & {*part.train.rows, *part.validation.rows, *part.test.rows}
        assert len(part.train) + len(part.validation) + len(part.test) == 96


def test_test_images_are_spared_if_that_is_asked_for():
    """Those that were taken from the set's training images, too; a source keeps it."""
    digits = data.load_data("digits", multiple_of=4)
    pool, held = {*digits.train.rows, *digits.validation.rows}, set(digits.test.rows)
    parts = [folded(digits, Fold(index, 3, 5, spare_test=True)) for index in range(3)]
    assert sorted(np.concatenate([part.test.rows for part in parts])) == sorted(pool)
    for part in parts:
        assert not held & {*part.train.rows, *part.validation.rows, *part.test.rows}
    source = source_of("digits").folded(Fold(1, 3, 5, spare_test=True))
    assert open_source(Source.model_validate_json(source.model_dump_json())).identity == parts[1].identity
    found = data.survey("digits", folds=3, spare_test=True)
    assert (found.train, found.validation, found.test) == tuple(len(getattr(parts[0], name)) for name in PARTS)


def test_statistics_are_of_the_training_images_alone():
    part = folded(data.load_data("digits"), Fold(1, 3))
    pixels = part.train.images.astype(np.float64) / 255
    assert part.mean == pytest.approx([pixels.mean()])
    assert part.std == pytest.approx([pixels.std()])


def test_folds_are_known_by_their_images():
    digits = data.load_data("digits")
    found = {part.identity for seed in (0, 1) for of in (2, 3) for part in every(digits, of, seed)}
    assert len(found | {digits.identity}) == 11
    assert folded(digits, Fold(2, 3, 1)).identity == folded(data.load_data("digits"), Fold(2, 3, 1)).identity


def test_what_a_seed_chose_to_validate_makes_no_difference_to_folds():
    one, two = (data.load_data("digits", seed=seed) for seed in (0, 1))
    assert (one.validation.rows != two.validation.rows).any()
    assert (folded(one, Fold(0, 5)).test.rows == folded(two, Fold(0, 5)).test.rows).all()


def test_a_source_finds_its_fold_again():
    source = source_of("digits").folded(Fold(1, 5, 7))
    again = Source.model_validate_json(source.model_dump_json())
    assert again == source
    assert {again: 1}[source] == 1
    assert open_source(again).identity == folded(data.load_data("digits", multiple_of=4), Fold(1, 5, 7)).identity
    assert open_source(again.folded(None)).identity == data.load_data("digits").identity


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (175, "folds=175 needs as many images of every class, but '8' has 174: give at most 174"),
        (1, "folds=1 must be at least 2"),
        (0, "folds=0 must be at least 2"),
        (-3, "folds=-3 must be at least 2"),
    ],
)
def test_folds_that_cannot_be(of, message):
    with pytest.raises(ValueError, match=message) as caught:
        folded(data.load_data("digits"), Fold(0, of))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        data.survey("digits", folds=of)


def test_a_survey_counts_the_images_of_a_fold():
    for name in ("digits", "synthetic:classes=3,images=96,size=8,channels=1"):
        part, found = folded(data.load_data(name), Fold(0, 3)), data.survey(name, folds=3)
        assert (found.train, found.validation, found.test) == (len(part.train), len(part.validation), len(part.test))


def test_images_in_several_arrays_are_not_dealt_out():
    digits = data.load_data("digits")
    moved = data.Split(digits.validation.store.copy(), digits.validation.rows, digits.validation.labels)
    with pytest.raises(ValueError, match="folds of digits need all its images in one array"):
        folded(
            data.Dataset("digits", digits.classes, digits.train, moved, digits.test, (0.5,), (1.0,), "x"), Fold(0, 3)
        )
