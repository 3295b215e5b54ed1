"""Trackers: listeners that log a training to another program. A new one is one file here (or in
LINVIT_PLUGINS) with `@TRACKERS.register("name")`."""

from __future__ import annotations

import importlib.util
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from linvit.registry import Registry
from linvit.schemas.experiment import Experiment
from linvit.training.events import Began, Diverged, Event, Tested, Validated


class Tracker(ABC):
    """Logs one training. `folder` is that of the training, `home` may hold a store for several trainings. A store that
    cannot be reached at the beginning is an error; one that is lost later ends the tracking, not the training."""

    package = ""  # that it needs

    def __init__(self, experiment: Experiment, folder: Path, home: Path):
        self.experiment, self.folder, self.home = experiment, folder, home
        self.begun = self.lost = self.ended = False

    def __call__(self, event: Event) -> None:
        if self.lost:
            return
        try:
            if isinstance(event, (Began, Validated, Tested, Diverged)) and not self.begun:
                self.begin(event.step)
                self.begun = True
            if isinstance(event, (Validated, Tested)):
                self.log(event.step, {key: value for key, value in event.row.items() if key not in ("step", "epoch")})
            if isinstance(event, (Tested, Diverged)):
                self.ended = True
                self.end(isinstance(event, Diverged))
        except Exception as error:  # whatever a network, a disk or somebody's package does
            why = (str(error).strip() or type(error).__name__).partition("\n")[0]
            if not self.begun:
                raise ValueError(f"{self.package} cannot be used ({why})") from None
            self.lost = True
            warnings.warn(f"{self.package} no longer logs this training ({why})", UserWarning, stacklevel=2)

    def give_up(self) -> None:
        """Close without a final event: the training is not tested, or was stopped early."""
        if self.begun and not self.lost and not self.ended:
            self.ended = True
            with suppress(Exception):
                self.end(False)

    @abstractmethod
    def begin(self, step: int) -> None:
        """Start, or resume after this step; what was logged for later steps will be logged again."""

    @abstractmethod
    def log(self, step: int, row: dict[str, float]) -> None: ...

    @abstractmethod
    def end(self, diverged: bool) -> None: ...


TRACKERS: Registry[type[Tracker]] = Registry("tracker", "linvit.training.trackers")


def tracking(names: Sequence[str]) -> list[type[Tracker]]:
    """Those of these names; a ValueError if one is unknown or its package is not there."""
    for name in names:
        if importlib.util.find_spec(TRACKERS[name].package) is None:
            raise ValueError(f"track={name} needs a package that is not installed: pip install 'linvit[track]'")
    return [TRACKERS[name] for name in names]
