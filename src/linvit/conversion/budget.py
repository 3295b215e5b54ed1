"""How many images a conversion that chooses its own target can look at: as many as the time is enough for."""

from __future__ import annotations

import hashlib
import statistics
from dataclasses import asdict, dataclass, replace

import numpy as np

from linvit.conversion.candidates import ROUNDS, WARM_UP
from linvit.conversion.context import Context, sizes
from linvit.conversion.images import ConversionImages
from linvit.conversion.measuring import BATCH_TOKENS, sizes_between
from linvit.conversion.search import images_needed
from linvit.conversion.stages import find_seconds
from linvit.data import Split
from linvit.data.splits import thin
from linvit.ledger import key_of
from linvit.measure.models import model_calls
from linvit.measure.race import timed
from linvit.records import Record

RACE = 0.25  # of the time, at most
SPARE = 0.9  # of the time is planned: models are built and files written, too
SHARES = {"search": 0.35, "decide": 0.35, "validation": 0.1, "test": 0.2}  # of what the races leave
MIN_IMAGES = {"search": 64, "decide": 0, "validation": 64, "test": 256}  # where there are as many
MAX_KINDS, MAX_DECIDED = 2, 3  # attentions that are mixed; mixes that are decided on
FINAL_ROUNDS = 10  # of the race of teacher and student


@dataclass(frozen=True)
class Plan:
    seconds: float  # that it takes, about
    batch: int  # of the races
    search: int  # images
    decide: int
    validation: int
    test: int


def make_plan(
    pace: float,
    total: float,
    *,
    tokens: int,
    depth: int,
    candidates: int,
    have: dict[str, int],
    needed: int,
    grown: int = 0,
) -> Plan:
    """pace: seconds that the teacher takes for an image; total: seconds that there are; have: images of each split;
    needed: images without which nothing can be decided; grown: sizes of images at which the result is evaluated."""
    calls = (candidates + 2) * (ROUNDS + WARM_UP) + 2 * 2 * (FINAL_ROUNDS + WARM_UP)
    batch = max(1, min(64, BATCH_TOKENS // tokens, int(RACE * total / (pace * calls))))
    left = max(0.0, total * SPARE / pace - calls * batch)  # forward passes of one image
    weights = passes(depth, candidates, grown)
    counts = {}
    for name, share in SHARES.items():
        fewest = max(MIN_IMAGES[name], needed if name == "decide" else 0)
        counts[name] = min(have[name], max(fewest, int(share * left / weights[name])))
    work = sum(weights[name] * count for name, count in counts.items())
    return Plan(pace * (calls * batch + work) / SPARE, batch, **counts)


def passes(depth: int, candidates: int, grown: int = 0) -> dict[str, float]:
    """Forward passes that one image of each split takes, about: a mix repeats half of a model."""
    mixes = depth * (MAX_KINDS + 2)
    return {
        "search": 1 + candidates + 0.5 * mixes + depth * 2,
        "decide": 1.0 + MAX_DECIDED + 1,
        "validation": 3.0 + 2 * grown,
        "test": 2.0,
    }


def pace(c: Context) -> float:
    """Seconds that the teacher takes for an image of a batch; once."""

    def measured() -> list[Record]:
        batch = max(1, min(16, BATCH_TOKENS // c.config.tokens))
        call = model_calls(c.config, c.device, batch, dtype=c.dtype)["inference"]
        c.progress(0, 1, "timing the teacher")
        times = [timed(call, 1, c.device)["wall"] for _ in range(5)][1:]
        tags = {"batch": batch, **sizes(c.config)}
        return [c.record("conversion_pace", statistics.median(times) / batch, len(times), **tags)]

    return float(c.ledger.once(key_of("conversion_pace", **sizes(c.config)), measured).value or 0.0)


def planned(c: Context, candidates: int) -> Plan:
    """The plan of this conversion, made once."""
    splits = {name: c.images.split(name) for name in SHARES}

    def made() -> list[Record]:
        plan = make_plan(
            pace(c),
            find_seconds(c.conversion.budget),
            tokens=c.config.tokens,
            depth=c.config.depth,
            candidates=candidates,
            have={name: len(split) for name, split in splits.items()},
            grown=len(sizes_between(c.stored.config, c.config)),
            needed=images_needed(c.conversion.max_drop or 0.0, MAX_DECIDED + 2),
        )
        tags = asdict(plan)
        return [c.record("conversion_plan", tags.pop("seconds"), candidates, **tags)]

    record = c.ledger.once(key_of("conversion_plan"), made)
    tags = {name: int(record.tags[name] or 0) for name in ("batch", *SHARES)}
    return Plan(float(record.value or 0.0), **tags)


def fewer(images: ConversionImages, plan: Plan, seed: int) -> ConversionImages:
    """As many of the images as planned, evenly over the classes."""

    def some(split: Split, name: str) -> Split:
        return split.some(thin(np.arange(len(split)), split.labels, getattr(plan, name), f"fewer {name}", seed))

    data = images.dataset
    validation, test = some(data.validation, "validation"), some(data.test, "test")
    text = repr((data.identity, len(validation), len(test), seed)).encode()
    data = replace(data, validation=validation, test=test, identity=hashlib.sha256(text).hexdigest()[:32])
    return ConversionImages(data, some(images.search, "search"), some(images.decide, "decide"))
