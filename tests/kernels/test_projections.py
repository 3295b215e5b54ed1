"""Ω: orthogonal blocks, the lengths of rows, seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from linvit.kernels.projections import Omega, draw
from linvit.randomness import generator

D = 13


def rows(projection: str, norms: str, m: int = 31, d: int = D, key: int = 0) -> torch.Tensor:
    return draw(m, d, projection, norms, generator("test", key))  # type: ignore[arg-type]


@pytest.mark.parametrize("norms", ["chi", "sqrt"])
@pytest.mark.parametrize("projection", ["orthogonal", "hadamard"])
def test_rows_of_a_block_are_orthogonal(projection, norms):
    """T14."""
    d = D if projection == "orthogonal" else 16
    omega = rows(projection, norms, m=2 * d + 3, d=d)
    for start in range(0, len(omega), d):
        unit = torch.nn.functional.normalize(omega[start : start + d])
        assert (unit @ unit.t() - torch.eye(len(unit), dtype=unit.dtype)).abs().max() < d * torch.finfo(unit.dtype).eps
    between = torch.nn.functional.normalize(omega[:d]) @ torch.nn.functional.normalize(omega[d : 2 * d]).t()
    assert between.abs().max() > 1e-3


@pytest.mark.parametrize("projection", ["orthogonal", "iid", "hadamard"])
def test_squared_lengths_are_chi_square(projection):
    """T14, by the test of Kolmogorov and Smirnov. A padded Hadamard row is only nearly so; a whole one is."""
    d = 16 if projection == "hadamard" else D
    squares = torch.cat([rows(projection, "chi", d=d, key=key).square().sum(1) for key in range(40)])
    assert stats.kstest(squares.numpy(), stats.chi2(d).cdf).pvalue > 0.001
    assert stats.kstest(squares.numpy(), stats.chi2(d + 2).cdf).pvalue < 1e-9


@pytest.mark.parametrize("projection", ["orthogonal", "iid", "hadamard"])
def test_sqrt_norms(projection):
    lengths = rows(projection, "sqrt").norm(dim=1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, math.sqrt(D)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("projection", ["orthogonal", "iid"])
def test_coordinates_are_normal(projection):
    """Each coordinate of each row, the first and the last of a block too, where LAPACK's signs would show."""
    many = torch.stack([rows(projection, "chi", m=5, d=5, key=key) for key in range(1000)])
    worst = min(stats.kstest(many[:, i, j].numpy(), "norm").pvalue for i in range(5) for j in range(5))
    assert worst > 0.001 / 25


def test_hadamard_coordinates_have_mean_zero_and_variance_one():
    many = torch.stack([rows("hadamard", "chi", m=3, d=D, key=key) for key in range(2000)])
    z = many.mean(0) / many.std(0) * math.sqrt(len(many))
    assert z.abs().max() < stats.norm.isf(0.001 / 2 / z.numel())
    squares = many.square()
    z = (squares.mean(0) - 1) / squares.std(0) * math.sqrt(len(many))
    assert z.abs().max() < stats.norm.isf(0.001 / 2 / z.numel())


@pytest.mark.parametrize("d", [1, 2, 3, 64])
@pytest.mark.parametrize("projection", ["orthogonal", "iid", "hadamard"])
@pytest.mark.parametrize("m", [1, 67])
def test_any_size(projection, m, d):
    omega = rows(projection, "chi", m=m, d=d)
    assert omega.shape == (m, d)
    assert omega.isfinite().all()
    assert omega.any(1).all()
    assert len(np.unique(omega.numpy(), axis=0)) == m
    assert rows(projection, "sqrt", m=m, d=d).isfinite().all()


def test_seeded_by_seed_layer_and_step():
    def bits(seed: int, layer: int, step: int) -> torch.Tensor:
        omega = Omega(11, D, "orthogonal", "chi", seed, layer)
        omega.redraw(step)
        return omega.rows

    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 11, 1), (0, 1, 11), (0, 0, 1000)]
    drawn = [bits(*key) for key in keys]
    assert all(torch.equal(a, bits(*key)) for a, key in zip(drawn, keys, strict=True))
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_a_step_is_a_number_however_it_is_held():
    omega = Omega(11, D, "iid", "chi", 0, 0)
    omega.redraw(5)
    expected = omega.rows.clone()
    for step in (np.int64(5), torch.tensor(5)):
        omega.redraw(0)
        omega.redraw(step)  # type: ignore[arg-type]
        assert torch.equal(omega.rows, expected)


def test_draws_of_today_are_draws_of_tomorrow():
    """A resumed run must find its features: the seeding may not change between versions."""
    assert [int(torch.randint(1000, (), generator=generator("omega", 0, 1, step))) for step in range(3)] == [
        96,
        883,
        687,
    ]
