"""Conversion: all that decides how a teacher becomes a student; stored as convert.json."""

from __future__ import annotations

import hashlib
import json
from typing import Any, ClassVar, Literal

from pydantic import Field

from linvit.schemas.base import Document, Frozen
from linvit.schemas.experiment import DatasetRef, Source, Start
from linvit.schemas.pixels import ImageSize

Inherit = Literal["all", "not-qk", "mlp"]
AUTO = "auto"  # in place of a spec: the conversion chooses it
MAX_DROP = 0.01  # of such a conversion, if none is given
MIN_SPEED = 1.05  # relative to the teacher: what it may choose is at least as fast


def fast_enough(speed: float) -> bool:
    """As a reader sees it, with two decimals."""
    return round(speed, 2) >= MIN_SPEED


class Conversion(Document):
    model_config = Frozen.model_config
    kind = "convert"
    current_format: ClassVar[int] = 4

    format: int = 4
    data: DatasetRef
    source: Source | None = None
    teacher: Start
    to: tuple[str, ...]  # the specs asked for
    stages: tuple[int, ...]
    inherit: Inherit = "all"
    max_drop: float | None = Field(None, gt=0, lt=1)  # share of the teacher's accuracy
    image_size: ImageSize
    patch_size: int | None = Field(None, ge=1)  # other than the teacher's
    seed: int = Field(0, ge=0)
    budget: str | None = None
    steps: dict[str, int] = Field(default_factory=dict)  # of each stage
    options: dict[str, Any] = Field(default_factory=dict)  # of the stages' recipes
    trained_on: str | None = None  # the name of the teacher's data set; empty: not known
    decided_on: str | None = None  # the split whose images guide and decide the search
    request: dict[str, Any] = Field(default_factory=dict)  # what was asked (linvit.requests)
    started: float = 0.0

    @property
    def auto(self) -> bool:
        """Whether the conversion chooses the attention."""
        return self.to == (AUTO,)

    def settings(self) -> dict[str, Any]:
        """Steps that follow from a budget are not among them."""
        derived = {"steps"} if self.budget else set()
        found = self.model_dump(
            mode="json", exclude={"source", "request", "started", "trained_on", "decided_on", *derived}
        )
        return found | {"teacher": self.teacher.sha256}

    @property
    def id(self) -> str:
        return hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()[:12]
