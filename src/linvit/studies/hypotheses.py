"""Claims as hypotheses: the tests they are made of, and how tests add up to a verdict.

A claim holds if all of its tests are shown to hold, and does not hold if one is shown to fail. `better`, `at_least` and
`equal` are one-sided tests of differences in test accuracy over shared seeds, with the bounds of `report.comparison`
and a margin of one point (0.2 points for `at_least` on MNIST, where all are right on more than 99 %; 0.01 bits for
models of pixels):

    better     holds: a − b > 0 is shown.               fails: a − b < 1 point is shown, and a − b > 0 is not
    at_least   holds: a − b > −1 point is shown.        fails: a − b < −1 point is shown
    equal      holds: |a − b| < 1 point is shown.       fails: |a − b| > 1 point is shown

The p-value of a claim is the largest of its tests' p-values (intersection–union); that of its refutation is n times the
smallest of n (Bonferroni). Holm's correction bounds the chance that any claim of a report is wrongly said to hold by
5 %, and likewise for claims said to fail, where an advantage below the margin counts as none.

Fewer than three shared seeds show nothing. If the best model still gains more than five points in the second half of
its training, or is hardly above chance, the models are barely trained, and a small difference shows nothing either: a
claim is then refuted only by a difference in the other direction, and equality is never shown. Speeds (`races`) are
medians of a race against softmax: one row is faster than another if the quartiles of its rounds are all above the
other's. What is counted or computed rather than sampled is certain. `tests/studies/test_verdicts.py` simulates studies
whose claims are false, or true by the margin, and counts wrong verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from linvit.records import Record
from linvit.report.comparison import ENOUGH, LEVEL
from linvit.report.statistics import MARGIN, holm
from linvit.report.summary import count_seeds
from linvit.studies.results import Pair, Ref, Results
from linvit.studies.samples import Sample, above, fisher, of_means

SOFTMAX = ("transformer", "Transformer", "ViT", "softmax")  # rows
PIXELS = ("paper-fig6-7", "paper-fig18")  # studies that count bits
Both = tuple[Ref, Ref]  # a row, and the same trained for longer
HOLDS, FAILS, OPEN, MISSING = "holds", "does not hold", "cannot tell at this scale", "not run"


@dataclass(frozen=True)
class Part:
    """What one test found. `holds` and `fails` are p-values: below 5 %, it was shown."""

    what: str
    found: str
    holds: float = 1.0
    fails: float = 1.0
    ran: bool = True
    detects: str = ""  # the difference that it would have shown with a probability of 80 %
    topic: str = ""  # of a Performer against softmax: accuracy, training, inference or memory
    seeds: float = 0.0  # with which it would be decided, where seeds decide; infinite: no number of them
    early: bool = False  # the models are barely trained
    busy: bool = False  # measured on a busy core
    open: str = ""  # why it is not decided, if no run changes that

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


def _difference(
    a: Ref,
    b: Ref,
    relation: str,
    p_values: Callable[[Pair], tuple[float, float]],
    topic: str = "",
    margin: float = MARGIN,
) -> Test:
    what = f"{a} {relation} {b}" if a.study != b.study else f"{a.row} {relation} {b.row} ({b.study}, {b.column})"

    def run(results: Results) -> Part:
        pair = results.pair(a, b)
        if pair is None:
            return replace(Part.missing(what), topic=topic)
        if isinstance(pair, str):
            return Part(what, pair, topic=topic, open=pair)
        known = {"detects": pair.detects, "seeds": pair.needed(margin), "early": bool(pair.early), "topic": topic}
        return Part(what, str(pair), *p_values(pair), **known)

    return Test((a.study, b.study), run)


def better(a: Ref, b: Ref) -> Test:
    def p_values(pair: Pair) -> tuple[float, float]:
        holds = pair.above(0)
        return holds, 1.0 if holds <= LEVEL else pair.below(0 if pair.early else MARGIN)

    return _difference(a, b, "is more accurate than", p_values)


def margin_of(study: str) -> tuple[float, str]:
    """What a row may lose there: a point, 0.2 points of MNIST's digits, or 0.01 bits of its pixels."""
    if study.startswith(PIXELS):
        return MARGIN, "0.01 bits"
    return (MARGIN / 5, "0.2 points") if study == "000-mnist" else (MARGIN, "1 point")


