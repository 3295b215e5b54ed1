"""Devices: moving tensors to one without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on the device. To CUDA it is copied from pinned memory, so that neither side waits."""
    device = torch.device(device)
    return (x.pin_memory() if device.type == "cuda" and x.is_cpu else x).to(device, non_blocking=True)
