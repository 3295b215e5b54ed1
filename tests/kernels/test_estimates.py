"""Kernels against the mathematics: bias as a z-score over draws, mean squared errors against their formulas.

z = x + y, Δ = x − y, SM = e^{x·y}. Seeds are fixed, so a test passes always or never; thresholds are quantiles of the
normal distribution at 99.9 %, corrected for the number of comparisons of the whole file.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor

from linvit.kernels import KERNELS, create_kernel
from linvit.kernels import projections as projections_module
from linvit.kernels.pointwise import gauss_hermite
from linvit.kernels.projections import draw
from linvit.randomness import generator
from linvit.registry import signature_options

D, M, DRAWS = 7, 21, 500  # whole blocks of orthogonal rows, so that pieces of a long Ω are draws of their own
SOFTMAX = ["exp", "hyp", "trig", "oprf"]


def options(name: str) -> dict[str, inspect.Parameter]:
    return signature_options(KERNELS[name])


def make(text: str, head_dim: int) -> Any:
    return create_kernel(text, head_dim=head_dim)


def spec(name: str, **wanted: object) -> str:
    """The kernel without its ε: `exact` is for ε = 0."""
    idle = {"eps"} if "stabilizer" in options(name) else set()
    idle |= {"m"} if wanted.get("projection") == "none" else set()
    idle |= {"negative"} if getattr(KERNELS[name], "minimum", 0.0) == 0.0 else set()
    chosen = {key: value for key, value in ({"m": M, "eps": 0.0} | wanted).items() if key in {*options(name)} - idle}
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in chosen.items()) if chosen else name


def estimated() -> list[tuple[str, str]]:
    """(kernel, projection) for every kernel that estimates something at random; hadamard is not quite Gaussian."""
    found = []
    for name in KERNELS.names():
        for projection in ("orthogonal", "iid") if "projection" in options(name) else ():
            if make(spec(name, projection=projection), head_dim=D).exact(*pairs()) is not None:
                found.append((name, projection))
    return found


def pairs(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pairs of vectors with ‖x+y‖² ≤ 2: along ±(1, …, 1)/√d, where a missing sign shows, and at random."""
    source = torch.Generator().manual_seed(seed)
    ones = torch.ones(D, dtype=torch.float64) / math.sqrt(D)
    lengths = torch.rand(5, 1, generator=source, dtype=torch.float64) * 0.4 + 0.3
    x, y = (torch.nn.functional.normalize(torch.randn(5, D, generator=source, dtype=torch.float64)) for _ in "xy")
    x = torch.cat([0.7 * ones[None], -0.7 * ones[None], 1.2 * ones[None], -1.2 * ones[None], lengths * x])
    y = torch.cat([0.7 * ones[None], -0.7 * ones[None], 0.2 * ones[None], 0.2 * ones[None], lengths * y])
    assert (x + y).square().sum(-1).max() <= 2
    return x, y


ESTIMATED = estimated()


def threshold(sides: int = 2) -> float:
    comparisons = len(ESTIMATED) * len(pairs()[0])
    return float(stats.norm.isf(0.001 / comparisons / sides))


def scores(name: str, projection: str) -> Tensor:
    """z-scores of the estimates' means over draws, one per pair."""
    kernel = make(spec(name, projection=projection, m=M * DRAWS), head_dim=D).double()
    x, y = pairs()
    values = DRAWS * (kernel.phi(x) * kernel.phi(y)).view(len(x), -1, DRAWS, M).sum((1, 3))
    expected = kernel.exact(x, y)
    assert expected is not None
    # an estimate without variance (identity of orthogonal rows of one block has little) must be exact to rounding
    error = values.std(1) / math.sqrt(DRAWS) + 1e-12
    return (values.mean(1) - expected) / error


DRAWN: dict[tuple, Tensor] = {}


@pytest.fixture
def one_draw(monkeypatch):
    """Kernels that ask for the same rows get them without another QR for each block."""

    def drawn(m, d, projection, norms, _source):
        if (m, d, projection, norms) not in DRAWN:
            DRAWN[m, d, projection, norms] = draw(m, d, projection, norms, generator("once"))
        return DRAWN[m, d, projection, norms]

    monkeypatch.setattr(projections_module, "draw", drawn)


def test_every_registered_kernel_is_estimated_or_learned():
    learned = {name for name in KERNELS.names() if KERNELS[name].estimates.startswith("learned")}
    assert {name for name, _ in ESTIMATED} | learned == set(KERNELS.names())
    for name in learned:
        assert make(name, head_dim=D).exact(*pairs()) is None


@pytest.mark.parametrize(("name", "projection"), ESTIMATED)
def test_unbiased(name, projection, one_draw):
    """T1."""
    assert scores(name, projection).abs().max() < threshold()


