"""What `advise` is asked about, as a model: a number of tokens, images, or a trained model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from linvit.attention import BASELINE
from linvit.data import Arrays, read_image, survey
from linvit.data.cache import LARGEST, cache_root
from linvit.data.dataset import read_source
from linvit.data.decode import resized
from linvit.measure import hardware
from linvit.measure.advice import points
from linvit.measure.memory import MAX_TOKENS
from linvit.models import model_config
from linvit.pipeline.design import DataShape, resolve
from linvit.requests import AdviseRequest, CompareRequest
from linvit.schemas.model import ModelConfig
from linvit.schemas.pixels import ImageSize, join_sides, sides
from linvit.training import backbones
from linvit.training.checkpoint import Stored, on_hub, read_model

SIZE, PATCH = "small", 16  # of the model, if only a number of tokens is given
IMAGES = 2  # whose q and k are used
POOL = 512  # the first images of a set, from which they are taken


@dataclass(frozen=True)
class Question:
    """The model that is asked about, and where its weights and images are, if there are any."""

    text: str
    config: ModelConfig
    data: str | None = None
    name: str | None = None  # of the data
    trained: Path | None = None  # the folder of its weights
    options: dict[str, Any] = field(default_factory=dict)  # with which `compare` makes the same model
    size: ImageSize | None = None  # the image size, if `compare` must be given it

    @property
    def tokens(self) -> int:
        return self.config.tokens

    def pixels(self, tokens: float) -> ImageSize:
        """The size of an image of this shape with at least this many tokens."""
        (rows, columns), (height, width) = self.config.grid, sides(self.config.image_size)
        more = math.ceil(math.sqrt(max(1.0, tokens - self.config.prefix_tokens) * columns / rows) - 1e-9)
        if height == width:
            return more * (width // columns)
        return join_sides(math.ceil(more * rows / columns) * max(1, height // rows), more * max(1, width // columns))

    def comparison(self, spec: str, pixels: ImageSize | None = None) -> CompareRequest:
        """What would prove it: accuracy and speed of both attentions, at another image size if one is given."""
        data, size = self.data or "path/to/images", pixels or self.size
        return CompareRequest.of(data=data, attentions=[BASELINE, spec], image_size=size, **self.options)


def ask(request: AdviseRequest) -> Question:
    """The model that the request is about; one line for what cannot be one."""
    text = request.about
    if text.lstrip("+-").isdecimal():
        found = _of_tokens(request, int(text))
    elif on_hub(text) or any((Path(text) / part / "config.json").is_file() for part in (".", "best")):
        found = _of_model(request)
    else:
        found = _of_data(request)
    if request.data is not None:
        if found.data is not None:
            raise ValueError(
                f"data={request.data}: {text} are images already; data needs a model or a number of tokens"
            )
        found = replace(found, data=request.data, name=survey(request.data, request.data_root).name)
    if not found.config.depth:
        raise ValueError(f"{text} has no attention layers: depth=0")
    check_length(found.tokens, request)
    return found


def check_length(tokens: int, request: AdviseRequest) -> None:
    """Forecasts end with the longest sequence that is timed, or for other devices published."""
    most = max(load.site.tokens for load, _ in points()) if request.hardware is None else hardware.MAX_TOKENS
    if tokens > most:
        hint = f"; `linvit bench speed --tokens {tokens}` times single layers" if tokens <= MAX_TOKENS else ""
        raise ValueError(f"N={tokens:,} tokens are too many: forecasts end at {most:,}{hint}")


def _of_tokens(request: AdviseRequest, tokens: int) -> Question:
    """A square grid of patches, with or without a CLS token: this many tokens, or the nearest number that makes one."""
    if tokens < 1:
        raise ValueError(f"N={tokens} must be at least 1 token")
    if request.image_size is not None:
        raise ValueError(f"image_size={request.image_size} has no effect with {tokens} tokens: give one of them")
    check_length(tokens, request)
    root, patch, size = math.isqrt(tokens), request.patch or PATCH, request.size or SIZE
    side, cls = min(product((root, root + 1), (0, 1)), key=lambda made: abs(made[0] ** 2 + made[1] - tokens))
    config = model_config(size, image_size=side * patch, patch_size=patch, pool="cls" if cls else "mean")
    options: dict[str, Any] = {"size": size, "patch_size": patch} | ({"pool": "cls"} if cls else {})
    patches = f"{side} × {side} patches" + " and CLS" * cls
    near = "" if config.tokens == tokens else f", the square nearest to {tokens:,}"
    return Question(f"a model of size {size} with {patches}{near}", config, options=options, size=side * patch)


def _of_model(request: AdviseRequest) -> Question:
    folder, patch = request.about, request.patch
    if request.size is not None:
        raise ValueError(f"size={request.size} has no effect: {folder} is a model and has its own; leave it out")
    stored = read_model(folder)
    config = stored.config
    if patch is not None and config.stem != "patch":
        raise ValueError(f"patch={patch} has no effect: stem={config.stem} has no patches: leave it out")
    changes = {"image_size": request.image_size or config.image_size, "patch_size": patch or config.patch_size}
    config = model_config(**config.model_dump() | changes)
    trained_on = "" if stored.foreign else f", trained on {stored.about['name']}"
    text = f"{describe(stored)} ({config.attention}{trained_on}) at {config.image_size} px"
    options: dict[str, Any] = {"start": folder} | ({} if patch is None else {"patch_size": patch})
    return Question(text, config, trained=stored.folder, options=options, size=request.image_size)


def describe(stored: Stored) -> str:
    """A backbone, or the name of its folder, or that of a model from elsewhere, which may be in any folder."""
    home = stored.folder.resolve()
    if home in (folder.resolve() for folder in backbones.shipped().values()):
        return f"the {stored.config.attention} backbone of linvit"
    folder = home.parent.name if home.name in ("best", "last") else home.name
    return f"model {stored.about['name'] if stored.foreign else folder}"


def _of_data(request: AdviseRequest) -> Question:
    """The model that `linvit compare` would train on these images."""
    images = survey(request.about, request.data_root)
    given: dict[str, Any] = {} if request.size is None else {"size": request.size}
    if request.patch is not None:
        given |= {"stem": "patch", "patch_size": request.patch}
    like = trained = None
    if backbones.suit(images, request.image_size or images.side, given):
        trained = backbones.shipped()[BASELINE]
        like = read_model(trained).config
    side = request.image_size or (like.image_size if like else min(images.side, LARGEST))
    data = DataShape(images.name, side, images.channels, images.classes)
    config, _ = resolve(data, BASELINE, 0, given, like, trained is not None)
    text = f"{images.name} at {side} px"
    return Question(text, config, request.about, images.name, trained, given, request.image_size)


def some_images(question: Question, data_root: Path | None) -> np.ndarray:
    """A few images as the model takes them, uint8 (n, C, H, W), without decoding the rest."""
    config = question.config
    _, found = read_source(question.data or "", data_root, cache_root(None))
    step = max(1, min(POOL, len(found.labels)) // IMAGES)
    if isinstance(found, Arrays):
        return resized(found.images[: step * IMAGES : step][:IMAGES], config.image_size, config.channels)
    chosen = islice(found.read(), 0, step * IMAGES, step)
    return np.stack([read_image(where, config.image_size, config.channels, name) for name, where in chosen])
