"""A folder of images: `class/image`, or the same under `train/`, `val/` and `test/`."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from linvit.data import parquet
from linvit.data.decode import SUFFIXES
from linvit.data.sources import FORMATS, SPLITS, Arrays, Pictures

SPLIT_NAMES = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}
LAYOUT = "put images as class/image.png, or as train/class/image.png, val/… and test/…"


@FORMATS.register("folder")
def folder(path: Path) -> Arrays | Pictures:
    if shards := parquet.shards(path):
        return parquet.pictures(path, shards)
    inside = _subfolders(path)
    splits = {"train": path}
    if "train" in inside and set(inside) <= set(SPLIT_NAMES) and _subfolders(inside["train"]):
        splits = {SPLIT_NAMES[name]: sub for name, sub in inside.items()}
    classes = sorted(_subfolders(splits["train"]))
    if not classes:
        loose = any(entry.suffix.lower() in SUFFIXES for entry in splits["train"].iterdir())
        raise ValueError(f"{splits['train']}: has {'images but no class folders' if loose else 'no images'}: {LAYOUT}")
    files = {name: _labelled(splits[name], classes) for name in SPLITS if name in splits}
    if empty := sorted(set(range(len(classes))) - {label for _, label in files["train"]}):
        raise ValueError(f"{splits['train'] / classes[empty[0]]}: has no images: add some or remove the folder")
    counts = {name: len(pairs) for name, pairs in files.items() if pairs}
    return from_files(path, [pair for pairs in files.values() for pair in pairs], classes, counts)


def from_files(path: Path, files: Sequence[tuple[str, int]], classes: list[str], counts: dict[str, int]) -> Pictures:
    """Pictures from (file below the path, label) pairs in the order of the splits."""
    sha, start = hashlib.sha256(repr((sorted(counts.items()), classes)).encode()), len(str(path / "x")) - 1
    for name, label in files:
        try:
            status = os.stat(name)
            state = f"{status.st_size}\0{status.st_mtime_ns}"
        except OSError:  # a broken link: decoding says so, or skips it
            state = "unreadable"
        sha.update(f"{name[start:]}\0{label}\0{state}\n".encode())
    labels = np.array([label for _, label in files], np.int64)

    def read(rows: Iterable[int] = range(len(files))) -> Iterator[tuple[str, Path]]:
        return ((files[row][0], Path(files[row][0])) for row in rows)

    return Pictures(read, labels, classes, counts, sha.hexdigest(), files=True)


def images_under(folder: Path, above: tuple[str, ...] = ()) -> list[Path]:
    """Every image below a folder, in a fixed order; links are followed, and one that leads in a circle is refused."""
    real = os.path.realpath(folder)
    if real in above:
        raise ValueError(f"{folder}: this link leads back to a folder it lies in ({real}): remove it")
    images: list[Path] = []
    for entry in _shown(folder):
        if _is_folder(entry):
            images += images_under(entry, (*above, real))
        elif entry.suffix.lower() in SUFFIXES:
            images.append(entry)
    return sorted(images)


def find_images(paths: Sequence[str | Path]) -> list[Path]:
    """The files among these paths, and every image below the folders among them."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = images_under(path)
            if not inside:
                raise ValueError(f"{path}: there are no images in this folder")
            found += inside
        elif not path.exists():
            raise ValueError(f"{path}: there is no such file or folder: check the path")
        else:
            found.append(path)
    return found


def _labelled(folder: Path, classes: list[str]) -> list[tuple[str, int]]:
    """Names rather than paths: there may be a million, and a path takes ten times the memory."""
    subfolders = _subfolders(folder)
    if strange := sorted(set(subfolders) - set(classes)):
        raise ValueError(
            f"{folder / strange[0]}: this class is not among the training classes: add it there or remove it"
        )
    pairs: list[tuple[str, int]] = []
    for label, name in enumerate(classes):
        pairs += [(str(file), label) for file in images_under(subfolders[name])] if name in subfolders else []
    return pairs


def _subfolders(folder: Path) -> dict[str, Path]:
    return {entry.name: entry for entry in _shown(folder) if _is_folder(entry)}


def _shown(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.name != "__MACOSX"]


def _is_folder(path: Path) -> bool:
    try:
        return os.path.isdir(path) or (path.suffix.lower() not in SUFFIXES and stat.S_ISDIR(path.stat().st_mode))
    except OSError as error:
        raise ValueError(f"{path}: cannot be followed ({error.strerror}): repair or remove the link") from None
