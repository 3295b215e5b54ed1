"""Images with several labels each: average precision of every class, its mean, and thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from linvit.data import Split, normalise
from linvit.devices import amp_dtype, autocast, to_device

HALF = 0.5  # the threshold of a class of which no validation image tells another
EDGE = 1e-6  # thresholds are at least this far from 0 and 1, where a probability has no logit


@dataclass(frozen=True)
class Several:
    """What a model says of a split."""

    loss: float
    labels: np.ndarray  # uint8 (n, classes)
    logits: np.ndarray  # float32 (n, classes)
    thresholds: np.ndarray  # float64 (classes,): probabilities from which a class is given
    classes: Sequence[str]

    @cached_property
    def precisions(self) -> np.ndarray:
        """Average precision of each class (classes,); NaN where no image has it."""
        return np.array([average_precision(self.labels[:, c], self.logits[:, c]) for c in range(len(self.classes))])

    @property
    def mean_average_precision(self) -> float:
        """Over the classes that some image has."""
        return float(np.nanmean(self.precisions)) if np.isfinite(self.precisions).any() else float("nan")

    @property
    def right(self) -> float:
        """Share of all decisions, one for each image and class, that are right."""
        return float(((self.logits > logit(self.thresholds)) == (self.labels > 0)).mean())

    @cached_property
    def of_images(self) -> np.ndarray:
        """float64 (n,): jackknife pseudo-values n·mAP − (n − 1)·mAP₋ᵢ. Their mean is about mAP, and the variance of
        their mean is mAP's by the choice of images."""
        n = len(self.labels)
        parts = [without_each(self.labels[:, c], self.logits[:, c]) for c in range(len(self.classes))]
        known = np.isfinite(parts)
        without = np.where(known, parts, 0).sum(0) / np.maximum(1, known.sum(0))
        return n * self.mean_average_precision - (n - 1) * without

    def per_class(self) -> list[tuple[str, float, float, float, float]]:
        """(class, average precision, precision, recall, F1) at the thresholds; 0 where there is none."""
        given, true = self.logits > logit(self.thresholds), self.labels > 0
        hits, said, there = (given & true).sum(0), given.sum(0), true.sum(0)
        precision, recall = hits / np.maximum(1, said), hits / np.maximum(1, there)
        f1 = 2 * hits / np.maximum(1, said + there)
        columns = (self.precisions, precision, recall, f1)
        return [(name, *(float(column[c]) for column in columns)) for c, name in enumerate(self.classes)]  # type: ignore[misc]


def logit(share: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(share) - np.log1p(-share)


def average_precision(true: np.ndarray, scores: np.ndarray) -> float:
    """The mean, over images that have the class, of the precision among those with at least their score."""
    _, positives, hits, place = _runs(true, scores)
    return float((positives * hits / place).sum() / hits[-1]) if true.any() else float("nan")


def without_each(true: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Average precision without each image in turn (n,), in one pass: an image changes only those that have at most its
    score."""
    if not len(true):
        return np.empty(0)
    run, positives, hits, place = _runs(true, scores)
    mine, shifted = true > 0, np.maximum(place - 1, 1)  # a first run of one image is empty without it
    above = np.cumsum(positives * hits / place) - positives * hits / place
    below, moved = (np.cumsum(part[::-1])[::-1] for part in (positives * hits / shifted, positives / shifted))
    own = moved + (hits - 1) / shifted  # of an image that has the class: one hit fewer for the others, and not itself
    left = hits[-1] - mine
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(left > 0, ((above + below)[run] - mine * own[run]) / left, np.nan)


def _runs(true: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Runs of equal scores, from the highest: the run of each image, and of each run the number of images that have the
    class, how many of them have at least its score, and how many images do. The order of equal scores has no effect."""
    _, run, sizes = np.unique(-scores, return_inverse=True, return_counts=True)
    positives = np.bincount(run, weights=true > 0, minlength=len(sizes))
    return run, positives, np.cumsum(positives), np.cumsum(sizes)


def best_threshold(true: np.ndarray, scores: np.ndarray) -> float:
    """The probability with the highest F1, half-way to the next score; without positives, one half."""
    if not true.any():
        return HALF
    order = np.argsort(-scores, kind="stable")
    ranked, sorted_scores = true[order] > 0, scores[order].astype(float)
    f1 = 2 * np.cumsum(ranked) / (np.arange(1, len(ranked) + 1) + ranked.sum())
    f1[:-1][sorted_scores[:-1] == sorted_scores[1:]] = -1  # no threshold lies between equal scores
    last = int(f1.argmax())
    following = sorted_scores[last + 1] if last + 1 < len(ranked) else sorted_scores[last] - 1
    limit = float(logit(np.array(1 - EDGE)))
    return float(1 / (1 + np.exp(-np.clip((sorted_scores[last] + following) / 2, -limit, limit))))


def thresholds(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """For each class, from images that were not trained on."""
    return np.array([best_threshold(labels[:, c], logits[:, c]) for c in range(labels.shape[1])])


@torch.inference_mode()
def logits_of(
    model: nn.Module,
    split: Split,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    batch: int = 256,
    dtype: torch.dtype | None = None,
) -> tuple[np.ndarray, float]:
    """float32 (n, classes) of a split, unaugmented, and the mean binary cross-entropy; the model's mode is left as it
    was."""
    dtype = amp_dtype("auto", device) if dtype is None else dtype
    was_training = model.training
    model.eval()
    found, losses = [], []
    for start in range(0, len(split), batch):
        images, labels = (to_device(part, device) for part in split.batch(slice(start, start + batch)))
        with autocast(device, dtype):
            logits = model(normalise(images, mean, std)).float()
        losses.append(F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="sum"))
        found.append(logits)
    model.train(was_training)
    whole = torch.cat(found).cpu().numpy()
    return whole, sum(torch.stack(losses).tolist()) / max(1, whole.size)
