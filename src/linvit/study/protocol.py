"""Protocol: what makes variants comparable."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from linvit.data import Dataset, Fold, folded
from linvit.errors import clear
from linvit.files import slug
from linvit.models import ModelConfig, VisionTransformer, match_parameters
from linvit.registry import parse_layers
from linvit.study.design import Study, Variant
from linvit.study.jobs import Job
from linvit.train import Experiment, Source, Start, architecture, design
from linvit.train.experiment import Images


@dataclass
class Protocol:
    """What makes variants comparable: the same images, order, steps and, if `match`, number of parameters."""

    whole: Dataset
    origin: Source | None  # where that is found again
    seed: int
    options: dict[str, Any]
    match: bool
    start: Start | None = None  # whose shape all variants have, also those that do not begin with its weights
    folds: int | None = None
    task: str = "classification"  # of the base
    spare_test: bool = False  # folds are dealt of other images alone
    datasets: dict[str, Dataset] = field(default_factory=dict)  # those that jobs are done with, by identity
    opened: dict[tuple[Source | None, Fold | None], Dataset] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.opened[self.origin, None] = self.whole

    @cached_property
    def like(self) -> ModelConfig | None:
        return architecture(self.start)

    @cached_property
    def base(self) -> Experiment:
        return design(
            self.dataset, "softmax", self.seed, source=self.source, start=self.start, like=self.like, task=self.task,
            **self.options,
        )  # fmt: skip

    @cached_property
    def dataset(self) -> Dataset:
        """The base's images; of folds, with the first held out."""
        return self._images(Variant())[0]

    @cached_property
    def source(self) -> Source | None:
        return self._images(Variant())[1]

    def config(self, variant: Variant) -> ModelConfig:
        return self.experiment(variant).model

    def experiment(self, variant: Variant) -> Experiment:
        """The variant with the first seed; built once, so that a bad option is an error before anything is trained."""
        dataset, source = self._images(variant)
        found = design(
            dataset,
            variant.attention,
            self.seed,
            source=source,
            start=variant.start,
            like=architecture(variant.start) or self.like,
            task=variant.task,
            **self.options | variant.options,
        )
        parse_layers(variant.attention, found.model.depth)
        shaped = self.like is not None or variant.start is not None  # by weights that are there
        if self.match and variant.column == "fair" and not shaped and variant.attention != "softmax":
            rest = {key: value for key, value in variant.options.items() if key != "mlp_dim"}
            like = design(dataset, "softmax", self.seed, task=variant.task, **self.options | rest).model
            model = match_parameters(found.model, VisionTransformer(like).parameter_count())
        else:
            model = VisionTransformer(found.model).config
        return found.model_copy(update={"model": model, "label": variant.label or variant.attention})

    def _images(self, variant: Variant, fold: Fold | None = None) -> tuple[Dataset, Source | None]:
        """The variant's, opened once; of folds, the first if none is said."""
        source = self.origin
        if variant.data:
            if source is None:
                raise ValueError(f"variant '{variant.id}' wants data options, but the images were given as they are")
            try:
                source = Source(**source.model_dump() | variant.data)
            except ValidationError as error:
                raise clear(error) from None
            if (source, None) not in self.opened:
                self.opened[source, None] = source.open()
        fold = fold or next(iter(self.every_fold()), None)
        if fold and (source, fold) not in self.opened:
            self.opened[source, fold] = folded(self.opened[source, None], fold)
        found = self.opened[source, fold]
        self.datasets[found.identity] = found
        return found, source and source.folded(fold)

    def every_fold(self) -> list[Fold]:
        """Of the first seed; of no folds, none."""
        return [Fold(index, self.folds or 0, self.seed, self.spare_test) for index in range(self.folds or 0)]

    def holding_out(self, experiment: Experiment, variant: Variant, fold: Fold) -> Experiment:
        """The variant's experiment with this fold held out."""
        data, source = self._images(variant, fold)
        images = Images(name=data.name, identity=data.identity)
        return experiment.model_copy(update={"data": images, "source": source})

    def jobs(self, study: Study, folder: Path, device: torch.device) -> list[Job]:
        """One for each run of the study, each in a folder of its own."""
        first = {variant.id: self.experiment(variant) for variant in study.variants if variant.id in study.seeds}
        runs, found = study.runs(), []
        sizes = [0.5 if run.half else 1.0 for run in runs]
        for number, (variant, seed, half, fold) in enumerate(runs):
            experiment = first[variant.id]
            changes: dict[str, Any] = {"seed": seed, "model": experiment.model.model_copy(update={"seed": seed}),
                                       "start": variant.starts.get(seed, experiment.start)}  # fmt: skip
            if study.budget is not None:
                changes["recipe"] = experiment.recipe.model_copy(update={"steps": study.steps})
            experiment = experiment.model_copy(update=changes)
            if fold is not None and study.folds:
                experiment = self.holding_out(experiment, variant, Fold(fold, study.folds, seed))
            if half:
                images = len(self.datasets[experiment.data.identity].train)
                steps = max(1, experiment.length(images).total // 2)
                recipe = experiment.recipe.model_copy(update={"steps": steps})
                experiment = experiment.model_copy(update={"recipe": recipe})
            run = f"{'half-' if half else ''}seed{seed}-{'' if fold is None else f'fold{fold}-'}{experiment.id[:6]}"
            place = folder / f"{slug(variant.id)}-{run}"
            part = (sum(sizes[:number]) / sum(sizes), sum(sizes[: number + 1]) / sum(sizes))
            found.append(Job(number=number, jobs=len(runs), part=part, variant=variant.id, half=half, fold=fold,
                             experiment=experiment, folder=str(place), device=str(device)))  # fmt: skip
        return found
