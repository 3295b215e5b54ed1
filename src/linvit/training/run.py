"""One experiment in its folder: train it or resume it, then, if asked, evaluate it on the test images, once."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from linvit import ranks
from linvit.data import Dataset
from linvit.files import remove_parts, write_atomically
from linvit.ledger import Ledger, open_ledger
from linvit.locks import claim_folder, locked
from linvit.records import Record
from linvit.schemas.experiment import Experiment
from linvit.training.card import model_card
from linvit.training.checkpoint import read_config, save_about
from linvit.training.events import Listener, Tested, tell
from linvit.training.experiment import OURS, claim, record_of
from linvit.training.files import load_tensors
from linvit.training.loop import Training

FINISHED = ("test_seconds", "diverged")  # one of these metrics is recorded last


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
    training = Training(experiment, dataset, device, listeners)  # what cannot be built leaves nothing in the folder
    first = training.first
    with locked(folder, wait) if first else nullcontext():  # the first rank's, which alone writes
        if first:
            claim(experiment, folder)
            remove_parts(folder, folder / "best", folder / "last")
        ledger = open_ledger(folder)
        if _is_left(first, ledger, "learning_curve"):
            training.fit(folder, checkpoint_seconds)
            if first:
                ledger.replace([*ledger, *_fitted(training)])  # all of a stage or nothing
        if test and _is_left(first, ledger, *FINISHED):
            found = _tested(experiment, dataset, folder, training)
            if first:
                ledger.replace([*ledger, *found])
        ranks.highest(0)  # no rank continues before everything is written
        return list(ledger)


def _is_left(first: bool, ledger: Ledger, *last: str) -> bool:
    """Whether no earlier call finished the stage that ends with one of these metrics, as the first rank sees it."""
    return bool(ranks.highest(first and not ledger.has(*last))[0])


def status(experiment: Experiment, folder: Path) -> str:
    """How far the experiment is; a ValueError if the folder holds another one. Nothing is written."""
    if claim_folder(folder / "experiment.json", experiment, OURS) is None:
        return "not started"
    if open_ledger(folder).has(*FINISHED):
        return "finished"
    steps = [path.stem.removeprefix("step-") for path in (folder / "last").glob("step-*.safetensors")]
    return f"resumes at step {int(max(steps)):,}" if steps else "started"


def _fitted(training: Training) -> list[Record]:
    base, tally, model = record_of(training.experiment, training.device), training.tally, training.model
    found = [
        replace(base, metric="parameters", value=model.parameter_count(), unit="count"),
        replace(base, metric="macs", value=model.macs(), unit="MAC"),
        replace(base, metric="learning_curve", value=None, artefact="log.jsonl"),
        replace(base, metric="train_seconds", value=tally.seconds, unit="s"),
        replace(base, metric="gradient_norm", value=tally.norms[1]),
    ]
    for (layer, name), value in training.averaged.learned().items():
        found.append(replace(base, metric="learned_parameter", value=value).tagged(layer=layer, name=name))
    if training.diverged is not None:
        step, layer = training.diverged.step, training.diverged.layer
        return [*found, replace(base, metric="diverged", value=step, unit="step").tagged(layer=layer)]
    if "accuracy" in tally.first_row:
        value, n = tally.first_row["accuracy"], len(training.dataset.validation)
        found.append(replace(base, metric="start_accuracy", value=value, unit="fraction", n=n))
    for name, unit in (("accuracy", "fraction"), ("mean_average_precision", "fraction"), ("bits_per_dim", "bit")):
        if name in tally.best_row:
            value, n = tally.best_row[name], len(training.dataset.validation)
            found.append(replace(base, metric=f"validation_{name}", value=value, unit=unit, n=n))
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
        found[name] = training.evaluate(models, dataset.test)
    seconds = time.perf_counter() - start
    base = record_of(experiment, training.device)
    records, files = training.task.records(base, found["best"], found["last"])
    rows = {name: {f"test_{key}": value for key, value in training.task.row(found[name]).items()} for name in facts}
    if training.first and (about := training.task.about(found["best"])):
        stored = read_config(folder / "best")[1]["data"]
        save_about(folder / "best", experiment.model, stored | about)
    for name, content in files.items() if training.first else ():
        write_atomically(folder / name, content)
    for name, (_, about) in facts.items() if training.first else ():
        write_atomically(folder / name / "README.md", model_card(experiment, dataset, about | rows[name]))
    tell(training.listeners, Tested(facts["best"][1]["step"], rows["best"]))
    return [replace(base, metric="test_seconds", value=seconds, unit="s"), *records]
