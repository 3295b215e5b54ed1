"""Learnable kernels: three as the reports wrote them, `hedgehog`, and `theta`, which is positive and starts exactly at
FAVOR+."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from linvit.kernels.base import NOT_BY_CONTENT, FeatureMap, Features, Prepared, Size, centred, register, square_norm
from linvit.kernels.exponential import Exponential
from linvit.kernels.pointwise import LEAST
from linvit.kernels.projections import Projected
from linvit.randomness import generator
from linvit.site import Site


def _linear(source: torch.Generator, inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """PyTorch's usual initialisation, from an explicit generator."""
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.empty_like(parameter).uniform_(-1, 1, generator=source) / math.sqrt(inputs))
    return layer


def _run(module: nn.Module, x: Tensor) -> Tensor:
    """module(x) in x's precision, whatever the module's own."""
    return functional_call(module, {name: value.to(x) for name, value in module.named_parameters()}, (x,))


class Learned(FeatureMap):
    """φ is computed as it is written, and differentiated by autograd."""

    least: ClassVar[float] = 0.0  # see Features

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        return Prepared(self.phi(q * self.scale), self.phi(k * self.scale), Features(f=torch.clone, least=self.least))


@register("theta-linear")
class ThetaLinear(Learned, Projected):
    """relu(W Ωx) with W learned and drawn unscaled, as reported; ε keeps the denominator from vanishing."""

    formula = "relu(W Ωx) + ε, W (m×m) learned"
    estimates = "learned"
    origin = "report 001"
    signed = False

    @dataclass(frozen=True, kw_only=True)
    class Options(Projected.Options):
        eps: float = 1e-3

    def __init__(self, site: Site, **options):
        super().__init__(site, **options)
        self.affordable(self.width**2, f"W ({self.width} × {self.width})")
        self.weight = nn.Parameter(torch.randn(self.width, self.width, generator=generator("w", site.seed, site.layer)))

    @classmethod
    def size(cls, site: Site, options: Options) -> Size:
        one = super().size(site, options)
        return one._replace(macs=one.macs + one.width**2, parameters=one.width**2)

    def phi(self, x: Tensor) -> Tensor:
        u = x if self.omega is None else x @ self.omega.rows.to(x).t()
        return F.relu(u @ self.weight.to(x).t()) + self.options.eps


@register("theta-mixture")
class ThetaMixture(Learned):
    """α exp(u/τ) + (1−α) relu(u/τ) + ε with u an MLP of x and α, τ, ε free, as reported; the clamp is of exp's argument
    alone."""

    formula = "α exp(u/τ) + (1−α) relu(u/τ) + ε, u = MLP(x)"
    estimates = "learned"
    caution = NOT_BY_CONTENT
    origin = "report 002"

    @dataclass(frozen=True, kw_only=True)
    class Options(FeatureMap.Options):
        alpha: float = 0.5  # α, weight of exp
        tau: float = 1.0  # τ, temperature
        eps: float = 1e-3
        clamp: float = 5.0  # bounds |u/τ| inside exp

    def __init__(self, site: Site, **options):
        super().__init__(site, **options)
        o, d, source = self.options, site.head_dim, generator("mixture", site.seed, site.layer)
        self.mlp = nn.Sequential(_linear(source, d, 2 * d), nn.LayerNorm(2 * d), nn.ReLU(), _linear(source, 2 * d, d))
        self.alpha, self.tau, self.eps = (nn.Parameter(torch.tensor(float(x))) for x in (o.alpha, o.tau, o.eps))

    @classmethod
    def size(cls, site: Site, options: Options) -> Size:
        d = site.head_dim
        return Size(d, 4 * d**2, 4 * d**2 + 7 * d + 3)  # the MLP's weights, biases and layer norm, and α, τ, ε

    def phi(self, x: Tensor) -> Tensor:
        u, bound = _run(self.mlp, x) / self.tau, self.options.clamp
        return self.alpha * u.clamp(-bound, bound).exp() + (1 - self.alpha) * u.relu() + self.eps

    def learned(self) -> dict[str, Tensor]:
        return {"alpha": self.alpha, "tau": self.tau, "eps": self.eps}


@register("theta-mlp")
class ThetaMlp(Learned):
    """W₂ relu(W₁x + b₁) + b₂, signed, as reported; its denominator is kept away from zero."""

    formula = "W₂ relu(W₁x + b₁) + b₂"
    estimates = "learned"
    caution = NOT_BY_CONTENT
    origin = "report 002"
    least = LEAST
    size_option = "m"

    @dataclass(frozen=True, kw_only=True)
    class Options(FeatureMap.Options):
        m: int = 64

    def __init__(self, site: Site, **options):
        super().__init__(site, **options)
        m, source = self.options.m, generator("mlp", site.seed, site.layer)
        self.affordable(m * max(m, site.head_dim), f"W₂ ({m} × {m})")
        self.mlp = nn.Sequential(_linear(source, site.head_dim, m), nn.ReLU(), _linear(source, m, m))

    @classmethod
    def size(cls, site: Site, options: Options) -> Size:
        m, weights = options.m, options.m * (site.head_dim + options.m)
        return Size(m, weights, weights + 2 * m)

    def phi(self, x: Tensor) -> Tensor:
        return _run(self.mlp, x)


