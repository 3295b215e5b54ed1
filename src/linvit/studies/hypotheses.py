"""Claims as hypotheses: the tests they are made of, and how tests add up to a verdict.

A claim holds if all of its tests are shown to hold, and does not hold if one is shown to fail. `better`, `at_least` and
`equal` are one-sided tests of differences in test accuracy over shared seeds, with the bounds of `report.comparison`
and a margin of one point (0.2 points for `at_least` on MNIST, where all are right on more than 99 %):

    better     holds: a − b > 0 is shown.               fails: a − b < 1 point is shown, and a − b > 0 is not
    at_least   holds: a − b > −1 point is shown.        fails: a − b < −1 point is shown
    equal      holds: |a − b| < 1 point is shown.       fails: |a − b| > 1 point is shown

The p-value of a claim is the largest of its tests' p-values (intersection–union); that of its refutation is n times the
smallest of n (Bonferroni). Holm's correction bounds the chance that any claim of a report is wrongly said to hold by
5 %, and likewise for claims said to fail, where an advantage below the margin counts as none.

Fewer than three shared seeds show nothing. If the best model still gains more than five points in the second half of
its training, or is hardly above chance, the models are barely trained, and a small difference shows nothing either: a
claim is then refuted only by a difference in the other direction, and equality is never shown. Speeds are medians of a
race against softmax: one row is faster than another if the quartiles of its rounds are all above the other's. What is
counted or computed rather than sampled is certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr

from linvit.records import Record
from linvit.report.comparison import ENOUGH, LEVEL
from linvit.report.statistics import MARGIN, holm
from linvit.studies.results import Pair, Ref, Results

HOLDS, FAILS, OPEN, MISSING = "holds", "does not hold", "cannot tell at this scale", "not run"


@dataclass(frozen=True)
class Part:
    """What one test found. `holds` and `fails` are p-values: below 5 %, it was shown."""

    what: str
    found: str
    holds: float = 1.0
    fails: float = 1.0
    ran: bool = True

    @classmethod
    def certain(cls, what: str, found: str, holds: bool | None) -> Part:
        """What needs no statistics; None: neither is shown."""
        return cls(what, found, *((1.0, 1.0) if holds is None else (1.0 - holds, float(holds))))

    @classmethod
    def missing(cls, what: str) -> Part:
        return cls(what, "not run", ran=False)


@dataclass(frozen=True)
class Test:
    studies: tuple[str, ...]  # that it looks at
    run: Callable[[Results], Part]


def _difference(a: Ref, b: Ref, relation: str, p_values: Callable[[Pair], tuple[float, float]]) -> Test:
    what = f"{a} {relation} {b}" if a.study != b.study else f"{a.row} {relation} {b.row} ({b.study}, {b.column})"

    def run(results: Results) -> Part:
        pair = results.pair(a, b)
        if pair is None:
            return Part.missing(what)
        return Part(what, pair) if isinstance(pair, str) else Part(what, str(pair), *p_values(pair))

    return Test((a.study, b.study), run)


def better(a: Ref, b: Ref) -> Test:
    def p_values(pair: Pair) -> tuple[float, float]:
        holds = pair.above(0)
        return holds, 1.0 if holds <= LEVEL else pair.below(0 if pair.early else MARGIN)

    return _difference(a, b, "is more accurate than", p_values)


def at_least(a: Ref, b: Ref) -> Test:
    margin, points = (MARGIN / 5, "0.2 points") if "mnist" in a.study else (MARGIN, "1 point")

    def p_values(pair: Pair) -> tuple[float, float]:
        return 1.0 if pair.early else pair.above(-margin), pair.below(-margin)

    return _difference(a, b, f"loses less than {points} to", p_values)


def equal(a: Ref, b: Ref) -> Test:
    def p_values(pair: Pair) -> tuple[float, float]:
        holds = 1.0 if pair.early else max(pair.above(-MARGIN), pair.below(MARGIN))
        return holds, min(1.0, 2 * min(pair.below(-MARGIN), pair.above(MARGIN)))

    return _difference(a, b, "is within 1 point of", p_values)


def faster(a: Ref, b: Ref) -> Test:
    """In training, each relative to the softmax of its own study."""
    what = f"{a} trains faster than {b}" if a.study != b.study else f"{a.row} trains faster than {b.row} ({b.study})"

    def show(median: float, low: float, high: float) -> str:
        return f"{median:.2f}×" + (f" ({low:.2f} to {high:.2f})" if low < high else "")

    def run(results: Results) -> Part:
        mine, other = results.speed(a), results.speed(b)
        if mine is None or other is None:
            return Part.missing(what)
        holds, found = _apart(mine, other), f"{show(*mine)} against {show(*other)} softmax's speed"
        if results.shrunk(a) or results.shrunk(b):
            return Part.certain(what, f"{found}; a smaller model than at full size, which decides nothing", None)
        return Part.certain(what, found, holds)

    return Test((a.study, b.study), run)


def _apart(mine: tuple[float, float, float], other: tuple[float, float, float]) -> bool | None:
    """Whether the first median is above the other by all quartiles; None if these overlap."""
    return True if mine[1] > other[2] else False if mine[2] < other[1] else None


def _ends_of(record: Record) -> tuple[float, float, float]:
    """Median and quartiles."""
    value = float(record.value or 0)
    low, high = (float(record.tags.get(end) or value) for end in ("low", "high"))
    return value, low, high


RACED = {"train_step": "trains", "inference": "infers"}


def quicker(race: str, a: str, b: str, task: str = "train_step") -> Test:
    """At the report's own size, each relative to softmax in the same race. race: a study, and what distinguishes it."""
    study = f"{race[:3]}-sizes"
    what = f"{a} {RACED[task]} faster than {b} ({study}, {race})"

    def run(results: Results) -> Part:
        pair = [results.sized(race[:3], f"{task}_vs_softmax", f"{race}: {row}") for row in (a, b)]
        one, other = pair
        if one is None or other is None or not (one.value and other.value):
            return Part.missing(what)
        holds = None if one.tags.get("busy") or other.tags.get("busy") else _apart(_ends_of(one), _ends_of(other))
        busy = "; measured on a busy core, which decides nothing" if one.tags.get("busy") else ""
        found = f"{one.value:.2f}× against {other.value:.2f}× softmax's speed, batch {one.tags.get('batch')}{busy}"
        return Part.certain(what, found, holds)

    return Test((study,), run)


