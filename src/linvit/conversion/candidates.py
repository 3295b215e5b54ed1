"""Candidates of a conversion that names no attention: their speed in a short race of whole models, their accuracy
without training, and a forecast of the image size from which each is fast enough."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from linvit.attention import LIMIT, attention_cost, role_of
from linvit.conversion.context import Context, sizes
from linvit.conversion.search import Blocks
from linvit.conversion.student import in_place_of_softmax, make_student, replaced_layers, zero_shot
from linvit.ledger import key_of
from linvit.measure.models import model_calls
from linvit.measure.provenance import provenance
from linvit.measure.race import over_rounds, race
from linvit.models import ModelConfig, VisionTransformer
from linvit.models.cost import frame
from linvit.progress import Progress
from linvit.records import Record, Tag
from linvit.registry import join_layers, parse_layers
from linvit.schemas.conversion import fast_enough
from linvit.schemas.pixels import ImageSize, sides, with_height

# Few, and different from one another. Those that need no training come first.
TABLE = (
    "twoscale",
    "twoscale:reach=1",
    "window:size=7",
    "linformer:k=64",
    "agent:n=49",
    "inline",
    "performer-hyp:m=64",
)
ROUNDS, WARM_UP = 15, 2  # of the race; calls of each model before it
MAX_GROWTH = 4  # largest side of images in a forecast, relative to that of these images
SPLIT = "candidates"  # of the records of their accuracy
SAME = "is exact softmax at this image size"  # why a candidate is not raced


@dataclass(frozen=True)
class Candidate:
    """An attention in all layers that have softmax."""

    layers: str  # the spec of every layer
    speed: float  # of the whole model, relative to the teacher
    accuracy: float | None = None  # without training; None: not evaluated
    agreement: float | None = None


def candidate_layers(c: Context) -> dict[str, str]:
    """The specs of all layers with each attention of the table → why it is not a candidate, "" if it is."""
    found = {}
    for text in TABLE:
        layers = join_layers(in_place_of_softmax(text, c.specs(c.config.attention)))
        try:
            model = make_student(c.teacher, layers, "all", c.conversion.seed)
            found[layers] = SAME if disguised(model) else ""
        except ValueError as error:
            found[layers] = str(error)
    return found


def disguised(model: VisionTransformer) -> str:
    """The spec of a layer that is not softmax by name but computes exact softmax attention; "" if there is none."""
    specs = parse_layers(model.config.attention, model.config.depth)
    pairs = zip(specs, model.attentions(), strict=True)
    return next((str(spec) for spec, one in pairs if one.is_softmax and role_of(spec) != "baseline"), "")


def race_kinds(c: Context, kinds: Sequence[str], batch: int, seconds: float | None = None) -> dict[str, float]:
    """The speed of the whole model with each of them and without attention, relative to the teacher; measured once.
    The race ends after `seconds`, unless the fewest rounds take longer."""
    specs = [*kinds, without_attention(c)]
    here, known = sizes(c.config), {}
    for spec in specs:
        known[spec] = c.ledger.done(key_of("conversion_candidate", model=spec, **here))
    if missing := [spec for spec, record in known.items() if record is None]:
        records = _raced(c, missing, batch, seconds)
        c.ledger.append(records)
        known |= {str(record.tags["model"]): record for record in records}
    return {spec: float(record.value or 0.0) for spec, record in known.items() if record is not None}


def without_attention(c: Context) -> str:
    return join_layers(in_place_of_softmax(LIMIT, c.specs(c.config.attention)))


def _raced(c: Context, specs: Sequence[str], batch: int, seconds: float | None) -> list[Record]:
    teacher = c.config.attention
    configs = {spec: c.config.model_copy(update={"attention": spec}) for spec in (teacher, *specs)}
    calls = {spec: model_calls(one, c.device, batch, dtype=c.dtype)["inference"] for spec, one in configs.items()}
    shown: Progress = lambda done, total, what: c.progress(done, total, f"speed: {what}")  # noqa: E731
    deadline = None if seconds is None else time.monotonic() + seconds
    times = race(calls, device=c.device, rounds=ROUNDS, progress=shown, deadline=deadline)
    where, tags = provenance(c.device, c.dtype), {**c.base.tags, **sizes(c.config), "batch": batch}
    found = []
    limit = without_attention(c)
    for spec in specs:
        own: dict[str, Tag] = {"model": spec, "clock": times.clock, "tokens": c.config.tokens, "limit": spec == limit}
        own["replaced"] = replaced_layers(c.specs(spec))
        found.append(over_rounds("conversion_candidate", times.ratios(teacher, spec), "×", where, {**tags, **own}))
    return [replace(record, experiment=c.conversion.id) for record in found]


def refuse(c: Context, layers: str, why: str) -> None:
    key = key_of("conversion_candidate", model=layers, **sizes(c.config))
    record = replace(c.base, metric="conversion_candidate", value=None, unit="×")
    c.ledger.once(key, lambda: [record.tagged(model=layers, refused=why, **sizes(c.config))])


def evaluate_kinds(c: Context, kinds: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Accuracy on the images of the search, and agreement with the teacher, of the teacher and of each kind in all
    layers without training; measured once, in one pass over the images."""
    every, here = [c.config.attention, *kinds], {"split": SPLIT, **sizes(c.config)}
    if any(c.ledger.done(key_of("conversion_accuracy", model=spec, **here)) is None for spec in every):
        c.ledger.append(_evaluated(c, every))
    found = {}
    for spec in every:
        records = [c.ledger.last(f"conversion_{what}", model=spec, **here) for what in ("accuracy", "agreement")]
        accuracy, agreement = (float(record.value or 0.0) for record in records if record)
        found[spec] = accuracy, agreement
    return found


