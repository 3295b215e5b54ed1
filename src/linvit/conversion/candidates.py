"""Attentions that a model may get: a short race of whole models, their accuracy before any training, and a forecast of
the image size from which they are fast enough."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from linvit.attention import LIMIT, attention_cost
from linvit.conversion.context import Context, sizes
from linvit.conversion.search import Blocks
from linvit.conversion.student import in_place_of_softmax, make_student, replaced_layers, zero_shot
from linvit.ledger import key_of
from linvit.measure.models import model_calls
from linvit.measure.provenance import provenance
from linvit.measure.race import over_rounds, race
from linvit.models import ModelConfig
from linvit.models.cost import frame
from linvit.progress import Progress
from linvit.records import Record, Tag
from linvit.registry import join_layers, parse_layers
from linvit.schemas.conversion import fast_enough

# What is tried in place of softmax: few, and different from one another. Those that need no training come first.
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
MAX_GROWTH = 4  # times the side of the images, up to which it is forecast from where on an attention is fast enough
SPLIT = "candidates"  # of the records of their accuracy


@dataclass(frozen=True)
class Tried:
    """An attention in all layers that have softmax."""

    layers: str  # the spec of every layer
    speed: float  # of the whole model, relative to the teacher
    accuracy: float | None = None  # before any training; None: not evaluated
    agreement: float | None = None


def possible(c: Context) -> dict[str, str]:
    """The table's attentions as specs of all layers → why one cannot be here, if it cannot."""
    found = {}
    for text in TABLE:
        specs = in_place_of_softmax(text, c.specs(c.config.attention))
        layers = join_layers(specs)
        try:
            make_student(c.teacher, layers, "all", c.conversion.seed)
            found[layers] = ""
        except ValueError as error:
            found[layers] = str(error)
    return found


def race_kinds(c: Context, kinds: Sequence[str], batch: int, seconds: float | None = None) -> dict[str, float]:
    """How many times faster than the teacher the whole model is with each of them, and with no attention; once. Within
    these seconds if the fewest rounds allow it."""
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
    layers with nothing trained; once, in one pass over the images."""
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
    blocks = Blocks(models, images, data.mean, data.std)
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


def forecast_speeds(config: ModelConfig, speeds: Mapping[str, float], limit: float, side: int) -> dict[str, float]:
    """How many times faster than the teacher's each model of this race would be with images of another side, without
    those that cannot be there; and under "" how much slower the teacher would become. `limit`: the speed without
    attention. What is not attention grows with its multiply–accumulates, and an attention with its own."""
    other = config.model_copy(update={"image_size": side})
    rest = frame(other).macs / frame(config).macs / limit  # in seconds of the teacher at its own size

    def seconds(spec: str, speed: float) -> float:
        own, there = (_attention_macs(spec, one) for one in (config, other))
        return rest + max(0.0, 1 / speed - 1 / limit) * there / max(1, own)

    teacher = seconds(config.attention, 1.0)
    found = {"": teacher}
    for spec, speed in speeds.items():
        try:
            found[spec] = teacher / seconds(spec, speed)
        except ValueError:  # e.g. it needs another grid
            continue
    return found


def _attention_macs(layers: str, config: ModelConfig) -> int:
    return sum(attention_cost(spec, config.site, config.dim).macs for spec in parse_layers(layers, config.depth))


def fast_from(config: ModelConfig, speeds: Mapping[str, float], limit: float) -> dict[str, int]:
    """Spec → the smallest side of images from which on the model is fast enough, where there is one."""
    step, found = config.image_size // config.grid[0], {}
    for side in range(config.image_size + step, MAX_GROWTH * config.image_size + 1, step):
        try:
            there = forecast_speeds(config, speeds, limit, side)
        except ValueError:  # the teacher's own attention cannot have this size
            continue
        found |= {spec: side for spec, speed in there.items() if spec and fast_enough(speed) and spec not in found}
    return found
