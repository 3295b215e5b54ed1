"""Recipe: how a model is trained. The learning rate is a pure function of the step, so a resumed run needs no state."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from linvit.errors import choices, clear
from linvit.measure.provenance import check_bfloat16
from linvit.train.optimizers import OPTIMIZERS

Fraction = Annotated[float, Field(ge=0, lt=1)]


class Recipe(BaseModel):
    """How a model is trained."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    epochs: float = Field(20, gt=0)
    steps: int | None = Field(None, ge=1)  # instead of epochs
    batch_size: int = Field(128, ge=1)
    optimizer: str = "muon"
    lr: float = Field(5e-3, gt=0)
    weight_decay: float = Field(0.05, ge=0)
    momentum: Fraction = 0.9  # of sgd, with Nesterov's correction
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    schedule: Literal["constant", "cosine", "step", "restarts", "onecycle"] = "onecycle"
    warmup: Fraction = 0.1  # fraction of all steps
    final_lr: float = Field(0.0, ge=0, le=1)  # fraction of lr at the end of cosine, restarts and onecycle
    step_epochs: float = Field(5, gt=0)  # schedule=step: the rate is multiplied by step_factor every so many epochs
    step_factor: float = Field(0.5, gt=0, le=1)
    restart_epochs: float = Field(10, gt=0)  # schedule=restarts: length of the first cycle; each next is twice as long
    clip_norm: float = Field(1.0, ge=0)  # 0: no clipping
    label_smoothing: Fraction = 0.1
    ema: Fraction = 0.0  # decay of the averaged weights that are evaluated and kept; 0: none
    patience: int = Field(0, ge=0)  # stop after so many epochs without a lower validation loss; 0: never
    redraw: int = Field(1000, ge=0)  # new random features every so many steps; 0: never
    pad_crop: int = Field(0, ge=0)
    flip: Literal["none", "random", "alternating"] = "none"
    cutout: int = Field(0, ge=0)
    mixup: float = Field(0.0, ge=0)
    cutmix: float = Field(0.0, ge=0)
    randaugment: int = Field(0, ge=0)
    amp: Literal["off", "bf16", "fp16"] = "off"
    compile: bool = False

    @field_validator("optimizer")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in OPTIMIZERS:
            raise ValueError("is unknown" + choices(name, OPTIMIZERS))
        return name

    def augmentation(self) -> dict[str, Any]:
        return self.model_dump(include={"pad_crop", "flip", "cutout", "mixup", "cutmix", "randaugment"})


def idle(recipe: Recipe) -> dict[str, str]:
    """Options that change nothing in this recipe, and why."""
    sgd, steps = recipe.optimizer == "sgd", recipe.schedule
    found = {"betas": f"optimizer={recipe.optimizer} has none"} if sgd else {"momentum": "it is of optimizer=sgd"}
    if steps != "step":
        found |= dict.fromkeys(("step_epochs", "step_factor"), "they are of schedule=step")
    if steps != "restarts":
        found["restart_epochs"] = "it is of schedule=restarts"
    if steps in ("constant", "step"):
        found["final_lr"] = f"schedule={steps} does not end anywhere"
    return found


def create_recipe(base: Recipe | None = None, **options: Any) -> Recipe:
    """A recipe with these options over the base, checked."""
    if unknown := set(options) - set(Recipe.model_fields):
        name = sorted(unknown)[0]
        raise ValueError(f"a recipe has no option '{name}'" + choices(name, Recipe.model_fields))
    try:
        return Recipe(**((base.model_dump() if base else {}) | options))
    except ValidationError as error:
        raise clear(error) from None


def learning_rate(recipe: Recipe, step: int, total: int, steps_per_epoch: int) -> float:
    """The rate of step 0 … total−1."""
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


def check_amp(amp: str, device: torch.device) -> None:
    """Refuse half precision where it would not work, or crawl."""
    if amp == "fp16" and device.type != "cuda":
        raise ValueError(f"amp=fp16 needs a CUDA device, not {device.type}: choose amp=off")
    if amp == "bf16" and device.type == "cpu":
        has = torch.cpu.get_capabilities()
        if has.get("architecture") == "x86_64" and not (has.get("avx512_bf16") or has.get("amx_bf16")):
            raise ValueError("amp=bf16: this CPU has no native bfloat16 and would take many times longer: use amp=off")
        check_bfloat16("amp=bf16", device)
