"""A student that learns from its teacher, without labels.

The two share all but their blocks: the student is the teacher with other attentions. So both tasks take the teacher's
own tokens, final norm and head, which then get no gradient, and stem, positions and head stay the teacher's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.data import Dataset, Split, normalise
from linvit.measure.accuracy import Evaluation
from linvit.models import VisionTransformer
from linvit.records import Record
from linvit.registry import parse_layers
from linvit.schemas.experiment import Experiment
from linvit.training.start import load_start
from linvit.training.tasks import TASKS
from linvit.training.tasks.classification import Classification

TEMPERATURE = 2.0  # of both softmaxes in the divergence of logits
TINY = 1e-12


@dataclass(frozen=True)
class Matched:
    loss: float  # of the task
    agreement: float  # share of the images to which student and teacher give the same class
    labelled: Evaluation


class Matching(Classification):
    """Chosen by the lowest loss; the labels are read for the log alone."""

    mean_over_images = False  # errors are relative to a whole batch's

    def __init__(self, experiment: Experiment, dataset: Dataset, device: torch.device):
        super().__init__(experiment, dataset, device)
        if experiment.teacher is None:
            raise ValueError(f"task {experiment.task} needs a teacher: `linvit convert` gives it one")
        self.teacher = load_start(experiment.teacher).to(device).requires_grad_(False)

    @abstractmethod
    def match(self, student: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Normalised images → the loss, the teacher's logits, and the student's if they were made on the way."""

    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, indices: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor]:
        x, _ = self.augment(images, labels, indices, epoch, self.experiment.seed)
        loss, wanted, said = self.match(model, x)
        return loss, torch.zeros_like(loss) if said is None else (said.detach().argmax(-1) == wanted.argmax(-1)).sum()

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, split: Split) -> Matched:
        data, was_training, batch = self.dataset, model.training, self.experiment.recipe.batch_size
        model.eval()
        rows = []
        for start in range(0, len(split), batch):
            images, labels = split.batch(slice(start, start + batch))
            x = normalise(images.to(self.device), data.mean, data.std)
            loss, wanted, said = self.match(model, x)
            said = (model(x) if said is None else said).float()
            true = F.cross_entropy(said, labels.to(self.device))
            best = said.softmax(-1).max(-1)
            rows.append((len(x) * torch.stack([loss, true]), best.indices, best.values, wanted.argmax(-1)))
        model.train(was_training)
        sums, said, sure, wanted = zip(*rows, strict=True)
        loss, true = (torch.stack(sums).sum(0) / len(split)).tolist()
        said, sure, wanted = (torch.cat(parts).cpu().numpy() for parts in (said, sure, wanted))
        return Matched(loss, float(np.mean(said == wanted)), Evaluation(true, split.labels, said, sure, data.classes))

    def row(self, found: Matched) -> Mapping[str, float]:
        return {"loss": found.loss, "accuracy": found.labelled.accuracy, "agreement": found.agreement}

    def select(self, found: Matched) -> tuple[float, float]:
        return -found.loss, 0.0  # of the same images: comparable between models

    def records(self, base: Record, best: Matched, final: Matched) -> tuple[list[Record], dict[str, str | bytes]]:
        return super().records(base, best.labelled, final.labelled)


@TASKS.register("attention-matching")
class AttentionMatching(Matching):
    """Each attention that is another one, given the teacher's input to it, gives the teacher's output: the mean over
    layers of ‖student − teacher‖² / ‖teacher‖², after `proj` and before the residual. Only attentions are trained."""

    def match(self, student: VisionTransformer, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        seen: list[tuple[Tensor, Tensor]] = []
        hooks = [
            block.attn.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))  # type: ignore[union-attr]
            for block in self.teacher.blocks
        ]
        try:
            with torch.no_grad():
                logits = self.teacher(x)
        finally:
            for hook in hooks:
                hook.remove()
        specs, old = (parse_layers(one.config.attention, one.config.depth) for one in (student, self.teacher))
        new = [i for i, spec in enumerate(specs) if spec != old[i]] or range(len(specs))
        errors = [distance(student.blocks[i].attn(seen[i][0]), seen[i][1]) for i in new]  # type: ignore[operator]
        return torch.stack(errors).mean(), logits, None


@TASKS.register("distillation")
class Distillation(Matching):
    """All blocks together: ‖student − teacher‖² / ‖teacher‖² over all tokens after the final norm, and
    T² KL(teacher ‖ student) of the classes at temperature T."""

    def match(self, student: VisionTransformer, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.no_grad():
            first = theirs = self.teacher.embed(x)
            for block in self.teacher.blocks:
                theirs = block(theirs)
            features, logits = self.teacher.norm(theirs), self.teacher.classify(theirs).float()
        mine = first
        for block in student.blocks:
            mine = block(mine)
        said = self.teacher.classify(mine).float()
        divergence = F.kl_div(
            (said / TEMPERATURE).log_softmax(-1),
            (logits / TEMPERATURE).log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
        return distance(self.teacher.norm(mine), features) + TEMPERATURE**2 * divergence, logits, said


def distance(found: Tensor, wanted: Tensor) -> Tensor:
    """‖found − wanted‖² / ‖wanted‖²."""
    found, wanted = found.float(), wanted.float()
    return (found - wanted).square().sum() / wanted.square().sum().clamp_min(TINY)
