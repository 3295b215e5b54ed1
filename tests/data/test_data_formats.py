"""The original file formats: read right, and refused in one line when damaged."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linvit import data
from linvit.data import cifar, download, sources, tiny_imagenet
from linvit.data.idx import read_idx

RNG = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no network here")

    monkeypatch.setattr(download.urllib.request, "urlopen", refuse)


def write_mnist(folder: Path, *, packed: bool = True) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True)
    arrays = {}
    for name, count in (("train", 50), ("t10k", 20)):
        arrays[f"{name}-images-idx3-ubyte"] = RNG.integers(0, 256, (count, 7, 7), np.uint8)
        arrays[f"{name}-labels-idx1-ubyte"] = (np.arange(count) % 10).astype(np.uint8)
    for name, array in arrays.items():
        content = gzip.compress(idx(array)) if packed else idx(array)
        (folder / (name + ".gz" * packed)).write_bytes(content)
    return arrays


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
    ],
)
def test_idx_sets(tmp_path, name, folder, packed):
    arrays = write_mnist(tmp_path / folder, packed=packed)
    loaded = data.load_data(name, root=tmp_path)
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (40, 10, 20)
    assert (loaded.test.images[:, 0] == arrays["t10k-images-idx3-ubyte"]).all()
    assert (loaded.test.labels == arrays["t10k-labels-idx1-ubyte"]).all()
    assert loaded.classes[9] == ("9" if name == "mnist" else "Ankle boot")


def test_a_root_with_other_files_of_the_same_names_is_not_taken(tmp_path, offline):
    write_mnist(tmp_path / "mnist")
    with pytest.raises(ValueError, match="fashion-mnist: its files are not in"):
        data.load_data("fashion-mnist", root=tmp_path / "mnist")
    assert len(data.load_data("mnist", root=tmp_path / "mnist").test) == 20


GOOD = idx(np.zeros((3, 5, 5), np.uint8))


@pytest.mark.parametrize(
    "content",
    [b"", b"text", GOOD[:-1], GOOD + b"\0", GOOD[:10], idx(np.zeros((3, 5), np.uint8)), b"\0\0\x08\x03" + b"\xff" * 12],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_corrupt_idx(tmp_path, content, suffix):
    path = tmp_path / f"images{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(ValueError, match=r"images.*: is corrupt \(.*delete it to download it again"):
        read_idx(path, 3)


def test_a_gzip_that_is_none(tmp_path):
    for content in (GOOD, gzip.compress(GOOD)[:-9], gzip.compress(GOOD)[:25]):
        (tmp_path / "images.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"images\.gz: is corrupt"):
            read_idx(tmp_path / "images.gz", 3)


def test_idx_labels_must_fit(tmp_path):
    write_mnist(tmp_path / "mnist", packed=False)
    labels = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    labels.write_bytes(idx(np.full(20, 10, np.uint8)))
    with pytest.raises(
        ValueError, match=r"labels-idx1-ubyte: label 10 of image 0 is out of range: labels must be 0 to 9"
    ):
        data.load_data("mnist", root=tmp_path)
    labels.write_bytes(idx(np.zeros(19, np.uint8)))
    with pytest.raises(ValueError, match=r"has 20 images, but t10k-labels-idx1-ubyte has 19 labels"):
        data.load_data("mnist", root=tmp_path)


def cifar_files(kind: str, binary: bool) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    """Contents by name, and the test images and labels."""
    batches = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]
    names = batches if kind == "cifar-10" else ["train", "test"]
    files: dict[str, bytes] = {}
    fine = [f"class {i}" for i in range(10)]
    pixels, labels = np.empty(0), np.empty(0)
    for name in names:
        count = 10 if kind == "cifar-10" else 50 if name == "train" else 10
        pixels = RNG.integers(0, 256, (count, 3072), np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        coarse = labels // 5
        if binary:
            columns = [labels[:, None], pixels] if kind == "cifar-10" else [coarse[:, None], labels[:, None], pixels]
            files[f"{name}.bin"] = np.concatenate(columns, 1).tobytes()
        elif kind == "cifar-10":
            files[name] = pickle.dumps({b"data": pixels, b"labels": labels.tolist(), b"filenames": ["a"] * count}, 4)
        else:
            columns = {"data": pixels, "fine_labels": labels.tolist(), "coarse_labels": coarse.tolist()}
            files[name] = pickle.dumps(columns, 3)
    if binary:
        files["batches.meta.txt" if kind == "cifar-10" else "fine_label_names.txt"] = (
            "\n".join(fine) + "\n\n"
        ).encode()
        files["coarse_label_names.txt"] = b"low\nhigh\n"
    elif kind == "cifar-10":
        files["batches.meta"] = pickle.dumps({"label_names": fine}, 2)
    else:
        files["meta"] = pickle.dumps({"fine_label_names": fine, "coarse_label_names": ["low", "high"]}, 2)
    return files, pixels.reshape(-1, 3, 32, 32), labels


def write_cifar(root: Path, kind: str, binary: bool, packed: bool, files: dict[str, bytes]) -> Path:
    folders = {("cifar-10", True): "cifar-10-batches-bin", ("cifar-10", False): "cifar-10-batches-py"}
    folder = folders.get((kind, binary), f"{kind}-{'binary' if binary else 'python'}")
    root.mkdir(parents=True, exist_ok=True)
    if packed:
        path = root / f"{kind}-{'binary' if binary else 'python'}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(f"{folder}/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return path
    (root / folder).mkdir()
    for name, content in files.items():
        (root / folder / name).write_bytes(content)
    return root / folder


@pytest.fixture
def small_cifar(monkeypatch):
    monkeypatch.setattr(cifar, "EXPECTED", {"train": 50, "test": 10})


@pytest.mark.usefixtures("small_cifar")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("kind", ["cifar-10", "cifar-100"])
def test_cifar(tmp_path, kind, binary, packed):
    files, pixels, labels = cifar_files(kind, binary)
    write_cifar(tmp_path, kind, binary, packed, files)
    loaded = data.load_data(kind.replace("-", ""), root=tmp_path)
    assert (loaded.test.images == pixels).all()
    assert (loaded.test.labels == labels).all()
    assert loaded.classes == [f"class {i}" for i in range(10)]
    assert (len(loaded.train), len(loaded.validation)) == (40, 10)


@pytest.mark.usefixtures("small_cifar")
@pytest.mark.parametrize("kind", ["cifar-10", "cifar-100"])
def test_grey_cifar_is_as_pillow_makes_it(tmp_path, kind):
    files, pixels, _ = cifar_files(kind, True)
    write_cifar(tmp_path, kind, True, False, files)
    found = data.load_data(kind.replace("-", "") + ":grey=true", root=tmp_path).test.images
    assert found.shape == (10, 1, 32, 32)
    for image, colours in zip(found, pixels, strict=True):
        assert (image[0] == np.asarray(Image.fromarray(colours.transpose(1, 2, 0)).convert("L"))).all()


@pytest.mark.usefixtures("small_cifar")
@pytest.mark.parametrize("binary", [True, False])
def test_coarse_labels(tmp_path, binary):
    files, _, labels = cifar_files("cifar-100", binary)
    write_cifar(tmp_path / "cifar100", "cifar-100", binary, False, files)
    loaded = data.load_data("cifar100:labels=coarse", root=tmp_path)
    assert loaded.classes == ["low", "high"]
    assert (loaded.test.labels == labels // 5).all()


@pytest.mark.usefixtures("small_cifar")
def test_corrupt_cifar(tmp_path):
    files, _, _ = cifar_files("cifar-10", True)

    def load(number: int, change: dict[str, bytes]) -> None:
        write_cifar(tmp_path / str(number), "cifar-10", True, False, files | change)
        data.load_data("cifar10", root=tmp_path / str(number))

    with pytest.raises(ValueError, match=r"data_batch_2\.bin: is corrupt \(not whole records"):
        load(1, {"data_batch_2.bin": files["data_batch_2.bin"][:-7]})
    with pytest.raises(ValueError, match="has 49 train images instead of 50"):
        load(2, {"data_batch_2.bin": files["data_batch_2.bin"][:-3073]})
    with pytest.raises(ValueError, match="label 77 of image 0 is out of range"):
        load(3, {"data_batch_1.bin": b"\x4d" + files["data_batch_1.bin"][1:]})
    del files["test_batch.bin"]
    with pytest.raises(ValueError, match=r"test_batch\.bin: cannot be read \(No such file"):
        load(4, {})


@pytest.mark.usefixtures("small_cifar")
def test_corrupt_archives(tmp_path):
    files, _, _ = cifar_files("cifar-10", True)
    path = write_cifar(tmp_path, "cifar-10", True, True, files)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"not a tar", whole[:30]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cifar-10-binary\.tar\.gz: is corrupt .*delete it"):
            data.load_data("cifar10", root=tmp_path)


class Bomb:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


@pytest.mark.usefixtures("small_cifar")
@pytest.mark.parametrize("packed", [True, False])
def test_a_pickle_bomb_in_cifar_does_not_go_off(tmp_path, packed):
    files, _, _ = cifar_files("cifar-10", False)
    files["data_batch_3"] = pickle.dumps({"data": Bomb(tmp_path / "created"), "labels": [0]})
    write_cifar(tmp_path, "cifar-10", False, packed, files)
    with pytest.raises(ValueError, match=r"data_batch_3: was not read: it would run posix\.system"):
        data.load_data("cifar10", root=tmp_path)
    assert not (tmp_path / "created").exists()


def write_tiny(root: Path, name: str = "tiny-imagenet-200", ids: Sequence[str] = ("n02", "n01", "n03")) -> Path:
    folder = root / name
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(ids))
    (folder / "words.txt").write_text("n01\tgoldfish, Carassius\nn02\ttoad\nn03\ttoad\n")
    for label, key in enumerate(sorted(ids)):
        (folder / "train" / key / "images").mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (8, 8), (label, number, 0)).save(
                folder / "train" / key / "images" / f"{number}.JPEG", "PNG"
            )
        Image.new("RGB", (8, 8), (label, 99, 0)).save(folder / "val" / "images" / f"val_{label}.JPEG", "PNG")
    (folder / "val" / "val_annotations.txt").write_text("val_2.JPEG\tn03\t0\t0\t1\t1\nval_0.JPEG\tn01\t0\t0\t1\t1\n")
    return folder


@pytest.mark.parametrize("name", ["tiny-imagenet-200", "tiny-imagenet-100"])
def test_tiny_imagenet(tmp_path, name):
    folder = write_tiny(tmp_path, name)
    loaded = data.load_data("tiny-imagenet", root=tmp_path)
    assert loaded.classes == ["goldfish", "n02", "n03"]
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (12, 3, 2)
    assert loaded.test.labels.tolist() == [2, 0]
    for split in (loaded.train, loaded.validation, loaded.test):
        assert (split.images[:, 0, 0, 0] == split.labels).all()
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn77\t0\n")
    with pytest.raises(ValueError, match=r"val_annotations\.txt:1: class 'n77' is not in wnids\.txt"):
        data.load_data("tiny-imagenet", root=tmp_path)


def test_a_part_of_tiny_imagenet(tmp_path):
    write_tiny(tmp_path, ids=[f"n{i:02d}" for i in range(1, 8)])
    names = data.load_data("tiny-imagenet", root=tmp_path).classes
    few = data.load_data("tiny-imagenet:part=most,per_class=4", root=tmp_path)
    assert few.classes == names[:4] + names[5:]
    assert len(few.train) + len(few.validation) == 4 * 6
    for split in (few.train, few.test):  # red tells the class
        assert [(0, 1, 2, 3, 5, 6)[label] for label in split.labels] == split.images[:, 0, 0, 0].tolist()
    assert data.load_data("tiny-imagenet:names=wnid", root=tmp_path).classes == [f"n{i:02d}" for i in range(1, 8)]
    with pytest.raises(ValueError, match="per_class=0"):
        data.load_data("tiny-imagenet:per_class=0", root=tmp_path)


def test_tiny_imagenet_is_unpacked_from_its_archive(tmp_path, offline):
    import shutil

    write_tiny(tmp_path / "made")
    shutil.make_archive(str(tmp_path / "tiny-imagenet-200"), "zip", tmp_path / "made")
    assert len(data.load_data("tiny-imagenet", root=tmp_path).train) == 12
    assert not list(tmp_path.glob("*.part"))
    shutil.rmtree(tmp_path / "tiny-imagenet-200")
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(b"PK")
    with pytest.raises(
        ValueError, match=r"tiny-imagenet-200\.zip: cannot be unpacked .*delete it to download it again"
    ):
        data.load_data("tiny-imagenet", root=tmp_path)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "tiny-imagenet"])
def test_without_a_network_one_line_says_what_to_put_where(tmp_path, offline, name):
    with pytest.raises(
        ValueError, match=rf"{name}: its files are not in .*\(no network here\): put .*(gz|zip) from http.* there"
    ) as caught:
        data.load_data(name, root=tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_download_is_verified_before_it_gets_its_name(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file.gz").write_bytes(b"content")
    url = (tmp_path / "there" / "file.gz").as_uri()
    with pytest.raises(
        ValueError, match=r"file\.gz: the download has MD5 9a0364b9e99bb480dd25e1f0284c8555 instead of 00"
    ):
        download.download(download.Remote(url, "00"), tmp_path / "here")
    assert [path.name for path in (tmp_path / "here").iterdir()] == [".file.gz.lock"]
    target = download.download(download.Remote(url, "9a0364b9e99bb480dd25e1f0284c8555"), tmp_path / "here")
    assert target.read_bytes() == b"content"


def test_a_missing_set_is_downloaded(tmp_path, monkeypatch):
    import hashlib
    import shutil

    write_tiny(tmp_path / "made")
    archive = Path(shutil.make_archive(str(tmp_path / "server" / "tiny-imagenet-200"), "zip", tmp_path / "made"))
    remote = download.Remote(archive.as_uri(), hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(tiny_imagenet, "ARCHIVE", remote)
    assert len(data.load_data("tiny-imagenet", root=tmp_path / "root").train) == 12


def keras(path: Path, **changes) -> Path:
    arrays = {
        "x_train": RNG.integers(0, 256, (30, 5, 5, 3), np.uint8),
        "y_train": (np.arange(30) % 3)[:, None],
        "x_test": RNG.integers(0, 256, (6, 5, 5, 3), np.uint8),
        "y_test": (np.arange(6) % 3)[:, None],
    }
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


def test_npz(tmp_path):
    path = keras(tmp_path / "set.npz")
    loaded = data.load_data(path)
    with np.load(path) as file:
        assert (loaded.test.images == file["x_test"].transpose(0, 3, 1, 2)).all()
        assert (loaded.test.labels == file["y_test"][:, 0]).all()
    assert (loaded.name, len(loaded.train), len(loaded.validation)) == ("set.npz", 27, 3)


def test_npz_shapes_and_types(tmp_path):
    grey = RNG.integers(0, 256, (30, 5, 5), np.uint8)
    no_test = {"x_test": None, "y_test": None}
    plain = data.load_data(keras(tmp_path / "grey.npz", x_train=grey, **no_test))
    assert (plain.channels, len(plain.test)) == (1, 6)
    for number, x in enumerate([grey / 255, grey.astype(np.float32), grey.astype(np.int64), grey[:, None]]):
        other = data.load_data(keras(tmp_path / f"{number}.npz", x_train=x, **no_test))
        assert other.identity == plain.identity
    own = {"x_val": grey[:4], "y_val": np.arange(4) % 3, "x_test": grey[:6]}
    assert len(data.load_data(keras(tmp_path / "val.npz", x_train=grey, **own)).validation) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": None}, r"needs the arrays x_train and y_train .*it has x_test, y_test, y_train"),
        ({"y_train": np.arange(29) % 3}, "train has 30 images but 29 labels"),
        ({"y_train": np.arange(30) % 3 - 1}, "y_train: label -1 of image 0 is out of range"),
        ({"y_train": np.full(30, 2**62)}, "y_train: label 4611686018427387904 is more than 99,999"),
        ({"y_test": np.full(6, 3)}, "y_test: label 3 of image 0 is out of range: labels must be 0 to 2"),
        ({"y_train": np.arange(30) % 3 + 1, "y_test": np.ones(6, int)}, "class '0' has 0 training images"),
        ({"y_train": np.arange(30) % 2 * 2}, "class '1' has 0 training images"),  # though y_test has some
        ({"y_train": np.zeros(30, int), "y_test": np.zeros(6, int)}, "there is only one class"),
        ({"y_train": np.full(30, 0.5)}, "y_train has shape .*labels are whole numbers"),
        ({"x_train": np.zeros((30, 5, 5, 4), np.uint8)}, r"x_train has shape \(30, 5, 5, 4\)"),
        ({"x_train": np.zeros((30, 5, 5, 3)) - 1}, "x_train runs from -1 to -1"),
        ({"x_train": np.full((30, 5, 5, 3), np.nan)}, "x_train has values that are not pixels"),
        ({"x_test": np.zeros((6, 7, 7, 3), np.uint8)}, r"test images have shape \(3, 7, 7\), train has \(3, 5, 5\)"),
        (
            {"x_train": np.zeros((30, 3, 3), np.uint8), "x_test": np.zeros((6, 3, 3), np.uint8)},
            "images are 3 × 3 pixels",
        ),
        ({"x_train": np.array([None] * 30)}, r"is not a readable \.npz of plain arrays \(.*allow_pickle"),
    ],
)
def test_bad_npz(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        data.load_data(keras(tmp_path / "set.npz", **changes))
    assert str(tmp_path / "set.npz") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_corrupt_npz(tmp_path):
    whole = keras(tmp_path / "set.npz").read_bytes()
    broken = whole.replace(b"'shape': (", b"'shape': [", 1)  # NumPy's tokenizer fails on its header
    assert broken != whole
    for content in (b"", b"text", whole[: len(whole) // 2], whole[:200] + b"\xff" * 300 + whole[500:], broken):
        (tmp_path / "set.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"set\.npz: is not a readable \.npz"):
            data.load_data(tmp_path / "set.npz")


def test_an_npz_larger_than_memory_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MEMORY", 4000)
    with pytest.raises(ValueError, match="more than half of this machine"):
        data.load_data(keras(tmp_path / "set.npz"))


def test_a_plain_npy_is_no_npz(tmp_path):
    np.save(tmp_path / "set.npy", np.zeros(3))
    (tmp_path / "set.npy").rename(tmp_path / "set.npz")
    with pytest.raises(ValueError, match=r"set\.npz: is not a readable \.npz"):
        data.load_data(tmp_path / "set.npz")


def png(label: int, number: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 6), (label, number, 0)).save(file, "PNG")
    return file.getvalue()


def write_parquet(path: Path, count: int = 20, *, struct: bool = True, names: bool = True, **columns) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [png(i % 2, i) for i in range(count)]
    table = {"image": [{"bytes": image, "path": None} for image in images] if struct else images}
    table |= {"label": [i % 2 for i in range(count)]} | columns
    built = arrow.table({key: value for key, value in table.items() if value is not None})
    if names:
        features = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
        built = built.replace_schema_metadata({b"huggingface": json.dumps(features).encode()})
    parquet.write_table(built, path, row_group_size=7)
    return path


@pytest.mark.parametrize("struct", [True, False])
def test_parquet_file(tmp_path, struct):
    loaded = data.load_data(write_parquet(tmp_path / "set.parquet", struct=struct))
    assert loaded.classes == ["cat", "dog"]
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (14, 2, 4)
    for split in (loaded.train, loaded.validation, loaded.test):
        assert (split.images[:, 0, 0, 0] == split.labels).all()


@pytest.mark.parametrize("place", ["", "data"])
def test_parquet_folder(tmp_path, place):
    folder = tmp_path / "set" / place
    folder.mkdir(parents=True)
    write_parquet(folder / "train-00000-of-00002.parquet")
    write_parquet(folder / "train-00001-of-00002.parquet", names=False)
    write_parquet(folder / "test-00000-of-00001.parquet", 6)
    loaded = data.load_data(tmp_path / "set")
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (36, 4, 6)
    assert loaded.test.images[:, 1, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_parquet_labels_may_be_names(tmp_path):
    path = write_parquet(tmp_path / "set.parquet", names=False, label=["dog" if i % 2 else "ant" for i in range(20)])
    assert data.load_data(path).classes == ["ant", "dog"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": None}, r"set\.parquet: has no column 'image'; its columns are label"),
        ({"label": None}, r"set\.parquet: has no column 'label'; its columns are image"),
        ({"label": [2**62] * 20, "names": False}, r"set\.parquet: label 4611686018427387904 is more than 99,999"),
        ({"label": [-1] * 20}, r"set\.parquet: label -1 of image 0 is out of range"),
        (
            {"label": [i % 3 for i in range(20)]},
            r"set\.parquet: label 2 of image 2 is out of range: labels must be 0 to 1",
        ),
        ({"label": [None] + [0] * 19}, r"set\.parquet: column 'label' has 1 empty rows"),
        ({"label": [0.5] * 20}, r"set\.parquet: column 'label' must hold whole numbers or names"),
        ({"image": [png(0)] * 19 + [b"text"]}, r"set\.parquet, row 19: is not an image"),
        ({"image": [1] * 20}, r"set\.parquet, row 0: is not an image"),
    ],
)
def test_bad_parquet(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message):
        data.load_data(write_parquet(tmp_path / "set.parquet", **columns))


def test_corrupt_parquet(tmp_path):
    whole = write_parquet(tmp_path / "set.parquet").read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2]):
        (tmp_path / "set.parquet").write_bytes(content)
        with pytest.raises(ValueError, match=r"set\.parquet: is not a readable Parquet file"):
            data.load_data(tmp_path / "set.parquet")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "set.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"reading Parquet needs pyarrow: pip install 'linvit\[parquet\]'"):
        data.load_data(path)
