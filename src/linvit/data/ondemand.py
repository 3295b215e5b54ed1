"""Images that are decoded when they are read, for commands that read few of a large set, and those once or twice."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from filelock import FileLock

from linvit.data.cache import VERSION, Pixels, Wanted, attempt, cache_key, chunks, counts_of, ordered_map, seal
from linvit.data.decode import SMALLEST, BadImage, Header, Source, read_header, read_image
from linvit.data.sources import Pictures
from linvit.files import write_atomically
from linvit.progress import Progress
from linvit.schemas.experiment import Resize
from linvit.schemas.pixels import join_sides

KEPT_BYTES = 512 * 2**20  # of decoded images that stay in memory: a search reads the same few hundred many times


class OnDemand:
    """Reads like a uint8 array (n, C, H, W) whose first axis is indexed by integers, arrays and slices."""

    dtype = np.dtype(np.uint8)

    def __init__(self, pictures: Pictures, rows: np.ndarray, shape: tuple[int, ...], resize: Resize):
        """rows: the readable ones of the pictures."""
        self.pictures, self.rows, self.shape = pictures, rows, shape
        self.resize: Resize = resize
        self._kept, self._lock = dict[int, np.ndarray](), Lock()
        self._most = max(1, KEPT_BYTES // int(np.prod(shape[1:])))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        rows = np.arange(len(self))[index]
        found = self._decoded(np.atleast_1d(rows).tolist())
        return found if np.ndim(rows) else found[0]

    def _decoded(self, rows: Sequence[int]) -> np.ndarray:
        _, channels, *size = self.shape
        out, missing = np.empty((len(rows), *self.shape[1:]), np.uint8), []
        for place, row in enumerate(rows):
            if (kept := self._kept.get(row)) is None:
                missing.append(place)
            else:
                out[place] = kept
        pictures = self.pictures.read([int(self.rows[rows[place]]) for place in missing])
        decode = attempt(
            lambda name, source: read_image(source, join_sides(*size), channels, name, self.resize), skip=False
        )
        images = (image for chunk in ordered_map(decode, chunks(pictures, 8)) for image in chunk)
        for place, image in zip(missing, images, strict=True):
            assert image is not None  # none is skipped
            out[place] = image
            self._keep(rows[place], out[place].copy())
        return out

    def _keep(self, row: int, image: np.ndarray) -> None:
        with self._lock:
            self._kept[row] = image
            if len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]  # the oldest


def on_demand(pictures: Pictures, where: str, folder: Path, wanted: Wanted, progress: Progress) -> Pixels:
    """The images of a set whose headers are read once, and whose pixels when they are asked for. Their identity follows
    from the bytes of the files. With skip_bad, all are decoded once to find those that cannot be."""
    path = folder / f"{cache_key(pictures, wanted)}.json"
    if not path.exists():
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                write_atomically(path, json.dumps(_checked(pictures, where, wanted, progress)))
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows, shape = np.setdiff1d(np.arange(len(pictures.labels)), found["skipped"]), tuple(found["shape"])
        counts, digest = found["counts"], found["digest"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: this cache entry is damaged ({error}): delete it and run again") from None
    images = OnDemand(pictures, rows, shape, wanted.resize)
    return Pixels(images, pictures.labels[rows], counts, digest, len(found["skipped"]))


def _checked(pictures: Pictures, where: str, wanted: Wanted, progress: Progress) -> dict[str, Any]:
    def check(name: str, source: Source) -> tuple[Header, bytes]:
        header = read_header(name, source)  # before anything is read: it says so where there is no such file
        assert not isinstance(source, BadImage)  # it was raised
        content = source.read_bytes() if isinstance(source, Path) else source
        if wanted.skip_bad:
            read_image(content, SMALLEST, 3, name)
        return header, hashlib.blake2b(content, digest_size=16).digest()

    sha, total, kept = hashlib.sha256(), len(pictures.labels), []
    headers: Counter[Header] = Counter()
    done = 0
    for chunk in ordered_map(attempt(check, wanted.skip_bad), chunks(pictures.read())):
        for row, found in enumerate(chunk, done):
            if found is not None:
                headers[found[0]] += 1
                sha.update(found[1])
                kept.append(row)
        done += len(chunk)
        progress(done, total, "checking images")
    if not kept:
        raise ValueError(f"{where}: none of its {total} images can be read")
    shape, skipped = (len(kept), *wanted.shape_for(headers)), np.setdiff1d(np.arange(total), kept).tolist()
    sha.update(repr((VERSION, wanted.resize)).encode())
    digest = seal(sha, shape, pictures.labels[kept])
    return {"shape": shape, "counts": counts_of(pictures, kept), "skipped": skipped, "digest": digest}
