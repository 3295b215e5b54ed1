"""Speed of teacher, student and the mixes between them; accuracy and speed as images grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from linvit.conversion.context import Context, sizes
from linvit.conversion.student import replaced_layers
from linvit.conversion.teacher import fit_model
from linvit.data import normalise
from linvit.data.splits import thin
from linvit.ledger import key_of
from linvit.measure.models import model_calls
from linvit.measure.provenance import provenance
from linvit.measure.race import over_rounds, race
from linvit.models import ModelConfig, VisionTransformer
from linvit.progress import Progress
from linvit.records import Record, Tag
from linvit.schemas.pixels import ImageSize, scaled, sides, with_height
from linvit.training.checkpoint import read_model
from linvit.training.events import Noted

ROUNDS = 10
MAX_DOUBLED_TOKENS = 4097  # at twice the image size
BATCH_TOKENS = 4096  # of one batch that is timed
TIMED_MIXES = 4  # between teacher and student
MAX_GROWTH_IMAGES = 512  # validation images
GROWTH = "growth"  # the split that they form


def measure_speeds(c: Context, student: str) -> None:
    """Images per second of the teacher, the student and a few mixes of the search, timed together. If images have the
    teacher's own size, those of the first two at twice that size as well, where less work per token gains more."""
    if not sizes_between(c.stored.config, c.config):
        doubled = c.config.model_copy(update={"image_size": scaled(c.config.image_size, 2)})
        if doubled.image_tokens + doubled.prefix_tokens <= MAX_DOUBLED_TOKENS:
            _time_once(c, doubled, [c.config.attention, student])
    best = {
        record.tags["replaced"]: str(record.tags["model"])
        for record in sorted(c.ledger.find("conversion_accuracy", split="search"), key=lambda r: r.value or 0.0)
    }
    by_count = [best[count] for count in sorted(best, key=lambda count: int(count or 0))]
    places = np.linspace(0, len(by_count) - 1, TIMED_MIXES).round().astype(int) if by_count else []
    _time_once(c, c.config, [c.config.attention, student, *(by_count[i] for i in places)])


def speed_of(c: Context, student: str) -> float:
    """How many times faster than the teacher it was measured to be."""
    record = c.ledger.done(key_of("conversion_vs_teacher", model=student, **sizes(c.config)))
    return float(record.value or 0.0) if record else 1.0


def _time_once(c: Context, config: ModelConfig, specs: Sequence[str]) -> None:
    """The second spec is the student."""
    key = key_of("conversion_vs_teacher", model=specs[1], **sizes(config))
    c.ledger.once(key, lambda: _timed(c, config, specs))


def _timed(c: Context, config: ModelConfig, specs: Sequence[str]) -> list[Record]:
    specs, tokens = list(dict.fromkeys(specs)), config.image_tokens + config.prefix_tokens
    batch = max(1, min(64, BATCH_TOKENS // tokens))
    configs = {spec: config.model_copy(update={"attention": spec}) for spec in specs}
    calls = {spec: model_calls(one, c.device, batch, dtype=c.dtype)["inference"] for spec, one in configs.items()}
    shown: Progress = lambda done, total, what: c.progress(done, total, f"speed: {what}")  # noqa: E731
    times = race(calls, device=c.device, rounds=ROUNDS, progress=shown)
    found, where = [], provenance(c.device, c.dtype)
    for spec in specs:
        tags: dict[str, Tag] = {**c.base.tags, **sizes(config), "model": spec, "batch": batch, "clock": times.clock}
        tags |= {"replaced": replaced_layers(c.specs(spec)), "tokens": tokens}
        ratios = times.ratios(c.config.attention, spec)
        found.append(over_rounds("conversion_speed", [batch / t for t in times.of(spec)], "images/s", where, tags))
        found.append(over_rounds("conversion_vs_teacher", ratios, "×", where, tags))
    return [replace(record, experiment=c.conversion.id) for record in found]


def measure_growth(c: Context, student: str) -> None:
    """If there are more tokens than the teacher was trained with: accuracy and speed from its own size to this one,
    except for sizes that the student's attention cannot have."""
    for size, patch in sizes_between(c.stored.config, c.config):
        config = c.config.model_copy(update={"image_size": size, "patch_size": patch})
        key = key_of("conversion_accuracy", model="student", split=GROWTH, **sizes(config))
        if c.ledger.done(key) is not None:
            continue
        try:
            sources = {"teacher": c.stored, "student": read_model(c.folder / "best")}
            models = {name: fit_model(stored, c.images.dataset, size, patch) for name, stored in sources.items()}
        except ValueError as error:  # e.g. a Linformer with more keys than a small image has tokens
            shape = f"{size} px" + (f" with patches of {patch} px" if patch else "")
            c.on_event(Noted(f"not measured at {shape}: {error}"))
            continue
        records = [_accuracy(c, name, model) for name, model in models.items()]
        timed = [] if config == c.config else _timed(c, config, [c.config.attention, student])
        c.ledger.append([*timed, *records])


def sizes_between(old: ModelConfig, new: ModelConfig) -> list[tuple[ImageSize, int | None]]:
    """Sizes of images and of patches, from the old model's to the new one's; none if there are no more tokens, or if
    the images have another shape."""
    height, taller = sides(old.image_size)[0], sides(new.image_size)[0]
    if old.image_tokens >= new.image_tokens or with_height(old.image_size, taller) != new.image_size:
        return []
    if old.patch_size == new.patch_size:
        step = height // old.grid[0]
        middle = [(with_height(old.image_size, (height + taller) // 2 // step * step, step), old.patch_size)]
    elif old.image_size != new.image_size:
        middle = [(new.image_size, old.patch_size)]
    else:
        smaller = range((new.patch_size or 0) + 1, old.patch_size or 0)
        fitting = [(new.image_size, side) for side in smaller if not any(n % side for n in sides(new.image_size))]
        middle = fitting[len(fitting) // 2 :][:1]
    first, last = ((config.image_size, config.patch_size) for config in (old, new))
    return list(dict.fromkeys([first, *middle, last]))


@torch.inference_mode()
def _accuracy(c: Context, name: str, model: VisionTransformer) -> Record:
    """On validation images scaled to the model's size, the same images for all models, stratified by class."""
    data, size = c.images.dataset, model.to(c.device).config.image_size
    rows, labels = np.arange(len(data.validation)), data.validation.labels
    images = data.validation.some(thin(rows, labels, MAX_GROWTH_IMAGES, GROWTH, c.conversion.seed))
    right = 0
    for start in range(0, len(images), 32):
        c.progress(start, len(images), f"{name} at {size} px")
        pixels, truth = images.batch(slice(start, start + 32))
        x = F.interpolate(pixels.float(), sides(size), mode="bilinear", antialias=True).round().to(torch.uint8)
        x = normalise(x.to(c.device), data.mean, data.std)
        right += int((model(x).argmax(-1).cpu() == truth).sum())
    tags = {"model": name, "split": GROWTH, **sizes(model.config)}
    return c.record("conversion_accuracy", right / len(images), len(images), **tags)
