"""Tables of paths and labels, several labels of an image, and addresses that fsspec reads."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from linvit.data import load_data, survey
from linvit.data.splits import strata

NAMES = ["ant", "bee", "cow"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """30 images of 8 × 8, the first half darker."""
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(30):
        Image.new("RGB", (8, 8), (8 * i, 0, 0)).save(folder / f"{i}.png")
    return folder


def table(home, rows, name="labels.csv", first="path,label"):
    (home / name).write_text("\n".join([*([first] if first else []), *rows]) + "\n", encoding="utf-8")
    return home / name


def single(mark=","):
    return [f"{i}.png{mark}{NAMES[i % 3]}" for i in range(30)]


@pytest.mark.parametrize(
    ("name", "first", "mark"),
    [
        ("a.csv", "path,label", ","),
        ("a.csv", "\ufefffilename,CLASS", ","),
        ("a.csv", "image;label", ";"),
        ("a.csv", "", ","),
        ("a.tsv", "path\tlabel", "\t"),
    ],
)
def test_a_table_is_the_folder_it_lists(home, name, first, mark):
    found = load_data(table(home, single(mark), name, first))
    assert found.classes == NAMES
    assert not found.several
    for split in (found.train, found.validation, found.test):
        red = split.images[:, 0, 0, 0]
        np.testing.assert_array_equal(split.labels, red // 8 % 3)
    assert len(found.train) + len(found.validation) + len(found.test) == 30


def test_splits_of_the_table_are_kept(home):
    rows = [f"{i}.png,{NAMES[i % 3]},{'test' if i >= 24 else 'val' if i >= 18 else 'train'}" for i in range(30)]
    found = load_data(table(home, rows[::-1], first="path,label,split"))
    assert sorted(found.test.images[:, 0, 0, 0].tolist()) == [8 * i for i in range(24, 30)]
    assert (len(found.train), len(found.validation), found.own_test) == (18, 6, True)


def several():
    """Image i has class c where bit c of i % 8 is set; images 0, 8, … have none."""
    return [f"{i}.png," + ("|".join(NAMES[c] for c in range(3) if i % 8 >> c & 1) or "|") for i in range(30)]


def test_several_labels_are_a_table_of_ones(home):
    found = load_data(table(home, several()))
    assert found.several
    assert found.classes == NAMES
    for split in (found.train, found.validation, found.test):
        number = split.images[:, 0, 0, 0] // 8 % 8
        np.testing.assert_array_equal(split.labels, number[:, None] >> np.arange(3) & 1)
    images, labels = found.train.batch([0, 1])
    assert images.shape == (2, 3, 8, 8)
    assert labels.shape == (2, 3)
    assert survey(home / "labels.csv").several
    with pytest.raises(ValueError, match="folds are stratified by class"):
        survey(home / "labels.csv", folds=3)


def test_the_identity_is_of_labels_too(home):
    one = load_data(table(home, several())).identity
    changed = [several()[0].replace("|", "ant|"), *several()[1:]]
    assert load_data(table(home, changed)).identity != one


def test_images_are_drawn_by_their_rarest_class():
    labels = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 1], [0, 0, 0], [1, 0, 1], [1, 1, 1]], np.uint8)  # 5, 2 and 3 images
    assert strata(labels).tolist() == [1, 0, 2, 3, 2, 1]


def test_mixing_takes_several_labels(home):
    import torch

    found = load_data(table(home, several()))
    images, labels = found.train.batch(slice(0, 7))
    _, targets = found.augment(pad_crop=0, mixup=0.5)(images, labels, torch.arange(7), 0, 0)
    assert targets.shape == (7, 3)
    assert ((targets >= 0) & (targets <= 1)).all()
    mixed = labels.float().unsqueeze(0) * 0 + targets  # between an image's own and its partner's
    low, high = torch.minimum(labels, labels.roll(1, 0)), torch.maximum(labels, labels.roll(1, 0))
    assert ((mixed >= low - 1e-6) & (mixed <= high + 1e-6)).all()


@pytest.mark.parametrize(
    ("first", "rows", "says"),
    [
        ("path,label", [], "has no images"),
        ("name,kind", ["0.png,ant"], "needs the columns path and label in its first line, which has name, kind"),
        ("path,label", ["0.png"], r"labels.csv:2: has 1 columns, fewer than the first line"),
        ("path,label", ["0.png,ant", "1.png,"], r"labels.csv:3: has no label"),
        ("path,label", [",ant"], r"labels.csv:2: has no path"),
        ("path,label,split", ["0.png,ant,dev"], "split 'dev' is not one of train, val, test"),
        ("path,label,split", ["0.png,ant,test"], "has no training images"),
        ("path,label", ['"0.png,ant'], "is not a table in UTF-8"),
        ("path,label", [*single(), "lost.png,ant"], "lost.png"),
        ("path,label", [f"{i}.png,ant" for i in range(30)], "there is only one class"),
    ],
)
def test_bad_tables_are_one_line(home, first, rows, says):
    with pytest.raises(ValueError, match=says) as error:
        load_data(table(home, rows, first=first))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_text_is_one_line(home):
    (home / "labels.csv").write_bytes(b"path,label\n\xff\xfe\x00,ant\n")
    with pytest.raises(ValueError, match="is not a table in UTF-8"):
        load_data(home / "labels.csv")


def test_parquet_with_lists_of_labels(home):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    images = [{"bytes": (home / f"{i}.png").read_bytes()} for i in range(30)]
    lists = [[NAMES[c] for c in range(3) if i % 8 >> c & 1] for i in range(30)]
    parquet.write_table(pyarrow.table({"image": images, "label": lists}), home / "all.parquet")
    found, same = load_data(home / "all.parquet"), load_data(table(home, several()))
    assert found.classes == NAMES
    assert found.identity == same.identity
    numbers = [[c for c in range(3) if i % 8 >> c & 1] for i in range(30)]
    about = {"info": {"features": {"label": {"feature": {"names": NAMES, "_type": "ClassLabel"}}}}}
    import json

    rows = pyarrow.table({"image": images, "label": numbers})
    parquet.write_table(rows.replace_schema_metadata({"huggingface": json.dumps(about)}), home / "named.parquet")
    assert load_data(home / "named.parquet").identity == same.identity
    parquet.write_table(pyarrow.table({"image": images, "label": [[0.5]] * 30}), home / "bad.parquet")
    with pytest.raises(ValueError, match="must hold lists of whole numbers or names"):
        load_data(home / "bad.parquet")


def test_an_address_is_copied_once_and_again_when_it_changes(home):
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    system = fsspec.filesystem("memory")
    for i in range(30):
        system.pipe_file(f"/bucket/photos/{NAMES[i % 3]}/{i}.png", (home / f"{i}.png").read_bytes())
    found = load_data("memory://bucket/photos")
    assert found.classes == NAMES
    assert found.name == "photos"
    system.rm("/bucket/photos/ant/0.png")
    assert sum(map(len, (lambda d: (d.train, d.validation, d.test))(load_data("memory://bucket/photos")))) == 29
    table(home, [f"memory://bucket/photos/{NAMES[i % 3]}/{i}.png,{NAMES[i % 3]}" for i in range(1, 30)])
    again = load_data(home / "labels.csv")
    assert len(again.train) + len(again.validation) + len(again.test) == 29
    system.pipe_file("/bucket/labels.csv", (home / "labels.csv").read_bytes())
    assert load_data("memory://bucket/labels.csv").identity == again.identity


@pytest.mark.parametrize("name", [r"C:\x.png", r"..\..\x.png", "C:x.png"])
def test_names_that_lead_out_of_the_cache_on_windows_are_refused(name):
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    system = fsspec.filesystem("memory")
    system.pipe_file(f"/outside/{name}", b"")
    with pytest.raises(ValueError, match="is outside of it"):
        load_data("memory://outside")
    system.rm("/outside", recursive=True)


@pytest.mark.parametrize("address", ["memory://nothing/there", "nosuch://bucket/photos"])
def test_bad_addresses_are_one_line(home, address):
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    with pytest.raises(ValueError, match=f"{address}: cannot be read") as error:
        load_data(address)
    assert "\n" not in str(error.value)


@pytest.fixture
def bucket(home):
    """The images and a table of relative paths, at an address."""
    system = pytest.importorskip("fsspec", reason="fsspec is not installed").filesystem("memory")
    for i in range(30):
        system.pipe_file(f"/shop/photos/{i}.png", (home / f"{i}.png").read_bytes())
    system.pipe_file("/shop/labels.csv", table(home, [f"photos/{row}" for row in single()]).read_bytes())
    yield system
    system.store.clear()


def size(found):
    return len(found.train) + len(found.validation) + len(found.test)


def test_paths_of_a_table_at_an_address_are_relative_to_it(bucket, home):
    found = load_data("memory://shop/labels.csv")
    assert found.identity == load_data(table(home, single())).identity


@pytest.mark.parametrize("path", ["/0.png", "../0.png", "photos/../../0.png", "..\\0.png"])
def test_paths_outside_of_a_table_at_an_address_are_one_line(bucket, home, path):
    bucket.pipe_file("/shop/labels.csv", table(home, [*single(), f"{path},ant"]).read_bytes())
    with pytest.raises(ValueError, match=r"memory://shop/labels.csv:32: path '.*' is outside") as error:
        load_data("memory://shop/labels.csv")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cached", [True, False])
def test_a_missing_address_is_a_bad_image(bucket, cached):
    bucket.rm("/shop/photos/4.png")
    with pytest.raises(ValueError, match=r"memory://shop/photos/4.png: cannot be read .* skip_bad"):
        load_data("memory://shop/labels.csv", cached=cached)
    found = load_data("memory://shop/labels.csv", cached=cached, skip_bad=True)
    assert (found.skipped, size(found)) == (1, 29)


@pytest.mark.parametrize("cached", [True, False])
def test_a_changed_remote_image_changes_pixels_and_identity(bucket, home, cached):
    before = load_data("memory://shop/labels.csv", cached=cached)
    Image.new("RGB", (8, 8), (255, 0, 0)).save(home / "new.png")
    bucket.pipe_file("/shop/photos/0.png", (home / "new.png").read_bytes())
    after = load_data("memory://shop/labels.csv", cached=cached)
    assert after.identity != before.identity
    assert (
        sum((part.images[:, 0] == 255).all((1, 2)).sum() for part in (after.train, after.validation, after.test)) == 1
    )


def test_each_address_is_looked_up_once(bucket, monkeypatch):
    calls, plain = [], type(bucket).info
    monkeypatch.setattr(type(bucket), "info", lambda self, path, **k: calls.append(path) or plain(self, path, **k))
    load_data("memory://shop/labels.csv")  # headers, then pixels
    assert sorted(path for path in calls if path.endswith(".png")) == sorted(f"/shop/photos/{i}.png" for i in range(30))


def test_a_full_disk_skips_no_image(bucket, home, monkeypatch):
    from linvit.data import cache

    table(home, [f"memory://shop/photos/{row}" for row in single()])
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(ValueError, match="its copy takes"):
        load_data(home / "labels.csv", skip_bad=True)


def test_a_survey_copies_the_images_that_it_looks_at(bucket, home, monkeypatch):
    from linvit.data import surveys

    monkeypatch.setattr(surveys, "SAMPLE", 3)
    assert survey("memory://shop/labels.csv").total == 30
    assert len(list((home.parent / "cache" / "remote").glob("*/*.png"))) == 3
