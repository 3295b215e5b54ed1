"""Several labels per image: binary cross-entropy of each class; chosen by the mean average precision of validation
images, which also decide from which probability each class is given."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.data import Split
from linvit.devices import amp_dtype
from linvit.measure.several import Several, logits_of, thresholds
from linvit.records import Record
from linvit.training.tasks import TASKS, Task


@TASKS.register("multi-label")
class MultiLabel(Task):
    """Any number of classes for each image, none included."""

    several = True

    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, indices: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor]:
        x, targets = self.augment(images, labels, indices, epoch, self.experiment.seed)
        logits, smooth = model(x).float(), self.experiment.recipe.label_smoothing
        loss = F.binary_cross_entropy_with_logits(logits, targets.float() * (1 - smooth) + smooth / 2)
        return loss, ((logits.detach() > 0) == (labels > 0)).float().mean(1).sum()

    def evaluate(self, model: nn.Module, split: Split) -> Several:
        """Thresholds are those of the validation images, also where the test images are looked at."""
        data, dtype = self.dataset, amp_dtype(self.experiment.recipe.amp, self.device)

        def run(images: Split) -> tuple[np.ndarray, float]:
            return logits_of(model, images, data.mean, data.std, self.device, dtype=dtype)

        logits, loss = run(split)
        held = run(data.validation)[0] if split is data.test else logits
        chosen = thresholds((data.validation if split is data.test else split).labels, held)
        return Several(loss, split.labels, logits, chosen, data.classes)

    def row(self, found: Several) -> Mapping[str, float]:
        return {"loss": found.loss, "mean_average_precision": found.mean_average_precision, "right": found.right}

    def select(self, found: Several) -> tuple[float, float]:
        """With the jackknife's standard error."""
        score, n = found.mean_average_precision, len(found.labels)
        return score, float(found.of_images.std(ddof=1)) / n**0.5 if n > 1 else 0.0

    def about(self, found: Several) -> Mapping[str, Any]:
        return {"thresholds": [float(x) for x in found.thresholds]}

    def records(self, base: Record, best: Several, final: Several) -> tuple[list[Record], dict[str, str | bytes]]:
        base = replace(base, n=len(best.labels))
        chosen = base.tagged(selection="best")
        found = [replace(chosen, metric="image_precision", value=None, artefact="precision.npz")]
        names = ("average_precision", "precision", "recall", "f1")
        for (name, *values), threshold in zip(best.per_class(), best.thresholds, strict=True):
            of = chosen.tagged(**{"class": name})
            pairs = zip(names, values, strict=True)
            found += [replace(of, metric=m, value=x, unit="fraction") for m, x in pairs if np.isfinite(x)]
            found.append(replace(of, metric="threshold", value=float(threshold)))
        for selection, result in (("best", best), ("final", final)):
            row = base.tagged(selection=selection)
            score = result.mean_average_precision
            found.append(replace(row, metric="mean_average_precision", value=score, unit="fraction"))
            found.append(replace(row, metric="test_loss", value=result.loss, unit="nat"))
        file = io.BytesIO()
        np.savez_compressed(file, values=best.of_images.astype(np.float64))
        return found, {"precision.npz": file.getvalue()}
