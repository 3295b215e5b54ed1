"""What a study can detect, said before it is run: from a pilot's deviation between seeds."""

from __future__ import annotations

import math

from linvit.report.comparison import LEVEL, POWER, dunnett, held_out
from linvit.studies.agenda import AGENDA
from linvit.studies.claims import CLAIMS
from linvit.studies.declaration import Column, Declaration, PublishedStudy


def claims_of(name: str) -> list[str]:
    """The claims whose tests look at a study."""
    return [claim.id for claim in CLAIMS if name in {each for test in claim.tests for each in test.studies}]


def detectable(study: PublishedStudy, column: Column, seeds: int | None = None) -> float | None:
    """The difference between two rows that a one-sided test shows with a probability of 80 %, in the unit of the
    deviation. The level is the least that Holm's correction over the claims of the report leaves. None: without a
    pilot, or with too few seeds."""
    planned, size = AGENDA.get(study.name), study.size(column, "cpu")
    folds = size.folds or 0
    count, rows = (seeds or size.seeds) * max(1, folds), len(study.rows_of(column))
    if planned is None or planned.deviation is None or count < 3:
        return None
    freedom = max(1, rows - 1) * (count - 1)
    tested = max(1, sum(claim.report == study.report for claim in CLAIMS))
    error = planned.deviation * math.sqrt(1 / count + held_out(folds))
    return sum(dunnett(1, freedom, p) for p in (LEVEL / tested, 1 - POWER)) * error


def promise(study: Declaration, seeds: int | None = None) -> str:
    """What the fair column detects at scale cpu, in words; empty if that is not known."""
    if not isinstance(study, PublishedStudy) or (found := detectable(study, "fair", seeds)) is None:
        return ""
    planned, bits = AGENDA[study.name], study.task != "classification"
    unit, scale, digits = ("bits", 0.01, 3) if bits else ("points", 1.0, 1)
    shown, seen = f"{scale * found:.{digits}f}", f"{scale * (planned.deviation or 0):.{digits}f}"
    return (
        f"Detects differences of {shown} {unit} between fair rows with 80 % probability, not counting the choice of "
        f"test images (standard deviation of a difference over seeds: {seen} {unit}, {planned.source})"
    )
