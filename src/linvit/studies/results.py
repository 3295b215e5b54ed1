"""What was run of the published studies: looked up by study, column and row, for the page and for what it judges.

Of several scales the largest that was finished counts. One that is `smoke` shows that a study runs; no number of it is
ever looked up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from linvit.records import Record, Records
from linvit.report import Result, Summary, read, statistics, summarise
from linvit.report.growth import GAIN, gained
from linvit.report.merit import ACCURACY, Merit
from linvit.report.statistics import ENOUGH, LEVEL, Comparison
from linvit.report.summary import count_seeds
from linvit.studies import ENDS, SCALES

LEARNED = 0.1  # of the way from chance to no error, below which nothing was learned
REAL = tuple(scale for scale in SCALES if scale != "smoke")


class Ref(NamedTuple):
    """A row of a study's table."""

    study: str
    row: str
    column: str = "fair"

    def __str__(self) -> str:
        return f"{self.row} ({self.study}, {self.column})"


@dataclass(frozen=True)
class Ran:
    """One column of a study, as it was run."""

    scale: str
    folder: Path
    summary: Summary

    @property
    def finished(self) -> bool:
        return self.summary.study.info.get("finished") is not None

    @cached_property
    def early(self) -> str:
        """Why nothing is said here of small differences; empty if something is. Models that have hardly learned
        differ little, whatever they are."""
        able = [v for v in self.rows.values() if v.best and not v.diverged and not v.beside]
        if self.summary.merit is not ACCURACY or not able:
            return ""
        best = max(able, key=lambda v: v.best.mean if v.best else 0.0)
        chance = 1 / max(1, len(self.summary.study.dataset.get("classes") or range(10)))
        if best.best and best.best.mean < chance + LEARNED * (1 - chance):
            return f"{best.label} is hardly above chance"
        gain = gained(best)
        return f"{best.label} still gained {100 * gain:.1f} points from half to all" if gain > GAIN else ""

    @cached_property
    def rows(self) -> dict[str, Result]:
        """Those of which a run came to its end."""
        ends = {*ENDS, self.summary.merit.metric}
        ended = {r.tags.get("variant") for metric in ends for r in self.summary.study.of(metric)}
        return {v.id: v for v in self.summary.variants if v.id in ended}


@dataclass(frozen=True)
class Pair:
    """Two rows' merits over the seeds that both have: by how much the first is better."""

    comparison: Comparison
    i: int
    j: int
    scale: str
    merit: Merit
    early: str = ""  # why a difference that is small here may not stay small

    def above(self, difference: float) -> float:
        """p of the one-sided test that it is better by more than this."""
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
        return f"{signed(d)} {self.merit.unit}{span}, {count_seeds(seeds)}, scale {self.scale}{early}"


class Results:
    """What lies in a folder of results, DIR/NAME/SCALE; read once."""

    def __init__(self, home: Path):
        self.home = home
        self._columns: dict[tuple[str, str], Ran | None] = {}

    def column(self, study: str, column: str) -> Ran | None:
        key = study, column
        if key not in self._columns:
            found = [ran for scale in REAL if (ran := self._read(study, scale, column))]
            self._columns[key] = next((ran for ran in found if ran.finished), next(iter(found), None))
        return self._columns[key]

    def _read(self, study: str, scale: str, column: str) -> Ran | None:
        folder = self.home / study / scale / column
        if not (folder / "records.jsonl").exists():
            return None
        found = Ran(scale, folder, summarise(read(folder)))
        return found if found.rows else None

    def smoke(self, study: str) -> bool:
        """Whether it was run to see that it runs."""
        return any((self.home / study / "smoke").glob("**/records.jsonl"))

    def figure(self, study: str) -> tuple[str, Path] | None:
        """Scale and folder of one that was measured."""
        folders = {scale: self.home / study / scale for scale in REAL}
        return next(((s, folder) for s, folder in folders.items() if (folder / "records.jsonl").exists()), None)

    def records(self, study: str) -> list[Record]:
        found = self.figure(study)
        return list(Records(found[1] / "records.jsonl")) if found else []

    def get(self, ref: Ref) -> Result | None:
        ran = self.column(ref.study, ref.column)
        return ran.rows.get(ref.row) if ran else None

    def pair(self, a: Ref, b: Ref) -> Pair | str:
        """Two rows to compare, or why they cannot be."""
        ran, other = (self.column(ref.study, ref.column) for ref in (a, b))
        if not (ran and other and a.row in ran.rows and b.row in other.rows):
            return ""
        for ref, of in ((a, ran), (b, other)):
            if bad := of.rows[ref.row].diverged or of.rows[ref.row].failed:
                return f"{ref.row}: {'; '.join(bad)}"
        if ran is other:  # the noise of all its rows is known together
            beside = [v for v in ran.rows.values() if v.judged or v.id in (a.row, b.row)]
            verdicts = ran.summary.judge(beside)
            i, j = map(verdicts.names.index, (a.row, b.row))
            return Pair(verdicts.comparison, i, j, ran.scale, ran.summary.merit, ran.early)
        first, second = ran.summary, other.summary
        if (ran.scale, first.study.dataset.get("identity")) != (other.scale, second.study.dataset.get("identity")):
            return "run on other images or at another scale"
        rows = {str(a): (first, a.row), str(b): (second, b.row)}
        right = {name: of.study.right[row] for name, (of, row) in rows.items() if row in of.study.right}
        scores = {name: of[row].scores for name, (of, row) in rows.items()}
        verdicts = statistics.judge(scores, right, resolution=1 / first.images if first.merit is ACCURACY else 0.0)
        i, j = map(verdicts.names.index, (str(a), str(b)))
        return Pair(verdicts.comparison, i, j, ran.scale, first.merit, ran.early or other.early)

    def speed(self, ref: Ref) -> tuple[float, float, float] | None:
        """Of training, beside softmax, median and quartiles; above 1 is faster."""
        ran = self.column(ref.study, ref.column)
        if ran is None or ref.row not in ran.rows:
            return None
        found = next(iter(ran.summary.study.of("train_step_vs_softmax", variant=ref.row)), None)
        if found is None or not found.value:
            return (1.0, 1.0, 1.0) if ran.rows[ref.row].attention == "softmax" else None
        low, high = (float(found.tags.get(end) or found.value) for end in ("low", "high"))
        return float(found.value), low, high
