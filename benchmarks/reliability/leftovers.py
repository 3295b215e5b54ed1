"""What a run has left in its folder: that it is whole at any moment, that nothing reported is lost, and that two runs
ended the same."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sqlite3
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from linvit import files, metrics
from linvit.ledger import Ledger
from linvit.records import Record, Records
from linvit.training import loop
from linvit.training.files import load_tensors

MEASURED = ("time", "commit", "threads")  # of a record, whatever it measures
LOG_TIMES = ("seconds",)
DOCUMENTS_TIMES = ("started", "finished", "seconds", "placement", "machine", "warnings", "budget")


def report_to(file: Path) -> None:
    """From now on, what this process has stored and may therefore report is listed in the file, which is written
    without a buffer and so survives the process."""
    told = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(path: Path, lines: list[str]) -> None:
        rows = ({"file": str(path.resolve()), "line": line} for line in lines)
        os.write(told, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def append(self: Records, records: Any, call: Any = Records.append) -> None:
        records = list(records)
        call(self, records)
        tell(self.path, [record.line() for record in records])

    def replace(self: Ledger, records: Any, call: Any = Ledger.replace) -> None:
        call(self, records)
        tell(self.path, [record.line() for record in records])

    def append_line(path: Path, row: Any, call: Any = files.append_line) -> None:
        call(path, row)
        tell(path, [json.dumps(row)])

    Records.append, Ledger.replace, loop.append_line = append, replace, append_line  # type: ignore[method-assign]


def reported(file: Path) -> list[tuple[Path, str]]:
    """What `report_to` has listed: a file and a line that it must keep."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [(Path(row["file"]), row["line"]) for row in map(json.loads, lines)]


def stored_lines(folder: Path) -> int:
    """Of records and logs."""
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob("*.jsonl"))


def lost(told: list[tuple[Path, str]]) -> list[str]:
    """The reported lines that are no longer there. A line of a log may have been written again, with other times."""
    problems = []
    for path in {path for path, _ in told}:
        held = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        known = {_untimed(line) if path.name == "log.jsonl" else line for line in held}
        for _, line in (row for row in told if row[0] == path):
            if (_untimed(line) if path.name == "log.jsonl" else line) not in known:
                problems.append(f"{path}: {line} was reported and is lost")
    return problems


def _untimed(line: str) -> str:
    row = json.loads(line)
    return json.dumps({key: value for key, value in row.items() if key not in LOG_TIMES})


def torn(folder: Path) -> list[str]:
    """Files that are not whole under the name by which they are read. A last line without its end is left to the next
    writer."""
    found = []
    for path in sorted(folder.rglob("*")):
        check = CHECKS.get(path.suffix)
        if path.is_file() and not path.name.startswith(".") and check is not None:
            try:
                check(path)
            except Exception as error:
                found.append(f"{path}: {type(error).__name__}: {error}")
    return found


def _json_lines(path: Path) -> None:
    for line in path.read_bytes().split(b"\n")[:-1]:
        json.loads(line)


def _ends(text: str) -> Callable[[Path], None]:
    def check(path: Path) -> None:
        if not path.read_text(encoding="utf-8").rstrip().endswith(text):
            raise ValueError(f"it does not end with {text!r}")

    return check


def _arrays(path: Path) -> None:
    with np.load(io.BytesIO(path.read_bytes())) as file:
        for name in file.files:
            _ = file[name]


def _database(path: Path) -> None:
    connection = sqlite3.connect(path)
    try:
        if (answer := connection.execute("pragma integrity_check").fetchone()) != ("ok",):
            raise ValueError(str(answer))
    finally:
        connection.close()


CHECKS: dict[str, Callable[[Path], Any]] = {
    ".json": lambda path: json.loads(path.read_text(encoding="utf-8")),
    ".jsonl": _json_lines,
    ".toml": lambda path: tomllib.loads(path.read_text(encoding="utf-8")),
    ".safetensors": load_tensors,
    ".npz": _arrays,
    ".html": _ends("</html>"),
    ".svg": _ends("</svg>"),
    ".md": _ends(""),
    ".csv": _ends(""),
    ".png": lambda path: Image.open(path).load(),
    ".db": _database,
}


def left_by(folder: Path) -> dict[str, Any]:
    """Everything that does not depend on time: weights, records, logs, predictions, and which files there are."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file() or path.name.startswith(".") or path.name.startswith("step-"):
            continue
        found[name] = ""
        if path.suffix in (".safetensors", ".npz") or path.name in ("confusion.json", "config.json"):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name == "records.jsonl":
            found[name] = sorted(_records(path))
        elif path.name == "log.jsonl":
            found[name] = [_untimed(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return found


def _records(path: Path) -> Iterator[str]:
    """What each record says, without what a clock had to do with; the newest of each measurement."""
    newest: dict[Any, Record] = {metrics.key(record): record for record in Records(path)}
    for record in newest.values():
        metric = metrics.METRICS[record.metric]
        row = json.loads(record.line())
        kept = {"metric", *metric.per} - {"seconds"} if metric.timed else set(row) - {*MEASURED}
        yield json.dumps({key: row.get(key) for key in sorted(kept)})


def differences(one: Path, other: Path) -> list[str]:
    a, b = left_by(one), left_by(other)
    found = [f"{name} is only in {one if name in a else other}" for name in sorted(set(a) ^ set(b))]
    for name in sorted(set(a) & set(b)):
        if a[name] != b[name]:
            both = (a[name], b[name]) if isinstance(a[name], list) else ([a[name]], [b[name]])
            x, y = (next(iter(set(p) - set(q)), "the order") for p, q in (both, both[::-1]))
            found.append(f"{name} differs: {x} and {y}")
    return found
