"""Whether verdicts hold: in simulated studies, claims that are false, or true by the margin, are rarely judged wrongly;
and each claim can come out either way."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from synthetic import record

from linvit.report import statistics
from linvit.report.comparison import LEVEL
from linvit.report.merit import ACCURACY
from linvit.report.statistics import MARGIN
from linvit.studies.claims import CLAIMS
from linvit.studies.hypotheses import FAILS, HOLDS, Claim, at_least, better, equal, judge
from linvit.studies.results import Pair, Ref, Results

NOISE = 0.003  # of a row's accuracy, between seeds
CLAIMED, SEEDS, ROWS = 5, 5, 4
TESTS = (better, at_least, equal)


@dataclass
class Simulated:
    """A report with some claims, each of one or two tests in a study of its own, whose rows differ by the true
    differences from the first row."""

    truths: dict[str, float]  # kind of test → true difference
    rng: np.random.Generator
    drawn: dict[str, statistics.Verdicts] = field(default_factory=dict)

    def claims(self) -> list[Claim]:
        found = []
        for i in range(CLAIMED):
            kinds = [TESTS[(i + j) % len(TESTS)] for j in range(1 + i % 2)]
            tests = [kind(Ref(f"study-{i}", kind.__name__), Ref(f"study-{i}", "base")) for kind in kinds]
            found.append(Claim(f"000.{i}", "", "", tests))
        return found

    def pair(self, a: Ref, b: Ref) -> Pair:
        if a.study not in self.drawn:
            means = {"base": 0.0, **self.truths}
            seeds = 0.003 * self.rng.normal(size=SEEDS)  # shared by all rows
            scores = {
                name: dict(enumerate(0.8 + mean + seeds + NOISE * self.rng.normal(size=SEEDS)))
                for name, mean in means.items()
            }
            self.drawn[a.study] = statistics.judge(scores)
        names, comparison = self.drawn[a.study].names, self.drawn[a.study].comparison
        return Pair(comparison, names.index(a.row), names.index(b.row), "cpu", ACCURACY, "")


def wrong(truths: dict[str, float], word: str, studies: int) -> float:
    """The share of reports in which any claim gets this verdict."""
    rng, count = np.random.default_rng(0), 0
    for _ in range(studies):
        world = Simulated(truths, rng)
        count += any(found.word == word for found in judge(world.claims(), world))  # type: ignore[arg-type]
    return count / studies


STUDIES_DRAWN = 300
MOST = LEVEL + 2 * math.sqrt(LEVEL * (1 - LEVEL) / STUDIES_DRAWN)


def test_false_claims_are_rarely_said_to_hold():
    """At the edge of what each denies: no advantage, a loss of the margin, a difference of the margin."""
    assert wrong({"better": 0.0, "at_least": -MARGIN, "equal": MARGIN}, HOLDS, STUDIES_DRAWN) <= MOST


def test_claims_that_hold_by_the_margin_are_rarely_said_not_to():
    assert wrong({"better": MARGIN, "at_least": -MARGIN, "equal": -MARGIN}, FAILS, STUDIES_DRAWN) <= MOST


@pytest.mark.parametrize(
    ("truths", "word"),
    [
        ({"better": 0.05, "at_least": 0.02, "equal": 0.0}, HOLDS),
        ({"better": -0.05, "at_least": -0.06, "equal": 0.06}, FAILS),
    ],
)
def test_large_differences_are_found(truths, word):
    world = Simulated(truths, np.random.default_rng(1))
    found = [verdict.word for verdict in judge(world.claims(), world)]  # type: ignore[arg-type]
    assert found.count(word) >= CLAIMED - 1


class Imagined:
    """Results in which each thing that a test asks for is as a plan says: low, middling or high."""

    def __init__(self, plan: dict[str, int]):
        self.plan, self.asked = plan, {}

    def level(self, key: str) -> int:
        self.asked[key] = None
        return self.plan.get(key, 0)

    def pair(self, a: Ref, b: Ref) -> Pair:
        difference = 0.05 * self.level(f"{a} {b}")
        scores = {name: {s: 0.7 + d + 0.001 * ((s * k) % 3) for s in range(5)} for k, (name, d) in
                  enumerate({"a": difference, "b": 0.0, "c": 0.0}.items())}  # fmt: skip
        return Pair(statistics.judge(scores).comparison, 0, 1, "cpu", ACCURACY, "")

    def get(self, ref: Ref) -> SimpleNamespace:
        level = self.level(str(ref))
        bad = [f"seed {i}" for i in range(5)] if level < 0 else []
        return SimpleNamespace(diverged=bad, scores={i: 0.7 + 0.1 * level + 0.001 * i for i in range(5 - len(bad))})

    def row_records(self, ref: Ref, metric: str, **tags: str) -> list:
        value = 0.5 + 0.1 * self.level(f"{metric} {ref}")
        return [record(metric, value + 0.001 * seed, seed=seed) for seed in range(5)]

    def sized(self, report: str, metric: str, variant: str):
        value = 1.0 + 0.3 * self.level(f"{metric} {variant}")
        return record(metric, value, low=value - 0.01, high=value + 0.01, batch=8)


RECORDS_ALONE = {
    "paper-fig4",
    "paper-fig14",
    "paper-fig20-21",
    "002-non-finite",
}  # test_claims.py has both of their ends
JUDGED = [
    pytest.param(test, id=f"{claim.id} {i}")
    for claim in CLAIMS
    for i, test in enumerate(claim.tests)
    if test.studies and not RECORDS_ALONE & set(test.studies) and claim.id != "004.1"  # which is computed
]


@pytest.mark.parametrize("test", JUDGED)
def test_each_test_of_a_claim_can_come_out_either_way(test):
    """Some results show it, and some show the contrary."""
    first = Imagined({})
    test.run(first)
    keys = list(first.asked)
    plans = (
        itertools.product((-1, 0, 1), repeat=len(keys))
        if len(keys) <= 4
        else itertools.product((-1, 0, 1), repeat=1)  # all alike
    )
    shown = set()
    for plan in plans:
        values = plan if len(plan) == len(keys) else plan * len(keys)
        part = test.run(Imagined(dict(zip(keys, values, strict=True))))
        assert part.ran
        shown |= {"holds"} if part.holds <= LEVEL / 10 else set()
        shown |= {"fails"} if part.fails <= LEVEL / 10 else set()
        assert min(part.holds, part.fails) > LEVEL or part.holds != part.fails
    assert shown == {"holds", "fails"}


def test_what_is_imagined_is_all_that_tests_ask_for():
    assert {name for name in vars(Imagined) if not name.startswith("_")} - {"level"} <= set(dir(Results))
