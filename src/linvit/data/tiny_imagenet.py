"""TinyImageNet: 64×64 colour in 200 classes (or a 100-class cut of it), in its original folder layout.

The official validation images are the test set; the official test images have no labels and are not read.
"""

from __future__ import annotations

import os
import shutil
import zipfile
import zlib
from pathlib import Path
from typing import Literal

from filelock import FileLock

from linvit.data.download import Remote, fetch, homes
from linvit.data.folder import from_files, images_under
from linvit.data.sources import DATASETS, Pictures

ARCHIVE = Remote("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de")
NAMES = ("tiny-imagenet-200", "tiny-imagenet-100")


@DATASETS.register("tiny-imagenet")
def tiny_imagenet(
    root: Path,
    *,
    part: Literal["all", "most", "fifth"] = "all",
    per_class: int | None = None,
    names: Literal["english", "wnid"] = "english",
) -> Pictures:
    """64 × 64 colour photos in 200 classes; part=fifth is every fifth class, part=most the others."""
    if per_class is not None and per_class < 1:
        raise ValueError(f"tiny-imagenet: per_class={per_class} must be at least 1")
    places = [place for base in (root, root / "tiny-imagenet") for place in homes(base, *NAMES)]
    folder = next((place for place in places if (place / "wnids.txt").exists()), None) or _unpacked(root)
    every = sorted((folder / "wnids.txt").read_text(encoding="utf-8").split())
    ids = every if part == "all" else [name for i, name in enumerate(every) if (i % 5 == 4) == (part == "fifth")]
    label = {name: i for i, name in enumerate(ids)}
    train = [(str(file), label[name]) for name in ids for file in _class_images(folder / "train" / name)[:per_class]]
    test = []
    notes = folder / "val" / "val_annotations.txt"
    try:
        for number, line in enumerate(notes.read_text(encoding="utf-8").splitlines(), 1):
            file, name, *_ = line.split("\t") + [""]
            if name not in every:
                raise ValueError(f"{notes}:{number}: class '{name}' is not in wnids.txt: unpack the set again")
            if name in label:
                test.append((str(folder / "val" / "images" / file), label[name]))
    except OSError as error:
        raise ValueError(f"{notes}: cannot be read ({error.strerror}): unpack the set again") from None
    classes = ids if names == "wnid" else _words(folder, ids)  # trained models mostly know the ids
    return from_files(folder, train + test, classes, {"train": len(train), "test": len(test)})


def _class_images(folder: Path) -> list[Path]:
    files = images_under(folder / "images") if (folder / "images").is_dir() else []
    if not files:
        raise ValueError(f"{folder / 'images'}: has no images: unpack the set again")
    return files


def _words(folder: Path, ids: list[str]) -> list[str]:
    """The first English name of each class; its id where there is none, or where two share one."""
    words = folder / "words.txt"
    lines = words.read_text(encoding="utf-8").splitlines() if words.exists() else []
    first = {key: name.split(",")[0] for key, _, name in (line.partition("\t") for line in lines)}
    names = [first.get(key, key) for key in ids]
    return [name if names.count(name) == 1 else key for key, name in zip(ids, names, strict=True)]


def _unpacked(root: Path) -> Path:
    """Fetch the archive if need be and unpack it next to itself, under a temporary name until it is whole."""
    fetch("tiny-imagenet", root, [ARCHIVE], f" (or the folder {NAMES[0]} or {NAMES[1]} it unpacks to)")
    archive, target, part = root / ARCHIVE.name, root / NAMES[0], root / f"{NAMES[0]}.part"
    with FileLock(root / f".{NAMES[0]}.lock"):
        if target.exists():
            return target
        shutil.rmtree(part, ignore_errors=True)
        try:
            with zipfile.ZipFile(archive) as file:
                file.extractall(part)
            if not (part / NAMES[0] / "wnids.txt").exists():
                raise ValueError(f"it has no {NAMES[0]}/wnids.txt")
            os.rename(part / NAMES[0], target)
        except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{archive}: cannot be unpacked ({error}): delete it to download it again") from None
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target
