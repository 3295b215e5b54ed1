"""How many images there are, and how large, before any is decoded: what a plan is made from."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from linvit.data import splits
from linvit.data.cache import cache_root
from linvit.data.dataset import Dataset, Listing, read_source
from linvit.data.decode import BadImage, Source, read_header, read_image
from linvit.data.sources import SPLITS, Arrays, Pictures
from linvit.data.splits import Fold
from linvit.machine import cpu_count
from linvit.schemas.pixels import ImageSize, sides

SAMPLE, AMONG = 256, 8192  # headers that are read, evenly among the first images
DECODED = 8  # images that are decoded to tell how long all will take


@dataclass(frozen=True)
class Survey:
    name: str
    classes: int
    channels: int
    side: int  # the shorter one of a typical image
    train: int
    validation: int
    test: int
    several: bool = False  # labels of each image
    size: ImageSize | None = None  # of images that are decoded already
    listing: Listing | None = field(default=None, compare=False, repr=False)  # so that nothing is listed twice

    @classmethod
    def of(cls, data: Dataset) -> Survey:
        train, validation, test = (len(getattr(data, part)) for part in SPLITS)
        side, size = min(sides(data.image_size)), data.image_size
        return cls(data.name, len(data.classes), data.channels, side, train, validation, test, data.several, size)

    @property
    def total(self) -> int:
        return self.train + self.validation + self.test

    def limited(self, limit: int | None) -> Survey:
        """With at most this many images in each split."""
        most = self.total if limit is None else limit
        return replace(self, **{part: min(most, getattr(self, part)) for part in SPLITS})


def decoding_seconds(images: Survey, size: ImageSize) -> float:
    """How long decoding one of the images takes on this machine, from the first few, with all CPUs at work; 0 for those
    that are decoded."""
    found = images.listing[1] if images.listing else None
    if found is None or isinstance(found, Arrays):
        return 0.0
    start, count = time.perf_counter(), 0
    for name, where in _sampled(found, DECODED, 1):
        with suppress(BadImage):
            read_image(where, size, images.channels, name)
        count += 1
    return (time.perf_counter() - start) / max(1, count) / cpu_count()


def _sampled(found: Pictures, stop: int, step: int) -> Iterable[tuple[str, Source]]:
    """Every `step`-th of the first images; only files can be read without those in between."""
    rows = range(0, min(stop, len(found.labels)), step)
    return found.read(rows) if found.files else islice(found.read(), 0, stop, step)


def survey(
    source: str | Path,
    root: str | Path | None = None,
    limit: int | None = None,
    cache: str | Path | None = None,
    folds: int | None = None,
    spare_test: bool = False,
) -> Survey:
    """Of what `load_data` would load, or of one of its folds; what is wrong with the images is left for it to say."""
    name, found = read_source(source, root, cache_root(cache))
    splits.check(str(source), found.labels, found.counts, list(found.classes), 0.1, limit)
    if isinstance(found, Arrays):
        channels, side = found.images.shape[1], min(found.images.shape[2:])
    else:
        among = min(AMONG, len(found.labels))
        headers = []
        for picture in _sampled(found, among, max(1, among // SAMPLE)):
            try:
                headers.append(read_header(*picture))
            except BadImage:
                continue
        if not headers:
            raise ValueError(f"{source}: none of the {SAMPLE} sampled images can be read")
        channels = 3 if any(header.colour for header in headers) else 1
        side = int(np.median([min(header.width, header.height) for header in headers]))
    rows = splits.choose(found.labels, found.counts, validation=0.1, seed=0, limit=limit)
    if folds is not None:
        parts = ["train", "validation", *([] if "test" in found.counts or spare_test else ["test"])]
        pool = np.concatenate([rows[part] for part in parts])
        rows = splits.fold(found.labels[pool], found.classes, Fold(0, folds))
    counts = {part: len(rows[part]) for part in SPLITS}
    multiple = found.labels.ndim == 2
    return Survey(name, len(found.classes), channels, side, **counts, several=multiple, listing=(name, found))
