"""What was run of the published studies, looked up by study, column and row.

The largest finished scale counts. `smoke` shows that a study runs; none of its numbers is ever looked up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from linvit.records import Record, Records
from linvit.report import Summary, VariantResult, read_study, statistics, summarise
from linvit.report.comparison import ENOUGH, LEVEL, Comparison
from linvit.report.growth import GAIN, gained
from linvit.report.merit import ACCURACY, Merit
from linvit.report.summary import count_seeds
from linvit.studies.declaration import COLUMNS, STUDIES, PublishedStudy
from linvit.studies.declaration import Column as ColumnName
from linvit.studies.run import ENDS

LEARNED = 0.1  # of the way from chance to no error; below it nothing was learned
REAL_SCALES = ("full", "cpu")
SIZE = ("dim", "depth", "heads", "head_dim", "mlp_dim", "trunk", "size")  # options that make a model larger or smaller


class Ref(NamedTuple):
    """A row of a study's table."""

    study: str
    row: str
    column: str = "fair"

    def __str__(self) -> str:
        return f"{self.row} ({self.study}, {self.column})"


@dataclass(frozen=True)
class ColumnResult:
    """One column of a study, as it was run."""

    scale: str
    folder: Path
    summary: Summary

    @property
    def finished(self) -> bool:
        return self.summary.study.finished is not None

    @cached_property
    def early(self) -> str:
        """Why small differences show nothing here; empty if they do. Barely trained models differ little, whatever
        they are."""
        able = [row for row in self.rows.values() if row.best and not row.diverged and not row.variant.beside]
        if self.summary.merit is not ACCURACY or not able:
            return ""
        best = max(able, key=lambda row: row.best.mean if row.best else 0.0)
        chance = 1 / max(1, len(self.summary.study.dataset.classes))
        if best.best and best.best.mean < chance + LEARNED * (1 - chance):
            return f"{best.label} is hardly above chance"
        gain = gained(best)
        if gain <= GAIN:
            return ""
        return f"{best.label} still gained {100 * gain:.1f} points in the second half of its training"

    @cached_property
    def rows(self) -> dict[str, VariantResult]:
        """Those with a run that ended."""
        ends = {*ENDS, self.summary.merit.metric}
        ended = {record.tags.get("variant") for metric in ends for record in self.summary.evidence.of(metric)}
        return {row.id: row for row in self.summary.variants if row.id in ended}


@dataclass(frozen=True)
class Pair:
    """The difference of two rows over the seeds that both have; positive if the first is better."""

    comparison: Comparison
    i: int
    j: int
    scale: str
    merit: Merit
    early: str  # why a small difference may not stay small

    def above(self, difference: float) -> float:
        """p of the one-sided test that the first is better by more than this."""
        return self.comparison.exceeds(self.i, self.j, difference)

    def below(self, difference: float) -> float:
        return self.comparison.exceeds(self.j, self.i, -difference)

    def __str__(self) -> str:
        at = self.i, self.j
        signed = replace(self.merit, digits=self.merit.digits + 1).signed
        d, seeds = float(self.comparison.difference[at]), int(self.comparison.seeds[at])
        half = float(self.comparison.half(LEVEL / 2, 1)[at])
        span = f" ({signed(d - half)} to {signed(d + half)})" if seeds >= ENOUGH else ""
        early = f"; too early for small differences: {self.early}" if self.early else ""
        images = f", {self.comparison.tested:,} test images" if self.comparison.tested else ""
        return f"{signed(d)} {self.merit.unit}{span}, {count_seeds(seeds)}{images}, scale {self.scale}{early}"

    def needed(self, margin: float) -> float:
        """Seeds with which a one-sided test decides it if the rows differ by nothing or by two margins; infinite where
        no number of seeds does."""
        return float(self.comparison.needed(margin)[0][self.i, self.j])

    @property
    def detects(self) -> str:
        """The difference that this many seeds show with a probability of 80 %; empty if they are too few."""
        found = float(self.comparison.detectable()[self.i, self.j])
        merit = replace(self.merit, digits=self.merit.digits + 1)
        return f"{merit.plain(found)} {merit.unit}" if math.isfinite(found) else ""


