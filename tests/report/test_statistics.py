"""What the verdicts promise, checked on simulated studies, and the arithmetic they rest on."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from linvit.report import comparison, statistics
from linvit.report.comparison import compare, dunnett
from linvit.report.merit import ACCURACY
from linvit.report.statistics import DIVERGED, MISSING, OPEN, UNKNOWN, WORSE, interval, judge


def benchmark(name: str):
    """A script of benchmarks/ as a module."""
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


decisions, folded = benchmark("decisions"), benchmark("folds")
BEST, WITHIN = ACCURACY.best, ACCURACY.within(0.01)


def at_most(rate, studies):
    """The rate, plus the standard error of estimating it: random seeds are fixed, so a test that passes stays so, and
    a true rate of 8 % would seldom pass for 5 %."""
    return rate + math.sqrt(rate * (1 - rate) / studies)


@pytest.mark.parametrize(
    ("k", "deviation", "images", "studies"),
    [
        (2, 0.003, 0, 700),
        (2, 0.005, 0, 700),
        (2, (0.002, 0.01), 0, 400),
        (5, 0.003, 0, 200),
        (2, 0.003, 400, 300),
        (3, 0.002, 2000, 100),
    ],
)
def test_who_loses_the_margin_is_rarely_called_within_it(k, deviation, images, studies):
    """Over both looks, where every other variant loses exactly the margin: the worst case."""
    found = decisions.rates(decisions.accuracies(k, 0.01), deviation, images, studies)
    assert found.wrong <= at_most(0.05, studies)


@pytest.mark.parametrize("loss", [0.0, 0.02])
@pytest.mark.parametrize(
    ("k", "deviation", "images", "studies"),
    [
        (2, 0.005, 0, 400),
        (3, 0.005, 0, 300),
        (5, 0.003, 0, 200),
        (3, (0.002, 0.004, 0.006), 0, 200),
        (2, 0.002, 4000, 60),
    ],
)
def test_the_seeds_that_are_named_settle_it(k, deviation, images, studies, loss):
    found = decisions.rates(decisions.accuracies(k, loss), deviation, images, studies)
    assert found.named > 0.5
    assert found.settled >= 0.8
    assert found.wrongly_worse <= at_most(0.05, studies)


def test_images_that_cannot_settle_it_are_known():
    found = decisions.rates(decisions.accuracies(2, 0.0), 0.002, 359, 150)
    assert found.undecided > 0.7
    assert found.named < 0.3


@pytest.mark.parametrize(("count", "freedom", "level"), [(4, 8, 0.05), (2, math.inf, 0.05), (9, 2, 0.0225)])
def test_dunnetts_constant(count, freedom, level):
    rng = np.random.default_rng(0)
    z, s = rng.normal(size=(200_000, count + 1)), 1.0
    if math.isfinite(freedom):
        s = np.sqrt(rng.chisquare(freedom, (200_000, 1)) / freedom)
    largest = ((z[:, 1:] - z[:, :1]) / math.sqrt(2) / s).max(axis=1)
    assert np.mean(largest > dunnett(count, freedom, level)) == pytest.approx(level, rel=0.05)
    assert dunnett(1, freedom, level) == pytest.approx(stats.t.ppf(1 - level, freedom))


def test_two_variants_are_compared_by_the_paired_t_test():
    a, b = np.random.default_rng(1).normal(size=(2, 7))
    found = compare(np.stack([a, b + 0.9]))
    low, high = stats.ttest_rel(a, b + 0.9).confidence_interval()
    assert found.half(0.025)[0, 1] == pytest.approx((high - low) / 2)


def test_images_are_a_sample_beside_seeds():
    """The variance of a mean over both, by the mean squares of a two-way layout."""
    rng = np.random.default_rng(2)
    right = rng.random((2, 5, 300)) < np.clip(0.9 + 0.1 * rng.normal(size=300), 0, 1)
    found = compare(right.mean(axis=-1), list(right))
    d = right[0].astype(float) - right[1]
    images, rest = 5 * d.mean(axis=0).var(ddof=1), d - d.mean(axis=0) - d.mean(axis=1)[:, None] + d.mean()
    residual = (rest**2).sum() / (4 * 299)
    assert found.images[0, 1] == pytest.approx(max(0, images - residual) / (5 * 300), abs=1e-9)
    assert found.noise[0, 1] == pytest.approx(d.mean(axis=1).var(ddof=1))


def test_interval():
    found = interval([0.9, 0.92, 0.97])
    assert found is not None
    low, high = stats.t.interval(0.95, 2, loc=np.mean([0.9, 0.92, 0.97]), scale=stats.sem([0.9, 0.92, 0.97]))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    single = interval([0.5])
    assert single == statistics.Interval(0.5, None, None, 1)
    assert interval([]) is None
    assert interval([float("nan")]) is None


def scores(means, seeds=5, sd=0.002, number=0):
    rng = np.random.default_rng(number)
    return {name: dict(enumerate(mean + sd * rng.normal(size=seeds))) for name, mean in means.items()}


def words(found):
    return {name: standing.word for name, standing in found.of.items()}


def test_verdicts():
    found = judge(scores({"a": 0.97, "b": 0.9701, "c": 0.9}))
    assert found.best in ("a", "b")
    assert sorted(words(found).values()) == sorted([BEST, WITHIN, WORSE])
    assert found.of["c"].word == WORSE
    a, c = found.of["a"], found.of["c"]
    assert a.loses_at_most is not None
    assert c.loses_at_least is not None
    assert a.loses_at_most < 0.01 < c.loses_at_least < 0.07
    assert c.behind is not None
    assert c.over_seeds is not None
    assert c.over_seeds[0] < c.behind < c.over_seeds[1] < -0.06
    assert c.over_images is None
    alone = judge(scores({"a": 0.97, "b": 0.9}))
    assert words(alone) == {"a": BEST, "b": WORSE}
    assert alone.of["a"].shown
    assert alone.of["a"].behind is None


def test_the_margin_decides():
    table = scores({"a": 0.97, "b": 0.965})
    assert words(judge(table, margin=0.02))["b"] == "within 2 points"
    assert words(judge(table, margin=0.001))["b"] == WORSE


def test_too_few_seeds_are_said_to_be_too_few():
    for seeds in (1, 2):
        found = judge(scores({"a": 0.97, "b": 0.969, "c": 0.971}, seeds))
        assert sorted(words(found).values()) == [BEST, UNKNOWN, UNKNOWN]
        assert not any(standing.shown for standing in found.of.values())


def test_diverged_and_missing_variants_are_kept_and_compared_with_nothing():
    found = judge(scores({"a": 0.97, "b": 0.99}) | {"c": {}}, diverged=["b"])
    assert words(found) == {"a": BEST, "b": DIVERGED, "c": MISSING}
    assert judge({"c": {}}).best is None


def test_seeds_that_some_variants_lack():
    table = scores({"a": 0.97, "b": 0.95, "c": 0.9}, 6)
    del table["b"][0], table["c"][5]
    assert words(judge(table)) == {"a": BEST, "b": WORSE, "c": WORSE}


def test_the_best_is_found_over_shared_seeds():
    """More, harder seeds of two variants do not make the third the best."""
    table = {
        "a": {0: 0.97, 1: 0.97, 2: 0.97, 3: 0.90, 4: 0.90},
        "b": {0: 0.96, 1: 0.96, 2: 0.96, 3: 0.89, 4: 0.89},
        "c": {0: 0.965, 1: 0.965, 2: 0.965},
    }
    assert judge(table).best == "a"


def test_a_difference_of_one_image_is_not_believed():
    """The same one test image in every seed has no variance at all, and proves nothing."""
    same = {"a": dict.fromkeys(range(5), 0.95), "b": dict.fromkeys(range(5), 0.95 - 1 / 360)}
    assert words(judge(same, resolution=1 / 360, margin=0.001))["b"] == OPEN
    equal = judge({"a": {0: 0.9, 1: 0.9, 2: 0.9}, "b": {0: 0.9, 1: 0.9, 2: 0.9}})
    assert set(words(equal).values()) == {BEST, WITHIN}


def test_what_would_settle_it():
    table = {
        "a": {0: 0.970, 1: 0.975, 2: 0.972},
        "b": {0: 0.974, 1: 0.966, 2: 0.968},
        "c": dict.fromkeys(range(3), 0.9),
    }
    found = judge(table)
    assert found.of["b"].undecided
    seeds, who, _ = found.settle(["b"])
    assert 6 <= seeds <= 30
    assert who == ["a", "b"]  # c is out of it
    few = np.random.default_rng(0).random((2, 3, 100)) < 0.8
    right = {name: dict(enumerate(few[i])) for i, name in enumerate("ab")}
    found = judge({name: {s: float(x.mean()) for s, x in of.items()} for name, of in right.items()}, right)
    assert found.settle("ab")[0] == math.inf


def test_images_that_agree_by_chance_prove_nothing():
    """Two that are right on the same 359 images may still differ by a point; on the same 20,000 they do not."""
    for images, word in ((359, OPEN), (20_000, WITHIN)):
        right = {name: {s: np.arange(images) % 50 > 0 for s in range(5)} for name in "ab"}
        scores = {name: {s: float(x.mean()) for s, x in of.items()} for name, of in right.items()}
        found = judge(scores, right, resolution=1 / images)
        assert word in words(found).values()
        assert found.too_few_images is (word == OPEN)


def test_studies_with_few_images_are_rarely_wrong():
    """Nearly all images are right, and the other truly loses the margin: the worst case for the noise of images."""
    rng, studies, images, wrong = np.random.default_rng(0), 300, 500, 0
    for _ in range(studies):
        hard = rng.random(images) < 0.01  # of these the second knows none
        right = np.stack([rng.random((10, images)) < 0.999, (rng.random((10, images)) < 0.999) & ~hard])
        seen = {name: dict(enumerate(right[i])) for i, name in enumerate("ab")}
        scores = {name: {s: float(x.mean()) for s, x in of.items()} for name, of in seen.items()}
        wrong += judge(scores, seen, resolution=1 / images).of["b"].shown
    assert wrong / studies <= at_most(0.025, studies)


def test_a_second_look_takes_no_more_seeds_than_are_allowed():
    """From 16 seeds on, twice as many are more than 30; that does not make it hopeless."""
    rng = np.random.default_rng(1)
    a, b = 0.9 + 0.010 * rng.normal(size=(2, 16))
    found = judge({"a": dict(enumerate(a)), "b": dict(enumerate(b - b.mean() + a.mean() - 0.003))})
    assert found.of["b"].undecided
    assert found.settle(["b"])[0] == 30


def corrected(d: np.ndarray, held_out: float) -> tuple[float, float]:
    """Nadeau and Bengio by hand: the interval of the mean of d, one value for each run, of which so many times as many
    images as were trained on were held out."""
    n, mean = len(d), sum(d) / len(d)
    variance = sum((x - mean) ** 2 for x in d) / (n - 1)
    half = stats.t.ppf(0.975, n - 1) * math.sqrt((1 / n + held_out) * variance)
    return mean - half, mean + half


@pytest.mark.parametrize(("folds", "seeds"), [(3, 1), (5, 1), (7, 3)])
def test_folds_get_the_corrected_resampled_t(folds, seeds):
    shared = 1 / (folds - 1)
    a, b = 0.9 + 0.02 * np.random.default_rng(folds).normal(size=(2, folds * seeds))
    found = interval(a, shared)
    assert found is not None
    assert (found.low, found.high) == pytest.approx(corrected(a, shared))
    pair = compare(np.stack([a, b]), folds=folds)
    low, high = corrected(a - b, shared)
    assert pair.half(0.025)[0, 1] == pytest.approx((high - low) / 2)
    runs = [(seed, fold) for seed in range(seeds) for fold in range(folds)]
    standing = judge({"a": dict(zip(runs, a + 1, strict=True)), "b": dict(zip(runs, b, strict=True))}, folds=folds)
    assert standing.of["b"].over_seeds == pytest.approx(corrected(b - a - 1, shared))
    assert pair.half(0.025)[0, 1] > compare(np.stack([a, b])).half(0.025)[0, 1]


def test_folds_that_agree_by_chance_are_as_noisy_as_their_images():
    """Every fold has the same difference, but the images that only one model knows are a sample, too."""
    images, hand = 1000, np.arange(1000) % 5
    right = np.ones((2, 1, images), dtype=bool)
    right[0, 0, :20] = right[1, 0, -20:] = False
    runs = np.stack([right[:, 0, hand == fold].mean(axis=-1) for fold in range(5)], axis=-1)
    pair = compare(runs, list(right), resolution=5 / images, folds=5)
    half = float(stats.norm.ppf(0.975) * math.sqrt((right[0, 0].astype(float) - right[1, 0]).var(ddof=1) / images))
    assert pair.half(0.025)[0, 1] == pytest.approx(half, rel=1e-4)
    assert pair.exceeds(0, 1, -half) == pytest.approx(0.025, rel=1e-3)
    few = math.sqrt(0.1 * 0.9 / images) * stats.norm.ppf(0.975)  # to refute a loss of 10 points
    assert pair.half(0.025, loss=0.1)[0, 1] == pytest.approx(few, rel=1e-4)
    assert compare(runs, resolution=5 / images, folds=5).half(0.025)[0, 1] < half


def test_images_of_an_incomplete_seed_are_not_compared():
    right = np.random.default_rng(0).random((2, 50)) < 0.9
    scores = {
        name: {(0, fold): float(x[fold::5].mean()) for fold in range(5)} for name, x in zip("ab", right, strict=True)
    }
    seen = {name: {0: x} for name, x in zip("ab", right, strict=True)}
    assert np.isfinite(judge(scores, seen, folds=5).comparison.images[0, 1])
    scores["b"].pop((0, 0))
    assert not np.isfinite(judge(scores, seen, folds=5).comparison.images).any()


@pytest.mark.parametrize(
    ("folds", "k", "deviation", "share"),
    [(5, 2, 0.0005, 0.0), (5, 2, 0.01, 0.35), (10, 2, 0.006, 0.2), (3, 3, 0.003, 0.35)],
)
def test_folds_rarely_call_within_the_margin_what_loses_it(folds, k, deviation, share):
    """Over both looks, in the worst case, though models of all folds were trained on mostly the same images. An error
    rate of 8 % would pass with a probability of 1 %."""
    truth = decisions.accuracies(k, 0.01, folded.TOP)
    found = folded.rates(truth, deviation, share, 400, folds)
    assert found.wrong <= 0.05
    assert found.wrongly_worse <= 0.05
    assert found.coverage >= 0.95


def cross_validated(rng, folds: int, seeds: int, images: int = 100, features: int = 11) -> np.ndarray:
    """(2, runs): two learners that are equally good, each with features of its own; nearest class mean."""
    labels = np.arange(images) % 2
    x = rng.normal(size=(2, images, features)) + 0.35 * (2 * labels[:, None] - 1)
    found = []
    for _ in range(seeds):
        hand = rng.permutation(images) % folds
        for fold in range(folds):
            train, test = hand != fold, hand == fold
            means = [x[:, train & (labels == label)].mean(axis=1) for label in (0, 1)]
            w, middle = means[1] - means[0], (means[1] + means[0]) / 2
            said = np.einsum("lnf,lf->ln", x[:, test] - middle[:, None], w) > 0
            found.append((said == labels[test]).mean(axis=1))
    return np.array(found).T


@pytest.mark.parametrize(("folds", "seeds", "naive"), [(5, 1, 0.05), (5, 3, 0.2)])
def test_equal_learners_are_told_apart_as_rarely_as_promised(folds, seeds, naive):
    """But not, least with several seeds, if runs are taken for independent."""
    rng, studies = np.random.default_rng(folds + seeds), 400
    wrong = np.zeros(2)
    for _ in range(studies):
        scores = cross_validated(rng, folds, seeds)
        d = scores[0].mean() - scores[1].mean()
        wrong += [abs(d) > compare(scores, resolution=1e-9, folds=of).half(0.025)[0, 1] for of in (folds, 0)]
    assert wrong[0] / studies <= 0.05
    assert wrong[1] / studies > naive


def test_more_seeds_of_folds_settle_only_so_much():
    """What folds share does not become less with more of them: it takes more images."""
    table = {
        "a": {(0, i): 0.95 + 0.001 * (-1) ** i for i in range(5)},
        "b": {(0, i): 0.95 - 0.001 * (-1) ** i for i in range(5)},
    }
    assert judge(table, margin=0.002).settle(["b"])[0] == 27
    seeds, who, times = judge(table, margin=0.002, folds=5).settle(["b"])
    assert seeds == math.inf
    assert who == ["a", "b"]
    assert times == pytest.approx(11.91, abs=0.01)


@pytest.mark.parametrize("than", [-0.01, 0.0, 0.004])
def test_a_pair_exceeds_as_a_paired_t_says(than):
    """Two variants alone: the noise is their own, so it is the textbook's test."""
    rng = np.random.default_rng(3)
    a, b = 0.91 + 0.004 * rng.normal(size=(2, 5)) + np.array([[0.012], [0.0]])
    pair = compare(np.stack([a, b]))
    expected = stats.ttest_rel(a, b + than, alternative="greater").pvalue
    assert pair.exceeds(0, 1, than) == pytest.approx(expected, abs=2e-6)
    assert pair.exceeds(1, 0) == 1.0
    level = pair.exceeds(0, 1, than)
    assert pair.half(level, 1)[0, 1] == pytest.approx(pair.difference[0, 1] - than, rel=1e-3)


