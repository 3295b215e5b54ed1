"""A study folder, or several, → `Evidence`: what was asked for, what was measured, what is not fair about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from linvit import files, metrics
from linvit.records import Record, Records

FORMAT = 2  # of study.json


@dataclass(frozen=True)
class Asked:
    """A variant as the study describes it."""

    id: str
    label: str
    attention: str
    column: str = "fair"


@dataclass(frozen=True)
class Evidence:
    info: dict[str, Any]
    records: list[Record]
    warnings: list[str] = field(default_factory=list)

    @property
    def variants(self) -> list[Asked]:
        """As requested, then any that only the records know; no two with one label."""
        found: dict[str, Asked] = {}
        for row in self.info.get("variants") or []:
            if isinstance(row, dict) and row.get("id"):
                name = str(row["id"])
                texts = (
                    str(row.get(key) or default)
                    for key, default in (("label", name), ("attention", name), ("column", "fair"))
                )
                found[name] = Asked(name, *texts)
        for r in self.records:
            if (name := r.tags.get("variant")) and str(name) not in found:
                found[str(name)] = Asked(str(name), str(name), str(r.tags.get("attention") or name))
        labels = [asked.label for asked in found.values()]
        return [a if labels.count(a.label) == 1 else replace(a, label=f"{a.label} ({a.id})") for a in found.values()]

    @property
    def dataset(self) -> dict[str, Any]:
        found = self.info.get("dataset")
        return found if isinstance(found, dict) else {"name": str(found)} if found else {}

    @property
    def classes(self) -> list[str]:
        return [str(name) for name in self.dataset.get("classes") or []]

    def of(self, metric: str, **tags: Any) -> list[Record]:
        return [r for r in self.records if r.metric == metric and all(r.tags.get(k) == v for k, v in tags.items())]


def read(folders: Path | str | Sequence[Path | str]) -> Evidence:
    """Read and merge. Where two folders measured the same thing, the newer record counts."""
    paths = [Path(folders)] if isinstance(folders, (str, Path)) else [Path(folder) for folder in folders]
    if not paths:
        raise ValueError("no study folder given")
    parts = [_folder(path) for path in paths]
    names = {part.dataset.get("name") for part in parts if part.dataset.get("name")}
    if len(names) > 1:
        raise ValueError(f"studies of different data cannot be merged: {', '.join(sorted(map(str, names)))}")
    for what in ("identity", "classes"):
        if len({json.dumps(part.dataset[what]) for part in parts if part.dataset.get(what)}) > 1:
            raise ValueError("studies of different data cannot be merged: their images or classes are not the same")
    newest: dict[tuple, Record] = {}
    for record in sorted((r for part in parts for r in part.records), key=lambda r: r.time):
        newest[metrics.key(record)] = record
    info = dict(parts[0].info)
    info["variants"] = [row for part in parts for row in part.info.get("variants") or []]
    info["seeds"] = list(dict.fromkeys(seed for part in parts for seed in part.info.get("seeds") or []))
    info["commands"] = list(dict.fromkeys(str(text) for p in parts for text in p.info.get("commands") or []))
    warnings = [str(text) for part in parts for text in part.info.get("warnings") or []]
    for key in ("epochs", "steps", "model", "recipe", "machine", "match"):
        if len({json.dumps(part.info.get(key), sort_keys=True) for part in parts}) > 1:
            warnings.append(f"The merged studies differ in {key.replace('_', ' ')}.")
    warnings += [text for part in parts for text in part.warnings]
    return Evidence(info, list(newest.values()), list(dict.fromkeys(warnings)))


def _folder(path: Path) -> Evidence:
    file, records = path / "study.json", path / "records.jsonl"
    if not file.is_file() and not records.is_file():
        raise ValueError(f"{path} holds no study: neither study.json nor records.jsonl is there")
    info: Any = {}
    if file.is_file():
        try:
            info = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: not JSON ({error})") from None
        if not isinstance(info, dict):
            raise ValueError(f"{file}: not a study (a JSON object is expected)")
        if info.get("format", FORMAT) != FORMAT:
            raise ValueError(f"{file}: format {info['format']!r}, but this linvit reads format {FORMAT}")
    lost: list[str] = []
    found = [_resolve(record, path, lost) for record in Records(records)]
    warnings = [f"{len(lost)} files that the records name are missing, e.g. {lost[0]}."] if lost else []
    return Evidence(info, found, warnings)


def _resolve(record: Record, folder: Path, lost: list[str]) -> Record:
    """The artefact as an absolute path; none if it is missing or lies outside the study."""
    if not record.artefact:
        return record
    path = (folder / record.artefact).resolve()
    if path.is_file() and path.is_relative_to(folder.resolve()):
        return replace(record, artefact=str(path))
    lost.append(record.artefact)
    return replace(record, artefact="")


def read_json(record: Record) -> Any:
    try:
        return json.loads(Path(record.artefact).read_text(encoding="utf-8")) if record.artefact else None
    except (OSError, ValueError):
        return None


def read_lines(record: Record) -> list[dict[str, Any]]:
    """The JSON objects of a log; a damaged line is left out."""
    return list(files.read_lines(Path(record.artefact), skip_bad=True)) if record.artefact else []


def read_arrays(record: Record) -> dict[str, np.ndarray]:
    """The arrays of an .npz; nothing pickled is ever loaded."""
    if not record.artefact:
        return {}
    try:
        with np.load(record.artefact, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError):
        return {}
