"""In which order studies are worth running at scale cpu, how long each takes, and how noisy it is.

`linvit reproduce --all` runs them in this order: what decides most in the shortest time comes first. Minutes are of one
core of an AMD EPYC; `benchmarks/study_costs.py` measures them again. A deviation is that of the difference between
two rows over seeds, in points of accuracy or hundredths of a bit, from a pilot; `studies.power` says what a study can
detect with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Planned(NamedTuple):
    minutes: float  # of one core
    deviation: float | None = None  # None: no accuracy is compared
    source: str = ""  # where it was seen

    @property
    def duration(self) -> str:
        if self.minutes < 1:
            return "1 core-minute"
        if self.minutes < 100:
            return f"{self.minutes:.0f} core-minute{'s' * (round(self.minutes) != 1)}"
        return f"{self.minutes / 60:.1f} core-hours"


AGENDA: Mapping[str, Planned] = {}
