"""Accuracy of a model on a split: loss, predictions, and per-class precision, recall and F1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from linvit.data import Split, normalise
from linvit.devices import amp_dtype, autocast, to_device
from linvit.progress import Progress, ignore


@dataclass(frozen=True)
class Evaluation:
    loss: float
    labels: np.ndarray
    predictions: np.ndarray
    confidence: np.ndarray
    classes: list[str]

    @property
    def accuracy(self) -> float:
        return float(np.mean(self.labels == self.predictions))

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall over the classes that are there: every class counts alike, however few its images."""
        right = self.labels == self.predictions
        return float(np.mean([right[self.labels == label].mean() for label in np.unique(self.labels)]))

    def confusion(self) -> np.ndarray:
        """(classes, classes) counts: rows are true, columns predicted."""
        size = len(self.classes)
        return np.bincount(self.labels * size + self.predictions, minlength=size * size).reshape(size, size)

    def per_class(self) -> list[tuple[str, float, float, float]]:
        """(class, precision, recall, F1); 0 where a class was never predicted."""
        from sklearn.metrics import precision_recall_fscore_support

        every = np.arange(len(self.classes))
        table = precision_recall_fscore_support(self.labels, self.predictions, labels=every, zero_division=0.0)  # type: ignore[arg-type]
        return [(name, *(float(table[i][c]) for i in range(3))) for c, name in enumerate(self.classes)]  # type: ignore[index,misc]


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    split: Split,
    classes: list[str],
    mean,
    std,
    device: torch.device | str = "cpu",
    batch: int = 256,
    progress: Progress = ignore,
    dtype: torch.dtype | None = None,
) -> Evaluation:
    """One pass over a split, unaugmented, in evaluation mode; the model's mode is left as it was. dtype: of autocast,
    without it what is usual for the device."""
    device = torch.device(device)
    dtype = amp_dtype("auto", device) if dtype is None else dtype
    was_training = model.training
    model.eval()
    losses, predictions, confidence = [], [], []  # on the device until the end: no batch waits for the one before
    for start in range(0, len(split), batch):
        progress(start, len(split), "evaluating")
        images, labels = split.batch(slice(start, start + batch))
        images, labels = to_device(images, device), to_device(labels, device)
        with autocast(device, dtype):
            logits = model(normalise(images, mean, std)).float()
        losses.append(F.cross_entropy(logits, labels, reduction="sum"))
        best = logits.softmax(-1).max(-1)
        predictions.append(best.indices)
        confidence.append(best.values)
    progress(len(split), len(split), "evaluated")
    model.train(was_training)
    loss = sum(torch.stack(losses).tolist()) / max(1, len(split))
    said, sure = (torch.cat(parts).cpu().numpy() for parts in (predictions, confidence))
    return Evaluation(loss, split.labels, said, sure, classes)


def wilson(accuracy: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of an accuracy over n images: what another test set of this size could have given."""
    from scipy.stats import binomtest

    interval = binomtest(round(accuracy * n), n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)
