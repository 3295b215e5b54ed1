"""Starts: a training that begins with the weights of a trained model, whatever its attention, classes or image size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from linvit.data import Dataset
from linvit.data.augment import normalise
from linvit.models import ModelConfig, VisionTransformer
from linvit.models.resize import resized
from linvit.train.checkpoint import Stored, built, read_model
from linvit.train.experiment import Experiment, Start
from linvit.train.files import checksum

SEEN = 2048  # images that a new head is made from
SHARPNESS = 4.0  # deviations between what two classes' logits say of their own means, roughly


def start_from(path: str | Path) -> Start:
    """A trained model's folder as the start of an experiment."""
    stored = read_model(path)
    return Start(folder=str(stored.folder.resolve()), sha256=checksum(stored.tensors))


def load_start(start: Start) -> VisionTransformer:
    """The model that a start names, if its folder still holds those weights; in evaluation mode."""
    return built(_same(start))


def _same(start: Start) -> Stored:
    stored = read_model(start.folder)
    if checksum(stored.tensors) != start.sha256:
        raise ValueError(f"{stored.folder} holds other weights than this experiment was started from")
    return stored


def architecture(start: Start | None) -> ModelConfig | None:
    """Of the model that is started from: whoever takes its weights takes its shape."""
    return None if start is None else read_model(start.folder).config


def check_folds(start: Start | None, data: str, folds: int | None) -> None:
    """Every image is held out once: a start that was trained on some of them knows them by heart."""
    if folds is not None and start is not None and read_model(start.folder).about["name"] == data:
        raise ValueError(
            f"folds={folds} would hold out images that {start.folder} was trained on: leave one of them out"
        )


def normalised(dataset: Dataset, experiment: Experiment) -> Dataset:
    """With the statistics that the start's weights were trained with; for a next-pixel model, as fractions of white."""
    if experiment.model.causal:
        return replace(dataset, mean=(0.0,) * dataset.channels, std=(1.0,) * dataset.channels)
    if experiment.start is None:
        return dataset
    about = read_model(experiment.start.folder).about
    return replace(dataset, mean=tuple(about["mean"]), std=tuple(about["std"]))


def started(experiment: Experiment, dataset: Dataset) -> tuple[VisionTransformer, bool]:
    """The model as it begins, and whether its head is still to be made.

    Positions follow the image size, and the filters of patches theirs. An attention's own weights are new where the
    start has no such, and as near to softmax as they can be; the head has the start's rows for classes that the start
    knows by name, all of them or none. Everything else must be there, in its shape, and nothing of it is left over.
    """
    model, start = VisionTransformer(experiment.model), experiment.start
    if start is None:
        return model, False
    stored, depth = _same(start), experiment.model.depth
    if depth != stored.config.depth:
        raise ValueError(f"depth={depth}, but {stored.folder} has depth={stored.config.depth}: leave it out")
    tensors = resized(stored.tensors, stored.config, experiment.model.image_size, experiment.model.patch_size)
    for attention in model.attentions():
        attention.near_softmax()
    head = _known_rows(stored, dataset.classes)
    own, kept = model.state_dict(), False
    for key, value in own.items():
        there = tensors.get(key)
        if key.startswith("head."):
            if head is not None and there is not None and there.shape[1:] == value.shape[1:]:
                kept = True
                own[key] = there[head] if key.rpartition(".")[0] == _last(model.head) else there
        elif there is not None and there.shape == value.shape:
            own[key] = there
        elif ".attention." not in key:
            found = "nothing" if there is None else tuple(there.shape)
            wanted = tuple(value.shape)
            raise ValueError(f"{stored.folder} does not fit this model: {key} is {found} there, not {wanted}")
    for key, value in tensors.items():
        if key not in own and not key.startswith("head.") and ".attention." not in key:
            raise ValueError(
                f"{stored.folder} does not fit this model, which has no place for {key} {tuple(value.shape)}"
            )
    model.load_state_dict(own)
    return model, not kept


def _known_rows(stored: Stored, classes: Sequence[str]) -> Tensor | None:
    """Of the start's head, one for each class; None if it does not know them all."""
    number = {name: i for i, name in enumerate(stored.about["classes"])}
    return torch.tensor([number[name] for name in classes]) if set(classes) <= set(number) else None


def _last(head: nn.Module) -> str:
    """The name of the layer that gives one number for each class."""
    return "head" if isinstance(head, nn.Linear) else f"head.{len(list(head.children())) - 1}"


@torch.inference_mode()
def class_means(model: VisionTransformer, dataset: Dataset, seed: int, device: torch.device) -> dict[str, Tensor]:
    """A head that says whose mean the features are nearest to, from some of the training images: what the start knows
    of these classes before anything is learned, and a better beginning than chance.

    With features f, class means μ_c and their spread σ² around them, logits are s·(f·μ_c − ‖μ_c‖²/2)/σ², the
    log-likelihoods of Gaussians of one width.
    """
    if not isinstance(model.head, nn.Linear):
        return {}
    chosen = dataset.train.order(0, seed)[:SEEN]
    features, labels = [], []
    was, model.head = model.head, nn.Identity()  # type: ignore[assignment]
    training = model.training
    model.eval()
    try:
        for i in range(0, len(chosen), 64):
            images, some = dataset.train.batch(chosen[i : i + 64])
            features.append(model(normalise(images.to(device), dataset.mean, dataset.std)).float().cpu())
            labels.append(some)
    finally:
        model.head = was
        model.train(training)
    f, y = torch.cat(features).double(), torch.cat(labels)
    f0 = f.mean(0)
    member = nn.functional.one_hot(y, len(dataset.classes)).double()
    means = (member.T @ f + f0) / (member.sum(0)[:, None] + 1)  # as if one more image of each class were average
    spread = (f - means[y]).square().sum(1).mean() / f.shape[1] + 1e-12
    centred = means - f0
    gain = SHARPNESS / (centred.square().sum(1).mean() / spread).clamp_min(1.0)
    weight = gain * centred / spread
    bias = -(weight * (means + f0)).sum(1) / 2
    return {"weight": weight.to(was.weight), "bias": bias.to(was.weight)}
