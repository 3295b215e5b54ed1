"""Batches of a split on a device: a set that fits stays on a GPU as bytes, others are gathered by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from linvit.data.dataset import CHUNK, Split
from linvit.devices import pinned, to_device

RESIDENT = 0.25  # of a GPU's free memory, which images may take
AHEAD = 2  # batches that are gathered while the device computes

Item = TypeVar("Item")


class Feed:
    """First `gathered` on the host, in any thread, then `sent` to the device."""

    def __init__(self, split: Split, device: torch.device):
        self.split, self.device, self.resident = split, device, None
        size = len(split) * split.store[:1].nbytes
        if device.type == "cuda" and size <= RESIDENT * torch.cuda.mem_get_info(device)[0]:
            chunks = (split.batch(slice(start, start + CHUNK)) for start in range(0, len(split), CHUNK))
            images, labels = zip(*((to_device(x, device), to_device(y, device)) for x, y in chunks), strict=True)
            self.resident = torch.cat(images), torch.cat(labels)

    def gathered(self, chosen: np.ndarray) -> tuple[Tensor, ...]:
        """The images and labels at these positions; or the positions, where the images are on the device."""
        parts = self.split.batch(chosen) if self.resident is None else (torch.as_tensor(chosen),)
        return tuple(pinned(part, self.device) for part in parts)

    def sent(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """uint8 (B, C, H, W) and int64 (B,) on the device."""
        there = [to_device(part, self.device) for part in parts]
        if self.resident is None:
            return there[0], there[1]
        images, labels = self.resident
        return images[there[0]], labels[there[0]]


def ahead(items: Iterator[Item], count: int) -> Iterator[Item]:
    """The same items, of which a thread makes the next few; with count=0 there is no thread."""
    if not count:
        yield from items
        return
    end = object()
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, items, end) for _ in range(count))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(thread.submit(next, items, end))
            yield item  # type: ignore[misc]
