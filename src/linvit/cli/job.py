"""`linvit job`: one of a study's trainings, as a scheduler's array starts them."""

from __future__ import annotations

import os
from pathlib import Path

from linvit.cli._output import warnings_in_one_line
from linvit.requests import JobRequest

SLURM = "SLURM_ARRAY_TASK_ID"


def run(request: JobRequest) -> None:
    from linvit.cli._display import Display
    from linvit.cli.train import print_outlook
    from linvit.execute import DatasetCache
    from linvit.measure.devices import pick_device
    from linvit.study.jobs import read_job
    from linvit.training.trackers import tracking

    kinds = tracking(request.track)
    number = _number(request)
    job = read_job(request.folder, number)
    device = None if request.device is None else str(pick_device(request.device))
    changes = {"threads": request.threads, "device": device}
    job = job.model_copy(update={key: value for key, value in changes.items() if value is not None})
    place, datasets = Path(job.folder), DatasetCache()
    with Display(request.quiet) as display, warnings_in_one_line():
        dataset = datasets.find(job.experiment, display.progress)
        trackers = [kind(job.experiment, place, place) for kind in kinds]
        if not request.dry_run:
            job.run(datasets, lambda event: [listen(event) for listen in (display.on_event, *trackers)])  # type: ignore[func-returns-value]
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
        raise ValueError(f"which job? Give its number, or set {SLURM}")
    return int(text)
