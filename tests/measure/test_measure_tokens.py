"""Tokens that attention treats alike, and whole models by length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from linvit.data import load_data
from linvit.measure.lengths import model_times
from linvit.measure.memory import Limits
from linvit.measure.timing import Timing
from linvit.measure.tokens import attended, frequencies, nearness, similarity
from linvit.metrics import problems
from linvit.models import model_config
from linvit.studies.paper_charts import agreement, telling_heads, two_heads

SHAPE = {"stem": "masked-pixel", "channels": 1, "dim": 8, "depth": 1, "heads": 2, "mlp_dim": 8, "positions": "sincos"}


def test_frequencies_are_those_of_the_pixels():
    data = load_data("synthetic:images=40,size=6,channels=1")
    config = model_config(**SHAPE, image_size=6, levels=5)
    pixels = data.train.images.astype(int) * 5 // 256
    expected = np.bincount(pixels.ravel(), minlength=5) / pixels.size
    assert frequencies(data.train, config, batch=7) == pytest.approx(expected)


def test_attention_is_summed_by_the_level_of_the_keys():
    weights = torch.zeros(2, 3, 4, 4)
    weights[:, 0, :, 1] = 1.0  # head 0 looks at token 1 alone
    weights[:, 1] = 0.25  # head 1 at all alike
    weights[:, 2, :, 0], weights[:, 2, :, 3] = 0.5, -0.5  # signs do not cancel
    levels = torch.tensor([[0, 2, 2, 1], [0, 2, 1, 1]])
    found = attended(weights, levels, 4)
    assert found[0].tolist() == pytest.approx([0, 0, 1, 0])
    assert found[1].tolist() == pytest.approx([0.25, 0.375, 0.375, 0])
    assert found[2].tolist() == pytest.approx([0.5, 0.5, 0, 0])


def test_levels_that_the_same_heads_attend_to_are_alike():
    given = [torch.tensor([[0.4, 0.4, 0.2, 0.0], [0.1, 0.1, 0.8, 0.0]]), torch.tensor([[0.3, 0.2, 0.5, 0.0]])]
    found = similarity(given)
    assert found[0, 1] > 0.8
    assert found[0, 2] < -0.9
    assert np.diag(found)[:3] == pytest.approx(1)
    assert np.isnan(found[3]).all()  # it never occurs
    assert np.array_equal(found, found.T, equal_nan=True)


def test_neighbouring_levels_are_near():
    found = nearness(5)
    assert (found[0, 0], found[0, 4], found[1, 2]) == (1, 0, 0.75)


def test_telling_heads_are_found():
    side, n = 4, 17  # one token is no place of the image
    local, fixed, flat = np.zeros((n, n)), np.full((n, n), 1e-3), np.ones((n, n)) / n
    np.fill_diagonal(local, 1)
    fixed[:, 5] = 1
    weights = np.stack([np.stack([flat, fixed]), np.stack([local, flat])])
    assert telling_heads(weights, side) == {"neighbours": (1, 0), "fixed tokens": (0, 1)}
    chart = two_heads(weights, side).to_dict()
    assert len(chart["hconcat"]) == 4


def test_agreement_needs_pairs():
    assert np.isnan(agreement([]))


def test_models_are_timed_up_to_the_limit():
    timing = Timing(rounds=2)
    found = list(model_times(["softmax", "identity"], SHAPE, sides=(4, 6), timing=timing, limits=Limits(memory=2**30)))
    assert [problem for record in found for problem in problems(record)] == []
    timed = {(r.tags["attention"], r.tags["tokens"], r.tags["mode"]): r.value for r in found}
    assert set(timed) == {(a, n, m) for a in ("softmax", "identity") for n in (16, 36) for m in ("forward", "both")}
    assert all(timed.values())
    assert timed["softmax", 36, "both"] > timed["softmax", 36, "forward"]


def test_what_is_beyond_the_limit_is_refused_with_the_reason():
    found = list(model_times(["softmax"], SHAPE, sides=(4, 6, 8), timing=Timing(rounds=2), limits=Limits(seconds=1e-9)))
    assert [bool(r.value) for r in found] == [True, True, False, False]
    assert {r.tags["tokens"] for r in found if not r.value} == {36}
    assert all("more than 1e-09 s" in str(r.tags["refused"]) for r in found if not r.value)
