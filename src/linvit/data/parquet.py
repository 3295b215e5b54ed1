"""Parquet with Hugging Face's columns: `image` (a struct with `bytes`, or bytes) and `label`, which may be a list.

A file, or a folder with `train-*.parquet`, `test-*.parquet` and perhaps `validation-*.parquet`, there or in `data/`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from linvit.data.sources import FORMATS, SPLITS, Pictures, check_labels, numbered_classes, several
from linvit.files import parse_json

IMAGE, LABEL = ("image", "img"), ("label", "labels", "fine_label")


@FORMATS.register(".parquet")
def parquet(path: Path) -> Pictures:
    return pictures(path.parent, {"train": [path]})


def shards(folder: Path) -> dict[str, list[Path]]:
    """The Parquet files of a folder by split; empty if it is no such folder."""
    for place in (folder, folder / "data"):
        found = {name: sorted([*place.glob(f"{name}-*.parquet"), *place.glob(f"{name}.parquet")]) for name in SPLITS}
        if found["train"]:
            return {name: files for name, files in found.items() if files}
    return {}


def pictures(folder: Path, files: Mapping[str, list[Path]]) -> Pictures:
    tables = {split: [_Table(path) for path in paths] for split, paths in files.items()}
    ordered = [table for part in tables.values() for table in part]
    raw = [table.labels() for table in ordered]
    names = next((found for table in ordered if (found := table.class_names())), None)
    if any(isinstance(labels, list) for labels in raw):
        return _several(folder, tables, raw, names)
    train = np.concatenate(raw[: len(tables["train"])])
    if train.dtype.kind in "iu":
        classes = names or numbered_classes(ordered[0].path, train)
        for table, labels in zip(ordered, raw, strict=True):
            check_labels(table.path, labels, len(classes))
        labels = np.concatenate(raw).astype(np.int64)
    else:
        classes = sorted({str(label) for label in train})
        index = {name: i for i, name in enumerate(classes)}
        if strange := sorted({str(label) for part in raw for label in part} - set(classes)):
            raise ValueError(f"{folder}: class '{strange[0]}' is not among the training classes: add it or remove it")
        labels = np.array([index[str(label)] for part in raw for label in part], np.int64)
    return _pictures(tables, labels, classes)


def _several(
    folder: Path, tables: Mapping[str, list[_Table]], raw: Sequence[Any], names: Sequence[str] | None
) -> Pictures:
    """Of lists of labels."""
    if not all(isinstance(labels, list) for labels in raw):
        raise ValueError(f"{folder}: some files have lists of labels, others do not")
    sets = [row for labels in raw for row in labels]
    numbers = all(isinstance(label, int) for row in sets for label in row)
    if names is not None and numbers:
        check_labels(folder, np.array([label for row in sets for label in row], np.int64), len(names))
    known = names if numbers else None
    named = [[str(label) if known is None else known[int(label)] for label in row] for row in sets]
    found, classes = several(folder, named)
    return _pictures(tables, found, classes)


def _pictures(tables: Mapping[str, list[_Table]], labels: np.ndarray, classes: Sequence[str]) -> Pictures:
    ordered = [table for part in tables.values() for table in part]
    counts = {split: sum(table.rows for table in part) for split, part in tables.items()}
    sha = hashlib.sha256()
    for table in ordered:
        status = table.path.stat()
        sha.update(f"{table.path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())

    def read(rows: Sequence[int] = range(len(labels))) -> Iterator[tuple[str, bytes]]:
        """One pass over the files for each ascending run of rows."""
        chosen = np.asarray(rows, np.int64)
        for run in np.split(chosen, np.flatnonzero(np.diff(chosen) <= 0) + 1):
            among = np.isin(np.arange(len(labels)), run)
            yield from compress((row for table in ordered for row in table.read()), among)

    return Pictures(read, labels, classes, counts, sha.hexdigest())


class _Table:
    def __init__(self, path: Path):
        try:
            import pyarrow
            from pyarrow import parquet as reader
        except ImportError:
            raise ValueError(f"{path}: reading Parquet needs pyarrow: pip install 'linvit[parquet]'") from None
        self.path, self.errors = path, (OSError, pyarrow.ArrowException)
        with self.whole():
            self.file = reader.ParquetFile(path)
        self.schema = self.file.schema_arrow
        self.rows = self.file.metadata.num_rows
        self.image, self.label = self._column("image", IMAGE), self._column("label", LABEL)

    @contextmanager
    def whole(self) -> Iterator[None]:
        try:
            yield
        except self.errors as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{self.path}: is not a readable Parquet file ({why}): get it again") from None

    def _column(self, kind: str, allowed: tuple[str, ...]) -> str:
        found = next((name for name in allowed if name in self.schema.names), None)
        if found is None:
            raise ValueError(f"{self.path}: has no column '{kind}'; its columns are {', '.join(self.schema.names)}")
        return found

    def labels(self) -> Any:
        """An array, or lists of labels."""
        with self.whole():
            column: Any = self.file.read(columns=[self.label]).column(0)
        if column.null_count:
            raise ValueError(f"{self.path}: column '{self.label}' has {column.null_count} empty rows: fill them")
        if str(column.type).startswith(("list", "large_list", "fixed_size_list")):
            rows = column.to_pylist()
            if any(not isinstance(label, (int, str)) for row in rows for label in row):
                raise ValueError(f"{self.path}: column '{self.label}' must hold lists of whole numbers or names")
            return rows
        values = column.to_numpy()
        if values.dtype.kind not in "iu" and not all(isinstance(value, str) for value in values):
            raise ValueError(f"{self.path}: column '{self.label}' must hold whole numbers or names")
        return values

    def class_names(self) -> list[str] | None:
        """Hugging Face keeps them as JSON in the schema's metadata."""
        try:
            info = parse_json((self.schema.metadata or {})[b"huggingface"])
            found = info["info"]["features"][self.label]
            found = found[0] if isinstance(found, list) else found.get("feature", found)  # of lists of labels
            return [str(name) for name in found["names"]]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            return None

    def read(self) -> Iterator[tuple[str, bytes]]:
        with self.whole():
            batches = self.file.iter_batches(batch_size=64, columns=[self.image])
            for row, value in enumerate(value for batch in batches for value in batch.column(0).to_pylist()):
                content = value.get("bytes") if isinstance(value, dict) else value
                yield f"{self.path}, row {row}", content if isinstance(content, bytes) else b""
