"""A result folder → `Evidence`: the document that says what was asked, and the records of what was measured."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar
from zipfile import BadZipFile

import numpy as np

from linvit import metrics
from linvit.files import parse_json, read_lines
from linvit.ledger import open_ledger
from linvit.records import Record
from linvit.report.merit import ACCURACY, BITS, PRECISION, Merit
from linvit.schemas.base import Document
from linvit.schemas.study import Study, Variant

D = TypeVar("D", bound=Document)
Run = int | tuple[int, int]  # a seed, or a seed and the fold that was held out
Folders = Path | str | Sequence[Path | str]


@dataclass(frozen=True)
class Evidence(Generic[D]):
    document: D
    records: list[Record]  # the newest of each measurement
    warnings: list[str] = field(default_factory=list)

    def of(self, metric: str, **tags: Any) -> list[Record]:
        some = self._sorted[metric, tags.pop("variant", ...)]
        return [r for r in some if all(r.tags.get(k) == v for k, v in tags.items())] if tags else list(some)

    def value(self, metric: str, **tags: Any) -> float | None:
        """Of the last such record; None if there is none, or if it is not a finite number."""
        found = self.of(metric, **tags)
        return None if not found or found[-1].value is None else float(found[-1].value)

    def of_variant(self, name: str) -> list[Record]:
        return self._sorted[..., name]

    @cached_property
    def _sorted(self) -> dict[Any, list[Record]]:
        """Records by metric and by variant, … for any: a page makes hundreds of such queries."""
        found: dict[Any, list[Record]] = defaultdict(list)
        for r in self.records:
            variant = r.tags.get("variant")
            for key in ((r.metric, variant), (r.metric, ...), (..., variant)):
                found[key].append(r)
        return found

    def artefact(self, record: Record) -> dict[str, Any]:
        """The content of its .npz or .json file; empty if it cannot be read. Pickled objects are never loaded."""
        with suppress(OSError, ValueError, EOFError, BadZipFile):
            if record.artefact.endswith(".npz"):
                with np.load(record.artefact) as file:
                    return dict(file)
            found = parse_json(Path(record.artefact).read_bytes())
            return found if isinstance(found, dict) else {}
        return {}

    def first_artefact(self, metric: str) -> dict[str, Any]:
        """That can be read."""
        return next(filter(None, map(self.artefact, self.of(metric))), {})


@dataclass(frozen=True)
class StudyEvidence(Evidence[Study]):
    @property
    def folds(self) -> int:
        """Into which every seed divides the images; 0: all runs are tested on the same images."""
        return self.document.folds or 0

    @property
    def untrained(self) -> bool:
        """Whether all models are frozen starts with fitted heads, tested on the same images."""
        return self.document.steps == 0 and not self.folds

    @cached_property
    def merit(self) -> Merit:
        """What its variants are compared by."""
        return next((merit for merit in (BITS, PRECISION) if self.of(merit.metric)), ACCURACY)

    @cached_property
    def logs(self) -> dict[str, list[dict[str, Any]]]:
        """The learning curves, by artefact; each is used by several charts."""
        paths = {r.artefact for r in self.of("learning_curve")}
        return {path: list(read_lines(Path(path), skip_bad=True)) for path in paths}

    @cached_property
    def labels(self) -> np.ndarray:
        """The classes of the test images, where predictions are stored."""
        found = self.first_artefact("predictions").get("labels", np.zeros(0, int))
        return found if found.ndim == 1 and found.dtype.kind in "iu" and (found >= 0).all() else np.zeros(0, int)

    @cached_property
    def right(self) -> dict[str, dict[Run, np.ndarray]]:
        """variant → seed → whether each test image was right, or its score; only of runs that were tested on the same
        images. With folds, of all images, each when it was held out."""
        if self.folds:
            return self._out_of_fold
        found: dict[str, dict[Run, np.ndarray]] = defaultdict(dict)
        for metric, name, sign in (("image_bits", "bits", -1), ("image_precision", "values", 1)):
            shape = self.first_artefact(metric).get(name, np.zeros(0)).shape
            for r in self.of(metric):
                values = self.artefact(r).get(name, np.zeros(0))
                if values.shape == shape and len(values) > 1 and r.tags.get("selection", "best") == "best":
                    found[str(r.tags.get("variant"))][run_of(r)] = sign * values.astype(float)
        for r in self.of("predictions"):
            file = self.artefact(r) if r.tags.get("selection", "best") == "best" else {}
            labels = file.get("labels", np.zeros(0))
            right = _right(file, labels) if len(labels) > 1 and np.array_equal(labels, self.labels) else None
            if right is not None:
                found[str(r.tags.get("variant"))][run_of(r)] = right
        return dict(found)

    @property
    def _out_of_fold(self) -> dict[str, dict[Run, np.ndarray]]:
        """Of the seeds whose folds are complete; runs of earlier versions did not store which images they held out."""
        parts: dict[tuple[str, int], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        for r in self.of("predictions"):
            file = self.artefact(r) if "fold" in r.tags else {}
            rows, labels = (file.get(name, np.zeros(0)) for name in ("rows", "labels"))
            right = _right(file, labels)
            if right is not None and rows.shape == right.shape:
                parts[str(r.tags.get("variant")), int(r.tags.get("seed") or 0)].append((rows, right))
        found: dict[str, dict[Run, np.ndarray]] = defaultdict(dict)
        images = np.zeros(0)
        for (variant, seed), each in parts.items():
            if len(each) != self.folds:
                continue
            rows, right = (np.concatenate(values) for values in zip(*each, strict=True))
            order = np.argsort(rows)
            images = images if len(images) else rows[order]
            if np.array_equal(rows[order], images):
                found[variant][seed] = right[order]
        return dict(found)


def _right(file: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray | None:
    """From predicted classes, or from packed bits, which is what published records have."""
    if (bits := file.get("right")) is not None and bits.dtype == np.uint8 and bits.shape == (-(-len(labels) // 8),):
        return np.unpackbits(bits, count=len(labels)).astype(bool)
    predicted = file.get("predicted", np.zeros(0))
    return predicted == labels if predicted.shape == labels.shape else None


def provenance(records: Iterable[Record], *names: str) -> dict[str, str]:
    """Where records were measured, and with what: fields of theirs, without those that are always empty."""
    every = {name: sorted({str(getattr(record, name)) for record in records} - {"", "0"}) for name in names}
    return {name.capitalize(): ", ".join(values) for name, values in every.items() if values}


def run_of(record: Record) -> Run:
    """What distinguishes a run from the others of its variant."""
    seed, fold = (int(record.tags.get(name) or 0) for name in ("seed", "fold"))
    return seed if record.tags.get("fold") is None else (seed, fold)


def as_paths(folders: Folders) -> list[Path]:
    """Each folder once."""
    every = [folders] if isinstance(folders, (str, Path)) else folders
    return list({Path(folder).resolve(): Path(folder) for folder in every}.values())


def read(kind: type[D], folder: Path | str) -> Evidence[D]:
    """What a folder holds; of measurements that were made twice, the newest record counts."""
    folder = Path(folder)
    if not kind.path(folder).is_file():
        raise ValueError(f"{folder} does not hold a {kind.kind}.json: name a folder that linvit wrote")
    document = kind.read(kind.path(folder))
    missing: list[str] = []
    home = os.path.realpath(folder)
    records = [_resolve(record, home, missing) for record in open_ledger(folder)]
    warnings = [f"{len(missing)} files named by the records are missing, e.g. {missing[0]}."] if missing else []
    return Evidence(document, _newest(records), warnings)


def read_study(folders: Folders) -> StudyEvidence:
    """One study, or several of the same data as one; where two measured the same thing, the newer record counts."""
    paths = as_paths(folders)
    if not paths:
        raise ValueError("no study folder given")
    parts = [read(Study, path) for path in paths]
    if len(names := {part.document.dataset.name for part in parts}) > 1:
        raise ValueError(f"studies of different data cannot be merged: {', '.join(sorted(names))}")
    if len({(part.document.dataset.identity, *part.document.dataset.classes) for part in parts}) > 1:
        raise ValueError("studies of different data cannot be merged: their images or classes differ")
    if len({part.document.folds for part in parts}) > 1:
        raise ValueError("studies with different folds cannot be merged")
    if any(_protocol(part.document) != _protocol(parts[0].document) for part in parts):
        parts = [_renamed(part, path.resolve().name) for part, path in zip(parts, paths, strict=True)]
    studies = [part.document for part in parts]
    merged = functools.reduce(Study.extended, studies)
    merged = merged.model_copy(update={"variants": _with_distinct_labels(merged.variants), "margin": studies[0].margin})
    differing = [
        f"The merged studies differ in {name}."
        for name in ("epochs", "steps", "model", "recipe", "machine", "match")
        if any(getattr(study, name) != getattr(merged, name) for study in studies)
    ]
    warnings = [text for study in studies for text in study.warnings] + differing
    warnings += [text for part in parts for text in part.warnings]
    records = _newest([record for part in parts for record in part.records])
    return StudyEvidence(merged, records, list(dict.fromkeys(warnings)))


def _newest(records: list[Record]) -> list[Record]:
    return list({metrics.key(record): record for record in sorted(records, key=lambda r: r.time)}.values())


def _protocol(study: Study) -> list[Any]:
    """Under different ones, variants of the same name are different experiments."""
    return [study.steps, study.model, study.recipe, study.match]


def _renamed(part: Evidence[Study], name: str) -> Evidence[Study]:
    """With variants whose names say which study they belong to."""
    variants = [
        v.model_copy(update={"id": f"{v.id} ({name})", "label": f"{v.label or v.id} ({name})"})
        for v in part.document.variants
    ]
    seeds = {f"{variant} ({name})": own for variant, own in part.document.seeds.items()}
    records = [r.tagged(variant=f"{r.tags['variant']} ({name})") if "variant" in r.tags else r for r in part.records]
    return Evidence(part.document.model_copy(update={"variants": variants, "seeds": seeds}), records, part.warnings)


def _with_distinct_labels(variants: Sequence[Variant]) -> list[Variant]:
    """Labels are what charts distinguish variants by."""
    labels = [v.label or v.id for v in variants]
    distinct = [
        label if labels.count(label) == 1 else f"{label} ({v.id})" for v, label in zip(variants, labels, strict=True)
    ]
    return [v.model_copy(update={"label": label}) for v, label in zip(variants, distinct, strict=True)]


def _resolve(record: Record, home: str, missing: list[str]) -> Record:
    """With its artefact as an absolute path; empty if it is missing or outside the folder."""
    if not record.artefact:
        return record
    path = os.path.realpath(os.path.join(home, record.artefact))
    if path.startswith(os.path.join(home, "")) and os.path.isfile(path):
        return replace(record, artefact=path)
    missing.append(record.artefact)
    return replace(record, artefact="")
