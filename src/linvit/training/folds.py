"""Folds: every image is held out once, and what is then said of it is scored together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from linvit.measure.accuracy import Evaluation
from linvit.records import Record
from linvit.training.checkpoint import read_config
from linvit.training.tasks.classification import by_class

MACRO = ("macro_precision", "macro_recall", "macro_f1")


def out_of_fold(base: Record, runs: Sequence[Path]) -> list[Record]:
    """Accuracy, precision, recall and F1 over all images, each judged by the chosen model of the run that held it out;
    nothing unless every run has said what it thinks of its images. They belong to no single experiment."""
    files = [run / "predictions.npz" for run in runs]
    if not all(file.exists() for file in files):
        return []
    said = []
    for file in files:
        with np.load(file) as arrays:
            said.append((arrays["labels"], arrays["predicted"]))
    labels, predicted = (np.concatenate(parts) for parts in zip(*said, strict=True))
    classes = read_config(runs[0])[1]["data"]["classes"]
    found = Evaluation(math.nan, labels, predicted, np.zeros(0), classes)
    chosen = replace(base, experiment="", n=len(labels)).tagged(selection="best")
    means = np.mean([values for _, *values in found.per_class()], axis=0).tolist()
    return [
        replace(chosen, metric="test_accuracy", value=found.accuracy, unit="fraction"),
        *(replace(chosen, metric=name, value=mean, unit="fraction") for name, mean in zip(MACRO, means, strict=True)),
        *by_class(chosen, found),
    ]
