"""What a conversion is, and the trainings that it consists of: which, how long, by which recipe."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from linvit.convert.student import Inherit
from linvit.data import Dataset, Fold
from linvit.errors import choices, clear
from linvit.files import write_atomically
from linvit.train import Recipe, Source, Start, create_recipe
from linvit.train import experiment as experiments
from linvit.train.checkpoint import Stored
from linvit.train.defaults import tuned
from linvit.train.recipe import idle
from linvit.train.use import stored_source

FORMAT = 2  # of convert.json
OURS = ("experiment.json", "study.json", "records.jsonl", "report.html", "best")
TASKS = {"stage 1": "attention-matching", "stage 2": "distillation", "mix, stage 2": "distillation",
         "stage 3": "classification"}  # fmt: skip
SHARES = {"stage 1": 0.25, "stage 2": 0.5, "stage 3": 0.25}  # of all steps; two stages 2 have half of it each
RATES = {"stage 1": 0.2, "stage 2": 0.04, "mix, stage 2": 0.04, "stage 3": 0.02}  # over the width of the tokens
WHOLE = 64  # images of a step that these are for; fewer take a lower rate
BATCH_TOKENS = 16 * 197  # of one step, at most, if nothing is known of the teacher's training: many small steps
EPOCHS, STEPS = 4.0, 300  # of all stages together, if nothing else is asked for: the longer of the two


class Conversion(BaseModel):
    """All that decides a conversion; stored as convert.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    data: experiments.Images
    source: Source | None = None
    teacher: Start
    to: str  # the spec asked for
    stages: tuple[int, ...]
    inherit: Inherit = "all"
    max_drop: float | None = Field(None, gt=0, lt=1)  # share of the teacher's accuracy
    image_size: int
    patch_size: int | None = Field(None, ge=1)  # other than the teacher's
    seed: int = Field(0, ge=0)
    budget: str | None = None
    steps: dict[str, int] = Field(default_factory=dict)  # of each stage
    options: dict[str, Any] = Field(default_factory=dict)  # of the stages' recipes
    trained_on: str | None = None  # the name of the teacher's data; empty: it is from elsewhere
    decided_on: str | None = None  # the split that images for the search and its decision are taken from
    command: str = ""
    started: float = 0.0

    def settings(self) -> dict[str, Any]:
        """With a budget, the steps are what came of it."""
        derived = {"steps"} if self.budget else set()
        found = self.model_dump(
            mode="json", exclude={"source", "command", "started", "trained_on", "decided_on", *derived}
        )
        return found | {"teacher": self.teacher.sha256}

    @property
    def id(self) -> str:
        return hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()[:12]

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            found = cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = clear(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"{path} is not a conversion of this linvit ({why}): choose another --out") from None
        if found.format != FORMAT:
            raise ValueError(f"{path} has format {found.format}, but this linvit reads {FORMAT}: choose another --out")
        return found

    def save(self, folder: Path) -> None:
        write_atomically(folder / "convert.json", self.model_dump_json(indent=1) + "\n")


def known_stages(stages: Sequence[int]) -> tuple[int, ...]:
    for stage in stages:
        if stage not in (1, 2, 3):
            raise ValueError(f"stage {stage} is not one of 1, 2, 3")
    return tuple(sorted(set(stages)))


def shares(stages: Sequence[int], search: bool) -> dict[str, float]:
    """Of the whole length, for each training that there may be."""
    found = {f"stage {stage}": SHARES[f"stage {stage}"] for stage in stages}
    total = sum(found.values())
    found = {name: share / total for name, share in found.items()}
    if search and "stage 2" in found:
        found["stage 2"] = found["mix, stage 2"] = found["stage 2"] / 2
    return found


def lengths(
    recipe: Recipe, dataset: Dataset, stages: Sequence[int], search: bool, epochs: float | None, steps: int | None
) -> dict[str, int]:
    """Steps of each training."""
    parts = shares(stages, search)
    if epochs is not None and not epochs > 0:
        raise ValueError(f"epochs={epochs} must be more than 0")
    if steps is not None and steps < len(parts):
        raise ValueError(f"steps={steps} are too few for {len(parts)} trainings")
    per_epoch = max(1, len(dataset.train) // recipe.batch_size)
    total = steps or max(1, round(epochs * per_epoch) if epochs else max(STEPS, round(EPOCHS * per_epoch)))
    return {name: max(1, round(share * total)) for name, share in parts.items()}


def trained_on(stored: Stored, dataset: Dataset) -> bool:
    """Whether the teacher was, be it on another part of them; of one from elsewhere nothing is known. A conversion was
    trained on what it was converted with."""
    return not stored.foreign and stored.about["name"].partition(":")[0] == dataset.name.partition(":")[0]


def fold_of(stored: Stored) -> Fold | None:
    """The part of the images that was held out when the teacher was trained, or converted, if it was one of several."""
    try:
        fold = stored_source(stored.folder)[0].get("fold")
    except ValueError:
        return None
    return Fold(**fold) if fold else None


def rate(name: str, dim: int, batch: int) -> float:
    """The learning rate of a stage."""
    return RATES[name] / dim * min(1.0, math.sqrt(batch / WHOLE))


def common_recipe(stored: Stored, dataset: Dataset, tokens: int, options: dict[str, Any]) -> Recipe:
    """Of every stage, but for its rate and length: batches and augmentation as the teacher had them, or, where that is
    not known, as they suit the images."""
    for name in sorted(options):
        if name in ("epochs", "steps") or name not in Recipe.model_fields:
            known = [field for field in Recipe.model_fields if field not in ("epochs", "steps")]
            raise ValueError(f"a conversion has no option '{name}'" + choices(name, known))
    try:
        beside = (stored.folder.parent / "experiment.json").read_text(encoding="utf-8")  # of whichever version
        known = Recipe.model_validate(json.loads(beside)["recipe"])
        usual: dict[str, Any] = known.augmentation() | {"batch_size": known.batch_size}
    except (OSError, KeyError, TypeError, ValueError):
        usual = tuned(dataset.name, dataset.image_size, dataset.channels)
        usual = {key: usual[key] for key in ("batch_size", "pad_crop", "flip") if key in usual}
        if dataset.image_size > 48:
            usual["batch_size"] = max(4, min(WHOLE, BATCH_TOKENS // tokens))
    recipe = create_recipe(**usual | {"optimizer": "adamw", "redraw": 0, "weight_decay": 0.01} | options)
    for option, why in idle(recipe).items():
        if option in options:
            raise ValueError(f"{option}={options[option]} has no effect: {why}: leave it out")
    return recipe
