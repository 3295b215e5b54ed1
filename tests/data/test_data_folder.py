"""Image folders: layouts, what is refused, and a cache that survives anything."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linvit import data
from linvit.data import cache
from linvit.data.folder import find_images


def test_class_folders_become_splits(image_folder):
    folder = image_folder(classes={"dog": 20, "cat": 10})
    loaded = data.load_data(folder)
    assert loaded.classes == ["cat", "dog"]
    assert (loaded.name, loaded.channels, loaded.image_size) == ("images", 3, 11)
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (21, 3, 6)
    images, labels = loaded.test.batch(range(6))
    assert sorted(labels.tolist()) == [0, 0, 1, 1, 1, 1]
    assert (images[:, 0, 5, 5] == 50 * (labels == 0)).all()  # the maker numbered dog 0 and cat 1
    seen = [tuple(image[:, 0, 0]) for split in (loaded.train, loaded.validation, loaded.test) for image in split.images]
    assert len(set(seen)) == 30


def test_own_splits_are_kept(image_folder, tmp_path):
    for name, count in (("train", 5), ("val", 2), ("test", 3)):
        image_folder(f"set/{name}", {"cat": count, "dog": count})
    loaded = data.load_data(tmp_path / "set")
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (10, 4, 6)
    assert loaded.validation.labels.tolist() == [0, 0, 1, 1]


def test_train_and_test_without_validation(image_folder, tmp_path):
    image_folder("set/train")
    image_folder("set/test", {"cat": 3})  # a split may lack a class
    loaded = data.load_data(tmp_path / "set")
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (18, 2, 3)


def test_a_class_may_be_called_train(image_folder):
    loaded = data.load_data(image_folder(classes={"train": 5, "bus": 5}))
    assert loaded.classes == ["bus", "train"]


def test_grey_folder_has_one_channel_and_one_colour_image_makes_three(image_folder):
    folder = image_folder(mode="L")
    assert data.load_data(folder).channels == 1
    Image.new("RGB", (11, 11), "red").save(folder / "cat" / "red.png")
    assert data.load_data(folder).channels == 3
    assert data.load_data(folder, channels=1).channels == 1


def test_mixed_sizes_take_the_rounded_median(image_folder):
    folder = image_folder(size=11)
    for number in range(15):
        Image.new("RGB", (31, 31)).save(folder / "dog" / f"large{number}.png")
    for number in range(10):
        Image.new("RGB", (23, 23)).save(folder / "cat" / f"middle{number}.png")
    assert data.load_data(folder).image_size == 23
    assert data.load_data(folder, multiple_of=8).image_size == 24
    assert data.load_data(folder, multiple_of=8, image_size=20).image_size == 20


def test_photos_are_made_small_unless_a_size_is_asked_for(image_folder):
    folder = image_folder(size=300)
    assert data.load_data(folder).image_size == 224
    assert data.load_data(folder, multiple_of=16).image_size == 224
    assert data.load_data(folder, image_size=300).image_size == 300


def test_what_is_not_an_image_is_left_alone(image_folder):
    folder = image_folder()
    (folder / "readme.txt").write_text("hello")
    (folder / "cat" / "boxes.txt").write_text("1 2 3 4")
    (folder / "cat" / "._000.png").write_bytes(b"resource fork")
    (folder / ".git").mkdir()
    nested = folder / "cat" / "more"
    nested.mkdir()
    shutil.copy(folder / "cat" / "000.png", nested / "extra.PNG")
    loaded = data.load_data(folder)
    assert loaded.classes == ["cat", "dog"]
    assert len(loaded.train) + len(loaded.validation) + len(loaded.test) == 21


def test_images_to_predict_are_found_by_the_same_rules(image_folder):
    folder = image_folder(classes={"cat": 2, "dog": 1})
    (folder / "cat" / "._000.png").write_bytes(b"resource fork")
    (folder / "__MACOSX").mkdir()
    shutil.copy(folder / "cat" / "000.png", folder / "__MACOSX" / "000.png")
    pictures = [folder / "cat" / "000.png", folder / "cat" / "001.png", folder / "dog" / "000.png"]
    assert find_images([folder, pictures[1]]) == [*pictures, pictures[1]]
    loop_to_parent(folder)
    with pytest.raises(ValueError, match="this link leads back to a folder it lies in"):
        find_images([folder])
    empty(folder / "dog")
    with pytest.raises(ValueError, match="dog: there are no images in this folder"):
        find_images([folder / "dog"])


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def loose(folder: Path) -> None:
    shutil.copy(folder / "cat" / "000.png", folder / "a.png")
    shutil.rmtree(folder / "cat")
    shutil.rmtree(folder / "dog")


def loop_to_itself(folder: Path) -> None:
    (folder / "cat" / "loop").symlink_to(folder / "cat" / "loop")


def loop_to_parent(folder: Path) -> None:
    (folder / "cat" / "up").symlink_to(folder)


def one_image_each(folder: Path) -> None:
    for name in ("cat", "dog"):
        for file in sorted((folder / name).iterdir())[1:]:
            file.unlink()


def without_images(folder: Path) -> None:
    (folder / "bird").mkdir()


def own_splits(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "copy")
    empty(folder)
    shutil.copytree(folder.parent / "copy", folder / "train")
    shutil.copytree(folder.parent / "copy" / "cat", folder / "test" / "bird")


def put(name: str, content: bytes):
    return lambda folder: (folder / "cat" / name).write_bytes(content)


def broken_link(folder: Path) -> None:
    (folder / "cat" / "gone.png").symlink_to(folder / "nowhere.png")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (empty, "images: has no images: put images as class/image.png"),
        (loose, "images: has images but no class folders"),
        (lambda folder: shutil.rmtree(folder / "dog"), r"only one class \('cat'\)"),
        (one_image_each, "class 'cat' has 1 training image, but needs at least 3"),
        (without_images, "bird: has no images: add some or remove the folder"),
        (own_splits, "test/bird: this class is not among the training classes"),
        (loop_to_itself, "cat/loop: cannot be followed"),
        (loop_to_parent, "this link leads back to a folder it lies in"),
        (broken_link, r"gone\.png: cannot be opened \(No such file"),
        (put("words.png", b"some words"), r"cat/words\.png: is not an image of a known kind"),
        (put("zip.jpg", b"PK\x03\x04" + bytes(99)), r"cat/zip\.jpg: is not an image of a known kind"),
    ],
)
def test_bad_folders_get_one_line(image_folder, damage, message, own_cache):
    folder = image_folder()
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        data.load_data(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert not list(own_cache.glob("decoded/*.part"))


def test_a_folder_that_may_not_be_listed(image_folder, monkeypatch):
    folder = image_folder()

    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", forbidden)
    with pytest.raises(ValueError, match=r"images: cannot be read \(Permission denied\)"):
        data.load_data(folder)


def test_a_link_at_the_top_that_leads_nowhere(tmp_path):
    (tmp_path / "me").symlink_to(tmp_path / "me")
    with pytest.raises(ValueError, match="me: cannot be followed"):
        data.load_data(tmp_path / "me")


def test_unreadable_images_are_skipped_and_counted(image_folder):
    folder = image_folder()
    put("words.png", b"some words")(folder)
    broken_link(folder)
    whole = (folder / "dog" / "000.png").read_bytes()
    (folder / "dog" / "000.png").write_bytes(whole[:-30])  # the header is fine, the pixels are not
    loaded = data.load_data(folder, skip_bad=True)
    assert loaded.skipped == 3
    assert len(loaded.train) + len(loaded.validation) + len(loaded.test) == 19
    rows = np.concatenate([loaded.train.labels, loaded.validation.labels, loaded.test.labels])
    assert np.bincount(rows).tolist() == [10, 9]
    assert data.load_data(folder, skip_bad=True).identity == loaded.identity
    for split in (loaded.train, loaded.validation, loaded.test):
        assert (split.images[:, 0, 0, 0] == 50 * split.labels).all()


def test_skipping_may_leave_too_few(image_folder):
    folder = image_folder(classes={"cat": 3, "dog": 5})
    (folder / "cat" / "000.png").write_bytes(b"")
    with pytest.raises(ValueError, match="class 'cat' has 2 training images, but needs at least 3"):
        data.load_data(folder, skip_bad=True)


def test_decoding_happens_once_and_reports_progress(image_folder):
    folder = image_folder(classes={"cat": 50, "dog": 60})
    calls = []
    first = data.load_data(folder, progress=lambda *call: calls.append(call))
    assert calls[-1] == (110, 110, "decoding images")
    assert calls == sorted(calls)
    calls.clear()
    again = data.load_data(folder, progress=lambda *call: calls.append(call))
    assert not calls
    assert again.identity == first.identity
    assert isinstance(again.train.store, np.memmap)


def test_changed_files_are_decoded_again(image_folder):
    folder = image_folder()
    first = data.load_data(folder)
    Image.new("RGB", (11, 11), "white").save(folder / "cat" / "000.png")
    os.utime(folder / "cat" / "000.png", ns=(1, 1))
    assert data.load_data(folder).identity != first.identity


def test_identity_is_of_the_pixels_not_of_the_place(image_folder, tmp_path):
    folder = image_folder()
    moved = shutil.copytree(folder, tmp_path / "elsewhere" / "images", copy_function=shutil.copyfile)
    assert data.load_data(folder).identity == data.load_data(moved).identity


LOAD = """
import os, sys, time
from linvit import data
from linvit.data import cache
moment, cache.CHUNK, calls = sys.argv[2], 4, []
def die(*_): os.kill(os.getpid(), 9)
def progress(done, total, what):
    calls.append(done)
    time.sleep(0.1 if moment == "slowly" else 0)
    if moment == "decoding" and done >= 16: die()
