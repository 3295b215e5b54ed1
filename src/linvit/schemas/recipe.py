"""Recipe: how a model is trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from linvit.schemas.base import Frozen

Fraction = Annotated[float, Field(ge=0, lt=1)]
AUGMENTATION = ("pad_crop", "flip", "cutout", "mixup", "cutmix", "randaugment")


class Recipe(Frozen):
    """How a model is trained. Whether its optimizer exists is checked by `linvit.training.recipe.create_recipe`."""

    epochs: float = Field(20, gt=0, description="Passes over the training images.")
    steps: int | None = Field(None, ge=0, description="Optimizer steps, instead of epochs; 0: no training.")
    start_head: Literal["means", "fitted"] = Field(
        "means",
        description="Head of a trained start: means (new classes get their mean features) or fitted (to all images).",
    )
    batch_size: int = Field(128, ge=1, description="Images per step.")
    optimizer: str = Field("muon", description="muon, adamw, adam or sgd.")
    lr: float = Field(5e-3, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.05, ge=0, description="Weight decay of matrices and filters.")
    momentum: Fraction = Field(0.9, description="Nesterov momentum of optimizer=sgd.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.99), description="Betas of the other optimizers.")
    schedule: Literal["constant", "cosine", "step", "restarts", "onecycle", "torch-onecycle"] = Field(
        "onecycle",
        description="Learning rate schedule: cosine, onecycle, restarts, step, constant, or PyTorch's OneCycleLR as "
        "torch-onecycle.",
    )
    warmup: Fraction = Field(0.1, description="Fraction of all steps with a rising learning rate.")
    final_lr: float = Field(0.0, ge=0, le=1, description="Fraction of lr at the end of cosine, restarts and onecycle.")
    step_epochs: float = Field(5, gt=0, description="schedule=step: epochs between two drops of the learning rate.")
    step_factor: float = Field(0.5, gt=0, le=1, description="schedule=step: factor of each drop.")
    restart_epochs: float = Field(
        10, gt=0, description="schedule=restarts: epochs of the first cycle; each next is twice as long."
    )
    clip_norm: float = Field(1.0, ge=0, description="Gradient clipping; 0: none.")
    label_smoothing: Fraction = Field(0.1, description="Label smoothing.")
    ema: Fraction = Field(0.0, description="Decay of averaged weights (EMA), which are evaluated and kept; 0: none.")
    patience: int = Field(0, ge=0, description="Stop after N epochs without a lower validation loss; 0: never.")
    redraw: int = Field(1000, ge=0, description="Redraw random features every N steps; 0: never.")
    pad_crop: int = Field(0, ge=0, description="Random crops after padding by N pixels.")
    flip: Literal["none", "random", "alternating"] = Field("none", description="Horizontal flips.")
    cutout: int = Field(0, ge=0, description="Side of a blanked square.")
    mixup: float = Field(0.0, ge=0, description="Alpha of mixup; 0: none.")
    cutmix: float = Field(0.0, ge=0, description="Alpha of cutmix; 0: none.")
    randaugment: int = Field(0, ge=0, description="RandAugment operations per image; 0: none.")
    amp: Literal["auto", "off", "bf16", "fp16"] = Field(
        "auto", description="Mixed precision: off, bf16, fp16 or auto (on CUDA, and on CPUs with native bf16)."
    )
    compile: bool = Field(False, description="Use torch.compile: slow to start, then faster.")

    def augmentation(self) -> dict[str, Any]:
        return self.model_dump(include=set(AUGMENTATION))

    def unused(self) -> dict[str, str]:
        """Options that change nothing in this recipe, and why."""
        if self.optimizer == "sgd":
            found = {"betas": f"optimizer={self.optimizer} has none"}
        else:
            found = {"momentum": "only optimizer=sgd has it"}
        if self.schedule != "step":
            found |= dict.fromkeys(("step_epochs", "step_factor"), "only schedule=step has it")
        if self.schedule != "restarts":
            found["restart_epochs"] = "only schedule=restarts has it"
        if self.schedule in ("constant", "step", "torch-onecycle"):
            found["final_lr"] = f"schedule={self.schedule} has no final rate"
        return found
