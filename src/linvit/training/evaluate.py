"""Evaluate a stored model: its accuracy, or its bits per dimension, on a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from linvit.data import Dataset, Split
from linvit.devices import pick_device
from linvit.measure.accuracy import Evaluation, evaluate
from linvit.measure.likelihood import Likelihood, likelihood
from linvit.measure.several import Several, logits_of
from linvit.models import VisionTransformer
from linvit.progress import Progress, ignore
from linvit.training.checkpoint import built, read_model
from linvit.training.source import open_data, open_source, stored_source


@dataclass(frozen=True)
class Evaluated:
    folder: Path  # of the model
    data: str
    split: str
    result: Evaluation | Several | Likelihood  # by what the model was trained for
    changed: bool | None = None  # whether the data differ from those the model was trained on; None: not known


def evaluate_folder(
    folder: str | Path,
    data: str | Path | Dataset | None = None,
    *,
    split: str = "test",
    device: str = "auto",
    data_root: str | Path | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    batch: int = 256,
    progress: Progress = ignore,
) -> Evaluated:
    """Evaluate the model of a folder, by default on the data set it was trained on."""
    if split not in ("test", "validation"):
        raise ValueError(f"split '{split}' is not one of test, validation")
    stored = read_model(folder)
    model, config, identity = built(stored), stored.config, ""
    if not config.pixels:
        check_classes(model)
    reading = {"root": data_root and str(data_root), "limit": limit, "skip_bad": skip_bad or None}
    reading = {name: value for name, value in reading.items() if value is not None}
    fitting = {"image_size": config.image_size, "channels": config.channels, "resize": stored.about["resize"]}
    if data is None:
        source, identity = stored_source(stored.folder)
        dataset = open_source(source.model_copy(update=reading), progress)
    else:
        dataset, _ = open_data(data, progress, **fitting, **reading, cached=False)
    expected, found = (config.channels, config.image_size), (dataset.channels, dataset.image_size)
    if expected != found:
        raise ValueError(f"the images of {dataset.name} have (channels, size) {found}, but the model takes {expected}")
    images, place, about = getattr(dataset, split), pick_device(device), stored.about
    if not len(images):
        raise ValueError(f"{dataset.name} has no {split} images")
    if config.pixels:
        result: Evaluation | Several | Likelihood = likelihood(model.to(place), config, images, place)
    elif dataset.several or "thresholds" in about:
        result = _of_several(model.to(place), dataset, images, about)
    else:
        images = replace(images, labels=class_numbers(dataset, about["classes"])[images.labels])
        result = evaluate(
            model.to(place), images, about["classes"], about["mean"], about["std"], place, batch, progress
        )
    changed = dataset.identity != identity if identity and limit is None else None
    return Evaluated(stored.folder, dataset.name, split, result, changed)


def _of_several(model: VisionTransformer, dataset: Dataset, images: Split, about: dict[str, Any]) -> Several:
    """With the model's own thresholds."""
    if not dataset.several or "thresholds" not in about:
        has, knows = ("one label", "several") if not dataset.several else ("several labels", "one")
        raise ValueError(f"the images of {dataset.name} have {has} each, but the model was trained on {knows}")
    labels = np.zeros((len(images), len(about["classes"])), np.uint8)
    labels[:, class_numbers(dataset, about["classes"])] = images.labels
    images = replace(images, labels=labels)
    logits, loss = logits_of(model, images, about["mean"], about["std"], next(model.parameters()).device)
    return Several(loss, labels, logits, np.array(about["thresholds"], float), about["classes"])


def check_classes(model: VisionTransformer) -> None:
    """A ValueError if the model cannot classify."""
    if model.config.pixels:
        drawn = ": `linvit sample` draws images with it" if model.config.causal else ""
        raise ValueError(f"this is a {model.config.stem} model without classes{drawn}")
    if not model.about["classes"]:
        raise ValueError(
            f"{model.about['name']} has no head, only features: train it on images of the classes you need"
        )


def class_numbers(dataset: Dataset, classes: Sequence[str]) -> np.ndarray:
    """The index of each class of the data set among a model's classes, by name."""
    index = {name: i for i, name in enumerate(classes)}
    if unknown := [name for name in dataset.classes if name not in index]:
        raise ValueError(
            f"{dataset.name} has the class '{unknown[0]}', which the model does not know "
            f"(it knows {', '.join(list(index)[:8])}{', …' if len(index) > 8 else ''}): rename the classes, or "
            "give the model a new head with `linvit train DATA --from MODEL`"
        )
    return np.array([index[name] for name in dataset.classes])
