"""A study's runs as jobs: which they are, the file from which a scheduler starts them, and their records as the
study's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from linvit import metrics
from linvit.errors import clear
from linvit.execute import Job
from linvit.files import read_lines, slug, write_atomically
from linvit.ledger import Ledger, open_ledger
from linvit.pipeline.design import Designer
from linvit.records import Record, Tag
from linvit.schemas.experiment import Experiment, Fold
from linvit.schemas.study import Run, Study
from linvit.training.events import Event
from linvit.training.folds import out_of_fold

JOBS_FILE = "jobs.jsonl"
HALF_METRICS = {
    "test_accuracy": "half_accuracy",
    "mean_average_precision": "half_mean_average_precision",
    "bits_per_dim": "half_bits_per_dim",
}
FROZEN_METRICS = {"test_accuracy": "frozen_accuracy"}
SIZES = {"half": 0.5, "frozen": 0.25}  # of a run relative to a full one, roughly


class StudyJob(Job):
    """One run of a study."""

    number: int  # from 0
    jobs: int
    part: tuple[float, float] = (0.0, 1.0)  # of the study's steps: where it begins and ends
    variant: str  # its id
    half: bool = False  # trained for half of the steps, in addition to the variant's full runs
    fold: int | None = None  # held out
    frozen: bool = False  # not trained, in addition to the variant's full runs

    @property
    def full(self) -> bool:
        return not (self.half or self.frozen)

    @property
    def name(self) -> str:
        """For people."""
        fold = "" if self.fold is None else f", fold {self.fold}"
        kind = ", half of the steps" * self.half + ", frozen" * self.frozen
        return f"{self.experiment.label}, seed {self.experiment.seed}{fold}{kind}"


OnJobEvent = Callable[[StudyJob, Event], None]


def study_jobs(study: Study, designer: Designer, folder: Path, device: torch.device) -> list[StudyJob]:
    """One for each run of the study, each in a folder of its own."""
    runs = study.runs()
    sizes = [SIZES["half"] if run.half else SIZES["frozen"] if run.frozen else 1.0 for run in runs]
    found, done = [], 0.0
    for number, (run, size) in enumerate(zip(runs, sizes, strict=True)):
        experiment = _experiment(study, designer, run)
        fold = "" if run.fold is None else f"fold{run.fold}-"
        kind = "half-" * run.half + "frozen-" * (experiment.recipe.steps == 0)  # whether or not others are trained
        name = f"{slug(run.variant.id)}-{kind}seed{run.seed}-{fold}{experiment.id[:6]}"
        found.append(
            StudyJob(
                number=number,
                jobs=len(runs),
                part=(done / sum(sizes), (done + size) / sum(sizes)),
                variant=run.variant.id,
                half=run.half,
                frozen=run.frozen,
                fold=run.fold,
                experiment=experiment,
                folder=str(folder / name),
                device=str(device),
            )
        )
        done += size
    return found


def _experiment(study: Study, designer: Designer, run: Run) -> Experiment:
    experiment = designer.experiment(run.variant)
    changes: dict[str, Any] = {
        "seed": run.seed,
        "model": experiment.model.model_copy(update={"seed": run.seed}),
        "start": run.variant.starts.get(run.seed, experiment.start),
    }
    if study.budget is not None:
        changes["recipe"] = experiment.recipe.model_copy(update={"steps": study.steps})
    experiment = experiment.model_copy(update=changes)
    if run.fold is not None and study.folds:
        experiment = designer.hold_out(experiment, run.variant, Fold(run.fold, study.folds, run.seed))
    if run.half or run.frozen:
        half = max(1, experiment.length(designer.train_images(experiment)).total // 2)
        steps = half if run.half else 0
        recipe = experiment.recipe.model_copy(update={"steps": steps})
        experiment = experiment.model_copy(update={"recipe": recipe})
    return experiment


def write_jobs(folder: Path, jobs: Sequence[StudyJob]) -> Path:
    """With the folder of each relative to the study's, which may be mounted elsewhere."""
    rows = [job.model_copy(update={"folder": Path(job.folder).name}).model_dump(mode="json") for job in jobs]
    write_atomically(folder / JOBS_FILE, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return folder / JOBS_FILE


def read_jobs(folder: Path) -> list[StudyJob]:
    """All of a study's jobs, if they were written."""
    found = []
    for number, row in enumerate(read_lines(folder / JOBS_FILE), 1):
        try:
            found.append(StudyJob.model_validate(row | {"folder": str(folder / row["folder"])}))
        except ValidationError as error:
            raise ValueError(f"{folder / JOBS_FILE}:{number}: {clear(error)}") from None
    return found


def read_job(folder: Path, number: int) -> StudyJob:
    """The number counts from 1, as do the lines."""
    jobs = read_jobs(folder)
    if not jobs:
        raise ValueError(f"{folder} holds no {JOBS_FILE}: write it with `linvit compare … --jobs-file`")
    if not 1 <= number <= len(jobs):
        raise ValueError(f"{folder} has no job {number}: it has 1 to {len(jobs)}")
    return jobs[number - 1]


def assemble(folder: Path) -> None:
    """Copy the records of jobs that a scheduler has finished into the study's, once."""
    if jobs := read_jobs(folder):
        found = [record for job in jobs for record in study_records(job, job.finished())]
        store_runs(open_ledger(folder), found + pooled_records(found, folder, len({job.fold for job in jobs})))


def store_runs(ledger: Ledger, records: Iterable[Record]) -> None:
    """Those that the study does not have; a failed run may be repeated."""
    known = {_run_key(record) for record in ledger if record.metric != "failed"}
    ledger.append([record for record in records if _run_key(record) not in known])


def _run_key(record: Record) -> tuple[Any, ...]:
    return record.experiment, *metrics.key(record)


def study_records(job: StudyJob, records: Iterable[Record]) -> Iterator[Record]:
    """A run's records as the study has them; the files they name are in the run's folder."""
    place = Path(job.folder).name
    tags: dict[str, Tag] = {"variant": job.variant} if job.fold is None else {"variant": job.variant, "fold": job.fold}
    for r in records:
        if not job.full:  # only its final result matters
            kept = HALF_METRICS if job.half else FROZEN_METRICS
            if r.metric not in kept or r.tags["selection"] != "best":
                continue
            own = {name: value for name, value in r.tags.items() if name != "selection"}
            r = replace(r, metric=kept[r.metric], tags=own)
        yield replace(r, artefact=f"{place}/{r.artefact}" if r.artefact else "").tagged(**tags)


def pooled_records(records: Iterable[Record], folder: Path, folds: int) -> list[Record]:
    """Of each variant and seed, the result over the images of all folds; none where a fold is missing."""
    groups: dict[tuple[Tag, Tag], dict[Tag, Record]] = {}
    for r in records:
        if r.metric == "predictions" and "fold" in r.tags:
            groups.setdefault((r.tags["variant"], r.tags["seed"]), {})[r.tags["fold"]] = r
    pooled = []
    for each in groups.values():
        if len(each) == folds:
            mine = [each[fold] for fold in range(folds)]
            base = replace(mine[0], artefact="", tags={k: v for k, v in mine[0].tags.items() if k != "fold"})
            pooled += out_of_fold(base, [(folder / r.artefact).parent for r in mine])
    return pooled