@register("hedgehog")
class Hedgehog(FeatureMap):
    """exp(±Wx) with a W for each head that starts as the identity: designed to learn the softmax of a trained model."""

    formula = "[exp(Wx); exp(−Wx)], W (d×d) learned for each head"
    estimates = "learned (2 Σ_f cosh(x_f + y_f) at the start)"
    origin = "Hedgehog (ICLR 2024), arXiv:2402.04347"
    signed = False

    def __init__(self, site: Site, **options):
        super().__init__(site, **options)
        self.weight = nn.Parameter(torch.eye(site.head_dim).repeat(site.heads, 1, 1))

    @classmethod
    def size(cls, site: Site, options: FeatureMap.Options) -> Size:
        d = site.head_dim
        return Size(2 * d, d**2, site.heads * d**2)

    def log_features(self, x: Tensor) -> Tensor:
        """±Wx of x (…, heads, N, d), or of any (…, d) if there is one head."""
        weight = self.weight[0] if self.site.heads == 1 else self.weight
        u = x @ weight.to(x).mT
        return torch.cat([u, -u], -1)

    def phi(self, x: Tensor) -> Tensor:
        return self.log_features(x).exp()

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        q, k = (self.log_features(x.unflatten(0, (-1, self.site.heads)) * self.scale).flatten(0, 1) for x in (q, k))
        return Prepared(q, k, Features())


@register("theta")
class Theta(Exponential):
    """Positive and learnable: u = Ωx/τ + gate·MLP(x), with Ω learned; at the start gate = 0, τ = 1 and α = ½ make it
    exactly `hyp`, so training can only move away from FAVOR+ where that helps."""

    formula = "[√α exp(u − ‖x‖²/2); √(1−α) exp(−u − ‖x‖²/2)], u = Ωx/τ + gate·MLP(x)"
    estimates = "learned (softmax at the start)"
    symmetric = True
    redraw, exact = FeatureMap.redraw, FeatureMap.exact  # Ω is learned

    def __init__(self, site: Site, **options):
        super().__init__(site, **options)
        m, d, source = self.options.m, site.head_dim, generator("theta", site.seed, site.layer)
        rows = self.omega.rows  # type: ignore[union-attr]
        del self.omega
        self.omega = nn.Parameter(rows)
        self.mlp = nn.Sequential(_linear(source, d, 2 * d), nn.ReLU(), _linear(source, 2 * d, m))
        self.gate = nn.Parameter(torch.zeros(()))
        self.mix = nn.Parameter(torch.zeros(m))  # α = sigmoid(mix)
        self.temperature = nn.Parameter(torch.tensor(math.log(math.expm1(1 - 1e-3))))  # τ = softplus(·) + 10⁻³

    @classmethod
    def size(cls, site: Site, options: Exponential.Options) -> Size:
        m, d = options.m, site.head_dim
        weights = m * d + 2 * d * (d + m)  # Ω's, and the MLP's
        return Size(2 * m, weights, weights + 2 * d + 2 * m + 2)  # biases, mix, gate and temperature

    @property
    def tau(self) -> Tensor:
        return F.softplus(self.temperature) + 1e-3

    def learned(self) -> dict[str, Tensor]:
        """α is one for each row of Ω: its mean."""
        return {"gate": self.gate, "tau": self.tau, "alpha": self.mix.sigmoid().mean()}

    def log_parts(self, x: Tensor) -> Tensor:
        u = x @ self.omega.to(x).t() / self.tau.to(x) + self.gate * _run(self.mlp, x)
        return torch.cat([u, -u], -1)

    def phi(self, x: Tensor) -> Tensor:
        log = self.log_parts(x) + 0.5 * self._log_mix().to(x) - 0.5 * square_norm(x)
        return log.exp() / math.sqrt(self.width)

    def _log_mix(self) -> Tensor:
        """log 2α for one half, log 2(1−α) for the other: zero at the start."""
        return torch.cat([F.logsigmoid(self.mix), F.logsigmoid(-self.mix)]) + math.log(2)

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        x, y, weight = q * self.scale, k * self.scale, 0.0
        if self.center:
            x, y, weight = centred(x, y, keep)
        bias = self._log_mix().to(x).view(1, 1, -1)
        return Prepared(self.log_parts(x), self.log_parts(y), Features(), weight - 0.5 * square_norm(y), bias)
