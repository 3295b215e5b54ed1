"""Decode a set once; map it into memory ever after.

An entry is a folder `<key>/` with `images.u8`, `labels.npy` and `meta.json`. It is written as `<key>.part/`, synced and
renamed, under a lock that dies with its process: a reader sees all of it or nothing, a second process waits for the
first, and what a killed one left behind is removed by the next. Pixels are written in order as they are decoded, so
memory stays bounded however large the set is.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from filelock import FileLock

from linvit.data.decode import SMALLEST, BadImage, Header, Source, read_header, read_image
from linvit.data.sources import SPLITS, Pictures
from linvit.files import parse_json, sync_folder, write_atomically
from linvit.progress import Progress
from linvit.schemas.experiment import Resize
from linvit.schemas.pixels import ImageSize, join_sides, sides

VERSION = 2  # of what is stored; raise it when decoding changes
LARGEST = 224  # side, if none is asked for: a photo's own would be tens of thousands of tokens
CHUNK = 64  # images per task: large enough to hide the hand-over, small enough to hold many
SMALLER = "choose a smaller image_size or another cache"
Picture = tuple[str, Source]
T = TypeVar("T")


class Wanted(NamedTuple):
    """How images are to be decoded."""

    image_size: ImageSize | None
    multiple_of: int
    channels: int | None
    skip_bad: bool
    resize: Resize = "crop"

    def size_for(self, sizes: Iterable[tuple[int, int]]) -> ImageSize:
        """That asked for, or the side that all share; else the median side (of a crop, the shorter ones), rounded to a
        multiple; photos are made small."""
        if self.image_size:
            return self.image_size
        every = np.array(list(sizes))
        every = every.min(1) if self.resize == "crop" else every.ravel()
        if (every == every[0]).all() and every[0] <= LARGEST:
            return int(every[0])
        side = min(float(np.median(every)), LARGEST)
        return max(round(side / self.multiple_of), -(-SMALLEST // self.multiple_of)) * self.multiple_of

    def shape_for(self, headers: Counter[Header]) -> tuple[int, int, int]:
        """(channels, height, width)"""
        size = self.size_for((header.width, header.height) for header in headers.elements())
        return self.channels or (3 if any(header.colour for header in headers) else 1), *sides(size)


@dataclass(frozen=True)
class Pixels:
    """All images of a set, in the order of its splits."""

    images: Any  # uint8 (n, C, H, W): an array, or what reads like one
    labels: np.ndarray  # int64 (n,)
    counts: Mapping[str, int]
    digest: str
    skipped: int = 0


def cache_root(cache: str | Path | None) -> Path:
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linvit"
    return Path(cache or os.environ.get("LINVIT_CACHE") or usual).expanduser()


def digest(images: np.ndarray, labels: np.ndarray) -> str:
    """Of the pixels, not of the files: the same images give the same experiment on every machine."""
    sha = hashlib.sha256()
    for start in range(0, len(images), 1024):
        sha.update(np.ascontiguousarray(images[start : start + 1024]).data)
    return seal(sha, images.shape, labels)


def seal(sha: Any, shape: tuple[int, ...], labels: np.ndarray) -> str:
    sha.update(np.ascontiguousarray(labels, np.int64).data)
    sha.update(repr(tuple(map(int, shape))).encode())
    return sha.hexdigest()


def decoded(pictures: Pictures, where: str, folder: Path, wanted: Wanted, progress: Progress) -> Pixels:
    """The pixels of a set, from the cache or decoded into it."""
    key = cache_key(pictures, wanted)
    entry, part = folder / key, folder / f"{key}.part"
    if not entry.exists():
        with FileLock(folder / f"{key}.lock"):
            if not entry.exists():
                shutil.rmtree(part, ignore_errors=True)  # left by a killed process: the lock is ours
                part.mkdir()
                try:
                    with warnings.catch_warnings():  # Pillow warns about odd metadata; the pixels are what counts
                        warnings.simplefilter("ignore")
                        _write(part, pictures, where, wanted, progress)
                    os.rename(part, entry)
                    sync_folder(folder)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    return _read(entry)


def cache_key(pictures: Pictures, wanted: Wanted) -> str:
    size, multiple_of, channels, skip_bad, resize = wanted
    made_by = (VERSION, pictures.fingerprint, size, multiple_of if size is None else 1, channels, skip_bad, resize)
    return hashlib.sha256(repr(made_by).encode()).hexdigest()[:24]


def _read(entry: Path) -> Pixels:
    try:
        meta = parse_json((entry / "meta.json").read_text(encoding="utf-8"))
        images = np.memmap(entry / "images.u8", np.uint8, "r", shape=tuple(meta["shape"]))
        labels = np.load(entry / "labels.npy", allow_pickle=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{entry}: this cache entry is damaged ({error}): delete it and run again") from None
    return Pixels(images, labels, meta["counts"], meta["digest"], meta["skipped"])


def _write(part: Path, pictures: Pictures, where: str, wanted: Wanted, progress: Progress) -> None:
    total = len(pictures.labels)
    if wanted.image_size:  # before any file is opened; the number of channels may follow from the files
        least = wanted.channels or 1, *sides(wanted.image_size)
        check_space(f"{where}: decoded at {least[1]} × {least[2]} it", part, total * math.prod(least), SMALLER)

    headers: Counter[Header] = Counter()
    for chunk in ordered_map(attempt(read_header, wanted.skip_bad), chunks(pictures.read())):
        headers.update(header for header in chunk if header is not None)
    if not headers:
        raise ValueError(f"{where}: none of its {total} images can be read")
    depth, height, width = wanted.shape_for(headers)
    check_space(f"{where}: decoded at {height} × {width} it", part, total * depth * height * width, SMALLER)

    sha, kept, done = hashlib.sha256(), [], 0
    with open(part / "images.u8", "wb") as file:
        size = join_sides(height, width)
        decode = attempt(lambda name, source: read_image(source, size, depth, name, wanted.resize), wanted.skip_bad)
        for chunk in ordered_map(decode, chunks(pictures.read())):
            for row, pixels in enumerate(chunk, done):
                if pixels is not None:
                    raw = pixels.tobytes()
                    file.write(raw)
                    sha.update(raw)
                    kept.append(row)
            done += len(chunk)
            progress(done, total, "decoding images")
        file.flush()
        os.fsync(file.fileno())
    if not kept:
        raise ValueError(f"{where}: none of its {total} images can be read")
    shape, labels, buffer = (len(kept), depth, height, width), pictures.labels[kept], io.BytesIO()
    np.save(buffer, labels)
    write_atomically(part / "labels.npy", buffer.getvalue())
    meta = {"shape": shape, "counts": counts_of(pictures, kept), "skipped": total - len(kept)}
    write_atomically(part / "meta.json", json.dumps(meta | {"digest": seal(sha, shape, labels)}))


class NoSpace(ValueError):
    """The disk is too small."""


def check_space(what: str, folder: Path, needed: int, hint: str) -> None:
    free = shutil.disk_usage(folder).free
    if needed > 0.9 * free:
        size, left = needed / 1e9, free / 1e9
        raise NoSpace(f"{what} takes {size:.1f} GB, but {folder.parent} has {left:.1f} GB free: {hint}")


def counts_of(pictures: Pictures, rows: Sequence[int]) -> dict[str, int]:
    """How many of these rows each split has."""
    split = np.repeat(SPLITS, [pictures.counts.get(name, 0) for name in SPLITS])[rows].tolist()
    return {name: split.count(name) for name in pictures.counts}


def attempt(work: Callable[[str, Source], T], skip: bool) -> Callable[[list[Picture]], list[T | None]]:
    """`work` on a chunk; with `skip` an unreadable image gives None."""

    def one(picture: Picture) -> T | None:
        try:
            return work(*picture)
        except BadImage:
            if not skip:
                raise
            return None

    return lambda chunk: [one(picture) for picture in chunk]


def chunks(items: Iterable[T], size: int | None = None) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size or CHUNK)):
        yield chunk


def ordered_map(work: Callable[[Any], T], items: Iterable[Any], workers: int | None = None) -> Iterator[T]:
    """Like `map`, on threads (Pillow decodes without the GIL) and with only a few results waiting."""
    workers = workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            yield from (future.result() for future in waiting)
        finally:
            pool.shutdown(cancel_futures=True)