def test_two_seeds_exceed_nothing():
    assert compare(np.array([[0.99, 0.99], [0.1, 0.1]])).exceeds(0, 1) == 1.0


def test_holm():
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.6, 0.9]) == [1.0, 1.0]
    assert statistics.holm([]) == []


def test_models_without_training_differ_by_test_images_alone():
    """One run of each suffices, and the interval is that of paired images; trained models need more runs."""
    source, count = np.random.default_rng(5), 1009
    right = {name: {0: source.random(count) < share} for name, share in (("a", 0.9), ("b", 0.7))}
    scores = {name: {0: float(of[0].mean())} for name, of in right.items()}
    found = statistics.judge(scores, right, resolution=1 / count, margin=0.05, enough=1)
    d = right["b"][0].astype(float) - right["a"][0]
    half = 1.959964 * np.sqrt(d.var(ddof=1) / count)
    assert found.of["b"].over_images == pytest.approx((d.mean() - half, d.mean() + half), abs=1e-5)
    assert (found.of["b"].word, found.of["b"].over_seeds) == (statistics.WORSE, None)
    bound = comparison.dunnett(1, np.inf, comparison.LOOK) * np.sqrt(d.var(ddof=1) / count)
    assert found.of["b"].loses_at_least == pytest.approx(-d.mean() - bound, abs=1e-4)
    assert statistics.judge(scores, right, resolution=1 / count, margin=0.05).of["b"].word == statistics.UNKNOWN


def test_more_test_images_settle_what_no_seed_can():
    source = np.random.default_rng(5)
    right = {name: {0: source.random(200) < 0.8} for name in "ab"}
    scores = {name: {0: float(of[0].mean())} for name, of in right.items()}
    found = statistics.judge(scores, right, resolution=1 / 200, margin=0.01, enough=1)
    seeds, who, times = found.settle("ab")
    assert (seeds, sorted(who)) == (np.inf, ["a", "b"])
    assert 1 < times < np.inf
