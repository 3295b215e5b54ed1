"""`linvit job`: one of a study's trainings, as a scheduler's array starts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from linvit.cli._output import working
from linvit.requests import JobRequest

if TYPE_CHECKING:
    from linvit.training.events import Event

SLURM = "SLURM_ARRAY_TASK_ID"


def run(request: JobRequest) -> None:
    from linvit.cli.train import print_outlook
    from linvit.devices import pick_device
    from linvit.execute import DatasetCache, Tracking
    from linvit.study.jobs import read_job

    number = _number(request)
    job = read_job(request.folder, number)
    trackers = Tracking(request.track, Path(job.folder))
    device = None if request.device is None else str(pick_device(request.device))
    changes = {"threads": request.threads, "device": device}
    job = job.model_copy(update={key: value for key, value in changes.items() if value is not None})
    place, datasets = Path(job.folder), DatasetCache()
    with working(request) as display:
        dataset = datasets.find(job.experiment, display.progress)

        def on_event(event: Event) -> None:
            display.on_event(event)
            trackers(job, event)

        if not request.dry_run:
            job.run(datasets, on_event)
    if request.dry_run:
        print_outlook(job.experiment, dataset, place)
    elif not request.quiet:
        names = {"test_accuracy": "test accuracy", "bits_per_dim": "bits per dimension"}
        found = [r for r in job.finished() if r.metric in names and r.tags["selection"] == "best"]
        result = f"{names[found[0].metric]} {found[0].value:.4f}" if found else "diverged"
        print(f"job {number} of {job.jobs}, {job.name}: {result}, in {place}")


def _number(request: JobRequest) -> int:
    if request.number is not None:
        return request.number
    text = os.environ.get(SLURM, "")
    if not text.isdecimal():
        raise ValueError(f"give the number of a job, or set {SLURM}")
    return int(text)
