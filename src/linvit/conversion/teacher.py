"""The teacher: the stored model for these images, what it was trained on, and the recipe that suits it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from linvit.conversion.student import changed_config
from linvit.data import Dataset, Fold
from linvit.files import parse_json
from linvit.models import VisionTransformer
from linvit.models.resize import resized
from linvit.schemas.pixels import ImageSize, mean_side
from linvit.schemas.recipe import Recipe
from linvit.training.checkpoint import Stored, built
from linvit.training.defaults import tuned
from linvit.training.evaluate import class_numbers
from linvit.training.recipe import create_recipe
from linvit.training.source import stored_source

FULL_BATCH = 64  # images per step for which the learning rates of stages are made
MAX_BATCH_TOKENS = 16 * 197  # per step of large images, if the teacher's own recipe is not known


def fit_model(
    stored: Stored, dataset: Dataset, image_size: ImageSize | None = None, patch_size: int | None = None
) -> VisionTransformer:
    """A stored model for these images, or for the same images scaled: positions are interpolated, patch filters
    resized, and the head has the classes of the data alone."""
    config, about = stored.config, stored.about
    if not config.depth:
        raise ValueError(f"{stored.folder} has depth=0: there is no attention to convert")
    if config.pixels:
        raise ValueError(f"{stored.folder} is a {config.stem} model: only models with classes are converted")
    if dataset.channels != config.channels:
        have, takes = dataset.channels, config.channels
        raise ValueError(f"the images of {dataset.name} have {have} channels, but {stored.folder} takes {takes}")
    if not about["classes"]:
        raise ValueError(f"{stored.folder} has no head, only features: `linvit train DATA --from` it first")
    rows = torch.from_numpy(class_numbers(dataset, about["classes"]))
    tensors = {key: value.float() if value.is_floating_point() else value for key, value in stored.tensors.items()}
    size, patch = image_size or dataset.image_size, patch_size or config.patch_size
    tensors = resized(tensors, config, size, patch, stored.antialias)
    last = max((key.rpartition(".")[0] for key in tensors if key.startswith("head.")), default="")
    tensors |= {key: tensors[key][rows] for key in (f"{last}.weight", f"{last}.bias")}
    config = changed_config(config, image_size=size, patch_size=patch, classes=len(dataset.classes))
    return built(replace(stored, config=config, about=about | {"classes": dataset.classes}), tensors)


def trained_on(stored: Stored, dataset: Dataset) -> bool:
    """Whether the teacher was trained on this data set or another part of it; False also if that is not known."""
    return not stored.foreign and stored.about["name"].partition(":")[0] == dataset.name.partition(":")[0]


def held_out_fold(stored: Stored) -> Fold | None:
    """The fold that was held out when the teacher was trained or converted, if there was one."""
    try:
        return stored_source(stored.folder)[0].fold
    except ValueError:
        return None


def stage_recipe(stored: Stored, dataset: Dataset, tokens: int, options: dict[str, Any]) -> Recipe:
    """The recipe of all stages, apart from learning rate and length: batch size and augmentation of the teacher's
    training or, where that is not known, as they suit the images."""
    try:
        document = parse_json((stored.folder.parent / "experiment.json").read_text(encoding="utf-8"))  # of any format
        taught = Recipe.model_validate(document["recipe"])
        usual: dict[str, Any] = taught.augmentation() | {"batch_size": taught.batch_size}
    except (OSError, KeyError, TypeError, ValueError):
        usual = tuned(dataset.name, dataset.image_size, dataset.channels)
        usual = {key: usual[key] for key in ("batch_size", "pad_crop", "flip") if key in usual}
        if mean_side(dataset.image_size) > 48:
            usual["batch_size"] = max(4, min(FULL_BATCH, MAX_BATCH_TOKENS // tokens))
    recipe = create_recipe(**usual | {"optimizer": "adamw", "redraw": 0, "weight_decay": 0.01} | options)
    for option, why in recipe.unused().items():
        if option in options:
            raise ValueError(f"{option}={options[option]} has no effect: {why}: leave it out")
    return recipe
