"""How long the published studies take on this machine at scale cpu, without running them.

    python benchmarks/study_costs.py            # all of them, half a minute of one core
    python benchmarks/study_costs.py 000-mnist  # one

A training step of each column's softmax is timed in CPU seconds of one thread, and those of the other rows are taken to
be in proportion to their multiply-accumulates. Steps, evaluations, folds, seeds and the runs for half of the steps are
counted; measuring speed and memory afterwards is taken to be MEASURED seconds a row. The last column is for the minutes
of `studies/agenda.py`. On a busy machine the numbers are too large.
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from typing import Any

import torch

from linvit.measure.models import model_calls
from linvit.models import estimate
from linvit.pipeline.design import DataShape, resolve
from linvit.schemas.model import ModelConfig
from linvit.schemas.recipe import Recipe
from linvit.studies import STUDIES, PublishedStudy, Row
from linvit.studies.agenda import AGENDA
from linvit.studies.declaration import Column
from linvit.training.optimizers import make_optimizer

# data → side, channels, classes, and images of training, validation and test
SETS = {
    "mnist": (28, 1, 10, 54_000, 6_000, 10_000),
    "cifar10": (32, 3, 10, 45_000, 5_000, 10_000),
    "cifar10:grey=true": (32, 1, 10, 45_000, 5_000, 10_000),
    "cifar100": (32, 3, 100, 45_000, 5_000, 10_000),
    "tiny-imagenet": (64, 3, 100, 45_000, 5_000, 5_000),
}
MEASURED = 25  # seconds a row for speeds, memory, errors and examples
LIMIT = 32  # images of a timed step, at most
CPU = torch.device("cpu")


def step_seconds(config: ModelConfig, recipe: Recipe) -> float:
    """CPU seconds of a training step for one image."""
    like = config.model_copy(update={"attention": "softmax", "seed": 0, "dropout": 0.0, "emb_dropout": 0.0})
    seconds = timed(like.model_dump_json(), recipe.optimizer, min(LIMIT, recipe.batch_size))
    return seconds * estimate(config).macs / estimate(like).macs


@cache
def timed(model: str, optimizer: str, batch: int) -> float:
    """The same, measured."""
    config, recipe = ModelConfig(**json.loads(model)), Recipe.model_validate({"optimizer": optimizer, "lr": 1e-12})
    step = model_calls(config, CPU, batch, lambda net: make_optimizer(recipe, net))["train_step"]
    step()
    begun, count = time.process_time(), 0
    while time.process_time() - begun < 0.2:
        step()
        count += 1
    return (time.process_time() - begun) / count / batch


def run_seconds(study: PublishedStudy, column: Column, row: Row) -> float:
    """Of one training and its evaluations."""
    side, channels, classes, *splits = SETS[study.data]
    own: Any = row.literal_data.get("image_size") if column == "literal" else None
    shape = DataShape(study.data, own or study.image_size(column, "cpu") or side, channels, classes)
    options = study.options(column, "cpu") | study.row_options(column, "cpu", row)
    spec = (row.literal if column == "literal" else None) or row.attention
    model, recipe = resolve(shape, spec, 0, options, task=study.task)
    size = study.size(column, "cpu")
    train, validation, test = (min(count, size.limit or count) for count in splits)
    if size.folds:
        train, test = train * (size.folds - 1) // size.folds, train // size.folds
    each = step_seconds(model, recipe)
    return each * (train * recipe.epochs + (validation * recipe.epochs + 2 * test) / 3)


def minutes(study: PublishedStudy) -> float:
    total = 0.0
    for column in study.columns:
        size, rows = study.size(column, "cpu"), list(study.rows_of(column))
        if column == "fair" and study.length("fair") == 1 and not any(row.attention == "uniform" for row in rows):
            rows.append(Row("uniform", "uniform"))
        runs = size.seeds * (size.folds or 1)
        total += sum((runs + 0.5) * run_seconds(study, column, row) + MEASURED * size.measured for row in rows)
    return total / 60


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    known = {name: study for name, study in STUDIES.items() if isinstance(study, PublishedStudy)}
    total = 0.0
    for name in names or known:
        found = minutes(known[name])
        total += found
        planned = f"{AGENDA[name].minutes:.0f}" if name in AGENDA else "–"
        print(f"{name:30} planned {planned:>5} min, here {found:6.0f} core-minutes", flush=True)
    print(f"{'all':30} {total / 60:.1f} core-hours")


if __name__ == "__main__":
    main(sys.argv[1:])