def lighter(race: str, a: str, b: str) -> Test:
    """Peak memory of a training step at the report's own size; less than 2 % is no difference."""
    study = f"{race[:3]}-sizes"
    what = f"{a} takes less memory than {b} ({study}, {race})"

    def run(results: Results) -> Part:
        one, other = (results.sized(race[:3], "peak_memory", f"{race}: {row}") for row in (a, b))
        if one is None or other is None or not (one.value and other.value):
            return Part.missing(what)
        ratio = one.value / other.value
        holds = True if ratio < 0.98 else False if ratio > 1.02 else None
        return Part.certain(what, f"{ratio:.0%} of its memory, batch {one.tags.get('batch')}", holds)

    return Test((study,), run)


def outlasts(a: Ref, b: Ref) -> Test:
    """Better; or trained to the end in every seed where the other diverged in some."""
    plain = better(a, b)

    def run(results: Results) -> Part:
        ends = [results.get(ref) for ref in (a, b)]
        if any(end is None for end in ends):
            return plain.run(results)
        bad = [len(end.diverged) for end in ends if end]
        if not any(bad):
            return plain.run(results)
        found = f"{bad[0]} of its seeds diverged, {bad[1]} of the other's"
        return Part.certain(f"{a} is more accurate than {b}, or outlasts it", found, None if all(bad) else not bad[0])

    return Test(plain.studies, run)


def diverges(a: Ref) -> Test:
    """In some seed. That a few seeds do not diverge does not show that none would."""
    return _ends(a, "diverges", lambda diverged, trained: True if diverged else None)


def explodes(a: Ref) -> Test:
    """In some seed; where enough of them train to the end, at the depth of which it is claimed, it does not."""
    return _ends(a, "diverges", lambda bad, good: True if bad else False if good >= ENOUGH else None)


def lower_elsewhere(a: Ref, b: Ref) -> Test:
    """Less accurate than another row on other images, by the intervals of both."""
    what = f"{a} is less accurate than {b}"

    def run(results: Results) -> Part:
        ends = [results.get(ref) for ref in (a, b)]
        best = [end.best for end in ends if end is not None and end.best is not None]
        if len(best) < 2:
            return Part.missing(what)
        found = " against ".join(f"{100 * one.mean:.1f} %" for one in best)
        one, other = best
        if one.low is None or one.high is None or other.low is None or other.high is None:
            return Part(what, found)
        return Part.certain(what, found, True if one.high < other.low else False if one.low > other.high else None)

    return Test((a.study, b.study), run)


def closes(a: Ref, b: Ref) -> Test:
    """The first row's distance to the second is smaller after all of the steps than after half of them, by a t-test
    over the seeds that were also trained for half."""
    what = f"{a.row} comes closer to {b.row} in the second half of the training ({a.study}, {a.column})"

    def run(results: Results) -> Part:
        if results.get(a) is None or results.get(b) is None:
            return Part.missing(what)
        half, whole = [], []
        for ref in (a, b):
            result = results.get(ref)
            half.append({r.tags.get("seed"): r.value for r in results.row_records(ref, "half_accuracy") if r.value})
            whole.append(dict(result.scores) if result else {})
        shared = sorted(set(half[0]) & set(half[1]) & set(whole[0]) & set(whole[1]), key=str)
        gains = [(half[1][s] - half[0][s]) - (whole[1][s] - whole[0][s]) for s in shared]
        if not gains:
            return Part(what, "no seed was also trained for half of the steps")
        found = f"by {100 * sum(gains) / len(gains):+.1f} points, {len(gains)} seeds"
        if len(gains) < ENOUGH:
            return Part(what, found)
        error = max(float(np.std(gains, ddof=1)), 1e-9) / math.sqrt(len(gains))
        below = float(stdtr(len(gains) - 1, float(np.mean(gains)) / error))
        return Part(what, found, 1 - below, below)

    return Test((a.study, b.study), run)


