"""CIFAR-10 and CIFAR-100: 32×32 colour, 50,000 train and 10,000 test images.

Read from the original binary or Python batches, unpacked or still in their tar.gz; pickles are parsed, never loaded.
With grey=true images have one channel: 1,024 tokens for stem=pixel, the pixel task of Long Range Arena.
"""

from __future__ import annotations

import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from linvit.data import plain_pickle
from linvit.data.download import Remote, fetch, homes
from linvit.data.sources import DATASETS, Arrays, check_labels, stack

URL = "https://www.cs.toronto.edu/~kriz/"
PIXELS = 3 * 32 * 32
LARGEST = 200_000_000  # bytes in one member of an archive
EXPECTED = {"train": 50_000, "test": 10_000}
Files = dict[str, bytes]


@dataclass(frozen=True)
class Batches:
    """How one of the two sets is laid out: file names without suffix, and where a record's label stands."""

    stem: str
    folders: dict[str, str]  # what its archives unpack to
    train: tuple[str, ...]
    test: str
    classes_file: str  # in the binary version
    meta: str  # in the Python version, which has the classes under classes_key
    classes_key: str
    labels_key: str
    label_bytes: int
    label_at: int
    md5_binary: str


@DATASETS.register("cifar10")
def cifar10(root: Path, *, grey: bool = False) -> Arrays:
    layout = Batches(
        stem="cifar-10",
        folders={"binary": "cifar-10-batches-bin", "python": "cifar-10-batches-py"},
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test="test_batch",
        classes_file="batches.meta.txt",
        meta="batches.meta",
        classes_key="label_names",
        labels_key="labels",
        label_bytes=1,
        label_at=0,
        md5_binary="c32a1d4ab5d03f1284b67883e8d87530",
    )
    return _load("cifar10", layout, [*homes(root, "cifar10", "cifar-10", "CIFAR10"), root], grey)


@DATASETS.register("cifar100")
def cifar100(root: Path, *, labels: Literal["fine", "coarse"] = "fine", grey: bool = False) -> Arrays:
    layout = Batches(
        stem="cifar-100",
        folders={"binary": "cifar-100-binary", "python": "cifar-100-python"},
        train=("train",),
        test="test",
        classes_file=f"{labels}_label_names.txt",
        meta="meta",
        classes_key=f"{labels}_label_names",
        labels_key=f"{labels}_labels",
        label_bytes=2,
        label_at=int(labels == "fine"),
        md5_binary="03b5dce01913d631647c71ecec9e9cb8",
    )
    return _load("cifar100", layout, [*homes(root, "cifar100", "cifar-100", "CIFAR100"), root], grey)


def _load(dataset: str, layout: Batches, places: list[Path], grey: bool) -> Arrays:
    versions = [
        (path, version)
        for place in places
        for version, folder in layout.folders.items()
        for path in (place / folder, place / f"{layout.stem}-{version}.tar.gz")
        if path.exists()
    ]
    if not versions:
        remote = Remote(f"{URL}{layout.stem}-binary.tar.gz", layout.md5_binary)
        fetch(dataset, places[0], [remote], f" (or {layout.stem}-python.tar.gz, or either unpacked)")
        versions = [(places[0] / remote.name, "binary")]
    path, version = versions[0]
    names = [*layout.train, layout.test]
    if version == "binary":
        files = _contents(path, [*(f"{name}.bin" for name in names), layout.classes_file])
        classes = files[layout.classes_file].decode().split("\n")
        classes = [name.strip() for name in classes if name.strip()]
        pieces = [_records(path, files, layout, name) for name in names]
    else:
        files = _contents(path, [*names, layout.meta])
        classes = _unpickle(path, files, layout.meta).get(layout.classes_key, [])
        classes = [name.decode() if isinstance(name, bytes) else str(name) for name in classes]
        pieces = [_pickled(path, files, layout, name) for name in names]
    if grey:
        pieces = [(luma(images), labels) for images, labels in pieces]
    images, labels = zip(*pieces, strict=True)
    parts = {"train": (np.concatenate(images[:-1]), np.concatenate(labels[:-1])), "test": pieces[-1]}
    for split, (_, found) in parts.items():
        if len(found) != EXPECTED[split]:
            raise ValueError(
                f"{path}: has {len(found):,} {split} images instead of {EXPECTED[split]:,}: "
                "delete it to download it again"
            )
        check_labels(path, found, len(classes))
    return stack(parts, classes)


def luma(images: np.ndarray) -> np.ndarray:
    """uint8 (n, 3, H, W) → (n, 1, H, W), as Pillow makes colour grey (ITU-R 601-2, in whole numbers)."""
    red, green, blue = (images[:, i : i + 1].astype(np.uint32) for i in range(3))
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000 >> 16).astype(np.uint8)


def _records(path: Path, files: Files, layout: Batches, name: str) -> tuple[np.ndarray, np.ndarray]:
    raw = np.frombuffer(files[f"{name}.bin"], np.uint8)
    length = layout.label_bytes + PIXELS
    if not len(raw) or len(raw) % length:
        raise ValueError(f"{path / name}.bin: is corrupt (not whole records of {length} bytes): get it again")
    records = raw.reshape(-1, length)
    return records[:, layout.label_bytes :].reshape(-1, 3, 32, 32), records[:, layout.label_at].astype(np.int64)


def _pickled(path: Path, files: Files, layout: Batches, name: str) -> tuple[np.ndarray, np.ndarray]:
    batch = _unpickle(path, files, name)
    pixels, labels = batch.get("data"), np.asarray(batch.get(layout.labels_key, []))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != (len(labels), PIXELS):
        raise ValueError(f"{path / name}: is not a {layout.stem} batch (no 'data' and '{layout.labels_key}' that fit)")
    return pixels.reshape(-1, 3, 32, 32), labels.astype(np.int64)


def _unpickle(path: Path, files: Files, name: str) -> dict[str, Any]:
    try:
        value = plain_pickle.loads(files[name])
        if not isinstance(value, dict):
            raise ValueError("it holds no dictionary")
    except ValueError as error:
        raise ValueError(f"{path / name}: was not read: {error}") from None
    return {key.decode("latin-1") if isinstance(key, bytes) else str(key): item for key, item in value.items()}


def _contents(path: Path, names: list[str]) -> Files:
    """These files of a folder, or members of a tar.gz; nothing is ever extracted to disk."""
    try:
        if path.is_dir():
            return {name: (path / name).read_bytes() for name in names}
    except OSError as error:
        raise ValueError(f"{error.filename}: cannot be read ({error.strerror}): get it again") from None
    members: Files = {}
    try:
        with tarfile.open(path, "r|gz") as archive:  # one pass: going back in a gzip means starting over
            for member in archive:
                name = Path(member.name).name
                stream = archive.extractfile(member) if name in names and member.size <= LARGEST else None
                if stream is not None:
                    members[name] = stream.read()
        if missing := [name for name in names if name not in members]:
            raise EOFError(f"it has no '{missing[0]}'")
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise ValueError(f"{path}: is corrupt ({error}): delete it to download it again") from None
    return members
