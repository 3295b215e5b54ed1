"""Protocol: what makes variants comparable."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from linvit.data import Dataset
from linvit.errors import clear
from linvit.files import slug
from linvit.models import ModelConfig, VisionTransformer, match_parameters
from linvit.registry import parse_layers
from linvit.study.design import Study, Variant
from linvit.study.jobs import Job
from linvit.train import Experiment, Source, Start, architecture, design


@dataclass
class Protocol:
    """What makes variants comparable: the same images, order, steps and, if `match`, number of parameters."""

    dataset: Dataset
    source: Source | None
    seed: int
    options: dict[str, Any]
    match: bool
    start: Start | None = None  # whose shape all variants have, also those that do not begin with its weights

    @cached_property
    def like(self) -> ModelConfig | None:
        return architecture(self.start)

    @cached_property
    def base(self) -> Experiment:
        return design(
            self.dataset, "softmax", self.seed, source=self.source, start=self.start, like=self.like, **self.options
        )

    @cached_property
    def opened(self) -> dict[Source, Dataset]:
        """Of variants that want other images than the base."""
        return {}

    @property
    def datasets(self) -> dict[str, Dataset]:
        return {data.identity: data for data in (self.dataset, *self.opened.values())}

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
            like = design(dataset, "softmax", self.seed, **self.options | rest).model
            model = match_parameters(found.model, VisionTransformer(like).parameter_count())
        else:
            model = VisionTransformer(found.model).config
        return found.model_copy(update={"model": model, "label": variant.label or variant.attention})

    def _images(self, variant: Variant) -> tuple[Dataset, Source | None]:
        if not variant.data:
            return self.dataset, self.source
        if self.source is None:
            raise ValueError(f"variant '{variant.id}' wants data options, but the images were given as they are")
        try:
            source = Source(**self.source.model_dump() | variant.data)
        except ValidationError as error:
            raise clear(error) from None
        if source not in self.opened:
            self.opened[source] = source.open()
        return self.opened[source], source

    def jobs(self, study: Study, folder: Path, device: torch.device) -> list[Job]:
        """One for each run of the study, each in a folder of its own."""
        first = {variant.id: self.experiment(variant) for variant in study.variants if variant.id in study.seeds}
        runs, found = study.runs(), []
        sizes = [0.5 if run.half else 1.0 for run in runs]
        for number, (variant, seed, half) in enumerate(runs):
            experiment = first[variant.id]
            changes: dict[str, Any] = {"seed": seed, "model": experiment.model.model_copy(update={"seed": seed})}
            if study.budget is not None:
                changes["recipe"] = experiment.recipe.model_copy(update={"steps": study.steps})
            experiment = experiment.model_copy(update=changes)
            if half:
                images = len(self.datasets[experiment.data.identity].train)
                steps = max(1, experiment.length(images).total // 2)
                recipe = experiment.recipe.model_copy(update={"steps": steps})
                experiment = experiment.model_copy(update={"recipe": recipe})
            place = folder / f"{slug(variant.id)}-{'half-' if half else ''}seed{seed}-{experiment.id[:6]}"
            part = (sum(sizes[:number]) / sum(sizes), sum(sizes[: number + 1]) / sum(sizes))
            found.append(Job(number=number, jobs=len(runs), part=part, variant=variant.id, half=half,
                             experiment=experiment, folder=str(place), device=str(device)))  # fmt: skip
        return found