def at_least(a: Ref, b: Ref) -> Test:
    margin, points = margin_of(a.study)

    def p_values(pair: Pair) -> tuple[float, float]:
        return 1.0 if pair.early else pair.above(-margin), pair.below(-margin)

    topic = "accuracy" if b.row in SOFTMAX else ""
    return _difference(a, b, f"loses less than {points} to", p_values, topic, margin)


def equal(a: Ref, b: Ref) -> Test:
    def p_values(pair: Pair) -> tuple[float, float]:
        holds = 1.0 if pair.early else max(pair.above(-MARGIN), pair.below(MARGIN))
        return holds, min(1.0, 2 * min(pair.below(-MARGIN), pair.above(MARGIN)))

    return _difference(a, b, "is within 1 point of", p_values)


def outlasts(a: Ref, b: Ref) -> Test:
    """Better; or, if some seeds diverged, fewer of its own than of the other's, by Fisher's exact test."""
    plain = better(a, b)

    def run(results: Results) -> Part:
        ends = [results.get(ref) for ref in (a, b)]
        if any(end is None for end in ends):
            return plain.run(results)
        (bad, all_own), (worse, all_other) = (
            (len(end.diverged), len(end.diverged) + len(end.scores)) for end in ends if end
        )
        if not (bad or worse):
            return plain.run(results)
        found = f"{bad} of its {all_own} seeds diverged, {worse} of the other's {all_other}"
        holds, fails = fisher(bad, all_own, worse, all_other), fisher(worse, all_other, bad, all_own)
        seeds = 2 * max(all_own, all_other)
        return Part(f"{a} is more accurate than {b}, or outlasts it", found, holds, fails, seeds=seeds)

    return Test(plain.studies, run)


def explodes(a: Ref) -> Test:
    """In some seed; where enough of them train to the end, at the depth of which it is claimed, it does not."""
    return _ends(a, "diverges", lambda bad, good: True if bad else False if good >= ENOUGH else None)


def lower_elsewhere(a: Ref, b: Ref) -> Test:
    """Less accurate than another row on other images, by Welch's t-test."""
    what = f"{a} is less accurate than {b}"

    def run(results: Results) -> Part:
        ends = [results.get(ref) for ref in (a, b)]
        scores = [list(end.scores.values()) for end in ends if end is not None]
        if len(scores) < 2:
            return Part.missing(what)
        if not all(scores):
            return Part(what, "all seeds of one diverged", open="all seeds of one diverged")
        one, other = scores
        found = " against ".join(f"{100 * fmean(each):.1f} %, {count_seeds(len(each))}" for each in scores)
        if min(map(len, scores)) < ENOUGH:
            return Part(what, found, seeds=ENOUGH)
        below = above(Sample.of(other), Sample.of(one))
        return Part(what, found, below, 1 - below, seeds=2 * min(map(len, scores)))

    return Test((a.study, b.study), run)


def closes(a: Both, b: Both) -> Test:
    """The first row's distance to the second is smaller if both are trained for twice the steps, by a t-test over
    shared seeds. Of each, the row and the one that is trained for longer."""
    names, refs = f"{a[0].row} comes closer to {b[0].row}", (*a, *b)
    what = f"{names} with twice the steps ({a[0].study}, {a[0].column})"

    def run(results: Results) -> Part:
        ends = [results.get(ref) for ref in refs]
        scores = [end.scores for end in ends if end is not None]
        if len(scores) < len(refs):
            return Part.missing(what)
        shared = sorted(set.intersection(*(set(each) for each in scores)), key=str)
        gains = [(scores[2][s] - scores[0][s]) - (scores[3][s] - scores[1][s]) for s in shared]
        found = f"by {100 * sum(gains) / max(1, len(gains)):+.1f} points, {len(gains)} seeds"
        return Part(what, found, *of_means(gains), seeds=max(ENOUGH, 2 * len(gains)))

    return Test(tuple(dict.fromkeys(ref.study for ref in refs)), run)