@pytest.mark.parametrize("name", ["exp", "relu"])
def test_without_the_sign_fix_the_bias_shows(name, monkeypatch):
    """T1 can fail: LAPACK's Q alone is not Haar-distributed."""

    def raw(d: int, source: torch.Generator) -> Tensor:
        return torch.linalg.qr(torch.randn(d, d, generator=source, dtype=torch.float64))[0]

    monkeypatch.setattr(projections_module, "_haar", raw)
    assert scores(name, "orthogonal").abs().max() > 2 * threshold()


@pytest.mark.parametrize("name", [name for name in KERNELS.names() if "norms" in options(name)])
@pytest.mark.parametrize("norms", ["chi", "sqrt"])
def test_exact_knows_the_length_of_the_rows(name, norms):
    """Rows of length √d estimate another kernel than Gaussian ones: `exact` says which, or nothing."""
    kernel = make(spec(name, norms=norms, m=20011, projection="iid"), head_dim=3).double()
    x, y = (z[:, :3].contiguous() for z in pairs())
    expected = kernel.exact(x, y)
    if expected is None:
        assert norms == "sqrt"
        return
    products = kernel.phi(x) * kernel.phi(y)
    blocks = products.view(len(x), -1, 20011).sum(1) * 20011  # features of one row together
    z = (blocks.mean(1) - expected) / (blocks.std(1) / math.sqrt(20011) + 1e-12)
    assert z.abs().max() < float(stats.norm.isf(0.001 / 2 / len(x) / 40))


