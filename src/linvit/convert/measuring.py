"""What a conversion bought: images per second of teacher, student and the mixes between, as images grow; the card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from linvit import metrics
from linvit.convert.student import fitted, linear_layers
from linvit.data import normalise
from linvit.data.splits import thin
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
LARGER = 4097  # tokens, at most, of the images of twice the side at which speeds are shown, too
TOKENS = 4096  # of one batch that is timed
MIXES = 4  # timed between teacher and student
GROWTH, GROWN = "growth", 512  # validation images, at most, whose accuracy is shown as they grow


def sizes(config: ModelConfig) -> dict[str, int | None]:
    """Tags that say of which images and patches a number is."""
    return {"image_size": config.image_size, "patch_size": config.patch_size}


def speeds(work: Work, student: str) -> None:
    """Images per second of the teacher, the student and a few mixes of the search, side by side; and, if images are of
    the teacher's own size, of the first two at twice that, where linear attention is worth more."""
    if not between(work.stored.config, work.config):
        larger = work.config.model_copy(update={"image_size": 2 * work.config.image_size})
        tokens = math.prod(grid(larger)) + larger.prefix_tokens
        if tokens <= LARGER and not work.of("conversion_vs_teacher", model=student, **sizes(larger)):
            work.keep(_raced(work, list(dict.fromkeys([work.config.attention, student])), larger))
    if work.of("conversion_vs_teacher", model=student, **sizes(work.config)):
        return
    searched = {r.tags["linear"]: str(r.tags["model"]) for r in sorted(
        work.of("conversion_accuracy", split="search"), key=lambda r: r.value or 0.0)}  # fmt: skip
    best = [searched[linear] for linear in sorted(searched, key=lambda x: int(x or 0))]
    places = np.linspace(0, len(best) - 1, MIXES).round().astype(int) if best else []
    mixes = [best[i] for i in places]
    specs = dict.fromkeys([work.config.attention, student, *mixes])
    work.keep(_raced(work, list(specs), work.config))


def _raced(work: Work, specs: Sequence[str], config: ModelConfig) -> list[Record]:
    configs = {spec: config.model_copy(update={"attention": spec}) for spec in specs}
    tokens = math.prod(grid(config)) + config.prefix_tokens
    batch = max(1, min(64, TOKENS // tokens))
    calls = {spec: _call(one, batch, work.device) for spec, one in configs.items()}
    times = race(calls, device=work.device, rounds=ROUNDS, progress=partial(_shown, work))
    found = []
    where = {"device": work.base.device, "threads": work.base.threads, "dtype": work.base.dtype}
    for spec in specs:
        linear = linear_layers(parse_layers(spec, work.config.depth))
        tags = work.base.tags | sizes(config) | {"model": spec, "batch": batch, "clock": times.clock,
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
    """Where there are more tokens than the teacher was trained with: accuracy and speed from there on, but for what the
    student's attention cannot have."""
    for size, patch in between(work.stored.config, work.config):
        config = work.config.model_copy(update={"image_size": size, "patch_size": patch})
        if work.of("conversion_accuracy", model="student", split=GROWTH, **sizes(config)):
            continue
        try:
            models = {"teacher": fitted(work.stored, work.images.data, size, patch), "student": _student(work, config)}
        except ValueError as error:  # e.g. more keys of a Linformer than so small an image has tokens
            shape = f"{size} px" + (f" in patches of {patch}" if patch else "")
            tell(work.listeners, Noted(f"{shape} are not among the sizes shown: {error}"))
            continue
        found = [_accuracy(work, name, model) for name, model in models.items()]
        timed = [] if config == work.config else _raced(work, [work.config.attention, student], config)
        work.keep([*timed, *found])


def between(old: ModelConfig, new: ModelConfig) -> list[tuple[int, int | None]]:
    """Sizes of images and of patches, from the old model's to the new one's; none where tokens do not become more."""
    if math.prod(grid(old)) >= math.prod(grid(new)):
        return []
    if old.patch_size == new.patch_size:
        fits = old.image_size // grid(old)[0]
        middle = [((old.image_size + new.image_size) // 2 // fits * fits, old.patch_size)]
    elif old.image_size != new.image_size:
        middle = [(new.image_size, old.patch_size)]
    else:
        sides = range((new.patch_size or 0) + 1, old.patch_size or 0)
        fit = [(new.image_size, side) for side in sides if new.image_size % side == 0]
        middle = fit[len(fit) // 2 :][:1]
    ends = [(config.image_size, config.patch_size) for config in (old, new)]
    return list(dict.fromkeys([ends[0], *middle, ends[1]]))


def _student(work: Work, config: ModelConfig) -> VisionTransformer:
    """The student for these images and patches, its weights interpolated."""
    stored = read_model(work.folder / "best")
    tensors = resized(stored.tensors, stored.config, config.image_size, config.patch_size)
    return built(replace(stored, config=stored.config.model_copy(update=sizes(config))), tensors)


@torch.inference_mode()
def _accuracy(work: Work, name: str, model: VisionTransformer) -> Record:
    """On validation images scaled to the model's size, the same for all; of each class its share."""
    data, size = work.images.data, model.to(work.device).config.image_size
    every = np.arange(len(data.validation))
    held = data.validation.some(thin(every, data.validation.labels, GROWN, GROWTH, work.plan.seed))
    right = 0
    for start in range(0, len(held), 32):
        work.progress(start, len(held), f"{size} pixels")
        images, labels = held.batch(slice(start, start + 32))
        x = F.interpolate(images.float(), (size, size), mode="bilinear", antialias=True).round().to(torch.uint8)
        x = normalise(x.to(work.device), data.mean, data.std)
        right += int((model(x).argmax(-1).cpu() == labels).sum())
    row = replace(work.base, metric="conversion_accuracy", value=right / len(held), unit="fraction", n=len(held))
    return row.tagged(model=name, split=GROWTH, **sizes(model.config))


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
