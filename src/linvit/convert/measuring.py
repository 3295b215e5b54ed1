"""What a conversion bought: images per second of teacher, student and the mixes between, as images grow; the card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from linvit import metrics
from linvit.data import normalise
from linvit.measure.race import over_rounds, race
from linvit.models import ModelConfig, VisionTransformer
from linvit.models.cost import grid
from linvit.models.resize import resized
from linvit.randomness import generator
from linvit.records import Record
from linvit.registry import parse_layers
from linvit.train.checkpoint import built, read_model
from linvit.train.events import Noted, tell

if TYPE_CHECKING:
    from linvit.convert.work import Row, Work

ROUNDS = 10
TOKENS = 4096  # of one batch that is timed
MIXES = 4  # timed between teacher and student
GROWN = 512  # validation images, at most, whose accuracy is shown as they grow


def speeds(work: Work, student: str) -> None:
    """Images per second of the teacher, the student and a few mixes of the search, side by side."""
    size = work.config.image_size
    if work.of("conversion_vs_teacher", model=student, image_size=size):
        return
    searched = {r.tags["linear"]: str(r.tags["model"]) for r in sorted(
        work.of("conversion_accuracy", split="search"), key=lambda r: r.value or 0.0)}  # fmt: skip
    between = [searched[linear] for linear in sorted(searched, key=lambda x: int(x or 0))]
    places = np.linspace(0, len(between) - 1, MIXES).round().astype(int) if between else []
    mixes = [between[i] for i in places]
    specs = dict.fromkeys([work.config.attention, student, *mixes])
    work.keep(_raced(work, list(specs), size))


def _raced(work: Work, specs: Sequence[str], size: int) -> list[Record]:
    configs = {spec: work.config.model_copy(update={"attention": spec, "image_size": size}) for spec in specs}
    first = configs[work.config.attention]
    tokens = int(np.prod(grid(first))) + first.prefix_tokens
    batch = max(1, min(64, TOKENS // tokens))
    calls = {spec: _call(config, batch, work.device) for spec, config in configs.items()}
    times = race(calls, device=work.device, rounds=ROUNDS, progress=partial(_shown, work))
    found = []
    where = {"device": work.base.device, "threads": work.base.threads, "dtype": work.base.dtype}
    for spec in specs:
        linear = sum(layer.name != "softmax" for layer in parse_layers(spec, work.config.depth))
        tags = work.base.tags | {"model": spec, "image_size": size, "batch": batch, "clock": times.clock,
                                 "linear": linear, "tokens": tokens}  # fmt: skip
        rates = [batch / t for t in times.of(spec)]
        beside = times.ratios(work.config.attention, spec)
        found += [over_rounds("conversion_speed", rates, "images/s", where, tags),  # type: ignore[arg-type]
                  over_rounds("conversion_vs_teacher", beside, "×", where, tags)]  # type: ignore[arg-type]  # fmt: skip
    return [replace(record, experiment=work.plan.id) for record in found]


def _shown(work: Work, done: int, total: int, what: str) -> None:
    work.progress(done, total, f"speed: {what}")


def _call(config: ModelConfig, batch: int, device: torch.device):
    model = VisionTransformer(config).to(device).eval()
    shape = batch, config.channels, config.image_size, config.image_size
    x = torch.randn(shape, generator=generator("speed", *shape)).to(device)
    return torch.inference_mode()(partial(model, x))


def growth(work: Work, student: str) -> None:
    """Where the images are larger than those the teacher was trained on: accuracy and speed at sizes up to theirs, but
    for those that the student's attention cannot have."""
    old, new = work.stored.config.image_size, work.config.image_size
    if old >= new:
        return
    fits = old // grid(work.stored.config)[0]
    middle = (old + new) // 2 // fits * fits
    folders = {"teacher": work.folder / "teacher", "student": work.folder / "best"}
    for size in sorted({old, middle} - {new}):
        if work.of("conversion_accuracy", model="student", image_size=size):
            continue
        try:
            models = {name: _scaled(work, folder, size) for name, folder in folders.items()}
        except ValueError as error:  # e.g. more keys of a Linformer than so small an image has tokens
            tell(work.listeners, Noted(f"{size} px are not among the sizes shown: {error}"))
            continue
        found = [_accuracy(work, name, model, size) for name, model in models.items()]
        work.keep([*_raced(work, [work.config.attention, student], size), *found])
    if not work.of("conversion_accuracy", model="student", image_size=new, split="validation"):
        work.keep([_accuracy(work, "student", _scaled(work, folders["student"], new), new)])


def _scaled(work: Work, folder: Path, size: int) -> VisionTransformer:
    """The model of a folder for images of this size, its weights interpolated."""
    stored = read_model(folder)
    config = stored.config.model_copy(update={"image_size": size})
    tensors = resized(stored.tensors, stored.config, size)
    return built(replace(stored, config=config, tensors=tensors)).to(work.device)


@torch.inference_mode()
def _accuracy(work: Work, name: str, model: VisionTransformer, size: int) -> Record:
    """On validation images scaled to this size."""
    data = work.images.data
    held = data.validation.some(np.arange(min(GROWN, len(data.validation))))
    right = 0
    for start in range(0, len(held), 32):
        work.progress(start, len(held), f"{size} pixels")
        images, labels = held.batch(slice(start, start + 32))
        x = F.interpolate(images.float(), (size, size), mode="bilinear", antialias=True).round().to(torch.uint8)
        x = normalise(x.to(work.device), data.mean, data.std)
        right += int((model(x).argmax(-1).cpu() == labels).sum())
    row = replace(work.base, metric="conversion_accuracy", value=right / len(held), unit="fraction", n=len(held))
    return row.tagged(model=name, split="validation", image_size=size)


def card(work: Work, row: Row, steps: int) -> str:
    """The README beside the model."""
    teacher = work.rows[0]
    lines = [f"| {name} | {value} |" for name, value in (
        ("layers with linear attention", f"{row.linear} of {work.config.depth}"),
        ("validation accuracy", f"{metrics.percent(row.accuracy)} (teacher {metrics.percent(teacher.accuracy)})"),
        ("the teacher's answer", metrics.percent(row.agreement)), ("chosen", row.name), ("steps of all stages", steps),
        *((f"test accuracy, {r.tags['model']}", metrics.percent(r.value or 0.0))
          for r in work.of("conversion_accuracy", split="test")),
    )]  # fmt: skip
    table = "\n".join(lines)
    return f"""# {work.plan.data.name}: vision transformer with {row.attention}

Converted from a model with {work.config.attention} by `linvit convert`.

| | |
|---|---|
{table}

```python
import linvit
model = linvit.load("path/to/this/folder")
```
"""
