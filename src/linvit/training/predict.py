"""Classify image files with a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from linvit.data import normalise, read_image
from linvit.data.decode import BadImage
from linvit.models import VisionTransformer
from linvit.progress import Progress, ignore
from linvit.training.evaluate import check_classes


@dataclass(frozen=True)
class Prediction:
    image: str
    top: list[tuple[str, float]]  # (class, probability), the most probable first; of several labels those it has


@torch.inference_mode()
def predict(
    model: VisionTransformer,
    images: Sequence[str | Path],
    *,
    top: int = 5,
    skip: Callable[[BadImage], None] | None = None,
    batch: int = 64,
    progress: Progress = ignore,
) -> Iterator[Prediction]:
    """The most probable classes of image files. An unreadable file is an error, or passed to `skip`."""
    check_classes(model)
    config, about = model.config, model.about
    device = next(model.parameters()).device
    for start in range(0, len(images), batch):
        names, pixels = [], []
        for path in images[start : start + batch]:
            try:
                pixels.append(read_image(Path(path), config.image_size, config.channels, resize=about["resize"]))
                names.append(str(path))
            except BadImage as error:
                if skip is None:
                    raise
                skip(error)
        if pixels:
            x = normalise(torch.from_numpy(np.stack(pixels)).to(device), about["mean"], about["std"])
            logits, limits = model(x).float(), about.get("thresholds")
            best = (logits.softmax(-1) if limits is None else logits.sigmoid()).topk(min(top, len(about["classes"])))
            for name, values, indices in zip(names, best.values.tolist(), best.indices.tolist(), strict=True):
                found = zip(indices, values, strict=True)
                kept = [(about["classes"][i], x) for i, x in found if limits is None or x >= limits[i]]
                yield Prediction(name, kept)
        progress(min(start + batch, len(images)), len(images), "images")
