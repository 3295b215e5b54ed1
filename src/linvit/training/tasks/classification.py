"""Classification: cross-entropy with augmentation; chosen by validation accuracy, the last of those
that are within its standard error of the best."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.data import Split
from linvit.devices import amp_dtype
from linvit.measure.accuracy import Evaluation, evaluate
from linvit.records import Record
from linvit.training.tasks import TASKS, Task


@TASKS.register("classification")
class Classification(Task):
    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, indices: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor]:
        x, targets = self.augment(images, labels, indices, epoch, self.experiment.seed)
        logits = model(x)
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=self.experiment.recipe.label_smoothing)
        return loss, (logits.detach().argmax(-1) == labels).sum()

    def evaluate(self, model: nn.Module, split: Split) -> Evaluation:
        data = self.dataset
        dtype = amp_dtype(self.experiment.recipe.amp, self.device)
        return evaluate(model, split, data.classes, data.mean, data.std, self.device, dtype=dtype)

    def row(self, found: Evaluation) -> Mapping[str, float]:
        return {"loss": found.loss, "accuracy": found.accuracy}

    def select(self, found: Evaluation) -> tuple[float, float]:
        """With the standard error of the accuracy."""
        right = found.accuracy
        return right, math.sqrt(right * (1 - right) / max(1, len(found.labels)))

    def records(self, base: Record, best: Evaluation, final: Evaluation) -> tuple[list[Record], dict[str, str | bytes]]:
        base = replace(base, n=len(best.labels))
        chosen = base.tagged(selection="best")
        found = [
            replace(chosen, metric="confusion", value=None, artefact="confusion.json"),
            replace(chosen, metric="predictions", value=None, artefact="predictions.npz"),
            *by_class(chosen, best),
        ]
        for selection, result in (("best", best), ("final", final)):
            row = base.tagged(selection=selection)
            found.append(replace(row, metric="test_accuracy", value=result.accuracy, unit="fraction"))
            found.append(replace(row, metric="test_loss", value=result.loss, unit="nat"))
        said = io.BytesIO()
        arrays = {"predicted": best.predictions.astype(np.int32), "labels": best.labels.astype(np.int32)}
        source = self.experiment.source
        if source is None or source.fold is not None:  # images in memory may be folded, too
            arrays["rows"] = self.dataset.test.rows.astype(np.int32)  # which images were held out
        np.savez_compressed(said, **arrays)  # type: ignore[arg-type]
        matrix = json.dumps({"matrix": best.confusion().tolist()})
        return found, {"confusion.json": matrix, "predictions.npz": said.getvalue()}


def by_class(base: Record, found: Evaluation) -> list[Record]:
    """Balanced accuracy, and precision, recall and F1 of every class."""
    records = [replace(base, metric="balanced_accuracy", value=found.balanced_accuracy, unit="fraction")]
    for name, *values in found.per_class():
        of = base.tagged(**{"class": name})
        pairs = zip(("precision", "recall", "f1"), values, strict=True)
        records += [replace(of, metric=metric, value=value, unit="fraction") for metric, value in pairs]
    return records
