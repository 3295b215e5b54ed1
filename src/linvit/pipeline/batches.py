"""Batches that fit the memory of a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linvit.devices import memory
from linvit.models import VisionTransformer
from linvit.schemas.model import ModelConfig


def largest_batch(model: ModelConfig, wanted: int, jobs: int, device: torch.device) -> int:
    """The batch size asked for, halved until the jobs of a device together take a quarter of its memory; a GPU has one
    job."""
    one, jobs = step_memory(model, 1), jobs if device.type == "cpu" else 1
    while wanted > 1 and jobs * one * wanted > memory(device) / 4:
        wanted //= 2
    return wanted


def step_memory(model: ModelConfig, batch: int) -> int:
    """Approximate bytes of a training step besides the model: the outputs of all modules for one image, kept for the
    backward pass, with their gradients. Measured peaks were half to two thirds of it."""
    outputs = 0

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal outputs
        if isinstance(output, Tensor) and not next(module.children(), None):
            outputs += output.numel()

    built = VisionTransformer(model).eval()
    for module in built.modules():
        module.register_forward_hook(count)
    with torch.inference_mode():
        built(torch.zeros(1, *model.image_shape))
    return 8 * outputs * batch