if moment == "writing labels": cache.np.save = die
if moment == "renaming": cache.os.rename = die
print(data.load_data(sys.argv[1], progress=progress).identity, len(calls))
"""


def start(folder: Path, moment: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", LOAD, str(folder), moment], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "moment", ["decoding", *(pytest.param(m, marks=pytest.mark.kills) for m in ("writing labels", "renaming"))]
)
def test_a_kill_leaves_nothing_that_is_later_read(image_folder, own_cache, moment):
    folder = image_folder(classes={"cat": 20, "dog": 20})
    assert start(folder, moment).wait(timeout=60) == -signal.SIGKILL
    assert [path.suffix for path in (own_cache / "decoded").iterdir() if path.is_dir()] == [".part"]
    loaded = data.load_data(folder)
    assert len(loaded.train) + len(loaded.validation) + len(loaded.test) == 40
    assert not list(own_cache.glob("decoded/*.part"))
    fresh = data.load_data(folder, cache=own_cache / "other")
    assert fresh.identity == loaded.identity
    assert (fresh.train.images == loaded.train.images).all()


@pytest.mark.kills
def test_of_two_processes_one_decodes_and_one_waits(image_folder, own_cache):
    folder = image_folder(classes={"cat": 30, "dog": 30})
    processes = [start(folder, "slowly") for _ in range(2)]
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    identity = data.load_data(folder).identity
    assert sorted(answers) == sorted([[identity, "0"], [identity, "15"]])
    assert len([path for path in (own_cache / "decoded").iterdir() if path.is_dir()]) == 1


def test_a_damaged_cache_entry_says_so(image_folder, own_cache):
    folder = image_folder()
    data.load_data(folder)
    (pixels,) = own_cache.glob("decoded/*/images.u8")
    pixels.write_bytes(pixels.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"this cache entry is damaged .* delete it and run again"):
        data.load_data(folder)


def test_a_set_that_does_not_fit_is_refused_before_decoding(image_folder, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(
        ValueError, match=r"decoded at 11 × 11 it takes .* choose a smaller image_size or another cache"
    ):
        data.load_data(image_folder())


def test_an_image_size_that_does_not_fit_is_refused_before_a_file_is_opened(image_folder, monkeypatch):
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10**9}))
    monkeypatch.setattr(cache, "read_header", lambda name, source: pytest.fail("a file was opened"))
    with pytest.raises(ValueError, match=r"decoded at 8000 × 8000 it takes 1\.3 GB, but .*decoded has 1\.0 GB free"):
        data.load_data(image_folder(), image_size=8000)


def test_results_wait_in_bounded_number():
    """However slow the writer, only a few decoded chunks are in memory."""
    made = []
    results = cache.ordered_map(lambda item: made.append(item) or item, range(200))
    assert next(results) == 0
    time.sleep(0.05)
    assert len(made) <= 2 * (os.cpu_count() or 1) + 1
    assert list(results) == list(range(1, 200))
