"""Ledger: a folder's records, indexed in memory; the only answer to "is this already measured?".

A records file is parsed once per process and again only where another process has appended to it. What was measured is
named by `metrics.key`: the metric and the tags that distinguish one measurement of it from another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from linvit import metrics
from linvit.files import write_atomically
from linvit.locks import appending
from linvit.records import Record, Records, Tag

Key = tuple[Any, ...]


class Ledger:
    """The records of one file, usually DIR/records.jsonl."""

    def __init__(self, path: str | Path):
        self._file = Records(path)
        self._records: list[Record] = []
        self._by_key: dict[Key, Record] = {}
        self._by_metric: dict[str, list[Record]] = {}
        self._stamp: tuple[int, ...] = ()  # of the file as it is indexed

    @property
    def path(self) -> Path:
        return self._file.path

    def __iter__(self) -> Iterator[Record]:
        self._refresh()
        return iter(list(self._records))

    def __len__(self) -> int:
        self._refresh()
        return len(self._records)

    def done(self, key: Key) -> Record | None:
        """The newest record of a measurement; None: it has not been made."""
        self._refresh()
        return self._by_key.get(key)

    def find(self, metric: str, **tags: Tag) -> list[Record]:
        """All records of a metric with these tags, oldest first."""
        self._refresh()
        every = self._by_metric.get(metric, [])
        return [record for record in every if all(record.tags.get(name) == value for name, value in tags.items())]

    def last(self, metric: str, **tags: Tag) -> Record | None:
        """The newest of them."""
        found = self.find(metric, **tags)
        return found[-1] if found else None

    def has(self, *names: str) -> bool:
        """Whether any of these metrics is recorded."""
        self._refresh()
        return any(name in self._by_metric for name in names)

    def append(self, records: Iterable[Record]) -> None:
        """Write them to disk; they are reported only after that."""
        records = list(records)
        self._refresh()
        before = self._stamp
        self._file.append(records)
        added = [Record.of(json.loads(record.line())) for record in records]
        grown = sum(len(record.line().encode()) + 1 for record in records)
        if (stamp := self._now()) and (not before or stamp[0] == before[0]) and stamp[1] == sum(before[1:2]) + grown:
            self._index(added)  # nobody else has written in between: nothing needs to be parsed
            self._stamp = stamp

    def append_new(self, records: Iterable[Record], key: Callable[[Record], Key] = metrics.key) -> None:
        """Write those whose measurement is not recorded yet."""
        known = {key(record) for record in self}
        self.append([record for record in records if key(record) not in known])

    def replace(self, records: Sequence[Record]) -> None:
        """Write these instead of all, at once: a reader sees all of them or none."""
        lines = [record.line() for record in records]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with appending(self.path):
            write_atomically(self.path, "".join(line + "\n" for line in lines))
        self._clear()
        self._index(Record.of(json.loads(line)) for line in lines)
        self._stamp = self._now()

    def once(self, key: Key, make: Callable[[], Sequence[Record]]) -> Record:
        """The record of a measurement; `make` is called only if there is none, and all that it returns is written."""
        if (found := self.done(key)) is None:
            self.append(make())
            found = self.done(key)
            if found is None:
                raise AssertionError(f"{key} was not among the records that were made")
        return found

    def _refresh(self) -> None:
        if (stamp := self._now()) != self._stamp:
            self._clear()
            self._index(self._file if stamp else ())
            self._stamp = stamp

    def _now(self) -> tuple[int, ...]:
        """Inode, size and time of the file; empty if there is none."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _clear(self) -> None:
        self._records, self._by_key, self._by_metric = [], {}, {}

    def _index(self, records: Iterable[Record]) -> None:
        for record in records:
            self._records.append(record)
            self._by_key[metrics.key(record)] = record
            self._by_metric.setdefault(record.metric, []).append(record)


@lru_cache(maxsize=256)
def _shared(path: Path) -> Ledger:
    return Ledger(path)


def open_ledger(folder: str | Path) -> Ledger:
    """The ledger of a result folder, one per process."""
    return _shared(Path(folder).resolve() / "records.jsonl")


def key_of(metric: str, **tags: Tag) -> Key:
    """The key of a measurement that is yet to be made."""
    return metrics.key(Record(metric, None, tags=dict(tags)))
