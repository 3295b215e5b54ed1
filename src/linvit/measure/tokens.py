"""The levels of pixels as tokens: how often each occurs, and which attention treats alike (the paper's figures 9 and
13, there of amino acids)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from linvit.data import Split, normalise
from linvit.models import ModelConfig
from linvit.models.stems import to_levels


def frequencies(split: Split, config: ModelConfig, batch: int = 256) -> np.ndarray:
    """The share of each level among the tokens of a split, (levels,)."""
    counts = torch.zeros(config.outputs, dtype=torch.int64)
    for start in range(0, len(split), batch):
        x = normalise(split.batch(slice(start, start + batch))[0], (0.0,), (1.0,))
        counts += torch.bincount(to_levels(x, config).flatten(), minlength=config.outputs)
    return (counts / counts.sum()).numpy()


def attended(weights: Tensor, levels: Tensor, count: int) -> Tensor:
    """How much of its attention each head gives to the tokens of each level, (heads, levels), each row summing to one.

    weights: of one layer, (B, H, N, N), rows are queries; levels: (B, N)."""
    shares = weights.abs().sum(2)  # (B, H, N): what the keys get from all queries
    of = torch.zeros(shares.shape[1], count, dtype=shares.dtype)
    for image, tokens in zip(shares, levels, strict=True):
        of.index_add_(1, tokens, image)
    return of / of.sum(1, keepdim=True)


def similarity(given: Iterable[Tensor]) -> np.ndarray:
    """Pearson's correlation between levels of the attention they get, over all heads of all layers (Vig et al., 2020):
    (levels, levels), NaN for a level that never occurs. given: `attended` of each layer."""
    heads = torch.cat(list(given)).double()
    centred = heads - heads.mean(0)
    length = centred.norm(dim=0)
    found = (centred.T @ centred) / (length[:, None] * length)
    found[length == 0, :] = torch.nan
    found[:, length == 0] = torch.nan
    return found.numpy()


def nearness(count: int) -> np.ndarray:
    """How alike two levels of grey are: 1 for equal ones, 0 for black and white."""
    place = np.arange(count)
    return 1 - np.abs(place[:, None] - place) / (count - 1)
