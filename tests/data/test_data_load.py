"""`load`: splits, identity, statistics and what it says to a wrong request."""

from __future__ import annotations

import dataclasses
import io
import json
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from linvit import data
from linvit.data import splits
from linvit.randomness import permutation


def test_digits_needs_nothing_and_is_split_once():
    digits = data.load_data("digits")
    assert (digits.channels, digits.image_size, len(digits.classes)) == (1, 8, 10)
    assert (len(digits.train), len(digits.validation), len(digits.test)) == (1295, 143, 359)
    rows = np.concatenate([digits.train.rows, digits.validation.rows, digits.test.rows])
    assert sorted(rows) == list(range(1797))
    for split, share in ((digits.validation, 0.08), (digits.test, 0.2)):
        counts = np.bincount(split.labels)
        assert counts.min() >= 0.85 * share * 174
        assert counts.max() <= 1.15 * share * 183


def test_batch_is_the_images_asked_for():
    digits = data.load_data("digits")
    images, labels = digits.validation.batch([7, 3, 3])
    assert images.shape == (3, 1, 8, 8)
    assert str(images.dtype) == "torch.uint8"
    assert str(labels.dtype) == "torch.int64"
    assert (images.numpy() == digits.validation.images[[7, 3, 3]]).all()
    assert (labels.numpy() == digits.validation.labels[[7, 3, 3]]).all()
    assert len(digits.validation.batch(slice(0, 5))[1]) == 5


def test_statistics_are_those_of_the_training_images():
    digits = data.load_data("synthetic")
    pixels = digits.train.images.astype(np.float64) / 255
    assert np.allclose(digits.mean, pixels.mean((0, 2, 3)), rtol=1e-12)
    assert np.allclose(digits.std, pixels.std((0, 2, 3)), rtol=1e-9)


def test_a_seed_moves_validation_but_never_test():
    first, again, other = data.load_data(seed=0), data.load_data(seed=0), data.load_data(seed=1)
    assert first.identity == again.identity != other.identity
    assert (first.validation.rows == again.validation.rows).all()
    assert (first.validation.rows != other.validation.rows).any()
    assert (first.test.rows == other.test.rows).all()


def test_the_split_is_fixed_for_all_time():
    """These rows are on disk in people's experiments: the draw may never change."""
    assert permutation(10, "order", 0, 0).tolist() == [4, 9, 8, 2, 5, 1, 6, 3, 0, 7]


def test_identity_sees_what_training_sees():
    base = data.load_data("synthetic").identity
    changes = [{"image_size": 8}, {"channels": 1}, {"validation": 0.2}, {"limit": 50}]
    identities = [data.load_data("synthetic", **change).identity for change in changes]
    identities.append(data.load_data("synthetic:noise=0.4").identity)
    assert len({base, *identities}) == 6


def test_the_index_file_is_used(tmp_path):
    file = tmp_path / "study" / "splits.json"
    made = data.load_data("digits", split_file=file)
    stored = json.loads(file.read_text())
    stored["train"], stored["validation"] = stored["validation"], stored["train"]
    file.write_text(json.dumps(stored))
    swapped = data.load_data("digits", split_file=file)
    assert (swapped.train.rows == made.validation.rows).all()
    with pytest.raises(ValueError, match=r"splits\.json: was made for other data, another seed"):
        data.load_data("digits", seed=1, split_file=file)
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"splits\.json: is not a split file"):
        data.load_data("digits", split_file=file)
    assert file.read_text() == "[]"


def test_a_damaged_index_file_in_the_cache_is_made_again(own_cache):
    first = data.load_data("digits")
    (file,) = (own_cache / "splits").iterdir()
    file.write_text("{")
    assert data.load_data("digits").identity == first.identity
    assert json.loads(file.read_text())["seed"] == 0


def test_limit_is_stratified():
    digits = data.load_data("digits", limit=50)
    for split in (digits.train, digits.validation, digits.test):
        assert np.bincount(split.labels).tolist() == [5] * 10
    with pytest.raises(ValueError, match="limit=9 is too few for the 10 classes of digits"):
        data.load_data("digits", limit=9)


