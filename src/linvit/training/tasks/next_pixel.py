"""Next pixel: the likelihood of images, each value from those before it; chosen by the fewest bits."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.data import Split
from linvit.measure.likelihood import Likelihood, likelihood
from linvit.models.stems import to_levels
from linvit.records import Record
from linvit.training.tasks import TASKS, Task

MIXES = ("label_smoothing", "mixup", "cutmix", "cutout")


@TASKS.register("next-pixel")
class NextPixel(Task):
    """The loss is −log p of a value given those before it, in nats, the mean over all values of all images. It is of
    levels: with fewer than 256, bits per dimension are those of coarser images, and not to be compared with others."""

    stem = "next-pixel"
    refused = dict.fromkeys(MIXES, "it learns the images as they are")

    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, indices: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor]:
        x, _ = self.augment(images, labels, indices, epoch, self.experiment.seed)
        levels, logits = to_levels(x, self.experiment.model), model(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), levels.flatten())
        return loss, (logits.detach().argmax(-1) == levels).float().mean(1).sum()

    def evaluate(self, model: nn.Module, split: Split) -> Likelihood:
        return likelihood(model, self.experiment.model, split, self.device)

    def row(self, found: Likelihood) -> Mapping[str, float]:
        return {"loss": found.loss, "bits_per_dim": found.bits_per_dim}

    def select(self, found: Likelihood) -> tuple[float, float]:
        return -found.loss, 0.0  # a mean over so many values has little chance in it

    def records(self, base: Record, best: Likelihood, final: Likelihood) -> tuple[list[Record], dict[str, str | bytes]]:
        base = replace(base, n=len(best.bits))
        found = [replace(base, metric="image_bits", value=None, artefact="bits.npz").tagged(selection="best")]
        for selection, result in (("best", best), ("final", final)):
            row = base.tagged(selection=selection)
            found.append(replace(row, metric="bits_per_dim", value=result.bits_per_dim, unit="bit"))
            found.append(replace(row, metric="test_loss", value=result.loss, unit="nat"))
        file = io.BytesIO()
        np.savez_compressed(file, bits=best.bits.astype(np.float32))
        return found, {"bits.npz": file.getvalue()}