@torch.inference_mode()
def _evaluated(c: Context, specs: Sequence[str]) -> list[Record]:
    data, images = c.images.dataset, c.images.search
    with torch.inference_mode(False):
        models = [c.teacher, *(zero_shot(c, spec).to(c.device) for spec in specs[1:])]
    blocks = Blocks(models, images, data.mean, data.std, c.batch, c.dtype)
    mixes = [(i,) * c.config.depth for i in range(len(models))]
    right, same = np.zeros(len(models)), np.zeros(len(models))
    for i, (labels, outputs) in enumerate(blocks.logits(mixes[0], mixes)):
        c.progress(i * blocks.batch, len(images), f"accuracy of {len(specs) - 1} attentions")
        classes = [logits.argmax(-1) for logits in outputs]
        right += [(one == labels).sum().item() for one in classes]
        same += [(one == classes[0]).sum().item() for one in classes]
    found = []
    for spec, hits, agreed in zip(specs, right / len(images), same / len(images), strict=True):
        tags: dict[str, Tag] = {"model": spec, "split": SPLIT, **sizes(c.config)}
        tags["replaced"] = replaced_layers(c.specs(spec))
        for what, value in (("accuracy", hits), ("agreement", agreed)):
            found.append(c.record(f"conversion_{what}", float(value), len(images), **tags))
    return found


def forecast_speeds(
    config: ModelConfig, speeds: Mapping[str, float], limit: float, size: ImageSize
) -> dict[str, float]:
    """Forecast for images of another size: the speed of each model relative to the teacher, except of those that are
    impossible there, and under "" the time of the teacher relative to its time here. speeds, limit: relative to the
    teacher here; `limit` is without attention. The time of an attention is assumed to be proportional to its
    multiply–accumulates and overhead, that of the rest of the model to its multiply–accumulates."""
    other = config.model_copy(update={"image_size": size})
    rest = frame(other).macs / frame(config).macs / limit  # in seconds of the teacher at its own size

    def seconds(spec: str, speed: float) -> float:
        own, there = (_attention_work(spec, one) for one in (config, other))
        return rest + max(0.0, 1 / speed - 1 / limit) * there / max(1, own)

    teacher = seconds(config.attention, 1.0)
    found = {"": teacher}
    for spec, speed in speeds.items():
        try:
            found[spec] = teacher / seconds(spec, speed)
        except ValueError:  # e.g. it needs another grid
            continue
    return found


def _attention_work(layers: str, config: ModelConfig) -> int:
    costs = [attention_cost(spec, config.site, config.dim) for spec in parse_layers(layers, config.depth)]
    return sum(cost.macs + cost.overhead for cost in costs)


def fast_from(config: ModelConfig, speeds: Mapping[str, float], limit: float) -> dict[str, ImageSize]:
    """Spec → the smallest images of the same shape at which the model is fast enough by forecast, if there are any."""
    height, found = sides(config.image_size)[0], {}
    step = height // config.grid[0]
    for taller in range(height + step, MAX_GROWTH * height + 1, step):
        size = with_height(config.image_size, taller, step)
        try:
            there = forecast_speeds(config, speeds, limit, size)
        except ValueError:  # the teacher's own attention cannot have this size
            continue
        found |= {spec: size for spec, speed in there.items() if spec and fast_enough(speed) and spec not in found}
    return found
