"""`linvit train`: a data set's name or a folder of images in, a trained vision transformer out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from linvit.cli._output import print_json, rows, working
from linvit.durations import duration
from linvit.requests import TrainRequest

PRECISION = "mean_average_precision"  # of images with several labels each

if TYPE_CHECKING:
    from pathlib import Path

    from linvit.data import Dataset
    from linvit.pipeline.train import Trained
    from linvit.schemas.experiment import Experiment


def run(request: TrainRequest) -> int:
    from linvit import ranks
    from linvit.pipeline import train as training

    with working(request) as display:
        trained = training.run(request, on_event=display.on_event, progress=display.progress)
    if ranks.number() > 0:  # the first rank prints
        return 0
    if request.print_config:
        print_config(request, trained)
    elif request.dry_run:
        for one in trained.folds or [trained]:
            print_outlook(one.experiment, one.data, one.folder)
    elif request.as_json:
        print_json(summary(trained))
    elif not request.quiet:
        print_summary(trained, already=not display.events)
    return explain_divergence(trained) if trained.diverged else 0


def summary(trained: Trained) -> dict[str, Any]:
    if trained.experiment.model.pixels:
        scores: dict[str, Any] = {
            "bits_per_dim": trained.value("bits_per_dim", "best"),
            "bits_per_dim_final": trained.value("bits_per_dim", "final"),
            "validation_bits_per_dim": trained.value("validation_bits_per_dim"),
        }
    elif trained.find(PRECISION, "best"):
        scores = {
            PRECISION: trained.value(PRECISION, "best"),
            f"{PRECISION}_final": trained.value(PRECISION, "final"),
            f"validation_{PRECISION}": trained.value(f"validation_{PRECISION}"),
        }
    elif trained.folds:
        scores = {
            "test_accuracy": trained.test_accuracy,
            "test_accuracy_interval": fold_interval(trained),
            "folds": [one.test_accuracy for one in trained.folds],
        }
    else:
        scores = {
            "test_accuracy": trained.test_accuracy,
            "test_accuracy_final": trained.value("test_accuracy", "final"),
            "validation_accuracy": trained.value("validation_accuracy"),
        }
    outcome = {"diverged": trained.diverged or None, "skipped": trained.data.skipped}
    return {"folder": str(trained.folder)} | scores | outcome | {"records": rows(trained.records)}


def print_summary(trained: Trained, already: bool) -> None:
    from linvit.measure.accuracy import wilson

    folder = trained.folder
    if already:
        print(f"{folder}: this experiment was already finished")
    if trained.data.skipped:
        print(f"skipped        {trained.data.skipped} unreadable images")
    if trained.folds:
        print_folds(trained)
        return
    pixels = trained.experiment.model.pixels
    several = trained.find(PRECISION, "best") is not None
    metric = "bits_per_dim" if pixels else PRECISION if several else "test_accuracy"
    best, final = (trained.find(metric, which) for which in ("best", "final"))
    if best is None or final is None or best.value is None:
        return
    if pixels:
        print(f"bits per dim   {best.value:.4f}, {best.n} test images, one seed: selected on validation images")
    elif several:
        print(f"mean av. prec. {best.value:.4f}, {best.n} test images, one seed: selected on validation images")
    else:
        low, high = wilson(best.value, best.n)
        interval = f"{best.value:.4f} [{low:.4f}, {high:.4f}], n = {best.n}"
        print(f"test accuracy  {interval}, one seed: selected on validation images")
    print(f"               {final.value:.4f}: after the last step")
    seconds = duration(trained.value("train_seconds") or 0)
    print(f"model          {best.tags['attention']}, {trained.value('parameters'):,} parameters, trained in {seconds}")
    print(f"folder         {folder} (the model: {folder / 'best'})")
    use = "sample {}" if trained.experiment.model.causal else "" if pixels else "predict IMAGE --model {}"
    if use:
        print(f"use it         linvit {use.format(folder)}")
    print(f"               linvit evaluate {folder} · linvit.load('{folder}') in Python")


def fold_interval(trained: Trained) -> tuple[float, float] | None:
    """Of the accuracy over all images, corrected for the images that folds share; None if a fold diverged."""
    from linvit.report.statistics import interval

    found = [one.test_accuracy for one in trained.folds]
    whole, spread = trained.test_accuracy, interval((x for x in found if x is not None), 1 / max(1, len(found) - 1))
    if whole is None or spread is None or spread.low is None:
        return None
    half = spread.mean - spread.low
    return max(0.0, whole - half), min(1.0, whole + half)


def print_folds(trained: Trained) -> None:
    whole, ends = trained.find("test_accuracy", "best"), fold_interval(trained)
    if whole is None or ends is None:
        return
    interval = f"{whole.value:.4f} [{ends[0]:.4f}, {ends[1]:.4f}], n = {whole.n} in {len(trained.folds)} folds"
    print(f"out of fold    {interval}, one seed: corrected resampled t")
    names = {"precision": "macro_precision", "recall": "macro_recall", "F1": "macro_f1"}
    scores = [f"{name} {trained.value(metric):.4f}" for name, metric in names.items()]
    print(f"               {', '.join(scores)}: means over classes")
    seconds = duration(sum(one.value("train_seconds") or 0 for one in trained.folds))
    print(f"model          {whole.tags['attention']}, {trained.value('parameters'):,} parameters, trained in {seconds}")
    print(f"folder         {trained.folder} (one model per fold: {trained.folder / 'fold-0' / 'best'}, …)")
    print("use it         train again without --folds for one model from all images but a test split")


def print_outlook(experiment: Experiment, data: Dataset, folder: Path) -> None:
    """What a training is and how far it is."""
    from linvit.models import estimate
    from linvit.training.run import status

    cost, config, recipe = estimate(experiment.model), experiment.model, experiment.recipe
    batch, per_epoch, steps = experiment.length(len(data.train))
    counts = f"{len(data.train):,} train, {len(data.validation):,} validate, {len(data.test):,} test"
    size = " × ".join(map(str, config.image_shape))
    print(f"experiment {experiment.id} in {folder}: {status(experiment, folder)}")
    print(f"  images   {counts}; {len(data.classes)} classes, {size}")
    counts = f"{cost.parameters:,} parameters, {config.tokens} tokens, {cost.macs:,} MACs per image"
    print(f"  model    {config.attention}, {counts}")
    print(f"  start    {f'from {experiment.start.name}' if experiment.start else 'from scratch'}")
    length = f"{steps:,} of {batch} images ({steps / per_epoch:.4g} epochs)"
    print(f"  steps    {length}, {recipe.optimizer}, lr {recipe.lr:g}")


def print_config(request: TrainRequest, trained: Trained) -> None:
    from linvit.toml import to_toml

    every = [one.experiment for one in trained.folds or [trained]]
    tables = [{"id": one.id} | one.model_dump(mode="json", exclude={"format"}) for one in every]
    resolved = {"folds": tables} if trained.folds else tables[0]
    print(to_toml({"request": request.stored()} | resolved), end="")


def explain_divergence(trained: Trained) -> int:
    """What to try, and the exit code."""
    step = trained.value("diverged")
    kept = f"the best model until then is in {trained.folder / 'best'}" if trained.model else "no epoch was finished"
    kept = f"the other folds are in {trained.folder}" if trained.folds else kept
    print(
        f"linvit: diverged at step {step:.0f}: {trained.diverged} is not finite; {kept}. Try a lower --lr, "
        "--set warmup=0.3, --set clip_norm=0.5 or an attention with qk_norm=head, and another --out",
        file=sys.stderr,
    )
    return 1
