"""Masked pixels: hidden values of an image from all the others, before and after them; chosen by the fewest bits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from linvit.measure.likelihood import hidden_places
from linvit.models.stems import hide, to_levels
from linvit.training.tasks import TASKS
from linvit.training.tasks.next_pixel import NextPixel


@TASKS.register("masked-pixel")
class MaskedPixel(NextPixel):
    """A random 15 % of an image's values are hidden, others in every epoch, and the loss is −log p of these alone, in
    nats, their mean. Validation and test images always have the same values hidden."""

    stem = "masked-pixel"

    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, indices: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor]:
        seed, config = self.experiment.seed, self.experiment.model
        x, _ = self.augment(images, labels, indices, epoch, seed)
        places = hidden_places(config.tokens, indices, epoch, seed, x.device)
        levels = to_levels(x, config).gather(1, places)
        logits = model(hide(x, places)).take_along_dim(places[:, :, None], 1)
        loss = F.cross_entropy(logits.float().flatten(0, 1), levels.flatten())
        return loss, (logits.detach().argmax(-1) == levels).float().mean(1).sum()
