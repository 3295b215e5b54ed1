"""How many bits a next-pixel model needs for the images of a split, or a masked-pixel model for their hidden values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.data import Split, normalise
from linvit.data.augment import Draw
from linvit.devices import to_device
from linvit.models import ModelConfig
from linvit.models.stems import hide, to_levels

MASKED = 0.15  # of the values of an image, as in masked language models


@dataclass(frozen=True)
class Likelihood:
    bits: np.ndarray  # float64 (images,): of each, per dimension, which is one value of one channel

    @property
    def bits_per_dim(self) -> float:
        return float(self.bits.mean())

    @property
    def loss(self) -> float:
        """The same in nats."""
        return self.bits_per_dim * math.log(2)


def hidden_places(
    tokens: int, indices: Tensor, epoch: int = 0, seed: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """The tokens that are hidden in these images, (B, n)."""
    return Draw(seed, epoch, indices, device).choice("mask", tokens, max(1, round(MASKED * tokens)))


@torch.inference_mode()
def likelihood(
    model: nn.Module, config: ModelConfig, split: Split, device: torch.device | str = "cpu", batch: int = 32
) -> Likelihood:
    """One pass over a split in evaluation mode; the model's mode is left as it was."""
    was_training = model.training
    model.eval()
    found = []
    for start in range(0, len(split), batch):
        images = to_device(split.batch(slice(start, start + batch))[0], device)
        x = normalise(images, (0.0,), (1.0,))  # fractions of white
        levels, places = to_levels(x, config), None
        if not config.causal:
            places = hidden_places(config.tokens, torch.arange(start, start + len(x)), device=x.device)
            x = hide(x, places)
        nats = F.cross_entropy(model(x).float().transpose(1, 2), levels, reduction="none")
        found.append(nats if places is None else nats.gather(1, places))
    model.train(was_training)
    nats = torch.cat(found).cpu().double().mean(1)  # some devices have no float64
    return Likelihood(nats.numpy() / math.log(2))
