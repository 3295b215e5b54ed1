"""One experiment in its folder: train it, or go on with it, then (if asked) look at the test images, once."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from linvit.data import Dataset
from linvit.files import remove_parts, write_atomically
from linvit.locks import locked
from linvit.records import Record, Records
from linvit.train.card import model_card
from linvit.train.events import Listener
from linvit.train.experiment import Experiment
from linvit.train.files import load_tensors
from linvit.train.loop import Training
from linvit.train.recipe import check_amp


def run(
    experiment: Experiment,
    dataset: Dataset,
    folder: Path,
    *,
    device: torch.device,
    listeners: Sequence[Listener] = (),
    checkpoint_seconds: float = 30.0,
    test: bool = True,
    wait: float = 0.0,
) -> list[Record]:
    """The experiment's records; what is finished is not done again. `test=False` never reads the test split; a later
    call may. `wait`: seconds to wait for another process to leave the folder."""
    for split in ("train", "validation", *(["test"] if test else [])):
        if not len(getattr(dataset, split)):
            raise ValueError(f"{dataset.name} has no {split} images, and training needs some")
    check_amp(experiment.recipe.amp, device)
    training = Training(experiment, dataset, device, listeners)  # what cannot be built leaves nothing in the folder
    with locked(folder, wait):
        experiment.claim(folder)
        remove_parts(folder, folder / "best", folder / "last")
        records = Records(folder / "records.jsonl")
        done = {record.metric for record in records}
        if not done & {"learning_curve"}:
            training.fit(folder, checkpoint_seconds)
            _store(records, _fitted(training))
            done = {record.metric for record in records}
        if test and not done & {"test_seconds", "diverged"}:
            _store(records, _tested(experiment, dataset, folder, training))
        return list(records)


def _store(records: Records, more: list[Record]) -> None:
    """All of a stage's records, or none: a stage is done when they are there."""
    write_atomically(records.path, "".join(record.line() + "\n" for record in [*records, *more]))


def _fitted(training: Training) -> list[Record]:
    base, tally, model = training.experiment.record(training.device), training.tally, training.model
    found = [
        replace(base, metric="parameters", value=model.parameter_count(), unit="count"),
        replace(base, metric="macs", value=model.macs(), unit="MAC"),
        replace(base, metric="learning_curve", value=None, artefact="log.jsonl"),
        replace(base, metric="train_seconds", value=tally.seconds, unit="s"),
    ]
    if training.diverged is not None:
        step, layer = training.diverged.step, training.diverged.layer
        return [*found, replace(base, metric="diverged", value=step, unit="step").tagged(layer=layer)]
    if "accuracy" in tally.first_row:
        value, n = tally.first_row["accuracy"], len(training.dataset.validation)
        found.append(replace(base, metric="start_accuracy", value=value, unit="fraction", n=n))
    if "accuracy" in tally.best_row:
        value, n = tally.best_row["accuracy"], len(training.dataset.validation)
        found.append(replace(base, metric="validation_accuracy", value=value, unit="fraction", n=n))
    return found


def _tested(experiment: Experiment, dataset: Dataset, folder: Path, training: Training) -> list[Record]:
    """The test split, seen once by each of the two models that are reported."""
    start = time.perf_counter()
    found, models = {}, copy.deepcopy(training.averaged)
    facts = {name: load_tensors(folder / name / "model.safetensors") for name in ("best", "last")}
    for name, (tensors, about) in facts.items():
        if name == "last" and about["step"] == facts["best"][1]["step"]:
            found["last"] = found["best"]
            continue
        models.load_state_dict(tensors)
        found[name] = training.task.evaluate(models, dataset.test)
    seconds = time.perf_counter() - start
    base = experiment.record(training.device)
    records, files = training.task.records(base, found["best"], found["last"])
    for name, content in files.items():
        write_atomically(folder / name, content)
    for name, (_, about) in facts.items():
        tested = {f"test_{key}": value for key, value in training.task.row(found[name]).items()}
        write_atomically(folder / name / "README.md", model_card(experiment, dataset, about | tested))
    return [replace(base, metric="test_seconds", value=seconds, unit="s"), *records]