def no_general(rows: Sequence[str], baseline: str, studies: Sequence[str]) -> Test:
    """Each row loses a margin to the baseline in some study; one that does not in any refutes it."""
    what = f"each Performer loses to {baseline} on some data"

    def run(results: Results) -> Part:
        holds, fails, found = [], [], []
        for row in rows:
            pairs = [results.pair(Ref(study, row), Ref(study, baseline)) for study in studies]
            tested = [pair for pair in pairs if isinstance(pair, Pair)]
            if len(tested) < len(studies):
                return Part.missing(what)
            margins = [MARGIN / 5 if "mnist" in study else MARGIN for study in studies]
            each = list(zip(tested, margins, strict=True))
            holds.append(min(1.0, len(each) * min(pair.below(-margin) for pair, margin in each)))
            fails.append(max(1.0 if pair.early else pair.above(-margin) for pair, margin in each))
            found.append(row + (" does" if holds[-1] <= LEVEL else " does not" if fails[-1] <= LEVEL else " is open"))
        return Part(what, ", ".join(found), max(holds), min(1.0, len(rows) * min(fails)))

    return Test(tuple(studies), run)


def trains(a: Ref) -> Test:
    """All seeds to the end, and enough of them; one that diverges refutes it."""
    return _ends(a, "trains to the end", lambda bad, good: not bad if bad or good >= ENOUGH else None)


def _ends(a: Ref, how: str, holds: Callable[[int, int], bool | None]) -> Test:
    def run(results: Results) -> Part:
        result = results.get(a)
        if result is None:
            return Part.missing(f"{a} {how}")
        bad, good = len(result.diverged), len(result.scores)
        return Part.certain(f"{a} {how}", f"{bad} of {bad + good} seeds diverged", holds(bad, good))

    return Test((a.study,), run)


def learned_below(a: Ref, parameter: str, bound: float, what: str) -> Test:
    """A learned parameter after training, by a t-test over seeds; one number per seed, the mean over layers."""

    def run(results: Results) -> Part:
        if results.get(a) is None:
            return Part.missing(f"{what}, {a}")
        seeds: dict[object, list[float]] = {}
        for record in results.row_records(a, "learned_parameter", name=parameter):
            if record.value is not None:
                seeds.setdefault(record.tags.get("seed"), []).append(record.value)
        means = [sum(values) / len(values) for values in seeds.values()]
        found = f"{', '.join(f'{value:.3f}' for value in means)}, one per seed"
        if len(means) < ENOUGH:
            return Part(f"{what}, {a}", found)
        error = max(float(np.std(means, ddof=1)), 1e-9) / math.sqrt(len(means))
        below = float(stdtr(len(means) - 1, (bound - float(np.mean(means))) / error))
        return Part(f"{what}, {a}", found, 1 - below, below)

    return Test((a.study,), run)


def shows(study: str, what: str, look: Callable[[list[Record]], tuple[bool | None, str]]) -> Test:
    """What the records of a figure say."""

    def run(results: Results) -> Part:
        records = results.records(study)
        if not records:
            return Part.missing(f"{what} ({study})")
        holds, found = look(records)
        return Part.certain(f"{what} ({study})", found, holds)

    return Test((study,), run)


@dataclass(frozen=True, eq=False)
class Claim:
    id: str
    says: str  # in our words
    test: str  # how it is tested, in words
    tests: Sequence[Test]
    own: str = ""  # what the report's own numbers say of it
    contradicted: str = ""  # the same, if they contradict it
    mistake: str = ""  # that matters for it
    see_also: tuple[str, ...] = ()  # studies that no test looks at

    @property
    def report(self) -> str:
        return self.id.partition(".")[0]

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.see_also, *(study for test in self.tests for study in test.studies)]))


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    word: str
    parts: list[Part]


def judge(claims: Sequence[Claim], results: Results) -> list[Verdict]:
    """All claims; the correction is over the claims of one report that were tested."""
    verdicts = []
    for report in dict.fromkeys(claim.report for claim in claims):
        parts = {claim: [test.run(results) for test in claim.tests] for claim in claims if claim.report == report}
        tested = [claim for claim, found in parts.items() if any(part.ran for part in found)]
        holds = holm([max(part.holds for part in parts[claim]) for claim in tested])
        fails = holm([min(1.0, len(parts[claim]) * min(part.fails for part in parts[claim])) for claim in tested])
        words = dict.fromkeys(parts, MISSING)
        for claim, p, q in zip(tested, holds, fails, strict=True):
            words[claim] = HOLDS if p <= LEVEL else FAILS if q <= LEVEL else OPEN
        for claim, word in words.items():
            verdicts.append(Verdict(claim, word, parts[claim]))
    return verdicts
