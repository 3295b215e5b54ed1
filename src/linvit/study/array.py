"""A study's jobs as a file, one line each, for schedulers that start a process for each of them.

`compare(…, jobs_file=True)` writes it, `linvit job DIR N` does one, wherever it runs, and `assemble` copies what is
finished into the study's records. Jobs share nothing but the folder, in which each has its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from linvit import metrics
from linvit.errors import clear
from linvit.files import read_lines, write_atomically
from linvit.records import Record, Records, Tag
from linvit.study.jobs import Job, finished
from linvit.train.folds import out_of_fold

FILE = "jobs.jsonl"
HALF = {"test_accuracy": "half_accuracy", "bits_per_dim": "half_bits_per_dim"}


def write_jobs(folder: Path, jobs: Sequence[Job]) -> Path:
    """With the folder of each relative to the study's, which may be mounted elsewhere."""
    rows = [
        job.model_dump(mode="json") | {"id": job.experiment.id, "folder": Path(job.folder).name}
        for job in jobs
    ]  # fmt: skip
    write_atomically(folder / FILE, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return folder / FILE


def read_job(folder: Path, number: int) -> Job:
    """The number counts from 1, as do the lines."""
    rows = list(read_lines(folder / FILE))
    if not rows:
        raise ValueError(f"{folder} holds no {FILE}: write it with `linvit compare … --jobs-file`")
    if not 1 <= number <= len(rows):
        raise ValueError(f"job {number} of {folder} is not there: it has 1 to {len(rows)}")
    row = rows[number - 1]
    try:
        return Job.model_validate({key: value for key, value in row.items() if key != "id"}
                                  | {"folder": str(folder / row["folder"])})  # fmt: skip
    except ValidationError as error:
        raise ValueError(f"{folder / FILE}:{number}: {clear(error)}") from None


def assemble(folder: Path) -> None:
    """Copy the records of finished jobs into the study's, once."""
    if not (folder / FILE).exists():
        return
    records, found, rows = Records(folder / "records.jsonl"), [], list(read_lines(folder / FILE))
    for row in rows:
        place = folder / row["folder"]
        mine = finished(place, row["id"], row["test"])
        found += of_study(mine, place.name, row["variant"], row["half"], row["fold"])
    found += of_all_folds(found, folder, len({row["fold"] for row in rows}))
    there = known(records)
    records.append(record for record in found if key(record) not in there)


def of_study(found: Iterable[Record], place: str, variant: str, half: bool, fold: int | None) -> list[Record]:
    """A run's records as the study has them; what they name lies in the run's folder."""
    if half:  # its accuracy, or its bits, are all that is asked of it
        found = [
            replace(r, metric=HALF[r.metric], tags={k: v for k, v in r.tags.items() if k != "selection"})
            for r in found if r.metric in HALF and r.tags["selection"] == "best"
        ]  # fmt: skip
    held: dict[str, Tag] = {} if fold is None else {"fold": fold}
    return [
        replace(r, artefact=f"{place}/{r.artefact}" if r.artefact else "").tagged(variant=variant, **held)
        for r in found
    ]  # fmt: skip


def of_all_folds(found: Iterable[Record], folder: Path, folds: int) -> list[Record]:
    """Of each variant and seed, what its folds say of all images; nothing where one of them is missing."""
    groups: dict[tuple[Tag, Tag], dict[Tag, Record]] = {}
    for r in found:
        if r.metric == "predictions" and "fold" in r.tags:
            groups.setdefault((r.tags["variant"], r.tags["seed"]), {})[r.tags["fold"]] = r
    whole = []
    for each in groups.values():
        if len(each) == folds:
            mine = [each[fold] for fold in range(folds)]
            base = replace(mine[0], artefact="", tags={k: v for k, v in mine[0].tags.items() if k != "fold"})
            whole += out_of_fold(base, [(folder / r.artefact).parent for r in mine])
    return whole


def known(records: Iterable[Record]) -> set[tuple[Any, ...]]:
    """Keys of what a study has of its runs."""
    return {key(record) for record in records if record.metric != "failed"}


def key(record: Record) -> tuple[Any, ...]:
    return record.experiment, *metrics.key(record)
