"""What the verdicts promise, checked on simulated studies, and the arithmetic they rest on."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from linvit.report import statistics
from linvit.report.statistics import BEST, DIVERGED, MISSING, SAME, UNKNOWN, WORSE, compare, holm, interval

STUDIES = 1500
BOUND = 0.05 + 2.33 * np.sqrt(0.05 * 0.95 / STUDIES)  # the level, plus the 99 % error of estimating it


def simulated(means, sd, seeds, shared, studies=STUDIES, number=0):
    """(studies, variants, seeds) accuracies in points: a seed's effect shared by all variants, and each one's own."""
    rng = np.random.default_rng(number)
    noise = rng.normal(size=(studies, len(means), seeds)) * np.broadcast_to(sd, len(means))[:, None]
    return np.asarray(means)[:, None] + noise + shared * rng.normal(size=(studies, 1, seeds))


@pytest.mark.parametrize(
    "sd", [0.5, (2, 0.2, 0.2, 0.2, 0.2, 0.2), (0.1, 0.3, 0.5, 1, 2, 4)], ids=["equal", "one", "all"]
)
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_equal_variants_are_rarely_called_different(sd, seeds):
    studies = simulated([97.0] * 6, sd, seeds, shared=0.5)
    rate = np.mean([(compare(scores).p <= 0.05).any() for scores in studies])
    assert rate <= BOUND


@pytest.mark.parametrize("shared", [0.0, 0.5], ids=["independent", "paired"])
@pytest.mark.parametrize("means", [(2, 0, 0, 0, 0, 0), (2, 2, 2, 2, 2, 0), (2, 1, 1, 0.5, 1.5, 0)], ids=str)
def test_two_points_are_found_with_five_seeds(means, shared):
    studies = simulated(means, 0.5, 5, shared)
    rate = np.mean([compare(scores).p[0, 5] <= 0.05 for scores in studies])
    assert rate >= 0.8


def test_two_variants_are_compared_by_the_paired_t_test():
    a, b = np.random.default_rng(1).normal(size=(2, 7))
    found = compare(np.stack([a, b + 0.9]))
    assert found.p[0, 1] == pytest.approx(stats.ttest_rel(a, b + 0.9).pvalue)
    low, high = stats.ttest_rel(a, b + 0.9).confidence_interval()
    assert found.margin[0, 1] == pytest.approx((high - low) / 2)


def test_holm():
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert len(holm(np.array([]))) == 0


def test_interval():
    found = interval([0.9, 0.92, 0.97])
    assert found is not None
    low, high = stats.t.interval(0.95, 2, loc=np.mean([0.9, 0.92, 0.97]), scale=stats.sem([0.9, 0.92, 0.97]))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    single = interval([0.5])
    assert single == statistics.Interval(0.5, None, None, 1)
    assert interval([]) is None
    assert interval([float("nan")]) is None


def scores(means, seeds=5, sd=0.003, number=0):
    rng = np.random.default_rng(number)
    return {name: dict(enumerate(mean + sd * rng.normal(size=seeds))) for name, mean in means.items()}


def test_verdicts():
    found = statistics.verdicts(scores({"a": 0.97, "b": 0.9701, "c": 0.9}))
    assert found.best in ("a", "b")
    assert found.of["c"] == WORSE
    assert {found.of["a"], found.of["b"]} == {BEST, SAME}
    assert 0 < found.loss("a") < 0.02 < found.loss("c")
    alone = statistics.verdicts(scores({"a": 0.97, "b": 0.9}))
    assert alone.of == {"a": BEST, "b": WORSE}
    assert alone.loss("a") == 0
    difference, p = alone.against_best("b") or (0, 1)
    assert -0.08 < difference < -0.06
    assert p < 0.05
    assert alone.against_best("a") is None


def test_too_few_seeds_are_said_to_be_too_few():
    for seeds in (1, 2):
        found = statistics.verdicts(scores({"a": 0.97, "b": 0.969, "c": 0.971}, seeds))
        assert sorted(found.of.values()) == [BEST, UNKNOWN, UNKNOWN]
    assert statistics.verdicts(scores({"a": 0.97, "b": 0.96}, 1)).loss("a") == float("inf")


def test_diverged_and_missing_variants_are_kept_and_compared_with_nothing():
    found = statistics.verdicts(scores({"a": 0.97, "b": 0.99}) | {"c": {}}, diverged=["b"])
    assert found.of == {"a": BEST, "b": DIVERGED, "c": MISSING}
    assert statistics.verdicts({"c": {}}).best is None


def test_seeds_that_some_variants_lack():
    table = scores({"a": 0.97, "b": 0.95, "c": 0.9}, 6)
    del table["b"][0], table["c"][5]
    assert statistics.verdicts(table).of == {"a": BEST, "b": WORSE, "c": WORSE}


def test_a_difference_of_one_image_is_not_believed():
    """The same one test image in every seed has no variance at all, and proves nothing."""
    same = {"a": dict.fromkeys(range(5), 0.95), "b": dict.fromkeys(range(5), 0.95 - 1 / 360)}
    assert statistics.verdicts(same, resolution=1 / 360).of["b"] == SAME
    equal = statistics.verdicts({"a": {0: 0.9, 1: 0.9, 2: 0.9}, "b": {0: 0.9, 1: 0.9, 2: 0.9}})
    assert set(equal.of.values()) == {BEST, SAME}
