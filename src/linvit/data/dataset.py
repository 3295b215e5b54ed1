"""`load_data`: a name or a path → a Dataset with its splits, statistics and identity."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F

from linvit.data import splits
from linvit.data.augment import Augment
from linvit.data.cache import Pixels, Wanted, cache_root, decoded, digest
from linvit.data.decode import LARGEST, SMALLEST, resized
from linvit.data.ondemand import OnDemand, on_demand
from linvit.data.remote import is_remote, local
from linvit.data.sources import DATASETS, FORMATS, SPLITS, Arrays, Pictures, check_memory
from linvit.data.splits import Fold
from linvit.errors import choices
from linvit.files import parse_json, slug, write_atomically
from linvit.progress import Progress, ignore
from linvit.randomness import permutation
from linvit.registry import check_options, parse, signature_options
from linvit.schemas.experiment import Resize
from linvit.schemas.pixels import ImageSize, check_sides, join_sides, parse_size, sides

CHUNK = 1024  # images looked at together
SAMPLE = 256  # training images that have the statistics of those that are decoded when they are read
ALIKE, CONTRAST = 16, 10  # grey values, of 256: the most that thumbnails of one picture differ by; their spread

Listing = tuple[str, Arrays | Pictures]  # the name of a data set, and what its reader found


@dataclass(frozen=True)
class Split:
    """A part of a data set's images. They are copied batch by batch, so a memory-mapped set stays on disk."""

    store: Any = field(repr=False)  # uint8 (N, C, H, W): all images of the set; an array, or `OnDemand`
    rows: np.ndarray = field(repr=False)  # int64 (n,): which of them are ours
    labels: np.ndarray = field(repr=False)  # int64 (n,), or uint8 (n, classes) where images have several

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def images(self) -> np.ndarray:
        """uint8 (n, C, H, W): a copy of all of them. For a few, or a large set, use `batch`."""
        return np.asarray(self.store[self.rows])

    def batch(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(uint8 (B, C, H, W), int64 (B,), or (B, classes) of several labels) for positions in this split: an array,
        tensor, list or slice."""
        chosen = indices if isinstance(indices, slice) else np.asarray(indices)
        images = np.ascontiguousarray(self.store[self.rows[chosen]])
        return torch.from_numpy(images), torch.from_numpy(self.labels[chosen].astype(np.int64))

    def some(self, places: np.ndarray) -> Split:
        """These of its images, as a split."""
        return Split(self.store, self.rows[places], self.labels[places])

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """The positions of this split, shuffled: a pure function of (seed, epoch), the same on every machine."""
        return permutation(len(self), "order", seed, epoch)


@dataclass(frozen=True)
class Dataset:
    name: str
    classes: list[str]
    train: Split
    validation: Split
    test: Split
    mean: tuple[float, ...]  # per channel over the training images, as fractions of white
    std: tuple[float, ...]
    identity: str  # of pixels, labels, class names and splits: equal identities are equal data
    skipped: int = 0  # unreadable images left out
    own_test: bool = True  # test images are the data set's own, not taken from train
    resize: Resize = "crop"  # how images got their shape

    @property
    def channels(self) -> int:
        return self.train.store.shape[1]

    @property
    def image_size(self) -> ImageSize:
        return join_sides(*self.train.store.shape[2:])

    @property
    def several(self) -> bool:
        """Whether images have several labels each, or none."""
        return self.train.labels.ndim == 2

    def augment(self, **options: Any) -> Augment:
        """Augmentation with this data set's statistics and classes."""
        return Augment(mean=self.mean, std=self.std, classes=len(self.classes), **options)


def repeats(dataset: Dataset, progress: Progress = ignore) -> int:
    """How many test images have exactly the pixels of a training or validation image: a model may know them by heart,
    whatever their label."""
    known = {_hash(image) for chunk in _chunks(dataset, ("train", "validation"), progress) for image in chunk}
    return sum(_hash(image) in known for chunk in _chunks(dataset, ("test",), progress) for image in chunk)


def alike(dataset: Dataset, progress: Progress = ignore) -> int:
    """How many test images show the same picture as a training or validation image: those of `repeats`, and those
    that were encoded anew, or mirrored.

    Thumbnails of 16 × 16 grey values then hardly differ anywhere. Flat ones do not tell, and are passed over. On images
    that a fixed camera took, many pictures of different things are alike.
    """
    from scipy.spatial import KDTree

    def thumbnails(*parts: str) -> torch.Tensor:
        """uint8 (n, 16, 16)"""
        found = [_thumbnails(torch.from_numpy(chunk)) for chunk in _chunks(dataset, parts, progress)]
        return torch.cat(found)

    def coarse(thumbnails: torch.Tensor) -> np.ndarray:
        """(n, 16): few enough numbers for a tree, in which candidates are found."""
        return thumbnails.float().view(len(thumbnails), 4, 4, 4, 4).mean((2, 4)).flatten(1).numpy()

    known, mine = thumbnails("train", "validation"), thumbnails("test")
    mine = mine[mine.float().std((1, 2)) > CONTRAST]
    tree, found = KDTree(coarse(known)), torch.zeros(len(mine), dtype=torch.bool)
    for view in (mine, mine.flip(2)):
        distance, nearest = tree.query(coarse(view), p=np.inf, distance_upper_bound=ALIKE / 2)
        near = np.flatnonzero(np.isfinite(distance))
        found[near] |= (view[near].short() - known[np.asarray(nearest)[near]].short()).abs().amax((1, 2)) <= ALIKE
    return int(found.sum())


def _chunks(dataset: Dataset, parts: Sequence[str], progress: Progress) -> Iterator[np.ndarray]:
    """The images of these splits in the order they are stored in, a few at a time: what lies on disk stays there."""
    for part in parts:
        split: Split = getattr(dataset, part)
        rows = np.sort(split.rows)
        for start in range(0, len(rows), CHUNK):
            progress(start, len(rows), f"looking for repeated images: {part}")
            yield np.asarray(split.store[rows[start : start + CHUNK]])


def _hash(image: np.ndarray) -> bytes:
    return hashlib.blake2b(image.tobytes(), digest_size=16).digest()


def _thumbnails(images: torch.Tensor) -> torch.Tensor:
    return F.adaptive_avg_pool2d(images.float().mean(1), 16).round().to(torch.uint8)


def load_data(
    source: str | Path = "digits",
    *,
    root: str | Path | None = None,
    image_size: int | str | tuple[int, int] | None = None,
    multiple_of: int = 1,
    channels: int | None = None,
    validation: float = 0.1,
    seed: int = 0,
    limit: int | None = None,
    skip_bad: bool = False,
    resize: Resize = "crop",
    cache: str | Path | None = None,
    split_file: str | Path | None = None,
    listing: Listing | None = None,
    cached: bool = True,
    progress: Progress = ignore,
) -> Dataset:
    """A registered name (with options: `cifar100:labels=coarse`) or the path of a folder, `.npz`, `.parquet`, `.csv` or
    `.tsv`, or an address that fsspec reads (s3://…).

    root: folder of the named sets' files (default: LINVIT_DATA, else the cache).
    image_size: the side of a square, or (height, width); by default the set's own side, for mixed sizes the median
        rounded to `multiple_of`. resize: of an image of another shape take the centre (crop), or all of it (squeeze).
    channels: 1 or 3; by default 3 if any image has colour.
    validation: the fraction of train held out, stratified, unless the set brings its own; chosen by `seed` and
        stored in `split_file` (default: in the cache).
    limit: maximum number of images in each split; no others are decoded.
    skip_bad: skip unreadable images and count them.
    listing: the result of an earlier `read_source`.
    cached: decode all images now, into the cache. Otherwise images in files of their own are decoded whenever they are
        read, and not stored; the first time, all files are read for a checksum. mean and std are those of 256 images.
    progress(done, total, what) is called while images are decoded or checked.
    """
    for right, message in (
        (1 <= multiple_of <= LARGEST, f"multiple_of={multiple_of} must be between 1 and {LARGEST}"),
        (channels in (None, 1, 3), f"channels={channels} must be 1 (grey) or 3 (colour)"),
        (0 <= validation < 1, f"validation={validation} must be a fraction of the training images, e.g. 0.1"),
        (limit is None or limit >= 1, f"limit={limit} must be at least 1"),
        (resize in get_args(Resize), f"resize={resize} must be crop or squeeze"),
    ):
        if not right:
            raise ValueError(message)
    size = None if image_size is None else parse_size(image_size)
    if size is not None:
        check_sides(size)
    store = cache_root(cache)
    name, found = listing or read_source(source, root, store)
    where = name if isinstance(source, str) and name in DATASETS else str(source)
    classes = list(found.classes)
    wanted = Wanted(size, multiple_of, channels, skip_bad, resize)
    splits.check(where, found.labels, found.counts, classes, validation, limit)
    own_test = "test" in found.counts
    try:
        if isinstance(found, Arrays):
            pixels = _fitted(found, where, wanted)
        else:
            if limit is not None:
                rows = splits.choose(found.labels, found.counts, validation=validation, seed=seed, limit=limit)
                found = found.some(rows)
            read = on_demand if found.files and not cached else decoded
            pixels = read(found, where, store / "decoded", wanted, progress)
        splits.check(where, pixels.labels, pixels.counts, classes, validation, limit)  # some may have been skipped
        key = hashlib.sha256(repr((pixels.digest, validation, seed, limit)).encode()).hexdigest()[:16]
        file_name = slug(name) + f"-{key}.json"
        path = Path(split_file) if split_file else store / "splits" / file_name
        stored = _splits(path, split_file is not None, pixels, validation, seed, limit)
    except OSError as error:
        place = error.filename or store
        raise ValueError(f"{place}: {error.strerror}: choose another cache (LINVIT_CACHE) or make room") from None
    rows = [np.array(stored[part], np.int64) for part in SPLITS]
    identity = hashlib.sha256(json.dumps([pixels.digest, classes]).encode())
    for part in rows:
        identity.update(len(part).to_bytes(8, "little") + part.tobytes())
    return Dataset(
        name,
        classes,
        *(Split(pixels.images, part, pixels.labels[part]) for part in rows),
        mean=tuple(stored["mean"]),
        std=tuple(stored["std"]),
        identity=identity.hexdigest()[:32],
        skipped=pixels.skipped,
        own_test=own_test,
        resize=resize,
    )


def folded(data: Dataset, which: Fold) -> Dataset:
    """The same images with one fold held out as test; statistics and validation are of the others. All images are dealt
    out, but for test images of the set's own, or all if they are to be spared: those are left alone."""
    parts = [data.train, data.validation, *([] if data.own_test or which.spare_test else [data.test])]
    store, rows = data.train.store, np.concatenate([part.rows for part in parts])
    if any(part.store is not store for part in parts):
        raise ValueError(f"folds of {data.name} need all its images in one array")
    order = np.argsort(rows, kind="stable")  # whichever of them a seed had chosen to validate
    pool = Split(store, rows[order], np.concatenate([part.labels for part in parts])[order])
    found = {part: pool.some(places) for part, places in splits.fold(pool.labels, data.classes, which).items()}
    mean, std = _statistics(store, found["train"].rows)
    identity = hashlib.sha256(data.identity.encode())
    for part in found.values():
        identity.update(len(part).to_bytes(8, "little") + part.rows.tobytes())
    return replace(data, **found, mean=tuple(mean), std=tuple(std), identity=identity.hexdigest()[:32])


def folder_of(source: Any) -> Path | None:
    """Of a folder of images; None for a name, a file, or images that were loaded."""
    named = isinstance(source, str) and source.partition(":")[0] in DATASETS
    path = Path(source) if isinstance(source, str | Path) and not named else None
    return path if path is not None and path.is_dir() else None


def read_source(source: str | Path, root: str | Path | None, store: Path) -> Listing:
    """Registered names win over files of the same name; write ./digits for a folder called digits."""
    if isinstance(source, str) and source.partition(":")[0] in DATASETS:
        spec = parse(source)
        name, reader = str(spec), DATASETS[spec.name]
        place = Path(root or os.environ.get("LINVIT_DATA") or store / "data").expanduser()
        options = check_options(spec, signature_options(reader))
    else:
        place, options = local(source, store) if is_remote(source) else Path(source).expanduser(), {}  # type: ignore[arg-type]
        reader, name = _format(place), place.resolve().name
        if is_remote(source) and "address" in signature_options(reader):
            options["address"] = source  # a table's paths are relative to it
    try:
        return name, reader(place, **options)
    except OSError as error:  # readers explain what they expect to go wrong; this is a folder that may not be listed
        raise ValueError(f"{error.filename}: cannot be read ({error.strerror}): check its permissions") from None


def _format(path: Path) -> Callable[..., Arrays | Pictures]:
    """The reader of this kind of file."""
    try:
        path.stat()
    except OSError as error:
        if path.is_symlink():
            raise ValueError(f"{path}: cannot be followed ({error.strerror}): repair or remove the link") from None
        if len(path.parts) > 1 or path.suffix:
            raise ValueError(f"{path}: there is no such file or folder: check the path") from None
        text = str(path)
        raise ValueError(f"unknown data set '{text}'" + choices(text, DATASETS.names()) + ", or a path") from None
    kind = "folder" if path.is_dir() else path.suffix.lower()
    if kind not in FORMATS:
        raise ValueError(f"{path}: is no known kind of data file" + choices(kind, FORMATS.names()))
    return FORMATS[kind]


def _fitted(arrays: Arrays, where: str, wanted: Wanted) -> Pixels:
    """Arrays in the wanted size and number of channels."""
    images = arrays.images
    _, depth, height, width = images.shape
    if min(height, width) < SMALLEST:
        raise ValueError(f"{where}: images are {width} × {height} pixels, under the smallest side of {SMALLEST}")
    size, channels = wanted.size_for([(width, height)]), wanted.channels or depth
    shape = channels, *sides(size)
    if (depth, height, width) != shape:
        check_memory(f"{where} at {shape[1]} × {shape[2]}", len(images) * math.prod(shape))
        images = resized(images, size, channels, wanted.resize)
    return Pixels(images, arrays.labels, arrays.counts, digest(images, arrays.labels))


def _splits(
    path: Path, strict: bool, pixels: Pixels, validation: float, seed: int, limit: int | None
) -> dict[str, Any]:
    """Rows, mean and std, from the index file or chosen and stored there. A caller's own file (`strict`) for other data
    is an error, never overwritten."""
    made_by = {"content": pixels.digest, "validation_fraction": validation, "seed": seed, "limit": limit}
    if path.exists():
        try:
            stored = parse_json(path.read_text(encoding="utf-8"))
            if all(stored[key] == value for key, value in made_by.items()):
                return stored
            why = "was made for other data, another seed, limit or validation fraction"
        except (ValueError, KeyError, TypeError):
            why = "is not a split file"
        if strict:
            raise ValueError(f"{path}: {why}: delete it or name another split_file")
    rows = splits.choose(pixels.labels, pixels.counts, validation=validation, seed=seed, limit=limit)
    mean, std = _statistics(pixels.images, rows["train"])
    stored = made_by | {"mean": mean, "std": std} | {name: part.tolist() for name, part in rows.items()}
    write_atomically(path, json.dumps(stored))
    return stored


def _statistics(images: Any, rows: np.ndarray) -> tuple[list[float], list[float]]:
    """Per-channel mean and standard deviation in whole numbers, so that they are the same to the last bit anywhere."""
    if isinstance(images, OnDemand):
        rows = rows[:: -(-len(rows) // SAMPLE) or 1]
    total, squares = np.zeros((2, images.shape[1]), np.int64)
    for start in range(0, len(rows), 256):
        chunk = images[rows[start : start + 256]]
        total += chunk.sum(axis=(0, 2, 3), dtype=np.int64)
        squares += np.square(chunk, dtype=np.uint16).sum(axis=(0, 2, 3), dtype=np.int64)
    n = len(rows) * images.shape[2] * images.shape[3]
    mean = total / n
    std = np.sqrt(np.maximum(squares / n - mean**2, 0))
    return (mean / 255).tolist(), np.where(std > 0, std / 255, 1.0).tolist()
