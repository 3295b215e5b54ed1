"""Stages: the trainings of a conversion, each an ordinary experiment in a folder of its own, and their lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from linvit.conversion.context import Context, StageResult
from linvit.conversion.teacher import FULL_BATCH
from linvit.durations import seconds
from linvit.schemas.experiment import DatasetRef, Experiment
from linvit.training.files import load_tensors
from linvit.training.loop import Training
from linvit.training.recipe import create_recipe
from linvit.training.run import run
from linvit.training.start import start_from, stored_of

FIND_SECONDS = 300.0  # at most, to find a target that is not named; a longer budget is for training
DEFAULT_EPOCHS, DEFAULT_STEPS = 4.0, 300  # of all stages together: the longer of the two
TIMED_SECONDS = 2.0  # of training, from which a budget is turned into steps


class Stage(NamedTuple):
    folder: str
    task: str
    share: float  # of all steps; two stages 2 have half of it each
    rate: float  # learning rate times the width of the tokens


STAGES = {
    "stage 1": Stage("stage-1", "attention-matching", 0.25, 0.2),
    "stage 2": Stage("stage-2", "distillation", 0.5, 0.04),
    "mix, stage 2": Stage("stage-2-mix", "distillation", 0.5, 0.04),
    "stage 3": Stage("stage-3", "classification", 0.25, 0.02),
}


def stage_shares(stages: Sequence[int], search: bool = False, auto: bool = False) -> dict[str, float]:
    """Each training's share of all steps. auto: only a mix is trained."""
    if auto:
        names = [name for stage, name in ((2, "mix, stage 2"), (3, "stage 3")) if stage in stages]
        total = sum(STAGES[name].share for name in names)
        return {name: STAGES[name].share / total for name in names}
    shares = {f"stage {stage}": STAGES[f"stage {stage}"].share for stage in stages}
    total = sum(shares.values())
    shares = {name: share / total for name, share in shares.items()}
    if search and "stage 2" in shares:
        shares["stage 2"] = shares["mix, stage 2"] = shares["stage 2"] / 2
    return shares


def stage_steps(shares: dict[str, float], per_epoch: int, epochs: float | None, steps: int | None) -> dict[str, int]:
    """Steps of each training."""
    if steps is not None and steps < len(shares):
        raise ValueError(f"steps={steps} are too few for {len(shares)} trainings")
    total = steps or max(1, round((epochs or DEFAULT_EPOCHS) * per_epoch))
    if steps is None and epochs is None:
        total = max(DEFAULT_STEPS, total)
    return {name: max(1, round(share * total)) for name, share in shares.items()}


def find_seconds(budget: str | None) -> float:
    """What there is to find the target."""
    return min(FIND_SECONDS, seconds(budget)) if budget else FIND_SECONDS


def training_seconds(budget: str | None) -> float:
    """What a budget leaves for training once the target is found."""
    return max(0.0, seconds(budget) - FIND_SECONDS) if budget else 0.0


def learning_rate(name: str, dim: int, batch: int) -> float:
    """Of a stage; small batches take a lower rate."""
    return STAGES[name].rate / dim * min(1.0, math.sqrt(batch / FULL_BATCH))


def plan_steps(c: Context, layers: str, student: Path) -> None:
    """Store the steps that fit the budget, from the time of a few real steps of each stage."""
    auto, budget = c.conversion.auto, c.conversion.budget
    shares = stage_shares(c.conversion.stages, c.conversion.max_drop is not None, auto)
    if c.conversion.steps or not budget or not shares:
        return
    total: float = training_seconds(budget) if auto else seconds(budget)
    steps, data = {}, c.images.dataset
    # whatever the length: teacher and student on both splits, and each stage before its first and after its last step
    evaluated = len(data.validation) * (2 + 3 * len(shares)) + 2 * len(data.test)
    for name, share in shares.items():
        c.progress(len(steps), len(shares), f"timing {name}")
        training = Training(stage_experiment(c, name, layers, student, 1), data, c.device, ())
        rate = training.rate(min(TIMED_SECONDS, total / 50))
        validation = len(data.validation) / rate.images / training.per_epoch
        left = max(total / 2, total - evaluated / rate.images)
        steps[name] = max(1, int(share * left / (1 / rate.steps + validation)))
    c.conversion = c.conversion.model_copy(update={"steps": steps})
    c.conversion.save(c.folder)


def train_stage(c: Context, name: str, layers: str, start: Path) -> StageResult:
    """Train the stage, resume it, or read what it produced."""
    folder = c.folder / STAGES[name].folder
    experiment = stage_experiment(c, name, layers, start, c.conversion.steps[name])
    trackers = [kind(experiment, folder, c.folder) for kind in c.trackers]
    listeners, every = [c.on_event, *trackers], c.checkpoint_seconds
    records = run(
        experiment, c.images.dataset, folder, device=c.device, listeners=listeners, checkpoint_seconds=every, test=False
    )
    for tracker in trackers:
        tracker.give_up()  # no test will end it
    if diverged := next((record for record in records if record.metric == "diverged"), None):
        raise ValueError(
            f"{name} diverged at step {diverged.value}, in {diverged.tags.get('layer')}: choose a lower lr than "
            f"{experiment.recipe.lr:g}, and another --out"
        )
    last, kept = (load_tensors(folder / which / "model.safetensors")[1]["step"] for which in ("last", "best"))
    spent = next((record.value for record in records if record.metric == "train_seconds"), None)
    return c.result(name, folder / "best", last, kept, float(spent or 0.0))


def stage_experiment(c: Context, name: str, layers: str, start: Path, steps: int) -> Experiment:
    task, begin = STAGES[name].task, start_from(start)
    rate = c.conversion.options.get("lr", learning_rate(name, c.config.dim, c.recipe.batch_size))
    return Experiment(
        data=DatasetRef(name=c.conversion.data.name, identity=c.images.dataset.identity),
        model=stored_of(begin).config.model_copy(update={"attention": layers}),
        recipe=create_recipe(c.recipe, lr=rate, steps=steps),
        seed=c.conversion.seed,
        task=task,
        start=begin,
        label=name,
        teacher=None if task == "classification" else c.teacher_start,
    )
