"""`train`: one experiment, or one per fold, from a request to a trained model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from linvit import ranks
from linvit.data import Dataset
from linvit.files import write_atomically
from linvit.measure.threads import use_threads
from linvit.models import VisionTransformer
from linvit.pipeline.configure import configured_training
from linvit.pipeline.prepare import Prepared, prepare, result_folder
from linvit.progress import Progress, ignore
from linvit.records import Record
from linvit.requests import TrainRequest
from linvit.schemas.experiment import Experiment
from linvit.schemas.study import Variant
from linvit.training import backbones
from linvit.training.checkpoint import load, read_model
from linvit.training.defaults import ATTENTION
from linvit.training.events import Began, Event, Noted
from linvit.training.experiment import record_of
from linvit.training.folds import out_of_fold
from linvit.training.run import run as run_experiment
from linvit.training.trackers import tracking

OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class Trained:
    """Result of a training: its folder, records and best model."""

    folder: Path
    records: Sequence[Record]
    model: VisionTransformer | None  # None: it diverged before there was one, or each fold has its own
    data: Dataset
    experiment: Experiment  # with folds: the first
    diverged: str = ""  # the layer whose output was not finite
    folds: Sequence[Trained] = ()  # one for each; the records above are then of all images first

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
        """Test accuracy of the selected model; with folds, over all images, unless a fold diverged."""
        found = self.find("test_accuracy", "best")
        return None if found is None or "fold" in found.tags else found.value


def train(
    data: str | Path | Dataset = "digits",
    *,
    on_event: OnEvent = lambda event: None,
    progress: Progress = ignore,
    **keywords: Any,
) -> Trained:
    """Train on a named data set or a path; the same call resumes an interrupted training, or returns a finished one.

    keywords: the fields of `linvit.requests.TrainRequest` (attention, start, folds, task, out, seed, device, …) and any
    option of ModelConfig and Recipe, e.g. epochs=10, lr=1e-3, dim=128, or size="001-I" for a named size.
    on_event: called with every event of the training. progress: called while images are decoded.
    """
    dataset = data if isinstance(data, Dataset) else None
    request = TrainRequest.of(data=dataset.name if dataset else data, **keywords)
    return run(request, dataset=dataset, on_event=on_event, progress=progress)


def run(
    request: TrainRequest,
    *,
    dataset: Dataset | None = None,
    on_event: OnEvent = lambda event: None,
    progress: Progress = ignore,
) -> Trained:
    request = configured_training(request)
    tracking(request.track)  # a missing package is an error before any image is read
    variant = Variant(attention=request.attention or _default_attention(request), task=request.task)
    with use_threads(request.threads):
        prepared = prepare(request, [variant], dataset=dataset, progress=progress)
        device = ranks.join(prepared.device)
        return Training(request, replace(prepared, device=device), on_event).run(dataset)


def _default_attention(request: TrainRequest) -> str:
    """A named start keeps its own attention; it is only trained further."""
    if request.start in (None, backbones.NAME, backbones.SCRATCH):
        return ATTENTION
    return read_model(request.start or "").config.attention


@dataclass(frozen=True)
class Training:
    """A prepared request being carried out."""

    request: TrainRequest
    prepared: Prepared
    on_event: OnEvent

    def run(self, dataset: Dataset | None) -> Trained:
        designer, variant, folds = self.prepared.designer, self.prepared.variants[0], self.request.folds
        first = designer.experiment(variant)
        if folds is None:
            folder = result_folder(self.request, f"{first.data.name}-{first.id}", dataset)
            return self._run(first, folder, folder, self.on_event)
        experiments = [designer.hold_out(first, variant, fold) for fold in designer.fold_list()]
        folder = result_folder(self.request, f"{first.data.name}-{folds}folds-{experiments[0].id}", dataset)
        if taken := [name for name in ("experiment.json", "study.json") if (folder / name).exists()]:
            raise ValueError(f"{folder} holds {taken[0]}: choose another --out")
        found = []
        for index, experiment in enumerate(experiments):
            announce = partial(self._announce, f"fold {index}, {index + 1} of {folds}")
            found.append(self._run(experiment, folder / f"fold-{index}", folder, announce))
        if self.request.dry_run or self.request.print_config:
            return Trained(folder, [], None, self.prepared.dataset, experiments[0], folds=found)
        return self._pooled(folder, found)

    def _announce(self, text: str, event: Event) -> None:
        if isinstance(event, Began):
            self.on_event(Noted(text))
        self.on_event(event)

    def _run(self, experiment: Experiment, folder: Path, home: Path, on_event: OnEvent) -> Trained:
        images = self.prepared.designer.datasets.find(experiment)
        if self.request.dry_run or self.request.print_config:
            return Trained(folder, [], None, images, experiment)
        trackers = [kind(experiment, folder, home) for kind in tracking(self.request.track)]
        records = run_experiment(
            experiment,
            images,
            folder,
            device=self.prepared.device,
            listeners=[on_event, *trackers],
            checkpoint_seconds=self.request.checkpoint_seconds,
            test=self.request.test,
        )
        diverged = next((str(r.tags.get("layer")) for r in records if r.metric == "diverged"), "")
        has_model = (folder / "best" / "model.safetensors").exists()
        return Trained(folder, records, load(folder / "best") if has_model else None, images, experiment, diverged)

    def _pooled(self, folder: Path, found: list[Trained]) -> Trained:
        """The folds as one: what they show for all images, then the records of each."""
        base = record_of(found[0].experiment, self.prepared.device)
        records = out_of_fold(base, [one.folder for one in found])
        for index, one in enumerate(found):
            for r in one.records:
                records.append(replace(r, artefact=r.artefact and f"{one.folder.name}/{r.artefact}").tagged(fold=index))
        if ranks.number() == 0:  # which alone writes
            write_atomically(folder / "records.jsonl", "".join(record.line() + "\n" for record in records))
        diverged = next((f"{one.diverged} of {one.folder.name}" for one in found if one.diverged), "")
        return Trained(folder, records, None, self.prepared.dataset, found[0].experiment, diverged, found)
