"""Trigonometric over positive features: the closed form against SPEC's numbers, against its parts, and Monte Carlo."""

from __future__ import annotations

import math

import pytest

from linvit.measure.angle import mse_ratios, ratio


def test_known_values():
    assert ratio(math.pi / 2, 1.0) == pytest.approx(0.43233, abs=1e-5)
    assert ratio(1.7426, 1.0) == pytest.approx(1.0, abs=1e-3)
    assert ratio(0.0, 1.3) == 0.0
    assert ratio(math.pi, 1.0) > 1e10  # positive features are exact there, but for rounding


@pytest.mark.parametrize(("angle", "length"), [(0.7, 0.6), (1.9, 1.3), (2.6, 1.7)])
def test_it_is_the_ratio_of_the_two_mean_squared_errors(angle, length):
    """MSE_trig = ½ e^{‖z‖²} SM⁻² (1 − e^{−‖Δ‖²})² and MSE_pos = e^{‖z‖²} SM² (1 − e^{−‖z‖²}), for one row."""
    z, delta = (2 * length**2 * (1 + sign * math.cos(angle)) for sign in (1, -1))
    kernel = math.exp(length**2 * math.cos(angle))
    trig = 0.5 * math.exp(z) * kernel**-2 * (1 - math.exp(-delta)) ** 2
    positive = math.exp(z) * kernel**2 * (1 - math.exp(-z))
    assert ratio(angle, length) == pytest.approx(trig / positive)


def test_the_kernels_follow_the_closed_form():
    """Within four of the intervals' half-widths (which are two deviations), and an interval tells something."""
    records = [r for r in mse_ratios(lengths=[], slices=[0.5, 1.0], rows=2**15) if r.tags["by"] == "Monte Carlo"]
    assert {r.tags["length"] for r in records} == {0.5, 1.0}
    assert all(2 * r.tags["length"] ** 2 * (1 + math.cos(r.tags["angle"])) <= 2 for r in records)
    for record in records:
        half = (record.tags["high"] - record.tags["low"]) / 2
        exact = ratio(record.tags["angle"], record.tags["length"])
        assert abs(record.value - exact) < 2 * half + 0.02 * exact
        assert half < 0.5 * exact


@pytest.mark.parametrize("angles", [8, 64])
def test_few_angles_are_drawn_too(monkeypatch, angles):
    monkeypatch.setattr("linvit.measure.angle._estimate", lambda angle, length, rows, seed: (1.0, 0.1))
    found = [r for r in mse_ratios(lengths=[], slices=[1.0], angles=angles) if r.tags["by"] == "Monte Carlo"]
    assert [round(8 * r.tags["angle"] / math.pi, 3) for r in found] == [4, 5, 6, 7]


def test_a_record_for_each_angle_and_length():
    records = list(mse_ratios(lengths=[0.3, 0.9], slices=[], angles=5))
    assert [(r.tags["length"], round(r.tags["angle"] / math.pi, 3)) for r in records] == [
        (length, i / 5) for length in (0.3, 0.9) for i in range(5)
    ]


@pytest.mark.parametrize(
    ("bad", "word"), [({"lengths": [0.0]}, "length=0.0"), ({"angles": 1}, "angles=1"), ({"rows": 3}, "rows=3")]
)
def test_bad_sizes(bad, word):
    with pytest.raises(ValueError, match=word):
        list(mse_ratios(**bad))
