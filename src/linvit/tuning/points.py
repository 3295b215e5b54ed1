"""Points of a search space, and the experiments that a search makes of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from linvit.pipeline.design import Designer
from linvit.schemas.experiment import Experiment
from linvit.schemas.search import Search
from linvit.schemas.study import Variant
from linvit.tuning.space import Point, apply_point, default_value, grid_points, suggested_point, variant_space
from linvit.tuning.storage import import_optuna

MAX_DRAWS = 64  # of points, to see whether any is possible


class Points:
    def __init__(self, search: Search, designer: Designer):
        self.search, self.space, self.designer = search, search.space, designer

    @cached_property
    def grids(self) -> dict[str, list[Point]]:
        """All points of each variant, in an order that is the same for variants with equally many."""
        found = {variant.id: list(grid_points(self.space, variant.attention)) for variant in self.search.variants}
        for points in found.values():
            random.Random(self.search.seed).shuffle(points)
        return found

    @property
    def max_trials(self) -> int | None:
        """Of each variant, void trials included; None: no limit."""
        return min(map(len, self.grids.values())) if self.search.sampler == "grid" else None

    def given(self, variant: Variant, number: int) -> Point | None:
        """The point of a trial; None: the sampler chooses."""
        if self.search.sampler == "grid":
            return self.grids[variant.id][number]
        return self.default(variant) if self.search.defaults and number == 0 else None

    def default(self, variant: Variant) -> Point | None:
        """The options of a training that is not tuned, if they are a point of the space."""
        found = {}
        for name, values in variant_space(self.space, variant.attention).items():
            value = default_value(self.designer.base, variant.attention, name)
            if value not in values:
                return None
            found[name] = value
        return found

    def experiment(self, variant: Variant, point: Mapping[str, Any]) -> Experiment:
        """A ValueError if the point is impossible. Parameters are matched to those of softmax at the same point."""
        spec, options = apply_point(variant.attention, point)
        return self.designer.experiment(variant.model_copy(update={"attention": spec}), options)

    def experiments(self, variant: Variant, point: Mapping[str, Any]) -> list[Experiment]:
        """Those of a trial: one, or one for each fold."""
        found = self.experiment(variant, point)
        return [self.designer.hold_out(found, variant, fold) for fold in self.designer.fold_list()] or [found]

    def check(self) -> None:
        """A ValueError unless some points are possible, before anything is written."""
        if self.max_trials == 0:
            raise ValueError(f"space {self.space.name} has no point")
        optuna = import_optuna()
        for variant in self.search.variants:
            study, why = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)), ""
            for _ in range(MAX_DRAWS):
                try:
                    self.experiment(variant, suggested_point(self.space, variant.attention, study.ask()))
                    break
                except ValueError as error:
                    why = str(error)
            else:
                raise ValueError(f"space {self.space.name} has no possible point for {variant.attention}: {why}")
