"""A study folder, or several, → `Evidence`: what was asked for, what was measured, what is not fair about it."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from linvit import metrics
from linvit.files import read_lines
from linvit.records import Record, Records
from linvit.report.merit import ACCURACY, BITS, Merit

FORMAT = 3  # of study.json


@dataclass
class Asked:
    """A variant as the study describes it."""

    id: str
    label: str
    attention: str
    column: str = "fair"
    beside: bool = False  # not judged with the others, having been trained for longer, or for less


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
            name = row["id"]
            found[name] = Asked(
                name, row.get("label") or name, row.get("attention", name), row.get("column", "fair"),
                bool(row.get("beside")),
            )  # fmt: skip
        for r in self.records:
            if name := str(r.tags.get("variant") or ""):
                found.setdefault(name, Asked(name, name, str(r.tags.get("attention") or name)))
        labels = [asked.label for asked in found.values()]
        return [a if labels.count(a.label) == 1 else replace(a, label=f"{a.label} ({a.id})") for a in found.values()]

    @property
    def dataset(self) -> dict[str, Any]:
        return self.info.get("dataset") or {}

    @property
    def folds(self) -> int:
        """Into which the images were dealt out for every seed; 0: each run was tested on the same images."""
        return int(self.info.get("folds") or 0)

    @property
    def classes(self) -> list[str]:
        return self.dataset.get("classes") or []

    def of(self, metric: str, **tags: Any) -> list[Record]:
        some = self._sorted[metric, tags.pop("variant", ...)]
        return [r for r in some if all(r.tags.get(k) == v for k, v in tags.items())] if tags else list(some)

    def of_variant(self, name: str) -> list[Record]:
        return self._sorted[..., name]

    @cached_property
    def _sorted(self) -> dict[Any, list[Record]]:
        """Records by metric and by variant, … for any: a page asks for hundreds of such, and there may be many."""
        found: dict[Any, list[Record]] = defaultdict(list)
        for r in self.records:
            variant = r.tags.get("variant")
            for key in ((r.metric, variant), (r.metric, ...), (..., variant)):
                found[key].append(r)
        return found

    @cached_property
    def logs(self) -> dict[str, list[dict[str, Any]]]:
        """The learning curves, by artefact; each is looked at for several charts."""
        paths = {r.artefact for r in self.of("learning_curve")}
        return {path: list(read_lines(Path(path), skip_bad=True)) for path in paths}

    def arrays(self, metric: str) -> dict[str, np.ndarray]:
        """The .npz of a metric that has one in a study; none if it cannot be read. Nothing pickled is ever loaded."""
        return next(filter(None, map(_arrays, self.of(metric))), {})

    @cached_property
    def labels(self) -> np.ndarray:
        """The classes of the test images, of which predictions are stored."""
        found = self.arrays("predictions").get("labels", np.zeros(0, int))
        return found if found.ndim == 1 and found.dtype.kind in "iu" and (found >= 0).all() else np.zeros(0, int)

    @cached_property
    def merit(self) -> Merit:
        """What its variants are compared by."""
        return BITS if self.of(BITS.metric) else ACCURACY

    @cached_property
    def right(self) -> dict[str, dict[int, np.ndarray]]:
        """variant → seed → whether each test image was right, of runs that were tested on the same images; where bits
        are counted, its score."""
        found: dict[str, dict[int, np.ndarray]] = {}
        shape = self.arrays("image_bits").get("bits", np.zeros(0)).shape
        for r in self.of("image_bits"):
            bits = _arrays(r).get("bits", np.zeros(0))
            if bits.shape == shape and len(bits) > 1 and r.tags.get("selection", "best") == "best":
                mine: dict[Any, np.ndarray] = found.setdefault(str(r.tags.get("variant")), {})
                mine[r.tags.get("seed", 0)] = -bits.astype(float)
        for r in self.of("predictions") if not self.folds else ():
            file = _arrays(r) if r.tags.get("selection", "best") == "best" else {}
            said, labels = (file.get(name, np.zeros(0)) for name in ("predicted", "labels"))
            if len(labels) > 1 and np.array_equal(labels, self.labels) and said.shape == labels.shape:
                mine = found.setdefault(str(r.tags.get("variant")), {})
                mine[r.tags.get("seed", 0)] = said == labels
        return found


def run_of(record: Record) -> Any:
    """What tells a run from the others of its variant: its seed, or its seed and the fold that was held out."""
    seed, fold = record.tags.get("seed", 0), record.tags.get("fold")
    return seed if fold is None else (seed, fold)


def _arrays(record: Record) -> dict[str, np.ndarray]:
    with suppress(OSError, ValueError, EOFError, BadZipFile), np.load(record.artefact) as file:
        return dict(file)
    return {}


def as_paths(folders: Path | str | Sequence[Path | str]) -> list[Path]:
    return [Path(folder) for folder in ([folders] if isinstance(folders, (str, Path)) else folders)]


def read(folders: Path | str | Sequence[Path | str]) -> Evidence:
    """Read and merge. Where two folders measured the same thing, the newer record counts."""
    paths = as_paths(folders)
    if not paths:
        raise ValueError("no study folder given")
    parts = [_folder(path) for path in paths]
    names = {part.dataset.get("name") for part in parts if part.dataset.get("name")}
    if len(names) > 1:
        raise ValueError(f"studies of different data cannot be merged: {', '.join(sorted(map(str, names)))}")
    for what in ("identity", "classes"):
        if len({json.dumps(part.dataset[what]) for part in parts if part.dataset.get(what)}) > 1:
            raise ValueError("studies of different data cannot be merged: their images or classes are not the same")
    if len({part.folds for part in parts}) > 1:
        raise ValueError("studies with other folds cannot be merged")
    if len({_protocol(part) for part in parts}) > 1:  # equal names are then different experiments
        parts = [_apart(part, path.resolve().name) for part, path in zip(parts, paths, strict=True)]
    records = sorted((r for part in parts for r in part.records), key=lambda r: r.time)
    newest = {metrics.key(record): record for record in records}
    every = {key: [item for part in parts for item in part.info.get(key) or []]
             for key in ("variants", "commands", "warnings")}  # fmt: skip
    seeds: dict[str, list[int]] = {}
    for part in parts:
        for name, mine in part.info["seeds"].items():
            seeds[name] = list(dict.fromkeys([*seeds.get(name, []), *mine]))
    info = parts[0].info | every | {"commands": list(dict.fromkeys(every["commands"])), "seeds": seeds}
    differing = [f"The merged studies differ in {key}."
                 for key in ("epochs", "steps", "model", "recipe", "machine", "match")
                 if len({json.dumps(part.info.get(key), sort_keys=True) for part in parts}) > 1]  # fmt: skip
    warnings = every["warnings"] + differing + [text for part in parts for text in part.warnings]
    return Evidence(info, list(newest.values()), list(dict.fromkeys(warnings)))


def _protocol(part: Evidence) -> str:
    return json.dumps([part.info.get(key) for key in ("steps", "model", "recipe", "match")], sort_keys=True)


def _apart(part: Evidence, name: str) -> Evidence:
    """Its variants under names that say which study they are of."""
    rows = [row | {"id": f"{row['id']} ({name})", "label": f"{row.get('label') or row['id']} ({name})"}
            for row in part.info.get("variants") or []]  # fmt: skip
    seeds = {f"{variant} ({name})": mine for variant, mine in part.info["seeds"].items()}
    records = [r.tagged(variant=f"{r.tags['variant']} ({name})") if "variant" in r.tags else r for r in part.records]
    return replace(part, info=part.info | {"variants": rows, "seeds": seeds}, records=records)


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
    if not isinstance(seeds := info.get("seeds") or {}, dict):  # the same for all
        seeds = {row["id"]: seeds for row in info.get("variants") or []}
    lost: list[str] = []
    home = os.path.realpath(path)
    found = [_resolve(record, home, lost) for record in Records(records)]
    warnings = [f"{len(lost)} files that the records name are missing, e.g. {lost[0]}."] if lost else []
    return Evidence(info | {"seeds": seeds}, found, warnings)


def _resolve(record: Record, home: str, lost: list[str]) -> Record:
    """The artefact as an absolute path; none if it is missing or lies outside the study."""
    if not record.artefact:
        return record
    path = os.path.realpath(os.path.join(home, record.artefact))
    if path.startswith(os.path.join(home, "")) and os.path.isfile(path):
        return replace(record, artefact=path)
    lost.append(record.artefact)
    return replace(record, artefact="")
