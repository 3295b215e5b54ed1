"""How many images a conversion that names no attention evaluates: as many as fit its time."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from linvit.conversion.candidates import ROUNDS, WARM_UP
from linvit.conversion.context import Context, sizes
from linvit.conversion.images import ConversionImages
from linvit.conversion.measuring import BATCH_TOKENS, sizes_between
from linvit.conversion.search import MOVES_AT_ONCE, images_needed
from linvit.conversion.stages import find_seconds
from linvit.data import Split
from linvit.data.splits import thin
from linvit.ledger import key_of
from linvit.measure.models import model_calls
from linvit.measure.race import timed
from linvit.models import ModelConfig
from linvit.records import Record

RACE_SHARE = 0.25  # of the time, at most
PLANNED_SHARE = 0.9  # of the time; the rest is for building models and writing files
SHARES = {"search": 0.35, "decide": 0.35, "validation": 0.1, "test": 0.2}  # of what the races leave
MIN_IMAGES = {"search": 64, "decide": 0, "validation": 64, "test": 256}  # of a split that has as many
MAX_KINDS, MAX_DECIDED = 2, 3  # attentions that are mixed; mixes that are decided on
READ_IMAGES = 32  # training images that are timed
FINAL_ROUNDS = 10  # of the race of teacher and student
READS = {"search": 1, "decide": 2, "validation": 4, "test": 2}  # how often an image is read


class Pace(NamedTuple):
    """Seconds for one image."""

    forward: float  # of the teacher
    read: float = 0.0


@dataclass(frozen=True)
class Plan:
    seconds: float  # estimated
    batch: int  # of the races
    search: int  # images
    decide: int
    validation: int
    test: int
    kinds: int = MAX_KINDS  # attentions that may be mixed


def make_plan(
    pace: Pace,
    total: float,
    *,
    tokens: int,
    depth: int,
    candidates: int,
    available: Mapping[str, int],
    needed: int,
    sizes: int = 0,
    kinds: int = MAX_KINDS,
) -> Plan:
    """total: seconds that there are; available: images of each split; needed: images without which nothing can be
    decided; sizes: how many image sizes the result is evaluated at; kinds: attentions that may be mixed."""
    calls = (candidates + 2) * (ROUNDS + WARM_UP) + 2 * 2 * (FINAL_ROUNDS + WARM_UP)
    batch = max(1, min(64, BATCH_TOKENS // tokens, int(RACE_SHARE * total / (pace.forward * calls))))
    race = calls * batch * pace.forward
    left = max(0.0, total * PLANNED_SHARE - race)
    needs = passes(depth, candidates, sizes, kinds)
    times = {name: count * pace.forward + READS[name] * pace.read for name, count in needs.items()}
    counts = {}
    for name, share in SHARES.items():
        fewest = max(MIN_IMAGES[name], needed if name == "decide" else 0)
        counts[name] = min(available[name], max(fewest, int(share * left / times[name])))
    work = sum(times[name] * count for name, count in counts.items())
    return Plan((race + work) / PLANNED_SHARE, batch, **counts, kinds=kinds)


def passes(depth: int, candidates: int, sizes: int = 0, kinds: int = MAX_KINDS) -> dict[str, float]:
    """How many forward passes an image of each split takes, at most: a mix repeats half of a model, and the search
    evaluates each move from a kind to a slower one or to softmax, and some of them again."""
    mixes = depth * kinds * (1 + MOVES_AT_ONCE)
    return {
        "search": 1 + candidates + 0.5 * mixes,
        "decide": 1.0 + MAX_DECIDED + 1,
        "validation": 3.0 + 2 * sizes,
        "test": 2.0,
    }


def measured_pace(c: Context) -> Pace:
    """With a batch of training images; measured once."""

    def measured() -> list[Record]:
        batch = max(1, min(16, BATCH_TOKENS // c.config.tokens))
        call = model_calls(c.config, c.device, batch, dtype=c.dtype)["inference"]
        c.progress(0, 1, "timing the teacher")
        times = [timed(call, 1, c.device)["wall"] for _ in range(5)][1:]
        images, start = c.images.dataset.train, time.perf_counter()
        read = len(images.batch(slice(READ_IMAGES))[1])
        reading = (time.perf_counter() - start) / read
        tags = {"batch": batch, "read": reading, **sizes(c.config)}
        return [c.record("conversion_pace", statistics.median(times) / batch, len(times), **tags)]

    record = c.ledger.once(key_of("conversion_pace", **sizes(c.config)), measured)
    return Pace(float(record.value or 0.0), float(record.tags["read"] or 0.0))


def plan_at(c: Context, candidates: int, config: ModelConfig, pace: Pace) -> Plan:
    """The plan of this conversion with images of another size: one kind alone, if there is no time to mix several."""
    total = find_seconds(c.conversion.budget)
    make = partial(
        make_plan,
        pace,
        total,
        tokens=config.tokens,
        depth=config.depth,
        candidates=candidates,
        available={name: len(c.images.split(name)) for name in SHARES},
        needed=images_needed(c.conversion.max_drop or 0.0, MAX_DECIDED + 2),
        sizes=len(sizes_between(c.stored.config, config)),
    )
    plan = make(kinds=MAX_KINDS)
    return plan if plan.seconds <= total else make(kinds=1)


def plan_images(c: Context, candidates: int) -> Plan:
    """The plan of this conversion, made once."""

    def made() -> list[Record]:
        tags = asdict(plan_at(c, candidates, c.config, measured_pace(c)))
        return [c.record("conversion_plan", tags.pop("seconds"), candidates, **tags)]

    record = c.ledger.once(key_of("conversion_plan"), made)
    tags = {name: int(record.tags[name] or 0) for name in ("batch", *SHARES, "kinds")}
    return Plan(float(record.value or 0.0), **tags)


def subset(images: ConversionImages, plan: Plan, seed: int) -> ConversionImages:
    """As many of the images as planned, evenly over the classes."""

    def some(split: Split, name: str) -> Split:
        return split.some(thin(np.arange(len(split)), split.labels, getattr(plan, name), f"fewer {name}", seed))

    data = images.dataset
    validation, test = some(data.validation, "validation"), some(data.test, "test")
    text = repr((data.identity, len(validation), len(test), seed)).encode()
    data = replace(data, validation=validation, test=test, identity=hashlib.sha256(text).hexdigest()[:32])
    return ConversionImages(data, some(images.search, "search"), some(images.decide, "decide"))
