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
    """Loss, evaluation and selection; built anew for every training from what the experiment says."""

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
        """Refuse what this task cannot train."""
        if (model.stem if model.pixels else "") != cls.stem:
            wanted = f"stem={cls.stem}" if cls.stem else "a stem whose model has classes"
            raise ValueError(f"stem={model.stem} does not go with task {name}, which needs {wanted}")
        for option, why in cls.refused.items():
            if value := getattr(recipe, option):
                raise ValueError(f"{option}={value} does not go with task {name}: {why}: leave it out")

    @classmethod
    def check_labels(cls, several: bool) -> None:
        """Refuse images that have another kind of label."""
        if several and not (cls.several or cls.stem):
            raise ValueError("these images have several labels each: add --task multi-label")
        if cls.several and not several:
            raise ValueError("task multi-label needs images with several labels each: a|b in a CSV, lists in Parquet")

    @abstractmethod
    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, indices: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """uint8 images (B, C, H, W) of the training split → the mean loss, and how many the model got right. Neither
        may wait for the device. Anything random is a function of (seed, epoch, indices)."""

    @abstractmethod
    def evaluate(self, model: nn.Module, split: Split) -> Any:
        """One pass over a split; the loop hands it to the methods below and knows nothing else of it."""

    @abstractmethod
    def row(self, found: Any) -> Mapping[str, float]:
        """Its numbers for log.jsonl: `loss`, which early stopping watches, and whatever else there is."""

    @abstractmethod
    def select(self, found: Any) -> tuple[float, float]:
        """A score, higher for the better model, and how far two may be apart by chance: within that of the highest, the
        last model is kept."""

    def about(self, found: Any) -> Mapping[str, Any]:
        """What a user of the chosen model must know besides its weights, from its evaluation on test images."""
        return {}

    @abstractmethod
    def records(self, base: Record, best: Any, final: Any) -> tuple[list[Record], dict[str, str | bytes]]:
        """What the test split says of the chosen and of the last model: records, and files they name."""


TASKS: Registry[type[Task]] = Registry("task", "linvit.training.tasks")
