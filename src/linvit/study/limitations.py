"""What a reader must know before trusting a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from linvit.data import repeats
from linvit.pipeline.prepare import Prepared
from linvit.schemas.study import Study
from linvit.study.jobs import StudyJob
from linvit.training.defaults import OF_TASK, TUNED

FEW_TEST_IMAGES = 500


def warnings(study: Study, prepared: Prepared, jobs: Sequence[StudyJob], limit: int | None) -> list[str]:
    """What a reader must know before trusting the comparison, and the records do not show."""
    found, data, recipe = [], prepared.designer.dataset, study.recipe
    pixels, done = study.model.pixels, study.epochs or 0.0
    full = (OF_TASK[study.model.stem] if pixels else TUNED.get(data.name, {})).get("epochs")
    if done < 1 and study.steps:
        found.append(f"{study.steps} steps are {done:.2g} of an epoch: the models are barely trained.")
    elif full and done < full and not _checked(jobs):
        found.append(f"{done:g} of the recipe's {full:g} epochs: more training may change the order.")
    if limit is not None:
        found.append(f"At most {limit:,} images of each split were used: more may change the order.")
    images = prepared.designer.train_images
    steps = {job.variant: job.experiment.length(images(job.experiment)).total for job in jobs if job.full}
    usual = statistics.mode(steps.values()) if steps else 0
    for other in sorted({*steps.values()} - {usual}):
        names = ", ".join(v.label for v in study.variants if steps.get(v.id) == other)
        found.append(f"{names} had {other:,} steps, the others {usual:,}: differences are not due to attention alone.")
    starts = [start for job in jobs if (start := job.experiment.start) and start.shipped]
    if len({start.sha256 for start in starts}) > 1:
        found.append(
            "Each variant started from a backbone with its own attention: softmax's was trained for five epochs, the "
            "others for one more from softmax's weights. Differences include those between the backbones."
        )
    if recipe.patience:
        found.append("With early stopping (patience), variants may differ in their number of steps.")
    if recipe.compile:
        found.append("Speeds and memory are of models without torch.compile, unlike the training.")
    if known := repeats(data):
        share = f"{known:,} of {len(data.test):,} test images ({known / len(data.test):.1%})"
        effect = "bits per dimension are too low" if pixels else "accuracies are too high"
        found.append(f"{share} repeat training images: {effect}.")
    tested = len(data.test) * (study.folds or 1)
    if not pixels and tested < FEW_TEST_IMAGES:
        share = "" if data.several else f": one of them is {1 / max(1, tested):.1%} of accuracy"
        found.append(f"Only {tested} test images{share}.")
    return found


def _checked(jobs: Sequence[StudyJob]) -> bool:
    """Whether every variant was also trained for half of the steps, by which the report judges if more would matter."""
    halves = [job for job in jobs if job.half]
    return {job.variant for job in halves} == {job.variant for job in jobs} and all(job.finished() for job in halves)


def unfinished(jobs: Sequence[StudyJob]) -> list[str]:
    """Runs for which the budget had no time."""
    half = sum(job.half for job in jobs)
    kinds = {"runs": len(jobs) - half, "runs with half the steps": half}
    return [
        f"There was no time for {count} of the {kind}: the same command adds them."
        for kind, count in kinds.items()
        if count
    ]