def test_no_validation_wanted():
    digits = data.load_data("digits", validation=0)
    assert (len(digits.train), len(digits.validation), len(digits.test)) == (1438, 0, 359)


def test_resizing_and_channels():
    digits = data.load_data("digits", image_size=12, channels=3, limit=20)
    images, _ = digits.train.batch([0])
    assert images.shape == (1, 3, 12, 12)
    assert (images[:, 0] == images[:, 2]).all()
    plain = Image.fromarray(data.load_data("digits", limit=20).train.images[0, 0])
    assert (images[0, 1].numpy() == np.asarray(plain.resize((12, 12), Image.Resampling.BICUBIC))).all()


def test_order_is_a_permutation_by_seed_and_epoch():
    split = data.load_data("digits").train
    assert sorted(split.order(0, 0)) == list(range(len(split)))
    assert (split.order(2, 5) == split.order(2, 5)).all()
    assert (split.order(2, 5) != split.order(3, 5)).any()
    assert (split.order(2, 5) != split.order(2, 6)).any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 30), min_size=2, max_size=5), st.floats(0.01, 0.6), st.integers(0, 9))
def test_stratified_takes_and_keeps_some_of_every_class(counts, fraction, seed):
    labels = np.repeat(np.arange(len(counts)), counts)
    kept, taken = splits.stratified(np.arange(len(labels)), labels, fraction, "validation", seed)
    assert sorted([*kept, *taken]) == list(range(len(labels)))
    for label, count in enumerate(counts):
        mine = int((labels[taken] == label).sum())
        assert 1 <= mine < count
        assert abs(mine - fraction * count) <= 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"source": "cifr10"}, "unknown data set 'cifr10'; did you mean 'cifar10'"),
        ({"source": "some/where"}, "some/where: there is no such file or folder"),
        ({"source": "digits:size=3"}, "'digits' has no option 'size'"),
        ({"source": "synthetic:classes=1"}, "synthetic: needs classes ≥ 2"),
        ({"image_size": 3}, "image_size=3 must be between 4 and 8192"),
        ({"image_size": 100_000}, "image_size=100000 must be between 4 and 8192"),
        ({"image_size": 8192}, "digits at 8192 × 8192 takes 120 GB, more than half of this machine's .* GB"),
        (
            {"source": "synthetic:images=1000000000"},
            "synthetic takes 12,288 GB, more than half of this machine's .* GB",
        ),
        ({"source": "synthetic:size=1000000"}, "synthetic takes .* GB"),
        ({"channels": 2}, "channels=2 must be 1"),
        ({"validation": 1.0}, "validation=1.0 must be a fraction"),
        ({"limit": 0}, "limit=0 must be at least 1"),
        ({"multiple_of": 0}, "multiple_of=0 must be between 1 and 8192"),
        ({"multiple_of": 100_000}, "multiple_of=100000 must be between 1 and 8192"),
    ],
)
def test_wrong_requests(request_, message):
    with pytest.raises(ValueError, match=message) as caught:
        data.load_data(**request_)
    assert "\n" not in str(caught.value)


def test_a_file_of_unknown_kind(tmp_path):
    (tmp_path / "table.xlsx").write_text("a,b")
    with pytest.raises(ValueError, match=r"table\.xlsx: is no known kind of data file; .*\.npz"):
        data.load_data(tmp_path / "table.xlsx")


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"file.*choose another cache \(LINVIT_CACHE\)"):
        data.load_data("digits", cache=tmp_path / "file")


