"""`linvit job`: one of a study's trainings, as a scheduler's array starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linvit.cli import _options as options


def run(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(
        metavar="DIR", help="A study's folder, with the jobs.jsonl that `linvit compare … --jobs-file` wrote.")],
    number: Annotated[int, typer.Argument(
        metavar="N", envvar="SLURM_ARRAY_TASK_ID", help="Which job, from 1. [default: $SLURM_ARRAY_TASK_ID]")],
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. [default: the study's, or 1]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. [default: the study's]")] = None,
    dry_run: options.DryRun = False,
    track: options.Track = None,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Do one training of a study, beside others that do the rest.

    The same command again goes on where it was stopped. `linvit report DIR` shows what is finished; the study's own
    command, without --jobs-file, then measures speeds where it runs and writes the whole page.

    Examples:

        linvit compare cifar10 --epochs 10 --out runs/c10 --jobs-file
        linvit job runs/c10 3
        linvit report runs/c10
    """
    from linvit.cli import _output, _training
    from linvit.cli._display import Display
    from linvit.study.array import read_job
    from linvit.study.jobs import Shelf
    from linvit.train import pick_device
    from linvit.train.trackers import tracking

    kinds = tracking(track or ())
    job = read_job(folder, number)
    changes = {"threads": threads, "device": None if device is None else str(pick_device(device))}
    job = job.model_copy(update={key: value for key, value in changes.items() if value is not None})
    experiment, place = job.experiment, Path(job.folder)
    with Display(quiet) as display, _output.warnings_in_one_line(), options.resumable(ctx):
        dataset = Shelf().find(experiment, display.progress)
        if not dry_run:
            job.do(dataset, [display.listen, *(kind(experiment, place, place) for kind in kinds)])
    if dry_run:
        _training.print_outlook(experiment, dataset, place)
    elif not quiet:
        names = {"test_accuracy": "test accuracy", "bits_per_dim": "bits per dimension"}
        found = [r for r in job.finished() if r.metric in names and r.tags["selection"] == "best"]
        result = f"{names[found[0].metric]} {found[0].value:.4f}" if found else "diverged"
        print(f"job {number} of {job.jobs}, {job.name}: {result}, in {place}")