def closed_form(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The kernels as published, written again and independently."""

    def angle(x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
        a, b = x.numpy(), y.numpy()
        lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        return lengths, np.arccos(np.clip((a * b).sum(-1) / np.maximum(lengths, 1e-300), -1, 1))

    def relu(x, y):
        r, t = angle(x, y)
        return torch.from_numpy(r * (np.sin(t) + (np.pi - t) * np.cos(t)) / (2 * np.pi))

    def absolute(x, y):
        r, t = angle(x, y)
        return torch.from_numpy(2 / np.pi * r * (np.sin(t) + np.cos(t) * (np.pi / 2 - t)))

    def smreg(x, y):
        a, b = x.numpy(), y.numpy()
        z = np.square(a + b).sum(-1)
        series = [(D * z / 4) ** n / (special.poch(D / 2, n) * special.factorial(n)) for n in range(40)]
        return torch.from_numpy(sum(series) * np.exp(-(np.square(a) + np.square(b)).sum(-1) / 2))

    def softmax(x, y):
        return torch.exp((x * y).sum(-1))

    return {
        "exp": softmax,
        "hyp": softmax,
        "trig": softmax,
        "oprf": softmax,
        "smreg": smreg,
        "relu": relu,
        "abs": absolute,
        "gexp": lambda x, y: torch.exp((x + y).square().sum(-1) / 2),
        "identity": lambda x, y: (x * y).sum(-1),
        "cos": lambda x, y: (torch.exp(-(x - y).square().sum(-1) / 2) + torch.exp(-(x + y).square().sum(-1) / 2)) / 2,
    }[name]


@pytest.mark.parametrize("name", ["exp", "hyp", "trig", "oprf", "smreg", "gexp", "relu", "abs", "identity", "cos"])
def test_exact_is_the_published_kernel(name):
    kernel = make(spec(name, negative="literal"), head_dim=D).double()
    x, y = pairs()
    torch.testing.assert_close(kernel.exact(x, y), closed_form(name)(x, y), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["elu", "gelu", "sigmoid", "tanh", "elu1", "cos", "relu"])
def test_quadrature(name):
    """Against a fine grid over the bivariate normal, shift included."""
    kernel = make(spec(name), head_dim=D).double()
    x, y = (z[4:6] for z in pairs())

    def shifted(u: np.ndarray) -> np.ndarray:
        return kernel.f(torch.from_numpy(u).clone()).numpy() - (kernel.minimum or 0.0)

    for a, b, value in zip(x, y, kernel.exact(x, y), strict=True):
        na, nb = float(a.norm()), float(b.norm())
        c = float(a @ b) / na / nb
        grid = np.linspace(-8, 8, 1601)  # eight standard deviations leave out less than 1e-14
        s, t = np.meshgrid(grid, grid, indexing="ij")
        table = shifted(na * s) * shifted(nb * (c * s + math.sqrt(1 - c * c) * t))
        table = table * np.exp(-(s * s + t * t) / 2) / (2 * math.pi)
        expected = integrate.trapezoid(integrate.trapezoid(table, x=grid), x=grid)
        # a jump in f' (relu, whose closed form is exact) costs this grid O(step²), a jump in f″ costs Gauss–Hermite's
        # 160 nodes, about π/√320 apart in the middle, O(that³); elsewhere both converge beyond all powers
        node = math.pi / math.sqrt(320)
        tolerance = {"relu": (grid[1] - grid[0]) ** 2, "elu": node**3 / 1000, "elu1": node**3 / 1000}.get(name, 1e-9)
        assert abs(float(value) - expected) < tolerance


def test_gauss_hermite_is_exact_for_polynomials():
    """E (ω·x)²(ω·y)² = ‖x‖²‖y‖² + 2(x·y)²."""
    x, y = pairs()
    expected = x.square().sum(-1) * y.square().sum(-1) + 2 * (x * y).sum(-1).square()
    torch.testing.assert_close(gauss_hermite(torch.square, x, y), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in KERNELS.names() if "projection" in options(n)])
def test_deterministic_features_are_their_own_kernel(name):
    try:
        kernel = make(spec(name, projection="none"), head_dim=D).double()
    except ValueError as refusal:
        assert "projection=none" in str(refusal)  # noqa: PT017
        return
    x, y = pairs()
    if (expected := kernel.exact(x, y)) is not None:
        torch.testing.assert_close((kernel.phi(x) * kernel.phi(y)).sum(-1), expected, rtol=1e-12, atol=1e-12)
    assert kernel.phi(x).shape == (len(x), D)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("relu", lambda x: x.clamp_min(0) + 1e-3),
        ("elu1", lambda x: torch.where(x > 0, x + 1, x.exp()) + 1e-3),
        ("exp", torch.exp),
        ("gexp", lambda x: x.exp() + 1e-3),
        ("tanh", lambda x: x.tanh() + 1 + 1e-3),
        ("gelu", lambda x: x * torch.special.ndtr(x) + 0.16997120747990369 + 1e-3),
        ("elu", lambda x: torch.where(x > 0, x, x.exp() - 1) + 1 + 1e-3),
        ("abs", lambda x: x.abs() + 1e-3),
        ("sigmoid", lambda x: 1 / (1 + (-x).exp()) + 1e-3),
        ("cos", lambda x: x.cos() + 1 + 1e-3),
        ("identity", lambda x: x + 1e-3),
    ],
)
def test_deterministic_formulas(name, expected):
    x = 2 * torch.randn(5, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kernel = make(f"{name}:projection=none", head_dim=D)
    torch.testing.assert_close(kernel.phi(x), expected(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "least"), [("elu", None), ("gelu", None), ("cos", None), ("tanh", None)])
def test_shifted_features_are_not_negative(name, least):
    kernel = make(f"{name}:projection=none,eps=0,negative=shift", head_dim=1).double()
    u = torch.linspace(-9, 9, 200003, dtype=torch.float64)[:, None]
    lowest = float(kernel.phi(u).min())
    assert 0 <= lowest < 1e-3  # the minimum is the function's own, not less


# Mean squared errors


def single_draws(name: str, x: Tensor, y: Tensor, rows: int, **more: object) -> Tensor:
    """(rows,) independent estimates from one row of Ω each."""
    kernel = make(spec(name, m=rows, projection="iid"), head_dim=len(x)).double()
    products = kernel.phi(x, **more) * kernel.phi(y, **more)
    return products.view(-1, rows).sum(0) * rows


def formulas(name: str, x: Tensor, y: Tensor) -> float:
    """m·MSE of m independent rows."""
    z, delta = float((x + y).square().sum()), float((x - y).square().sum())
    sm = math.exp(float(x @ y))
    trig = 0.5 * math.exp(z) * sm**-2 * (1 - math.exp(-delta)) ** 2
    pos = math.exp(z) * sm**2 * (1 - math.exp(-z))
    d, s = len(x), z
    rho = (math.sqrt((2 * s + d) ** 2 + 8 * d * s) - 2 * s - d) / (4 * s)
    second = ((rho + 1) / (2 * math.sqrt(rho))) ** d * math.exp((rho + 1) * z - float(x @ x) - float(y @ y))
    return {"trig": trig, "exp": pos, "hyp": 0.5 * (1 - math.exp(-z)) * pos, "oprf": second - sm**2}[name]


@pytest.mark.parametrize("name", SOFTMAX)
def test_mean_squared_error_follows_its_formula(name):
    """T2."""
    rows = 200003
    source = torch.Generator().manual_seed(2)
    for length in (0.2, 0.3):
        x, y = torch.nn.functional.normalize(torch.randn(2, 5, generator=source, dtype=torch.float64))
        x, y = length * x, 1.5 * length * y
        more = {"s": (x + y).square().sum()} if name == "oprf" else {}
        squares = (single_draws(name, x, y, rows, **more) - math.exp(float(x @ y))).square()
        z = (float(squares.mean()) - formulas(name, x, y)) / (float(squares.std()) / math.sqrt(rows))
        assert abs(z) < stats.norm.isf(0.001 / 2 / len(SOFTMAX) / 2)


def test_optimal_features_are_the_best_of_their_family():
    """oprf's second moment at its own s is below that of s far off and of exp (s → 0)."""
    x = torch.full((D,), 0.2, dtype=torch.float64)
    s = (2 * x).square().sum()
    second = {f: float(single_draws("oprf", x, x, 200003, s=f * s).square().mean()) for f in (1e-3, 1.0, 20.0)}
    assert second[1.0] < second[1e-3]
    assert second[1.0] < second[20.0]


def test_oprf_of_tiny_spread_is_exp():
    """ρ → 1 as s → 0, without cancellation."""
    kernel = make("oprf:m=11", head_dim=D)
    for s in (0.0, 1e-12, 1e-6, 1e-3):
        assert abs(float(kernel.tilt(torch.tensor(s)))) <= s + 1e-7
    plain = make("exp:m=11", head_dim=D)
    x = pairs()[0].float()
    torch.testing.assert_close(kernel.phi(x, torch.tensor(0.0)), plain.phi(x))


def test_ratio_of_trigonometric_to_positive_error():
    """T4: r(φ, l), .432 at a right angle and 17.8 at 3π/4."""
    rows, published = 400009, {math.pi / 2: 0.43233, 3 * math.pi / 4: 17.8}
    for angle, value in published.items():
        c = math.cos(angle)
        r = 0.5 * math.exp(-4 * c) * (1 - math.exp(-2 * (1 - c))) ** 2 / (1 - math.exp(-2 * (1 + c)))
        assert r == pytest.approx(value, abs=0.05)
        x = torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64)
        y = torch.tensor([c, math.sin(angle), 0, 0, 0], dtype=torch.float64)
        trig, pos = ((single_draws(name, x, y, rows) - math.exp(c)).square() for name in ("trig", "exp"))
        relative = math.hypot(*(float(e.std() / e.mean()) / math.sqrt(rows) for e in (trig, pos)))
        assert abs(math.log(float(trig.mean() / pos.mean()) / r)) < stats.norm.isf(0.001 / 2 / 2) * relative


