"""Backbones that ship: small trained models for photos, one per usual attention, so that a few hundred images and a few
minutes teach something. `benchmarks/backbones.py` made them; each has a card beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from linvit.data import Survey
from linvit.models import ModelConfig
from linvit.train.defaults import TUNED
from linvit.train.experiment import BACKBONES, Start
from linvit.train.start import start_from

HOME = BACKBONES
NAME, SCRATCH = HOME.name, "scratch"  # how they, and nothing, are asked for
SMALLEST, MOST = 48, 50_000  # pixels and images: beyond, one's own images teach more
OWN = "tiny-imagenet"  # what they were trained on


@cache
def shipped() -> dict[str, Path]:
    """The folder of each, by its attention."""
    found = {}
    for path in sorted(HOME.glob("*/config.json")):
        found[json.loads(path.read_text(encoding="utf-8"))["model"]["attention"]] = path.parent
    return found


def chosen(
    start: str | Path | None, attentions: Sequence[str], images: Survey, side: int | None, options: Mapping[str, Any],
    begun: Sequence[tuple[str, Start]] = (),
) -> dict[str, Start]:  # fmt: skip
    """What each attention begins with, as asked for or as is usual for such images; empty: with nothing.

    begun: what attentions that they are compared with have begun with already; they do as those did."""
    if start is None and suit(images, side or images.side, options):
        start = NAME
    if start in (None, SCRATCH):
        return {}
    if start != NAME:
        return dict.fromkeys(attentions, start_from(start))
    if not shipped():
        raise ValueError("this linvit ships no backbones: name a trained model's folder, or 'scratch'")
    ours = {spec: start_from(folder) for spec, folder in shipped().items()}
    kinds = {ours[spec].sha256: spec for spec in ours}
    before = [(spec, kinds.get(there.sha256)) for spec, there in begun]
    without = [spec for spec in attentions if spec not in ours]
    shared = any(kind == "softmax" != spec for spec, kind in before)
    if without and not shared and any(kind == spec != "softmax" for spec, kind in before):
        raise ValueError(
            f"attention '{without[0]}' has no backbone of its own, but those of this study began with theirs, and it "
            "would be behind: choose another --out, where all begin with softmax's, or with nothing by --from scratch"
        )
    own = not without and not shared  # else all from softmax's, so that none has an advantage
    return {spec: ours[spec if own else "softmax"] for spec in attentions}


def suit(images: Survey, side: int, options: Mapping[str, Any]) -> bool:
    """Photos that no recipe was tuned for, not too many and none of their own, and a model whose shape nobody chose."""
    shaped = {"size", *ModelConfig.model_fields} & {key for key, value in options.items() if value is not None}
    known = images.name in TUNED or images.name.partition(":")[0] == OWN
    count = images.train + images.validation + images.test
    photos = images.channels == 3 and side >= SMALLEST and count < MOST
    return "softmax" in shipped() and photos and not (known or shaped)


def first(starts: Mapping[str, Start]) -> Start | None:
    """The one that names a study's start: softmax's of those that ship, whichever attentions are asked for."""
    one = next(iter(starts.values()), None)
    return start_from(shipped()["softmax"]) if one and one.name == NAME and shipped() else one
