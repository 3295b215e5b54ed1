"""The images of a conversion: which of them train, which guide the search for layers to replace and which decide it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from linvit.data import Dataset, Split, normalise
from linvit.data.splits import stratified, thin

TRAIN_SHARE = 0.25  # of the training images, at most, are kept for the search and its decision
VALIDATION_SHARE = 0.7  # of the validation images, where the teacher was trained on the training images
MAX_SEARCH, MAX_DECIDE = 512, 4096  # images


@dataclass(frozen=True)
class ConversionImages:
    """A data set as teacher and student see it, with the teacher's normalisation, and the images kept from it."""

    dataset: Dataset  # without the images below
    search: Split  # guides the search
    decide: Split  # read once, to decide

    def split(self, name: str) -> Split:
        return getattr(self, name) if name in ("search", "decide") else getattr(self.dataset, name)


def divide_images(dataset: Dataset, about: dict[str, Any], search: bool, seen: bool, seed: int) -> ConversionImages:
    """search: whether images are kept for a search. seen: the teacher was trained on the training images, so that they
    must come from the validation images: a student loses less on images that its teacher has memorised."""
    if dataset.several:
        raise ValueError(f"{dataset.name}: its images have several labels each: convert needs one class for each image")
    part, share = ("validation", VALIDATION_SHARE) if seen else ("train", TRAIN_SHARE)
    source: Split = getattr(dataset, part)
    kept, guiding, deciding = np.arange(len(source)), *[np.zeros(0, np.int64)] * 2
    if search:
        _, taken = stratified(kept, source.labels, share, "held out", seed)
        guiding = thin(taken, source.labels, min(MAX_SEARCH, len(taken) // 4), "search", seed)
        deciding = thin(np.setdiff1d(taken, guiding), source.labels, MAX_DECIDE, "decide", seed)
        kept = np.setdiff1d(kept, np.concatenate([guiding, deciding]))
    mean, std = tuple(about["mean"]), tuple(about["std"])
    same = (mean, std) == (tuple(dataset.mean), tuple(dataset.std)) and not search
    text = repr((dataset.identity, mean, std, kept.tolist(), *([part] if seen else []))).encode()
    identity = dataset.identity if same else hashlib.sha256(text).hexdigest()[:32]
    rest = replace(dataset, mean=mean, std=std, identity=identity, **{part: source.some(kept)})
    return ConversionImages(rest, source.some(guiding), source.some(deciding))


def few_images(images: Split, about: dict[str, Any], count: int) -> Tensor:
    """Some of them, shuffled (a folder lists them class by class) and normalised as the teacher expects."""
    return normalise(images.batch(images.order(0, 0)[:count])[0], about["mean"], about["std"])
