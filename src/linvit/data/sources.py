"""What a reader hands over: images as pixels (`Arrays`) or still in their files (`Pictures`).

Both list train first, then validation, then test; `counts` says how many of each. A set without its own test or
validation images has no such entry, and `dataset.load_data` takes them from train.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linvit.data.decode import Source
from linvit.machine import MEMORY
from linvit.registry import Registry

MAX_CLASSES = 100_000
SPLITS = ("train", "validation", "test")

# name → function(root, *, options) and file suffix (or "folder") → function(path)
DATASETS: Registry[Callable[..., Arrays | Pictures]] = Registry("data set", "linvit.data")
FORMATS: Registry[Callable[[Path], Arrays | Pictures]] = Registry("data format", "linvit.data")


@dataclass(frozen=True)
class Arrays:
    """Decoded images, all of one size."""

    images: np.ndarray  # uint8 (n, C, H, W)
    labels: np.ndarray  # int64 (n,), or uint8 (n, classes): 1 for each class that an image has
    classes: Sequence[str]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Pictures:
    """Encoded images, which are decoded into the cache or when they are read."""

    # of all rows, or of those given: what to call an image in a message, and where it is or why it cannot be read
    read: Callable[..., Iterable[tuple[str, Source]]]
    labels: np.ndarray  # as of Arrays
    classes: Sequence[str]
    counts: Mapping[str, int]
    fingerprint: str  # changes when the files do
    files: bool = False  # each image is a file of its own, so that a few are read as fast as they would be in order

    def some(self, rows: Mapping[str, np.ndarray]) -> Pictures:
        """These rows of each split alone."""
        chosen = np.concatenate([rows[name] for name in SPLITS])
        digest = hashlib.sha256(self.fingerprint.encode() + chosen.astype(np.int64).tobytes()).hexdigest()
        counts = {name: len(rows[name]) for name in SPLITS}

        def read(places: Sequence[int] = range(len(chosen))) -> Iterable[tuple[str, Source]]:
            return self.read(chosen[np.asarray(places, np.int64)])

        return Pictures(read, self.labels[chosen], self.classes, counts, digest, self.files)


def stack(parts: Mapping[str, tuple[np.ndarray, np.ndarray]], classes: Sequence[str]) -> Arrays:
    """Arrays from (images, labels) for each split."""
    names = [name for name in SPLITS if name in parts]
    images = np.concatenate([parts[name][0] for name in names])
    labels = np.concatenate([parts[name][1] for name in names]).astype(np.int64)
    return Arrays(images, labels, classes, {name: len(parts[name][1]) for name in names})


def several(where: object, sets: Sequence[Sequence[str]]) -> tuple[np.ndarray, list[str]]:
    """Labels of images that have several each, and the names of the classes."""
    classes = sorted({name for names in sets for name in names})
    check_memory(f"{where}: a table of {len(sets):,} images × {len(classes):,} classes", len(sets) * len(classes))
    index, labels = {name: i for i, name in enumerate(classes)}, np.zeros((len(sets), len(classes)), np.uint8)
    for row, names in enumerate(sets):
        labels[row, [index[name] for name in names]] = 1
    return labels, classes


def check_memory(what: str, size: int) -> None:
    """Refuse what would take more than half of the machine's memory."""
    if size > MEMORY / 2:
        raise ValueError(f"{what} takes {size // 10**9:,} GB, more than half of this machine's {MEMORY // 10**9:,} GB")


def numbered_classes(where: object, labels: np.ndarray) -> list[str]:
    """The names of classes that only have numbers: from 0 to the largest."""
    if (largest := int(labels.max(initial=0))) >= MAX_CLASSES:
        raise ValueError(f"{where}: label {largest} is more than {MAX_CLASSES - 1:,}: number the classes from 0")
    return [str(i) for i in range(largest + 1)]


def check_labels(where: object, labels: np.ndarray, classes: int) -> None:
    """Labels must be 0 … classes−1; anything else would train silently on nonsense."""
    if labels.ndim == 2:
        return
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"{where}: label {labels[row]} of image {row} is out of range: "
            f"labels must be 0 to {classes - 1} for {classes} classes"
        )
