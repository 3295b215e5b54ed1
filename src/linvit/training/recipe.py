"""Recipes, checked; the learning rate as a pure function of the step, so that a resumed run needs no state."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from linvit.errors import choices, clear
from linvit.schemas.recipe import Recipe
from linvit.training.optimizers import OPTIMIZERS


def create_recipe(base: Recipe | None = None, **options: Any) -> Recipe:
    """A recipe with these options over the base, checked."""
    if unknown := set(options) - set(Recipe.model_fields):
        name = sorted(unknown)[0]
        raise ValueError(f"a recipe has no option '{name}'" + choices(name, Recipe.model_fields))
    try:
        recipe = Recipe(**((base.model_dump() if base else {}) | options))
    except ValidationError as error:
        raise clear(error) from None
    if recipe.optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer '{recipe.optimizer}'" + choices(recipe.optimizer, OPTIMIZERS))
    return recipe


def learning_rate(recipe: Recipe, step: int, total: int, steps_per_epoch: int) -> float:
    """The rate of step 0 … total−1."""
    if recipe.schedule == "torch-onecycle":
        return _torch_onecycle(recipe.lr, recipe.warmup, step, total)
    warmup = round(recipe.warmup * total)
    if step < warmup:
        return recipe.lr * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total - warmup)
    match recipe.schedule:
        case "constant":
            return recipe.lr
        case "step":
            return recipe.lr * recipe.step_factor ** int(step / (recipe.step_epochs * steps_per_epoch))
        case "onecycle":  # a straight line down after the warm-up
            return recipe.lr * (1 + (recipe.final_lr - 1) * done)
        case "restarts":
            position, length = step - warmup, recipe.restart_epochs * steps_per_epoch
            while position >= length:
                position, length = position - length, 2 * length
            done = position / length
    low = recipe.final_lr
    return recipe.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def _torch_onecycle(peak: float, rising: float, step: int, total: int) -> float:
    """`torch.optim.lr_scheduler.OneCycleLR` with pct_start=rising: by a half cosine from peak/25 to the peak, and by
    another to a ten-thousandth of that start."""
    first, turn = peak / 25, rising * total - 1
    if step <= turn:
        start, end, done = first, peak, step / turn if turn else 1.0
    else:
        start, end, done = peak, first / 1e4, (step - turn) / (total - 1 - turn)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))