X, Y = 0.15 * torch.ones(D, dtype=torch.float64), torch.linspace(-0.1, 0.2, D, dtype=torch.float64)


def errors(name: str, projection: str, m: int, draws: int) -> Tensor:
    """Squared errors of independent estimates: blocks of m = n·d rows out of one long Ω."""
    assert m % D == 0
    kernel = make(f"{name}:m={m * draws},projection={projection}", head_dim=D).double()
    if name == "oprf":
        kernel.spread.fill_(float((X + Y).square().sum()))
    products = kernel.phi(X) * kernel.phi(Y) * draws
    return (products.view(-1, draws, m).sum((0, 2)) - kernel.exact(X, Y)).square()


@pytest.mark.parametrize("name", SOFTMAX)
def test_orthogonal_rows_err_less(name, one_draw):
    """T3, at m = d."""
    iid, orthogonal = (errors(name, projection, D, 10007) for projection in ("iid", "orthogonal"))
    gap = float(iid.mean() - orthogonal.mean())
    noise = math.hypot(*(float(e.std()) / math.sqrt(10007) for e in (iid, orthogonal)))
    assert gap > stats.norm.isf(0.001 / len(SOFTMAX)) * noise


def test_orthogonal_error_is_below_its_bound(one_draw):
    """MSE ≤ MSE_pos − 2(m−1)/(m(d+2))·(SM − e^{−(‖x‖²+‖y‖²)/2})² for m ≤ d."""
    found = errors("exp", "orthogonal", D, 10007)
    gain = 2 * (D - 1) / (D * (D + 2)) * (math.exp(float(X @ Y)) - math.exp(-float(X @ X + Y @ Y) / 2)) ** 2
    bound = formulas("exp", X, Y) / D - gain
    assert float(found.mean()) < bound + stats.norm.isf(0.001) * float(found.std()) / math.sqrt(10007)


@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
def test_error_falls_with_the_root_of_m(name, projection, one_draw):
    """T5: the slope of log RMSE against log m is −½ (whole blocks of orthogonal rows are independent)."""
    sizes, draws = [7, 7 * 3, 7 * 11], 1009
    means = [errors(name, projection, m, draws) for m in sizes]
    logs = np.log([float(e.mean()) for e in means]) / 2
    spread = np.array([float(e.std() / e.mean()) / math.sqrt(draws) / 2 for e in means])
    at = np.log(sizes) - np.mean(np.log(sizes))
    weights = at / np.square(at).sum()
    slope, error = float(weights @ logs), float(np.sqrt(np.square(weights * spread).sum()))
    assert abs(slope + 0.5) < stats.norm.isf(0.001 / 2 / 8) * error
    assert error < 0.05
