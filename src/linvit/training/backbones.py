"""Backbones that ship: small trained models for photos, one per usual attention, so that a few hundred images and a few
minutes teach something. `benchmarks/backbones.py` made them; each has a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from linvit.attention import BASELINE
from linvit.data import Survey
from linvit.models import ModelConfig
from linvit.schemas.experiment import BACKBONES, Start
from linvit.schemas.pixels import ImageSize, sides
from linvit.training.defaults import TUNED
from linvit.training.start import start_from

HOME = BACKBONES
NAME, SCRATCH = HOME.name, "scratch"  # how they, and nothing, are asked for
SMALLEST, MOST = 48, 50_000  # pixels and images: beyond, the images themselves teach more
OWN = "tiny-imagenet"  # what they were trained on


@cache
def shipped() -> dict[str, Path]:
    """The folder of each, by its attention."""
    found = {}
    for path in sorted(HOME.glob("*/config.json")):
        found[json.loads(path.read_text(encoding="utf-8"))["model"]["attention"]] = path.parent
    return found


def chosen(
    start: str | Path | None,
    attentions: Sequence[str],
    images: Survey,
    size: ImageSize | None,
    options: Mapping[str, Any],
    begun: Sequence[tuple[str, Start]] = (),
) -> dict[str, Start]:
    """What each attention starts from, as requested or by default for such images; empty: from scratch.

    begun: what the attentions of the same study have started from already."""
    if start is None and suit(images, size or images.side, options):
        start = NAME
    if start in (None, SCRATCH):
        return {}
    if start != NAME:
        return dict.fromkeys(attentions, start_from(start))
    if not shipped():
        raise ValueError("no backbones are installed: name a trained model's folder, or 'scratch'")
    kinds = {_start_of(folder).sha256: spec for spec, folder in shipped().items()} if begun else {}
    before = [(spec, kinds.get(there.sha256)) for spec, there in begun]
    without = [spec for spec in attentions if spec not in shipped()]
    shared = any(kind == BASELINE != spec for spec, kind in before)
    if without and not shared and any(kind == spec != BASELINE for spec, kind in before):
        raise ValueError(
            f"attention '{without[0]}' has no backbone of its own, but the others in this study started from theirs: "
            "choose another --out, where all start from softmax's, or --from scratch"
        )
    own = not without and not shared  # else all from softmax's, so that none has an advantage
    return {spec: _start_of(shipped()[spec if own else BASELINE]) for spec in attentions}


@cache
def _start_of(folder: Path) -> Start:
    """A shipped model's weights do not change while linvit runs."""
    return start_from(folder)


def suit(images: Survey, size: ImageSize, options: Mapping[str, Any]) -> bool:
    """Whether to start from them by default: photos without a tuned recipe, not too many, and a model whose shape was
    not given."""
    shaped = {"size", *ModelConfig.model_fields} & {key for key, value in options.items() if value is not None}
    known = images.name in TUNED or images.name.partition(":")[0] == OWN
    count = images.train + images.validation + images.test
    photos = images.channels == 3 and min(sides(size)) >= SMALLEST and count < MOST
    return BASELINE in shipped() and photos and not (known or shaped)


def first(starts: Mapping[str, Start]) -> Start | None:
    """The one that names a study's start: softmax's of those that ship, whichever attentions are asked for."""
    one = next(iter(starts.values()), None)
    return _start_of(shipped()[BASELINE]) if one and one.shipped else one
