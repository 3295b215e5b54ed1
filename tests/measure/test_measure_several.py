"""Average precision against scikit-learn's, the jackknife and thresholds against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score

from linvit.measure.several import Several, average_precision, best_threshold, logit, thresholds, without_each

RNG = np.random.default_rng(11)
N = 37


def draw(share=0.3, n=N):
    return (RNG.random(n) < share).astype(np.uint8), RNG.normal(size=n).astype(np.float32)


def test_average_precision_is_scikit_learns():
    for share in (0.1, 0.5, 0.9):
        true, scores = draw(share)
        true[3] = 1
        assert average_precision(true, scores) == pytest.approx(average_precision_score(true, scores), abs=1e-12)
    assert np.isnan(average_precision(np.zeros(5), np.arange(5.0)))


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_the_order_of_equal_scores_has_no_effect(levels):
    true = draw()[0]
    scores = RNG.integers(0, levels, N) / 3
    for order in (np.arange(N), np.argsort(true), np.argsort(-true.astype(int))):
        expected = average_precision_score(true, scores)
        assert average_precision(true[order], scores[order]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("levels", [1, 2, 5, None])
def test_without_each_image_is_brute_force(levels):
    true, scores = draw()
    scores = scores if levels is None else RNG.integers(0, levels, N) / 3
    expected = [average_precision_score(np.delete(true, i), np.delete(scores, i)) for i in range(N)]
    np.testing.assert_allclose(without_each(true, scores), expected, atol=1e-12)


def test_without_the_only_image_of_a_class_there_is_no_precision():
    alone = np.eye(1, 5, 2)[0]
    assert np.isnan(without_each(alone, np.arange(5.0))[2])


def found(n=N, classes=3):
    labels, logits = (np.stack(part, 1) for part in zip(*(draw(0.4, n) for _ in range(classes)), strict=True))
    logits = logits + 2 * labels
    return Several(0.5, labels, logits, thresholds(labels, logits), ["a", "b", "c"][:classes])


def test_pseudo_values_have_the_jackknifes_mean_and_spread():
    one = found(400)
    assert one.of_images.mean() == pytest.approx(one.mean_average_precision, abs=0.01)
    error = one.of_images.std(ddof=1) / 20
    boot = []
    for _ in range(200):
        rows = RNG.integers(0, 400, 400)
        boot.append(np.mean([average_precision(one.labels[rows, c], one.logits[rows, c]) for c in range(3)]))
    assert 0.8 < error / np.std(boot) < 1.25  # ± 5 % of the bootstrap's own, four times


def test_thresholds_give_the_best_f1():
    true, scores = draw()
    at = best_threshold(true, scores)
    tried = [*scores, -np.inf]
    best = max(f1_score(true, scores > x, zero_division=0.0) for x in tried)
    assert f1_score(true, scores > logit(np.array(at))) == pytest.approx(best)
    assert best_threshold(np.zeros(4), np.arange(4.0)) == 0.5
    ties = best_threshold(np.array([1, 0, 1, 0]), np.array([1.0, 1.0, 1.0, 0.0]))
    assert 0.5 < ties < 1 / (1 + np.exp(-1.0))


@pytest.mark.parametrize(("high", "low"), [(60.0, 40.0), (-40.0, -60.0), (-14.5, -15.0)])
def test_thresholds_have_a_finite_logit(high, low):
    at = best_threshold(np.array([1, 0]), np.array([high, low]))
    assert 1e-6 - 1e-12 <= at <= 1 - 1e-6 + 1e-12
    assert np.isfinite(logit(np.array(at)))


def test_scores_by_class_are_scikit_learns():
    one = found()
    given = one.logits > logit(one.thresholds)
    for c, (_, ap, _, _, f1) in enumerate(one.per_class()):
        assert ap == pytest.approx(average_precision_score(one.labels[:, c], one.logits[:, c]))
        assert f1 == pytest.approx(f1_score(one.labels[:, c], given[:, c]))
    assert one.right == pytest.approx((given == one.labels).mean())


def test_a_class_that_no_image_has_does_not_count():
    one = found()
    labels = np.concatenate([one.labels, np.zeros((N, 1), np.uint8)], 1)
    logits = np.concatenate([one.logits, RNG.normal(size=(N, 1))], 1)
    more = Several(0.5, labels, logits, np.full(4, 0.5), ["a", "b", "c", "d"])
    assert more.mean_average_precision == pytest.approx(one.mean_average_precision)
    np.testing.assert_allclose(more.of_images, one.of_images)