class Results:
    """What is in a folder of results, DIR/NAME/SCALE; read once."""

    def __init__(self, home: Path):
        self.home = home
        self._columns: dict[tuple[str, str], ColumnResult | None] = {}

    def column(self, study: str, column: str) -> ColumnResult | None:
        key = study, column
        if key not in self._columns:
            existing = [found for scale in REAL_SCALES if (found := self._read(study, scale, column))]
            existing.sort(key=lambda found: not found.finished)
            self._columns[key] = next(iter(existing), None)
        return self._columns[key]

    def _read(self, study: str, scale: str, column: str) -> ColumnResult | None:
        folder = self.home / study / scale / column
        if not (folder / "records.jsonl").exists():
            return None
        found = ColumnResult(scale, folder, summarise(read_study(folder)))
        return found if found.rows else None

    def smoke(self, study: str) -> bool:
        """Whether it was run at scale smoke."""
        return any((self.home / study / "smoke").glob("**/records.jsonl"))

    def ran(self, study: str) -> bool:
        """Whether anything of it was run at a scale that counts."""
        return self.figure(study) is not None or any(self.column(study, column) for column in COLUMNS)

    def figure(self, study: str) -> tuple[str, Path] | None:
        """Scale and folder of a measured figure."""
        folders = {scale: self.home / study / scale for scale in REAL_SCALES}
        return next((found for found in folders.items() if (found[1] / "records.jsonl").exists()), None)

    def records(self, study: str) -> list[Record]:
        """Of a measured figure."""
        found = self.figure(study)
        return list(Records(found[1] / "records.jsonl")) if found else []

    def get(self, ref: Ref) -> VariantResult | None:
        found = self.column(ref.study, ref.column)
        return found.rows.get(ref.row) if found else None

    def row_records(self, ref: Ref, metric: str, **tags: str) -> Iterable[Record]:
        found = self.column(ref.study, ref.column)
        return found.summary.evidence.of(metric, variant=ref.row, **tags) if found else ()

    def pair(self, a: Ref, b: Ref) -> Pair | str | None:
        """Two rows to compare; None if one was not run, or why they cannot be compared."""
        first, second = (self.column(ref.study, ref.column) for ref in (a, b))
        if not (first and second and a.row in first.rows and b.row in second.rows):
            return None
        for ref, column in ((a, first), (b, second)):
            if bad := column.rows[ref.row].diverged or column.rows[ref.row].failed:
                return f"{ref.row}: {'; '.join(bad)}"
        if first is second:  # the noise is estimated from all rows together
            rows = [row for row in first.rows.values() if row.judged or row.id in (a.row, b.row)]
            names, verdicts = (a.row, b.row), first.summary.judge(rows)
        else:
            one, other = first.summary, second.summary
            if (first.scale, one.study.dataset.identity) != (second.scale, other.study.dataset.identity):
                return "run on other images or at another scale"
            if one.folds != other.folds:
                return "run with different folds"
            sides = {  # whose noise is estimated together: the same images and scale
                str(Ref(ref.study, row.id, ref.column)): (column.summary, row.id)
                for ref, column in ((a, first), (b, second))
                for row in column.rows.values()
                if (row.judged and not (row.diverged or row.failed)) or row.id == ref.row
            }
            names, scores = (str(a), str(b)), {name: summary[row].scores for name, (summary, row) in sides.items()}
            right: Any = {
                name: summary.evidence.right[row]
                for name, (summary, row) in sides.items()
                if row in summary.evidence.right
            }
            image = max(1, one.folds) / one.images if one.merit is ACCURACY else 0.0
            verdicts = statistics.judge(scores, right, resolution=image, folds=one.folds)
        i, j = map(verdicts.names.index, names)
        return Pair(verdicts.comparison, i, j, first.scale, first.summary.merit, first.early or second.early)

    def sized(self, report: str, metric: str, variant: str) -> Record | None:
        """Of a system at its report's own size."""
        found = (r for r in self.records(f"{report}-sizes") if r.metric == metric and r.tags.get("variant") == variant)
        return next(found, None)

    def shrunk(self, ref: Ref) -> bool:
        """Whether its model was smaller than the report's, at the scale that was run."""
        found, study = self.column(ref.study, ref.column), STUDIES[ref.study]
        if found is None or found.scale == "full" or not isinstance(study, PublishedStudy):
            return False
        column: ColumnName = "fair" if ref.column == "fair" else "literal"
        here, full = (study.options(column, scale) for scale in (found.scale, "full"))
        return any(here.get(key) != full.get(key) for key in SIZE)
