"""A CSV or TSV of paths and labels: columns `path` and `label`, and `split` (train, val, test) if there is one.

Without a header the first two columns are path and label. Paths are relative to the table; addresses such as s3://… are
read with fsspec. A table at an address may only name images below its own folder, or other addresses. `a|b` are several
labels of one image, and then an empty label is none of them.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from linvit.data.cache import cache_root, ordered_map
from linvit.data.decode import SUFFIXES, Source
from linvit.data.folder import SPLIT_NAMES
from linvit.data.remote import CONNECTIONS, RemoteImages, beside, is_remote
from linvit.data.sources import FORMATS, SPLITS, Pictures, several

PATH, LABEL, SPLIT = ("path", "image", "file", "filename"), ("label", "labels", "class", "classes"), ("split", "set")
MARK = "|"  # between several labels


class Row(NamedTuple):
    number: int
    path: str
    label: str
    split: str


@FORMATS.register(".csv")
def comma_separated(path: Path, *, address: str = "") -> Pictures:
    """A CSV of path and label."""
    return pictures(path, None, address)


@FORMATS.register(".tsv")
def tab_separated(path: Path, *, address: str = "") -> Pictures:
    """A TSV of path and label."""
    return pictures(path, "\t", address)


def pictures(path: Path, delimiter: str | None, address: str = "") -> Pictures:
    """address: of the table, if `path` is a copy of it."""
    rows = sorted(_rows(path, delimiter), key=lambda row: SPLITS.index(row.split))  # stable
    if not rows or rows[0].split != "train":
        raise ValueError(f"{path}: has no {'training ' if rows else ''}images")
    sets = [[name.strip() for name in row.label.split(MARK) if name.strip()] for row in rows]
    if multiple := any(MARK in row.label for row in rows):
        labels, classes = several(path, sets)
    else:
        if empty := next((row for row, names in zip(rows, sets, strict=True) if not names), None):
            raise ValueError(f"{path}:{empty.number}: has no label")
        classes = sorted({names[0] for names in sets})
        index = {name: i for i, name in enumerate(classes)}
        labels = np.array([index[names[0]] for names in sets], np.int64)
    counts = {name: count for name in SPLITS if (count := sum(row.split == name for row in rows))}
    places = [_place(path, row, address) for row in rows]
    remote = RemoteImages(filter(is_remote, places), cache_root(None))
    sha = hashlib.sha256(repr((sorted(counts.items()), classes, multiple)).encode())
    for row, place in zip(rows, places, strict=True):
        state = remote.state(place) if is_remote(place) else _state(place)
        sha.update(f"{row.path}\0{row.label}\0{state}\n".encode())

    def find(place: str) -> tuple[str, Source]:
        return place, remote.local(place) if is_remote(place) else Path(place)

    def read(rows: Iterable[int] = range(len(places))) -> Iterable[tuple[str, Source]]:
        chosen = (places[row] for row in rows)
        return ordered_map(find, chosen, CONNECTIONS) if remote else map(find, chosen)

    return Pictures(read, labels, classes, counts, sha.hexdigest(), files=True)


def _place(table: Path, row: Row, address: str) -> str:
    """Where the image of a row is."""
    if is_remote(row.path):
        return row.path
    if not address:
        return str(table.parent / row.path)
    path = PurePosixPath(row.path.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{address}:{row.number}: path '{row.path}' is outside of the table's folder")
    return beside(address, str(path))


def _state(place: str) -> str:
    """Changes when the file does."""
    try:
        status = os.stat(place)
    except (OSError, ValueError):  # there is none: decoding says so, or skips it
        return "unreadable"
    return f"{status.st_size}\0{status.st_mtime_ns}"


def _rows(path: Path, delimiter: str | None) -> Iterator[Row]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            if delimiter is None:
                first = file.readline()
                delimiter = ";" if ";" in first and "," not in first else ","
                file.seek(0)
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            columns: tuple[int, int, int | None] | None = None
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                if columns is None:
                    columns, header = _columns(path, [cell.strip() for cell in cells])
                    if header:
                        continue
                yield _row(path, reader.line_num, cells, *columns)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not a table in UTF-8 ({error})") from None


def _columns(path: Path, cells: Sequence[str]) -> tuple[tuple[int, int, int | None], bool]:
    """Where path, label and split are, and whether these cells are a header."""
    names = [cell.lower() for cell in cells]
    found = [next((names.index(name) for name in known if name in names), None) for known in (PATH, LABEL, SPLIT)]
    if found[0] is not None and found[1] is not None:
        return (found[0], found[1], found[2]), True
    if len(cells) == 2 and Path(cells[0]).suffix.lower() in SUFFIXES:
        return (0, 1, None), False
    raise ValueError(f"{path}: needs the columns path and label in its first line, which has {', '.join(cells[:8])}")


def _row(path: Path, number: int, cells: Sequence[str], where: int, label: int, split: int | None) -> Row:
    if len(cells) <= max(where, label, split or 0):
        raise ValueError(f"{path}:{number}: has {len(cells)} columns, fewer than the first line")
    part = "train" if split is None else cells[split].strip().lower()
    if part not in SPLIT_NAMES:
        raise ValueError(f"{path}:{number}: split '{cells[split or 0]}' is not one of train, val, test")
    if not cells[where].strip() or "\0" in cells[where]:
        raise ValueError(f"{path}:{number}: has no path")
    return Row(number, cells[where].strip(), cells[label], SPLIT_NAMES[part])