def test_a_plugin_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "halves.py").write_text(
        textwrap.dedent("""
        import numpy as np
        from linvit.data import DATASETS, Arrays

        @DATASETS.register("halves")
        def halves(root, *, images: int | None = 12):
            images = 30 if images is None else images
            labels = np.arange(images) % 2
            pixels = np.zeros((images, 1, 4, 4), np.uint8)
            pixels[labels == 1, :, :2] = 255
            return Arrays(pixels, labels, ["dark", "light"], {"train": images})
        """)
    )
    monkeypatch.setenv("LINVIT_PLUGINS", str(tmp_path / "halves.py"))
    try:
        loaded = data.load_data("halves:images=20")
        assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (14, 2, 4)
        assert len(data.load_data("halves:images=none").test) == 6  # none is None here, and no word
    finally:
        data.DATASETS._entries.pop("halves", None)


def _with_copies(change) -> data.Dataset:
    """Smooth images, with 7 test images that are training or validation images after `change`."""
    rng = np.random.default_rng(0)
    small = torch.from_numpy(rng.uniform(0, 255, (400, 3, 6, 6)))
    images = torch.nn.functional.interpolate(small, 32, mode="bicubic").clamp(0, 255).to(torch.uint8).numpy()
    rows = dict(zip(("train", "validation", "test"), np.split(rng.permutation(400), [250, 300]), strict=True))
    for i, part in enumerate([*["train"] * 5, *["validation"] * 2]):
        images[rows["test"][3 * i]] = change(images[rows[part][i]])
    parts = [data.Split(images, part, np.zeros(len(part), np.int64)) for part in rows.values()]
    return data.Dataset("made", ["a"], *parts, mean=(0.5,) * 3, std=(1.0,) * 3, identity="made")


def _encoded(image: np.ndarray) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(file, "JPEG", quality=75)
    return np.asarray(Image.open(file)).transpose(2, 0, 1)


@pytest.mark.parametrize(
    ("change", "same", "alike"),
    [
        (lambda image: image, 7, 7),
        (_encoded, 0, 7),
        (lambda image: image[:, :, ::-1], 0, 7),
        (lambda image: _encoded(image[:, :, ::-1]), 0, 7),
        (lambda image: image[:, ::-1], 0, 0),
        (lambda image: np.roll(image, 3, 2), 0, 0),
        (lambda image: np.full_like(image, 9), 0, 0),
    ],
)
def test_test_images_that_repeat_training_images_are_counted(monkeypatch, change, same, alike):
    monkeypatch.setattr("linvit.data.dataset.CHUNK", 37)
    heard = []
    found = _with_copies(change)
    assert data.repeats(found, lambda *said: heard.append(said)) == same
    assert data.alike(found) == alike
    assert {what.rpartition(" ")[2] for _, _, what in heard} == {"train", "validation", "test"}
    assert all(done < total for done, total, _ in heard)


def test_flat_images_repeat_each_other_only_exactly():
    found = _with_copies(lambda image: image)
    flat = dataclasses.replace(found.test, store=np.full_like(found.test.store, 9))
    flat.store[flat.rows[0]] = 10
    assert data.alike(dataclasses.replace(found, train=flat, test=flat)) == 0
    assert data.repeats(dataclasses.replace(found, train=flat, test=flat.some(np.arange(10)))) == 10


@pytest.mark.parametrize("name", ["digits", "synthetic:images=600"])
def test_sets_without_copies_have_none(name):
    found = data.load_data(name)
    assert data.repeats(found) == data.alike(found) == 0


def test_height_and_width(own_cache, image_folder):
    """Folders, decoded at once or on demand, and arrays."""
    folder = image_folder(size=23)
    found = [data.load_data(folder, image_size=size, cached=cached) for size in ("7x11", (7, 11)) for cached in (0, 1)]
    found.append(data.load_data("synthetic:images=40,size=13", image_size=[7, 11]))
    for dataset in found:
        assert (dataset.image_size, dataset.train.batch([0])[0].shape[2:]) == ("7x11", (7, 11))
    assert found[0].identity == found[2].identity
    assert found[1].identity == found[3].identity != data.load_data(folder, image_size=(11, 7)).identity
    assert data.load_data(folder, image_size=(11, 11)).image_size == 11
    assert data.Survey.of(found[0]).size == "7x11"
