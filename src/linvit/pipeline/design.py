"""Design: from defaults and options to experiments, each variant resolved once.

Defaults are layers in a fixed order, each over the ones before: the data set's tuned options, the shape of the model
that is started from, gentler training for trained weights, a named size, what suits the optimizer. What a user gives
comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import ValidationError

from linvit.attention import BASELINE, build_attention
from linvit.data import Dataset
from linvit.errors import clear
from linvit.execute.work import DatasetCache
from linvit.models import estimate, match_parameters, model_config
from linvit.registry import parse_layers
from linvit.schemas.experiment import DatasetRef, Experiment, Fold, Source, Start
from linvit.schemas.model import DATA_OPTIONS, ModelConfig, without_effect
from linvit.schemas.pixels import ImageSize
from linvit.schemas.recipe import Recipe
from linvit.schemas.study import DatasetFacts, Variant
from linvit.training.defaults import GENTLER, OF_TASK, tuned
from linvit.training.optimizers import OPTIMIZERS
from linvit.training.recipe import create_recipe
from linvit.training.start import architecture
from linvit.training.tasks import TASKS


class DataShape(NamedTuple):
    """What a model must know of its images."""

    name: str
    image_size: ImageSize
    channels: int
    classes: int

    @classmethod
    def of(cls, dataset: Dataset) -> DataShape:
        return cls(dataset.name, dataset.image_size, dataset.channels, len(dataset.classes))


class Layer(NamedTuple):
    """Options from one origin; `shape`: they replace all earlier options of the model."""

    origin: str
    options: Mapping[str, Any]
    shape: bool = False


def default_layers(
    data: DataShape, given: Mapping[str, Any], like: ModelConfig | None, pretrained: bool, task: str
) -> list[Layer]:
    """like: the model whose shape is taken; pretrained: its weights are, too."""
    usual = tuned(data.name, data.image_size, data.channels, task)
    layers = [Layer("data set", usual)]
    if like is not None:
        if data.channels != like.channels:
            raise ValueError(f"the images have channels={data.channels}, but the start takes {like.channels}")
        shape = like.model_dump(exclude={*DATA_OPTIONS, "attention", "seed"}, exclude_none=True)
        layers.append(Layer("start", shape, shape=True))
    if pretrained:
        layers.append(Layer("fine-tuning", GENTLER))
    if "size" in given:
        stem = {"stem": usual["stem"]} if task in OF_TASK else {}
        layers.append(Layer("size", stem, shape=True))
    if given.get("optimizer") in OPTIMIZERS:
        suited = dict(OPTIMIZERS[given["optimizer"]].options)
        if pretrained and "lr" in suited:
            suited["lr"] /= 2
        layers.append(Layer("optimizer", suited))
    return layers


def resolve(
    data: DataShape,
    attention: str,
    seed: int,
    given: Mapping[str, Any],
    like: ModelConfig | None = None,
    pretrained: bool = False,
    task: str = "classification",
) -> tuple[ModelConfig, Recipe]:
    """The model and the recipe for images of this shape, with given options over the defaults."""
    given = {key: value for key, value in given.items() if value is not None}
    if "epochs" in given and "steps" in given:
        raise ValueError("give epochs or steps, not both")
    usual: dict[str, Any] = {}
    for layer in default_layers(data, given, like, pretrained, task):
        if layer.shape:
            usual = {key: value for key, value in usual.items() if key not in ModelConfig.model_fields}
        usual |= layer.options
    merged = {key: value for key, value in usual.items() if key not in without_effect(usual | given)} | given
    recipe = create_recipe(**{key: value for key, value in merged.items() if key in Recipe.model_fields})
    for option, why in recipe.unused().items():
        if option in given:
            raise ValueError(f"{option}={given[option]} has no effect: {why}: leave it out")
    if not pretrained:
        for option, wrong in {"steps": recipe.steps == 0, "start_head": recipe.start_head == "fitted"}.items():
            if wrong:
                raise ValueError(f"{option}={getattr(recipe, option)} needs a trained start: name one with --from")
    shape = {key: value for key, value in merged.items() if key in ModelConfig.model_fields}
    facts = {name: getattr(data, name) for name in DATA_OPTIONS}
    return model_config(given.get("size"), **shape | facts | {"attention": attention, "seed": seed}), recipe


@dataclass
class Designer:
    """Makes variants comparable: the same images, order, steps and, if `match`, number of parameters."""

    whole: Dataset  # before any fold is held out
    origin: Source | None  # where it is found again
    seed: int
    options: Mapping[str, Any]  # of every variant
    match: bool = True
    start: Start | None = None  # whose shape all variants have, including those that do not take its weights
    folds: int | None = None
    task: str = "classification"
    spare_test: bool = False  # the test images are in no fold
    datasets: DatasetCache = field(default_factory=DatasetCache)

    def __post_init__(self) -> None:
        self.datasets.add(self.whole, self.origin)
        self._experiments: dict[str, Experiment] = {}

    @cached_property
    def like(self) -> ModelConfig | None:
        return architecture(self.start)

    @cached_property
    def base(self) -> Experiment:
        return self._design(Variant(start=self.start, task=self.task), self.options)

    @property
    def dataset(self) -> Dataset:
        """The base's images; with folds, the first is held out."""
        return self.images(Variant())[0]

    def facts(self, data: Dataset) -> DatasetFacts:
        """Images as a report describes them; with folds, those of one fold keep the identity of the whole."""
        return DatasetFacts(
            name=data.name,
            identity=self.whole.identity,
            classes=list(data.classes),
            image_size=data.image_size,
            channels=data.channels,
            train=len(data.train),
            validation=len(data.validation),
            test=len(data.test),
        )

    def experiment(self, variant: Variant, options: Mapping[str, Any] | None = None) -> Experiment:
        """The variant with the first seed. options: of this experiment, as if all variants had them."""
        key = repr((variant.model_dump_json(exclude={"id"}), sorted((options or {}).items())))
        if key not in self._experiments:
            self._experiments[key] = self._matched(variant, {**self.options, **(options or {})})
        return self._experiments[key]

    def _matched(self, variant: Variant, options: Mapping[str, Any]) -> Experiment:
        found = self._design(variant, {**options, **variant.options})
        check_attention(found.model)
        shape_is_given = self.like is not None or variant.start is not None
        if self.match and variant.column == "fair" and not shape_is_given and variant.attention != BASELINE:
            own = {key: value for key, value in variant.options.items() if key != "mlp_dim"}
            exact = variant.model_copy(update={"attention": BASELINE})
            target = estimate(self._design(exact, {**options, **own}).model).parameters
            found = found.model_copy(update={"model": match_parameters(found.model, target)})
        return found.model_copy(update={"label": variant.label or variant.attention})

    def _design(self, variant: Variant, options: Mapping[str, Any]) -> Experiment:
        dataset, source = self.images(variant)
        model, recipe = resolve(
            DataShape.of(dataset),
            variant.attention,
            self.seed,
            options,
            architecture(variant.start) or self.like,
            variant.start is not None,
            variant.task,
        )
        TASKS[variant.task].check(variant.task, model, recipe)
        return Experiment(
            data=DatasetRef(name=dataset.name, identity=dataset.identity),
            model=model,
            recipe=recipe,
            seed=self.seed,
            task=variant.task,
            start=variant.start,
            label=variant.attention,
            source=source,
        )

    def images(self, variant: Variant, fold: Fold | None = None) -> tuple[Dataset, Source | None]:
        """The variant's images, opened once; with folds, the first is held out unless another is named."""
        source = self.origin
        if variant.data:
            if source is None:
                raise ValueError(f"variant '{variant.id}' has data options, but the images were given as a Dataset")
            try:
                source = Source(**source.model_dump() | variant.data)
            except ValidationError as error:
                raise clear(error) from None
        fold = fold or next(iter(self.fold_list()), None)
        return self.datasets.open(source, fold), source and source.folded(fold)

    def fold_list(self) -> list[Fold]:
        """Those of the first seed; empty without folds."""
        return [Fold(index, self.folds or 0, self.seed, self.spare_test) for index in range(self.folds or 0)]

    def hold_out(self, experiment: Experiment, variant: Variant, fold: Fold) -> Experiment:
        """The variant's experiment with this fold held out."""
        data, source = self.images(variant, fold)
        reference = DatasetRef(name=data.name, identity=data.identity)
        return experiment.model_copy(update={"data": reference, "source": source})

    def train_images(self, experiment: Experiment) -> int:
        return len(self.datasets.find(experiment).train)


def check_attention(config: ModelConfig) -> None:
    """A ValueError if one of its attentions cannot be built; no model is built for it."""
    for spec in dict.fromkeys(map(str, parse_layers(config.attention, config.depth))):
        build_attention(spec, config.site, inside=True)
