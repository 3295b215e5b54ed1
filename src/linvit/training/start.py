"""Starts: the weights of a trained model as the first of a training, whatever its attention, classes or image size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from linvit.attention.multihead import OF_SPEC
from linvit.data import Dataset
from linvit.models import ModelConfig, VisionTransformer
from linvit.schemas.experiment import Experiment, Start
from linvit.training.checkpoint import Stored, built, read_model
from linvit.training.files import checksum

MAX_REMEMBERED = 8  # models whose weights stay in memory for the next training that starts from them

_recent: dict[Start, Stored] = {}  # the oldest first


def start_from(path: str | Path) -> Start:
    """A trained model's folder as the start of an experiment."""
    stored = read_model(path)
    start = Start(folder=str(stored.folder.resolve()), sha256=checksum(stored.tensors))
    _remember(start, stored)
    return start


def stored_of(start: Start) -> Stored:
    """The model that a start names, read once per process. Its weights are read when they are first used; a ValueError
    then if the folder holds other weights by now."""
    stored = _recent.get(start)
    if stored is None:
        found = read_model(start.folder, weights=False)
        stored = replace(found, read=partial(_same_weights, found, start))
    _remember(start, stored)
    return stored


def _same_weights(stored: Stored, start: Start) -> dict[str, Tensor]:
    if checksum(stored.tensors) != start.sha256:
        raise ValueError(f"{stored.folder} holds other weights than this experiment was started from")
    return stored.tensors


def _remember(start: Start, stored: Stored) -> None:
    _recent.pop(start, None)
    _recent[start] = stored
    while len(_recent) > MAX_REMEMBERED:
        _recent.pop(next(iter(_recent)), None)


def load_start(start: Start) -> VisionTransformer:
    """The model that a start names, in evaluation mode."""
    return built(stored_of(start))


def architecture(start: Start | None) -> ModelConfig | None:
    """Of the model that is started from: its weights need its shape."""
    return None if start is None else stored_of(start).config


def check_folds(start: Start | None, data: str, folds: int | None) -> None:
    """Every image is held out once, so a start must not have been trained on any of them."""
    if folds is not None and start is not None and stored_of(start).about["name"] == data:
        raise ValueError(
            f"folds={folds} would hold out images that {start.folder} was trained on: leave one of them out"
        )


def normalised(dataset: Dataset, experiment: Experiment) -> Dataset:
    """With the statistics that the start's weights were trained with; for a model of pixels, as fractions of white."""
    if experiment.model.pixels:
        return replace(dataset, mean=(0.0,) * dataset.channels, std=(1.0,) * dataset.channels)
    if experiment.start is None:
        return dataset
    about = stored_of(experiment.start).about
    return replace(dataset, mean=tuple(about["mean"]), std=tuple(about["std"]))


def started(experiment: Experiment, dataset: Dataset) -> tuple[VisionTransformer, bool]:
    """The model before the first step, and whether its head is still to be made.

    Positions follow the image size, and patch filters the patch size. An attention's own weights, its gate and cpe
    included, are new where the start has none of that shape, and as close to softmax as they can be. The head takes the
    start's rows if the start has all classes by name. All other weights must fit, and none may be left over.
    """
    model, start = VisionTransformer(experiment.model), experiment.start
    if start is None:
        return model, False
    stored, depth = stored_of(start), experiment.model.depth
    if depth != stored.config.depth:
        raise ValueError(f"depth={depth}, but {stored.folder} has depth={stored.config.depth}: leave it out")
    tensors = stored.tensors_at(experiment.model.image_size, experiment.model.patch_size)
    for block in model.blocks:
        block.attn.near_softmax()  # type: ignore[union-attr, operator]
    rows = _known_rows(stored, dataset.classes)
    own, kept = model.state_dict(), False
    for key, value in own.items():
        given = tensors.get(key)
        if key.startswith("head."):
            if rows is not None and given is not None and given.shape[1:] == value.shape[1:]:
                kept = True
                own[key] = given[rows] if key.rpartition(".")[0] == _last(model.head) else given
        elif given is not None and given.shape == value.shape:
            own[key] = given
        elif not OF_SPEC.search(key):
            shape = "missing" if given is None else f"{tuple(given.shape)}"
            raise ValueError(f"{stored.folder} does not fit this model: {key} is {shape}, not {tuple(value.shape)}")
    for key, value in tensors.items():
        if key not in own and not key.startswith("head.") and ".attention." not in key:
            raise ValueError(f"{stored.folder} does not fit this model, which has no {key} {tuple(value.shape)}")
    model.load_state_dict(own)
    return model, not kept


def _known_rows(stored: Stored, classes: Sequence[str]) -> Tensor | None:
    """Of the start's head, one for each class; None if it lacks one of them."""
    number = {name: i for i, name in enumerate(stored.about["classes"])}
    return torch.tensor([number[name] for name in classes]) if set(classes) <= set(number) else None


def _last(head: nn.Module) -> str:
    """The name of the layer whose outputs are the logits."""
    return "head" if isinstance(head, nn.Linear) else f"head.{len(list(head.children())) - 1}"
