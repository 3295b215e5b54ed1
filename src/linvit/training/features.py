"""Features of frozen models, computed once for each image.

Folds, seeds and larger budgets fit new heads to the same features. These are kept in the cache, by the content of the
model and of each image, so that whatever comes next computes those of new images only.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor, nn

from linvit.data.cache import cache_root
from linvit.models import VisionTransformer
from linvit.training.files import checksum, load_tensors, save_tensors

VERSION = 1  # raise it when features change
MAX_NUMBERS = 2**27  # that are kept of one model: half a gigabyte
MAX_IMAGES = 2**18
SAVE_SECONDS = 20.0


class Remembering(nn.Module):
    """A frozen model that looks the features of images up, and computes those that it does not find."""

    def __init__(self, trunk: nn.Module, head: nn.Module, path: Path):
        super().__init__()
        self.trunk, self.head, self.path = trunk, head, path
        self.known: dict[bytes, Tensor] = {}
        self.saved, self.new = time.monotonic(), 0
        with suppress(ValueError):  # there are none, or they are damaged
            tensors, _ = load_tensors(path)
            keys = tensors["keys"].numpy()
            self.known = {key.tobytes(): row for key, row in zip(keys, tensors["features"], strict=True)}

    def forward(self, x: Tensor) -> Tensor:
        keys = [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in x.numpy()]
        missing = [i for i, key in enumerate(keys) if key not in self.known]
        if missing:
            found = self.trunk(x[missing]).float()
            rows = dict(zip((keys[i] for i in missing), found, strict=True))
            self._keep(rows)
            return self.head(torch.stack([rows[key] if key in rows else self.known[key] for key in keys]))
        return self.head(torch.stack([self.known[key] for key in keys]))

    def _keep(self, rows: dict[bytes, Tensor]) -> None:
        room = min(MAX_IMAGES, MAX_NUMBERS // len(next(iter(rows.values())))) - len(self.known)
        if len(rows) <= room:
            self.known |= rows
            self.new += len(rows)
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Between two batches: what resumes computes the others in the same batches, and so with the same roundings."""
        if self.new:
            keys = torch.from_numpy(np.frombuffer(b"".join(self.known), np.uint8).reshape(len(self.known), -1).copy())
            save_tensors(self.path, {"keys": keys, "features": torch.stack(list(self.known.values()))})
        self.saved, self.new = time.monotonic(), 0


@contextmanager
def remembering(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[nn.Module]:
    """The model in evaluation mode, with features from the cache and its own head; on a CPU, where features take long.
    Another process that needs the same features waits for them."""
    is_vit = isinstance(model, VisionTransformer)
    if device.type != "cpu" or not is_vit or not isinstance(model.head, (nn.Linear, nn.Identity)):
        yield model
        return
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("head.")}
    config = model.config.model_dump(mode="json", exclude={"seed"})
    made_by = (VERSION, config, str(dtype), torch.get_num_threads(), checksum(weights))
    name = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:24]
    path = cache_root(None) / "features" / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    head, model.head = model.head, nn.Identity()  # type: ignore[assignment]
    try:
        with FileLock(path.with_suffix(".lock")):
            found = Remembering(model, head, path)
            yield found
            found.save()
    finally:
        model.head = head
