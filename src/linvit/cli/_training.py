"""What `linvit train` says when it is done, or before it begins, and how verbs read `--set`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from linvit.cli._output import rows
from linvit.progress import duration

if TYPE_CHECKING:
    from pathlib import Path

    from linvit.data import Dataset
    from linvit.train import Experiment, Trained


def summary(trained: Trained) -> dict[str, Any]:
    alone = {
        "test_accuracy_final": trained.value("test_accuracy", "final"),
        "validation_accuracy": trained.value("validation_accuracy"),
    }
    bits = {
        "bits_per_dim": trained.value("bits_per_dim", "best"),
        "bits_per_dim_final": trained.value("bits_per_dim", "final"),
        "validation_bits_per_dim": trained.value("validation_bits_per_dim"),
    }
    folds = {
        "test_accuracy_interval": interval_of_folds(trained),
        "folds": [one.test_accuracy for one in trained.folds],
    }
    return {
        "folder": str(trained.folder),
        **(bits if trained.experiment.model.causal else {"test_accuracy": trained.test_accuracy}),
        **(folds if trained.folds else {} if trained.experiment.model.causal else alone),
        "diverged": trained.diverged or None,
        "skipped": trained.data.skipped,
        "records": rows(trained.records),
    }


def print_summary(trained: Trained, already: bool) -> None:
    from linvit.measure.accuracy import wilson

    folder = trained.folder
    if already:
        print(f"{folder}: this experiment is finished; nothing was left to do")
    if trained.data.skipped:
        print(f"skipped        {trained.data.skipped} unreadable images")
    if trained.folds:
        print_folds(trained)
        return
    bits = trained.experiment.model.causal
    best, final = (trained.find("bits_per_dim" if bits else "test_accuracy", which) for which in ("best", "final"))
    if best is None or final is None or best.value is None:
        return
    if bits:
        print(f"bits per dim   {best.value:.4f}, {best.n} test images, one seed: chosen on validation")
    else:
        low, high = wilson(best.value, best.n)
        print(f"test accuracy  {best.value:.4f} [{low:.4f}, {high:.4f}], n = {best.n}, one seed: chosen on validation")
    print(f"               {final.value:.4f}: after the last step")
    seconds = duration(trained.value("train_seconds") or 0)
    print(f"model          {best.tags['attention']}, {trained.value('parameters'):,} parameters, trained in {seconds}")
    print(f"folder         {folder} (the model: {folder / 'best'})")
    print(f"use it         linvit {f'sample {folder}' if bits else f'predict IMAGE --model {folder}'}")
    print(f"               linvit evaluate {folder} · linvit.load('{folder}') in Python")


def interval_of_folds(trained: Trained) -> tuple[float, float] | None:
    """Of the accuracy over all images, corrected for those that folds share; None if a fold diverged."""
    from linvit.report.statistics import interval

    found = [one.test_accuracy for one in trained.folds]
    whole, spread = trained.test_accuracy, interval((x for x in found if x is not None), 1 / max(1, len(found) - 1))
    if whole is None or spread is None or spread.low is None:
        return None
    half = spread.mean - spread.low
    return max(0.0, whole - half), min(1.0, whole + half)


def print_folds(trained: Trained) -> None:
    whole, ends = trained.find("test_accuracy", "best"), interval_of_folds(trained)
    if whole is None or ends is None:
        return
    print(f"out of fold    {whole.value:.4f} [{ends[0]:.4f}, {ends[1]:.4f}], n = {whole.n} in {len(trained.folds)} "
          "folds, one seed: corrected resampled t")  # fmt: skip
    scores = [f"{name} {trained.value(f'macro_{key}'):.4f}"
              for name, key in (("precision", "precision"), ("recall", "recall"), ("F1", "f1"))]  # fmt: skip
    print(f"               {', '.join(scores)}: means over classes")
    seconds = duration(sum(one.value("train_seconds") or 0 for one in trained.folds))
    print(f"model          {whole.tags['attention']}, {trained.value('parameters'):,} parameters, trained in {seconds}")
    print(f"folder         {trained.folder} (a model for each fold: {trained.folder / 'fold-0' / 'best'}, …)")
    print("use it         train once more without --folds: all images but a test split then make one model")


def print_outlook(experiment: Experiment, data: Dataset, folder: Path) -> None:
    """What a training is and how far it is."""
    from linvit.models import VisionTransformer
    from linvit.train.run import how_far

    state, model, recipe = how_far(experiment, folder), VisionTransformer(experiment.model), experiment.recipe
    batch, per_epoch, steps = experiment.length(len(data.train))
    counts = f"{len(data.train):,} train, {len(data.validation):,} validate, {len(data.test):,} test"
    print(f"experiment {experiment.id} in {folder}: {state}")
    print(f"  images   {counts}; {len(data.classes)} classes, {data.channels} × {data.image_size} × {data.image_size}")
    print(f"  model    {experiment.model.attention}, {model.parameter_count():,} parameters, {model.tokens} tokens, "
          f"{model.macs():,} MACs per image")  # fmt: skip
    print(f"  start    {experiment.start.name if experiment.start else 'from nothing'}")
    print(
        f"  steps    {steps:,} of {batch} images ({steps / per_epoch:.4g} epochs), {recipe.optimizer}, lr {recipe.lr:g}"
    )


def print_config(trained: Trained) -> None:
    from linvit.toml import to_toml

    every = [one.experiment for one in trained.folds or [trained]]
    rows = [{"id": one.id} | one.model_dump(mode="json", exclude={"format"}) for one in every]
    print(to_toml({"folds": rows} if trained.folds else rows[0]), end="")


def explain_divergence(trained: Trained) -> int:
    """What to try, and the exit code."""
    step = trained.value("diverged")
    kept = f"the best model until then is in {trained.folder / 'best'}" if trained.model else "no epoch was finished"
    kept = f"the other folds are in {trained.folder}" if trained.folds else kept
    print(
        f"linvit: diverged at step {step:.0f}: {trained.diverged} is not finite; {kept}. "
        "Try a lower --lr, --set warmup=0.3, --set clip_norm=0.5 or an attention with qk_norm=true; and another --out",
        file=sys.stderr,
    )
    return 1


def settings(pairs: list[str] | None, **flags: Any) -> dict[str, Any]:
    """The flags that were given and the texts `key=value`, where a value with commas is a list. What they mean is
    checked by the library."""
    chosen = {key: value for key, value in flags.items() if value is not None}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not (key and equals and value):
            raise ValueError(f"--set {pair}: write KEY=VALUE, e.g. --set dropout=0.1")
        if key in ELSEWHERE:
            raise ValueError(f"--set {pair}: use --{key.replace('_', '-')}")
        if key in NOT_OPTIONS:
            raise ValueError(f"unknown option '{key}'")
        if key in chosen:
            raise ValueError(f"--set {pair}: {key} is given twice")
        chosen[key] = [part for part in value.split(",") if part] if "," in value else value
    return chosen


ELSEWHERE = (
    "data", "attention", "attentions", "seed", "seeds", "image_size", "limit", "skip_bad", "out", "device", "data_root",
    "budget", "match", "jobs", "jobs_file", "threads", "controls", "runner", "with_scratch", "with_redrawn", "folds",
    "on", "dry_run", "print_config", "track", "task",
)  # fmt: skip
NOT_OPTIONS = (  # but arguments of the functions
    "progress", "listeners", "checkpoint_seconds", "command", "hear", "test", "variants", "source", "start",
    "dataset", "trials", "space", "sampler", "pruner", "storage", "join", "say", "config",
)  # fmt: skip
