"""A trained model put to use: its accuracy on a data set, and predictions for images."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from linvit import data as data_package
from linvit.data import Dataset, Fold, Split, folded, normalise, read_image
from linvit.data.decode import BadImage
from linvit.data.folder import images_under
from linvit.files import write_atomically
from linvit.measure.accuracy import Evaluation, evaluate
from linvit.measure.likelihood import Likelihood, likelihood
from linvit.measure.provenance import pick_device
from linvit.models import VisionTransformer
from linvit.models.sampling import sample
from linvit.progress import Progress, ignore
from linvit.train.checkpoint import built, read_model


@dataclass(frozen=True)
class Evaluated:
    folder: Path  # of the model
    data: str
    split: str
    result: Evaluation | Likelihood  # of a next-pixel model the latter
    changed: bool | None = None  # the data are not those the model was trained on; None: nobody knows


def evaluate_folder(
    folder: str | Path,
    data: str | Path | Dataset | None = None,
    *,
    split: str = "test",
    device: str = "auto",
    data_root: str | Path | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    batch: int = 256,
    progress: Progress = ignore,
) -> Evaluated:
    """The accuracy of a trained model, or the bits that it needs, by default on the data set it was trained on."""
    if split not in ("test", "validation"):
        raise ValueError(f"split '{split}' is not one of test, validation")
    stored = read_model(folder)
    home, model = stored.folder, built(stored)
    config, identity = model.config, ""
    if not config.causal:
        _check_classes(model)
    if isinstance(data, Dataset):
        dataset = data
    elif data is not None:
        dataset = data_package.load_data(
            data, root=data_root, image_size=config.image_size, channels=config.channels, limit=limit,
            skip_bad=skip_bad, progress=progress,
        )  # fmt: skip
    else:
        asked, identity = stored_source(home)
        changes = {"root": data_root, "limit": limit, "skip_bad": skip_bad or None}
        asked |= {key: value for key, value in changes.items() if value is not None}
        fold = asked.pop("fold", None)
        dataset = data_package.load_data(asked.pop("data"), **asked, progress=progress)
        dataset = folded(dataset, Fold(**fold)) if fold else dataset
    wanted, found = (config.channels, config.image_size), (dataset.channels, dataset.image_size)
    if wanted != found:
        raise ValueError(f"the images of {dataset.name} have (channels, size) {found}, but the model takes {wanted}")
    chosen = getattr(dataset, split)
    if not len(chosen):
        raise ValueError(f"{dataset.name} has no {split} images")
    place = pick_device(device)
    about = model.about
    if config.causal:
        result: Evaluation | Likelihood = likelihood(model.to(place), config, chosen, place)
    else:
        chosen = _relabelled(chosen, dataset, model)
        result = evaluate(
            model.to(place), chosen, about["classes"], about["mean"], about["std"], place, batch, progress
        )
    changed = dataset.identity != identity if identity and limit is None else None
    return Evaluated(home, dataset.name, split, result, changed)


def _check_classes(model: VisionTransformer) -> None:
    if model.config.causal:
        raise ValueError("this is a next-pixel model, which knows no classes: `linvit sample` draws images with it")
    if not model.about["classes"]:
        raise ValueError(f"{model.about['name']} has no head, only features: train it on images of the classes wanted")


def stored_source(home: Path) -> tuple[dict[str, Any], str]:
    """How the data of the run were found, and their identity."""
    names = ("experiment.json", "convert.json")
    for path in (place / name for place in (home, home.parent) for name in names):
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
            return dict(there["source"]), there["data"]["identity"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    raise ValueError(f"{home}: which data the model was trained on is not stored beside it: name a data set or a path")


def _relabelled(split: Split, dataset: Dataset, model: VisionTransformer) -> Split:
    """Labels as the model numbers its classes, found by name."""
    number = class_numbers(dataset, model.about["classes"])
    return replace(split, labels=number[split.labels])


def class_numbers(dataset: Dataset, classes: Sequence[str]) -> np.ndarray:
    """Where each class of the data set stands among a model's, found by name."""
    known = {name: i for i, name in enumerate(classes)}
    if strange := [name for name in dataset.classes if name not in known]:
        raise ValueError(
            f"{dataset.name} has the class '{strange[0]}', which the model does not know "
            f"(it knows {', '.join(list(known)[:8])}{', …' if len(known) > 8 else ''})"
        )
    return np.array([known[name] for name in dataset.classes])


@dataclass(frozen=True)
class Prediction:
    image: str
    top: list[tuple[str, float]]  # (class, probability), the likeliest first


def find_images(paths: Sequence[str | Path]) -> list[Path]:
    """Files as they are, and every image below a folder, found as in a data set."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = images_under(path)
            if not inside:
                raise ValueError(f"{path}: there are no images in this folder")
            found += inside
        elif not path.exists():
            raise ValueError(f"{path}: there is no such file or folder: check the path")
        else:
            found.append(path)
    return found


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
    """The likeliest classes of image files. An unreadable one is an error, or given to `skip`."""
    _check_classes(model)
    config, about = model.config, model.about
    device = next(model.parameters()).device
    for start in range(0, len(images), batch):
        names, pixels = [], []
        for path in images[start : start + batch]:
            try:
                pixels.append(read_image(Path(path), config.image_size, config.channels))
                names.append(str(path))
            except BadImage as error:
                if skip is None:
                    raise
                skip(error)
        if pixels:
            x = normalise(torch.from_numpy(np.stack(pixels)).to(device), about["mean"], about["std"])
            best = model(x).float().softmax(-1).topk(min(top, len(about["classes"])))
            for name, values, indices in zip(names, best.values.tolist(), best.indices.tolist(), strict=True):
                classes = (about["classes"][i] for i in indices)
                yield Prediction(name, list(zip(classes, values, strict=True)))
        progress(min(start + batch, len(images)), len(images), "images")


def draw_images(
    model: VisionTransformer, path: Path, images: int = 16, *, seed: int = 0, temperature: float = 1.0,
    progress: Progress = ignore,
) -> None:  # fmt: skip
    """One PNG of so many images that a next-pixel model draws, in rows that are about as long as there are."""
    found = sample(model, images, seed, temperature, progress).numpy()
    columns = math.isqrt(images - 1) + 1
    found = np.concatenate([found, np.zeros((-images % columns, *found.shape[1:]), found.dtype)])
    n, channels, height, width = found.shape
    rows = found.reshape(n // columns, columns, channels, height, width).transpose(0, 3, 1, 4, 2)
    sheet = rows.reshape(n // columns * height, columns * width, channels)
    file = io.BytesIO()
    Image.fromarray(sheet[..., 0] if channels == 1 else sheet).save(file, "png")
    write_atomically(path, file.getvalue())
