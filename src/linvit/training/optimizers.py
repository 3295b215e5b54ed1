"""Optimizers by name. A new one is one entry here: how it is made, and the options that suit it by default.

All are fused: they take a step, or not, as the tensor `found_inf` says, so that the device need not be asked whether a
number is finite. (On MPS, where AdamW does not heed it, a diverged run is found all the same, but not its layer.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from linvit.training.muon import Muon

if TYPE_CHECKING:
    from linvit.schemas.recipe import Recipe

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    make: Callable[[Groups, Recipe], torch.optim.Optimizer]
    options: Mapping[str, float] = field(default_factory=dict)  # over a data set's own, where this one is asked for


def _sgd(groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    nesterov = recipe.momentum > 0
    made = torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=nesterov, fused=True)
    for weight in [weight for group in groups for weight in group["params"]] if nesterov else ():
        made.state[weight]["momentum_buffer"] = torch.zeros_like(weight)  # a first step that is skipped would leave any
    return made


def _adam_like(kind: Callable[..., torch.optim.Optimizer]) -> Callable[[Groups, Recipe], torch.optim.Optimizer]:
    return lambda groups, recipe: kind(groups, lr=recipe.lr, betas=recipe.betas, fused=True)


OPTIMIZERS = {
    "muon": Kind(_adam_like(Muon)),
    "adamw": Kind(_adam_like(torch.optim.AdamW), {"lr": 2e-3}),
    "adam": Kind(_adam_like(torch.optim.Adam), {"lr": 2e-3, "weight_decay": 0.0}),  # its decay joins the gradient,
    "sgd": Kind(_sgd, {"lr": 0.05, "weight_decay": 5e-4}),  # as does SGD's
}


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay for matrices and filters alone: not for biases, norms, positions, embeddings or learned kernels."""
    matrices, decayed, plain = [], [], []
    embeddings = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    for name, parameter in model.named_parameters():
        free = parameter.ndim < 2 or name.split(".")[-1] in ("cls", "position", "bias") or ".kernel." in name
        free |= name in embeddings
        # Muon is for maps between hidden layers: not for the first filters, the classifier, or an attention's own
        # weights, such as Linformer's projections of tokens and one filter per channel
        own = ".attention." in name or ".cpe." in name
        outer = name.startswith(("stem.layers.0.", "head.")) or own or parameter.ndim not in (2, 4)
        (plain if free else decayed if outer or recipe.optimizer != "muon" else matrices).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay, "orthogonal": True},
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return OPTIMIZERS[recipe.optimizer].make([group for group in groups if group["params"]], recipe)
