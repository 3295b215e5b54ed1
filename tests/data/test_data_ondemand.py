"""Images that are decoded when they are read, and those that a limit leaves out, which are not decoded at all."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

from linvit import data
from linvit.data import cache, dataset, ondemand


@pytest.fixture
def decoded(monkeypatch):
    """How many images have been decoded since this was last emptied."""
    calls = []
    for module in (ondemand, cache):
        monkeypatch.setattr(
            module, "read_image", lambda *words, read=module.read_image: calls.append(1) or read(*words)
        )
    monkeypatch.setattr(dataset, "SAMPLE", 3)
    return calls


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_pixels_labels_and_splits_are_those_of_the_cache(image_folder, own_cache, decoded):
    folder = image_folder(classes={"cat": 20, "dog": 13})
    lazy = data.load_data(folder, image_size=23, channels=3, cached=False)
    assert len(decoded) <= 3  # for mean and std
    assert [name.rpartition(".")[2] for name in files(own_cache / "decoded")] == ["json"]
    eager = data.load_data(folder, image_size=23, channels=3, cache=own_cache / "other")
    decoded.clear()
    for part in ("train", "validation", "test"):
        mine, theirs = getattr(lazy, part), getattr(eager, part)
        assert (mine.rows == theirs.rows).all()
        for index in (slice(None), slice(2), [1, 0], np.array([1])):
            for ours, other in zip(mine.batch(index), theirs.batch(index), strict=True):
                assert (ours == other).all()
    assert lazy.test.store.shape == eager.test.store.shape
    assert lazy.test.store[:1].nbytes == eager.test.store[:1].nbytes
    assert len(decoded) <= 33  # each once, though read several times
    assert data.load_data(folder, image_size=23, channels=3, cached=False).identity == lazy.identity


def test_memory_is_bounded(image_folder, decoded, monkeypatch):
    monkeypatch.setattr(ondemand, "KEPT_BYTES", 5 * 3 * 11**2)
    images = data.load_data(image_folder(), cached=False).train
    decoded.clear()
    for _ in range(2):
        images.batch(slice(None))
    assert len(images.store._kept) == 5
    assert len(decoded) > len(images)


def test_identity_is_of_the_files_contents_not_of_their_place(image_folder, tmp_path):
    folder = image_folder()
    first = data.load_data(folder, cached=False)
    moved = shutil.copytree(folder, tmp_path / "elsewhere" / "images", copy_function=shutil.copyfile)
    assert data.load_data(moved, cached=False).identity == first.identity
    file = moved / "cat" / "000.png"
    shutil.copyfile(moved / "cat" / "001.png", file)
    os.utime(file, ns=(1, 1))
    assert data.load_data(moved, cached=False).identity != first.identity


def test_bad_images_are_found(image_folder):
    folder = image_folder()
    whole = (folder / "cat" / "003.png").read_bytes()
    (folder / "cat" / "003.png").write_bytes(whole[:-30])  # its header is right
    lazy = data.load_data(folder, cached=False, validation=0.0)
    with pytest.raises(data.BadImage, match=r"003\.png: cannot be decoded .* skip_bad"):
        lazy.train.store[:]
    lazy = data.load_data(folder, cached=False, skip_bad=True)
    eager = data.load_data(folder, skip_bad=True)
    assert (lazy.skipped, len(lazy.train), len(lazy.test)) == (1, len(eager.train), len(eager.test))
    assert (lazy.train.images == eager.train.images).all()
    (folder / "cat" / "003.png").write_bytes(b"text")
    with pytest.raises(data.BadImage, match=r"003\.png: is not an image of a known kind"):
        data.load_data(folder, cached=False)


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_a_limit_decodes_the_images_that_it_leaves_alone(image_folder, own_cache, tmp_path, decoded, kind):
    source = image_folder(classes={"cat": 30, "dog": 30})
    every = data.load_data(source)
    if kind == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = [(p.read_bytes(), int(p.parent.name == "dog")) for p in sorted(source.rglob("*.png"))]
        source = tmp_path / "images.parquet"
        columns = {"image": [{"bytes": content} for content, _ in rows], "label": [label for _, label in rows]}
        pq.write_table(pa.table(columns), source)
    decoded.clear()
    few = data.load_data(source, limit=4, cache=tmp_path / "few")
    assert [len(part) for part in (few.train, few.validation, few.test)] == [4, 4, 4]
    assert len(decoded) == 12
    (pixels,) = (tmp_path / "few").glob("decoded/*/images.u8")
    assert pixels.stat().st_size == 12 * 3 * 11**2
    assert not few.own_test
    for part in ("train", "validation", "test"):
        mine, known = getattr(few, part), getattr(every, part)
        assert mine.labels.tolist() == [0, 0, 1, 1]
        assert {image.tobytes() for image in mine.images} <= {image.tobytes() for image in known.images}


def test_a_split_file_of_limited_images_states_the_limit(image_folder, tmp_path):
    folder, file = image_folder(classes={"cat": 20, "dog": 13}), tmp_path / "splits.json"
    made = data.load_data(folder, limit=4, split_file=file)
    assert json.loads(file.read_text())["limit"] == 4
    again = data.load_data(folder, limit=4, split_file=file)
    assert again.identity == made.identity
    assert len(again.train) == 4
