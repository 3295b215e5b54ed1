"""Task: what is learned. A new one is one file here (or in LINVIT_PLUGINS) with `@TASKS.register("name")`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from linvit.data import Dataset, Split
from linvit.records import Record
from linvit.registry import Registry

if TYPE_CHECKING:
    from linvit.models import ModelConfig
    from linvit.schemas.experiment import Experiment
    from linvit.schemas.recipe import Recipe


class Task(ABC):
    """Loss, evaluation and model selection of one training."""

    mean_over_images = True  # the loss is one: processes may then each compute it of a part of the batch
    stem: ClassVar[str] = ""  # of its models; empty: any stem whose model has classes
    several: ClassVar[bool] = False  # it is of images with several labels each
    refused: ClassVar[Mapping[str, str]] = {}  # options of the recipe that it cannot do with, and why

    def __init__(self, experiment: Experiment, dataset: Dataset, device: torch.device):
        self.check_labels(dataset.several)
        self.experiment, self.dataset, self.device = experiment, dataset, device
        self.augment = dataset.augment(**experiment.recipe.augmentation())

    @classmethod
    def check(cls, name: str, model: ModelConfig, recipe: Recipe) -> None:
        """Raise a ValueError for a model or recipe that the task does not support."""
        if (model.stem if model.pixels else "") != cls.stem:
            wanted = f"stem={cls.stem}" if cls.stem else "a stem whose model has classes"
            raise ValueError(f"stem={model.stem} cannot be combined with task {name}, which needs {wanted}")
        for option, why in cls.refused.items():
            if value := getattr(recipe, option):
                raise ValueError(f"{option}={value} cannot be combined with task {name}: {why}: leave it out")

    @classmethod
    def check_labels(cls, several: bool) -> None:
        """Raise a ValueError for images with another kind of label."""
        if several and not (cls.several or cls.stem):
            raise ValueError("these images have several labels each: add --task multi-label")
        if cls.several and not several:
            raise ValueError("task multi-label needs images with several labels each: a|b in a CSV, lists in Parquet")

    @abstractmethod
    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, indices: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """Mean loss of uint8 training images (B, C, H, W), and the number of correct predictions. Neither
        may synchronise with the device. Anything random is a function of (seed, epoch, indices)."""

    @abstractmethod
    def evaluate(self, model: nn.Module, split: Split) -> Any:
        """One pass over a split; the result is passed to the methods below."""

    @abstractmethod
    def row(self, found: Any) -> Mapping[str, float]:
        """Numbers for log.jsonl; `loss` is required, for early stopping."""

    @abstractmethod
    def select(self, found: Any) -> tuple[float, float]:
        """A score (higher is better) and its standard error: the last model within it of the highest score is kept."""

    def about(self, found: Any) -> Mapping[str, Any]:
        """Metadata stored with the selected model, from its evaluation."""
        return {}

    @abstractmethod
    def records(self, base: Record, best: Any, final: Any) -> tuple[list[Record], dict[str, str | bytes]]:
        """Records of the selected and the last model on the test split, and the files they name."""


TASKS: Registry[type[Task]] = Registry("task", "linvit.training.tasks")