def wider_gap(row: str) -> Test:
    """From experiment I to V, by 95 % intervals of both gaps."""
    what = f"the gap between ViT and {row} is wider on TinyImageNet (001-V) than on CIFAR-10 (001-I)"

    def run(results: Results) -> Part:
        pairs = [results.pair(Ref(study, "ViT"), Ref(study, row)) for study in ("001-I", "001-V")]
        found = [pair for pair in pairs if isinstance(pair, Pair)]
        if len(found) < 2:
            return Part.missing(what) if None in pairs else Part(what, "; ".join(map(str, pairs)))
        small, large = found
        steps = [i / 2000 for i in range(-400, 401)]  # of a gap: −20 to 20 points
        holds = 2 * min(max(small.below(gap), large.above(gap)) for gap in steps)  # for either may be wrong
        fails = 2 * min(max(small.above(gap), large.below(gap)) for gap in steps)
        early = bool(small.early or large.early)
        if early:
            holds, fails = 1.0, 1.0
        seeds = max(pair.needed(MARGIN) for pair in found)
        return Part(what, f"{large} against {small}", min(1.0, holds), min(1.0, fails), seeds=seeds, early=early)

    return Test(("001-I", "001-V"), run)


def no_general(rows: Sequence[str], baseline: str, studies: Sequence[str]) -> Test:
    """Each row loses a margin to the baseline in some study; one that does not in any refutes it."""
    what = f"each Performer loses to {baseline} on some data"

    def run(results: Results) -> Part:
        holds, fails, found, seeds, early = [], [], [], 0.0, False
        for row in rows:
            pairs = [results.pair(Ref(study, row), Ref(study, baseline)) for study in studies]
            tested = [pair for pair in pairs if isinstance(pair, Pair)]
            if None in pairs:
                return Part.missing(what)
            if len(tested) < len(studies):  # it diverged, or is of other images
                why = "; ".join(pair for pair in pairs if isinstance(pair, str))
                return Part(what, why, open=why)
            margins = [margin_of(study)[0] for study in studies]
            each = list(zip(tested, margins, strict=True))
            holds.append(min(1.0, len(each) * min(pair.below(-margin) for pair, margin in each)))
            fails.append(max(1.0 if pair.early else pair.above(-margin) for pair, margin in each))
            found.append(row + (" does" if holds[-1] <= LEVEL else " does not" if fails[-1] <= LEVEL else " is open"))
            if min(holds[-1], fails[-1]) > LEVEL:
                seeds = max(seeds, *(pair.needed(margin) for pair, margin in each))
                early = early or any(pair.early for pair in tested)
        known = {"seeds": seeds, "early": early}
        return Part(what, ", ".join(found), max(holds), min(1.0, len(rows) * min(fails)), **known)

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
        part = Part.certain(f"{a} {how}", f"{bad} of {bad + good} seeds diverged", holds(bad, good))
        return replace(part, seeds=ENOUGH)

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
        p_values = of_means([bound - value for value in means])
        return Part(f"{what}, {a}", found, *p_values, seeds=max(ENOUGH, 2 * len(means)))

    return Test((a.study,), run)


Look = Callable[[list[Record]], tuple[bool | tuple[float, float] | None, str]]


def shows(study: str, what: str, look: Look) -> Test:
    """What the records of a figure say: for certain, or by p-values that it holds and that it fails."""

    def run(results: Results) -> Part:
        records = results.records(study)
        if not records:
            return Part.missing(f"{what} ({study})")
        holds, found = look(records)
        told = f"{what} ({study})"
        part = Part(told, found, *holds) if isinstance(holds, tuple) else Part.certain(told, found, holds)
        return replace(part, busy=any(record.tags.get("busy") for record in records))

    return Test((study,), run)


@dataclass(frozen=True, eq=False)
class Claim:
    id: str
    says: str  # in our words
    test: str  # how it is tested, in words
    tests: Sequence[Test]
    own: str = ""  # what the report's own numbers say of it
    contradicted: str = ""  # the same, if they contradict it
    note: str = ""  # what else is to be known, in our words
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
