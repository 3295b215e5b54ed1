"""Training: `train("cifar10", attention="performer-relu:m=32", out="runs/mine")`, and the models it leaves."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from linvit import ranks
from linvit.data import Dataset, Fold, Survey, folded, folder_of, survey
from linvit.files import slug, write_atomically
from linvit.locks import apart
from linvit.measure.provenance import pick_device
from linvit.models import VisionTransformer
from linvit.progress import Progress, ignore
from linvit.records import Record
from linvit.train import backbones
from linvit.train.checkpoint import load, read_config, read_model
from linvit.train.defaults import ATTENTION
from linvit.train.events import Began, Event, Listener, Noted, tell
from linvit.train.experiment import Experiment, Start, design
from linvit.train.folds import out_of_fold
from linvit.train.recipe import Recipe, create_recipe
from linvit.train.run import run
from linvit.train.source import Source, open_data
from linvit.train.start import architecture, check_folds, start_from
from linvit.train.tasks import TASKS
from linvit.train.trackers import tracking

__all__ = [
    "Event", "Experiment", "Listener", "Recipe", "Source", "Start", "Trained", "architecture", "backbones",
    "create_recipe", "design", "load",
    "open_data", "pick_device", "read_config", "read_model", "run", "start_from", "train",
]  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """What a training leaves: a folder, its records, and the best model."""

    folder: Path
    records: Sequence[Record]
    model: VisionTransformer | None  # None: it diverged before there was one, or each fold has its own
    data: Dataset
    experiment: Experiment  # all that decided it; of folds, the first's
    diverged: str = ""  # the layer that gave a number that is not finite
    folds: Sequence[Trained] = ()  # one for each, if folds were asked for; the records then are of all images first

    def find(self, metric: str, selection: str | None = None) -> Record | None:
        for record in self.records:
            if record.metric == metric and selection in (None, record.tags.get("selection")):
                return record
        return None

    def value(self, metric: str, selection: str | None = None) -> float | None:
        found = self.find(metric, selection)
        return None if found is None else found.value

    @property
    def test_accuracy(self) -> float | None:
        """Of the model chosen on validation data; of folds, over all images, unless one of them diverged."""
        found = self.find("test_accuracy", "best")
        return None if found is None or "fold" in found.tags else found.value


def train(
    data: str | Path | Dataset = "digits",
    *,
    attention: str | None = None,
    start: str | Path | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    data_root: str | Path | None = None,
    image_size: int | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    folds: int | None = None,
    task: str = "classification",
    test: bool = True,
    dry_run: bool = False,
    listeners: Sequence[Listener] = (),
    track: Sequence[str] = (),
    progress: Progress = ignore,
    checkpoint_seconds: float = 30.0,
    **options: Any,
) -> Trained:
    """Train on a named data set or a path; the same call again goes on where it stopped, or returns what it left.

    start: a trained model's folder to begin with, its shape and, if none is named, its attention and image size taken;
        "backbones" for those that ship, which photos start from if nothing is said; "scratch" for nothing.
    folds: train so many times, each time with another part of the images held out; `test_accuracy` is of them all.
    task: what is learned; "next-pixel" is the likelihood of images, of which `linvit.sample` draws more.
    options: any of ModelConfig's and Recipe's, e.g. epochs=10, lr=1e-3, dim=128, and size="001-I" for a named size.
    test=False leaves the test images alone; dry_run=True ends before anything is trained or written. listeners hear of
    every step, progress of images being decoded; track: "tensorboard" or "mlflow", which are told of every validation.
    """
    kinds = tracking(track)
    home = folder_of(data)
    place = ranks.join(pick_device(device))
    if TASKS[task].causal:  # which has no use for classes, or for what was trained on them
        start = start or backbones.SCRATCH
        if folds is not None:
            raise ValueError(f"folds={folds} does not go with task {task}: folds are dealt, and scored, by class")
    images = Survey.of(data) if isinstance(data, Dataset) else survey(data, data_root, limit, folds=folds)
    spec = attention or ATTENTION
    begin = backbones.chosen(start, [spec], images, image_size, options).get(spec)
    check_folds(begin, images.name, folds)
    like = architecture(begin)
    data, source = open_data(
        data, progress, root=data_root, image_size=image_size or (like and like.image_size), limit=limit,
        channels=like and like.channels, skip_bad=skip_bad, patch_size=options.get("patch_size"),
    )  # fmt: skip
    if attention is None and like and start not in (None, backbones.NAME):
        spec = like.attention  # it is only trained further

    def designed(images: Dataset, fold: Fold | None = None) -> Experiment:
        where = source and source.folded(fold)
        return design(images, spec, seed, source=where, start=begin, like=like, task=task, **options)

    def trained(experiment: Experiment, images: Dataset, folder: Path, home: Path, hear: Sequence[Listener]) -> Trained:
        if dry_run:
            return Trained(folder, [], None, images, experiment)
        hear = [*hear, *(kind(experiment, folder, home) for kind in kinds)]
        records = run(
            experiment, images, folder, device=place, listeners=hear, checkpoint_seconds=checkpoint_seconds, test=test
        )
        diverged = next((str(r.tags.get("layer")) for r in records if r.metric == "diverged"), "")
        has_model = (folder / "best" / "model.safetensors").exists()
        return Trained(folder, records, load(folder / "best") if has_model else None, images, experiment, diverged)

    if folds is None:
        experiment = designed(data)
        folder = Path(out) if out is not None else Path("runs") / f"{slug(data.name)}-{experiment.id}"
        apart(folder, home)
        return trained(experiment, data, folder, folder, listeners)
    every = [Fold(index, folds, seed) for index in range(max(1, folds))]
    parts = [folded(data, fold) for fold in every]
    experiments = [designed(images, fold) for images, fold in zip(parts, every, strict=True)]
    folder = Path(out) if out is not None else Path("runs") / f"{slug(data.name)}-{folds}folds-{experiments[0].id}"
    apart(folder, home)
    if taken := [name for name in ("experiment.json", "study.json") if (folder / name).exists()]:
        raise ValueError(f"{folder} holds {taken[0]}: choose another --out")
    found = []
    for index, (experiment, images) in enumerate(zip(experiments, parts, strict=True)):
        hear = partial(_announced, listeners, f"fold {index}, {index + 1} of {folds}")
        found.append(trained(experiment, images, folder / f"fold-{index}", folder, [hear]))
    if dry_run:
        return Trained(folder, [], None, data, experiments[0], folds=found)
    return _together(folder, found, experiments[0].record(place), data)


def _announced(listeners: Sequence[Listener], what: str, event: Event) -> None:
    """The event, and before the first of a run what that is."""
    if isinstance(event, Began):
        tell(listeners, Noted(what))
    tell(listeners, event)


def _together(folder: Path, found: list[Trained], base: Record, data: Dataset) -> Trained:
    """The folds as one: what they say of all images, then the records of each."""
    records = out_of_fold(base, [one.folder for one in found])
    for index, one in enumerate(found):
        place = one.folder.name
        records += [replace(r, artefact=r.artefact and f"{place}/{r.artefact}").tagged(fold=index) for r in one.records]
    if ranks.number() == 0:  # who alone writes
        write_atomically(folder / "records.jsonl", "".join(record.line() + "\n" for record in records))
    diverged = next((f"{one.diverged} of {one.folder.name}" for one in found if one.diverged), "")
    return Trained(folder, records, None, data, found[0].experiment, diverged, found)


class _Callable(types.ModuleType):
    """`linvit.train` is this package, since a submodule's name is an attribute of its parent; calling it is `train`.
    So `linvit.train("digits")` and `from linvit.train import Recipe` both hold, in whatever order they come."""

    __call__ = staticmethod(train)
    __signature__ = inspect.signature(train)


sys.modules[__name__].__class__ = _Callable
