"""What the steps of a conversion share: the teacher, the images, the folder and its ledger. Models that a conversion
produces are stored and measured here, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from linvit import metrics
from linvit.conversion.images import ConversionImages
from linvit.conversion.student import replaced_layers
from linvit.devices import amp_dtype
from linvit.files import slug
from linvit.ledger import key_of, open_ledger
from linvit.measure.accuracy import Evaluation, evaluate
from linvit.measure.provenance import provenance
from linvit.models import ModelConfig, VisionTransformer
from linvit.progress import Progress
from linvit.records import Record, Tag
from linvit.registry import Spec, parse_layers
from linvit.schemas.conversion import Conversion
from linvit.schemas.experiment import Start
from linvit.schemas.recipe import Recipe
from linvit.training.checkpoint import Stored, load, read_model, save_config, save_model
from linvit.training.events import Listener, Noted
from linvit.training.start import start_from
from linvit.training.trackers import Tracker

EVAL_BATCH, EVAL_TOKENS = 64, 64 * 197  # images and tokens that are evaluated at once, at most: bounds memory


@dataclass(frozen=True)
class StageResult:
    """A model that a conversion produced, on validation images."""

    name: str  # teacher, zero-shot, stage 1, …
    accuracy: float
    agreement: float  # fraction of the images for which it predicts the teacher's class
    attention: str
    replaced: int  # layers whose attention is not the baseline
    steps: int
    seconds: float
    folder: Path = field(compare=False)


@dataclass
class Context:
    conversion: Conversion
    stored: Stored  # the teacher as it was trained
    teacher: VisionTransformer  # the teacher for these images
    recipe: Recipe  # of all stages
    images: ConversionImages
    folder: Path
    device: torch.device
    on_event: Listener
    progress: Progress
    trackers: Sequence[type[Tracker]] = ()
    checkpoint_seconds: float = 30.0
    results: list[StageResult] = field(default_factory=list)  # of this call, in order

    def __post_init__(self) -> None:
        self.teacher.to(self.device)
        self.ledger = open_ledger(self.folder)
        self._predictions: dict[str, np.ndarray] = {}  # of the teacher, by split

    @property
    def config(self) -> ModelConfig:
        return self.teacher.config

    @property
    def batch(self) -> int:
        """Images that are evaluated at once."""
        return max(1, min(EVAL_BATCH, EVAL_TOKENS // self.config.tokens))

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of autocast, in all stages and timings."""
        return amp_dtype(self.recipe.amp, self.device)

    @cached_property
    def base(self) -> Record:
        tags: dict[str, Tag] = {"dataset": self.conversion.data.name, "seed": self.conversion.seed}
        return Record("", None, experiment=self.conversion.id, **provenance(self.device, self.dtype), tags=tags)

    @cached_property
    def teacher_start(self) -> Start:
        return start_from(self.folder / "teacher")

    def record(self, metric: str, value: float, n: int = 1, **tags: Tag) -> Record:
        unit = metrics.METRICS[metric].unit
        return replace(self.base, metric=metric, value=value, unit=unit, n=n).tagged(**tags)

    def specs(self, layers: str) -> list[Spec]:
        return parse_layers(layers, self.config.depth)

    def store(self, name: str, make: Callable[[], VisionTransformer]) -> Path:
        """The folder of a model, made unless it is there. Weights are written last: a folder with weights is whole."""
        folder = self.folder / slug(name)
        if not (folder / "model.safetensors").exists():
            model = make()
            save_config(folder, model.config, self.images.dataset)
            save_model(folder, model)
        return folder

    def evaluate(self, folder: Path, split: str) -> Evaluation:
        data, what = self.images.dataset, f"evaluating {folder.name} on {split} images"
        model, images = load(folder).to(self.device), self.images.split(split)
        shown: Progress = lambda done, total, _: self.progress(done, total, what)  # noqa: E731
        return evaluate(model, images, data.classes, data.mean, data.std, self.device, self.batch, shown)

    def scored(self, name: str, folder: Path, split: str, attention: str) -> tuple[Evaluation, list[Record]]:
        """A model on a split, with records of its accuracy and its agreement with the teacher."""
        found = self.evaluate(folder, split)
        if name == "teacher":
            self._predictions[split] = found.predictions
        elif split not in self._predictions:
            self._predictions[split] = self.evaluate(self.folder / "teacher", split).predictions
        agreement = float(np.mean(found.predictions == self._predictions[split]))
        tags: dict[str, Tag] = {"model": name, "split": split, "attention": attention}
        tags |= {"replaced": replaced_layers(self.specs(attention)), **sizes(self.config)}
        values = {"conversion_accuracy": found.accuracy, "conversion_agreement": agreement}
        return found, [self.record(metric, value, len(found.labels), **tags) for metric, value in values.items()]

    def result(self, name: str, folder: Path, steps: int = 0, kept: int = 0, seconds: float = 0.0) -> StageResult:
        """Measure a model on validation images, once. steps and seconds: of its training; kept: the step it is from."""

        def measured() -> list[Record]:
            _, records = self.scored(name, folder, "validation", read_model(folder).config.attention)
            records.append(self.record("conversion_steps", steps, model=name, kept=kept))
            return [*records, self.record("conversion_seconds", seconds, model=name)]

        spent = self.ledger.once(key_of("conversion_seconds", model=name), measured).value or 0.0
        tags: dict[str, Tag] = {"model": name, "split": "validation", **sizes(self.config)}
        accuracy, agreement = (self.ledger.last(f"conversion_{what}", **tags) for what in ("accuracy", "agreement"))
        assert accuracy is not None and agreement is not None  # noqa: PT018 (written together)
        attention, replaced = str(accuracy.tags["attention"]), int(accuracy.tags["replaced"] or 0)
        reached, agreed = float(accuracy.value or 0), float(agreement.value or 0)
        result = StageResult(name, reached, agreed, attention, replaced, steps, spent, folder)
        self.results.append(result)
        text = f"{name}: {metrics.percent(reached)} on validation images"
        if name != "teacher":
            layers = f"{replaced} of {self.config.depth} layers replaced"
            text += f", {metrics.percent(agreed)} agreement with the teacher, {layers}"
        self.on_event(Noted(text))
        return result


def sizes(config: ModelConfig) -> dict[str, int | str | None]:
    """The tags of a measurement that say which images and patches it is for."""
    return {"image_size": config.image_size, "patch_size": config.patch_size}
