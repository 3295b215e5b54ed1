"""Kernels whose features are exponentials: FAVOR+ and its relatives, estimates of softmax's e^{x·y}.

The attention stabilises them exactly (attention/linear.py), so nothing here subtracts a maximum or adds an ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from linvit.kernels.base import Features, Prepared, Size, centred, clamped, masked_mean, register, square_norm
from linvit.kernels.projections import Norms, Projected
from linvit.site import Site


class Exponential(Projected):
    """φ(x) = rows^-½·exp(Ωx − ‖x‖²/2). `center` moves the means of q and k out of the estimate, which is exact."""

    symmetric: ClassVar[bool] = False  # Ω and −Ω
    signed = False
    deterministic = False

    @dataclass(frozen=True, kw_only=True)
    class Options(Projected.Options):
        center: bool | None = None  # subtract the means of q and k; by default for ±Ω, bidirectional
        shrink: bool = False  # shorten centred q and k to what the features can resolve: lower error, but biased

    def __init__(self, site: Site, **options):
        super().__init__(site, **options)
        if self.options.center and site.causal:
            raise ValueError("center=true needs the mean over all tokens, which a causal attention may not see")
        self.center = self.symmetric and not site.causal if self.options.center is None else self.options.center
        if self.options.shrink and not (self.center and self.omega is not None):
            raise ValueError("shrink=true shortens what center=true leaves of q and k, and needs a random Ω")

    @classmethod
    def size(cls, site: Site, options: Options) -> Size:
        one = super().size(site, options)
        return one._replace(width=2 * one.width, macs=2 * one.macs) if cls.symmetric else one

    def matrix(self) -> Tensor | None:
        rows = super().matrix()
        return torch.cat([rows, -rows]) if rows is not None and self.symmetric else rows

    def phi(self, x: Tensor) -> Tensor:
        omega = self.matrix()
        if omega is None:
            return x.exp()
        return torch.exp(x @ omega.to(x).t() - 0.5 * square_norm(x)) / math.sqrt(self.width)

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        scale, weight = self.scale, None
        if self.center:
            q, k, weight = centred(q, k, keep)
            weight = scale**2 * weight
        if self.options.shrink:
            q, k = self._shortened(q, k, keep)
        if self.omega is None:  # φ(x) = exp(x)
            return Prepared(q * scale, k * scale, Features(), weight)
        return Prepared(q, k, self.features(q), weight)

    def _shortened(self, q: Tensor, k: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Centred q and k times s, s² = min(1, ln(1 + F/4) / mean‖x_i + y_j‖²): the variance of F features relative to
        what they estimate is about (e^{s²‖x+y‖²} − 1)/F, and is a quarter at this s. With F → ∞ nothing is shortened.
        """
        squares = self.scale**2 * masked_mean(square_norm(q) + square_norm(k), keep)
        s = (math.log1p(self.width / 4) / squares.clamp_min(1e-6)).clamp_max(1.0).sqrt()
        return q * s, k * s

    def make_features(self, x: Tensor) -> Features:
        omega = self.matrix()
        assert omega is not None
        return Features(self.scale * omega.to(x), norm=-0.5 * self.scale**2)

    def exact(self, x: Tensor, y: Tensor) -> Tensor | None:
        """E e^{ω·(x+y)} e^{−(‖x‖²+‖y‖²)/2}: softmax for Gaussian rows, less than it for ‖ω‖ = √d."""
        z = x + y
        if self.omega is None:
            return z.exp().sum(-1)
        log, d = -0.5 * (x.square() + y.square()).sum(-1), x.shape[-1]
        if self.omega.norms == "chi":
            return (log + 0.5 * z.square().sum(-1)).exp()
        from scipy.special import hyp0f1  # takes a tenth of a second to import

        sphere = hyp0f1(d / 2, (d * z.square().sum(-1) / 4).cpu().double().numpy())
        return torch.as_tensor(sphere).to(x) * log.exp()


class Favor(Exponential):
    """`stabilizer=reference` is other packages' maximum on one side plus ε, which tends to uniform as norms grow."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Exponential.Options):
        norms: Norms = "chi"  # lengths of Ω's rows
        stabilizer: Literal["exact", "reference"] = "exact"  # reference: subtract one maximum and add ε
        eps: float = 1e-4  # ε of stabilizer=reference
        clamp: float | None = None  # bounds |Ωx|

    def __init__(self, site: Site, **options):
        super().__init__(site, **options)
        self.clamp, self.reference = self.options.clamp, self.options.stabilizer == "reference"
        if not self.reference:
            self.no_effect("stabilizer=exact needs no ε", "eps")
        elif self.options.center or self.omega is None:
            raise ValueError("stabilizer=reference cannot be combined with center=true or projection=none")
        elif self.options.shrink:
            raise ValueError("stabilizer=reference is not centred, and shrink=true shortens what centring leaves")
        elif site.causal:
            raise ValueError("stabilizer=reference needs a maximum over all keys, which a causal attention may not see")
        self.center = self.center and not self.reference
        straight = type(self).prepare is Favor.prepare and not (self.reference or self.center or self.options.shrink)
        self.direct = straight and self.omega is not None and self.clamp is None

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        if self.reference:
            q, k = self._with_floor(q, (-1,), None), self._with_floor(k, (-2, -1), keep)
            return Prepared(q, k, Features(f=torch.clone))
        prepared = super().prepare(q, k, keep)
        return prepared if self.clamp is None else clamped(prepared, self.clamp)

    def _with_floor(self, x: Tensor, axes: tuple[int, ...], keep: Tensor | None) -> Tensor:
        """exp(Ωx − ‖x‖²/2 − max Ωx) + ε with the maximum over a query's features, or over all of a head's keys."""
        omega, x = self.matrix(), x * self.scale
        assert omega is not None
        u = x @ omega.to(x).t()
        u = u if self.clamp is None else u.clamp(-self.clamp, self.clamp)
        seen = u if keep is None else u.masked_fill(~keep.bool(), -torch.inf)
        top = seen.amax(axes, keepdim=True).detach()
        top = top.masked_fill(top == -torch.inf, 0.0)  # every key is masked
        return torch.exp(u - 0.5 * square_norm(x) - top) + self.options.eps


@register("exp")
class Exp(Favor):
    """Positive random features, the FAVOR+ estimate of softmax; projection=none is φ(x) = exp(x)."""

    formula = "m^-½ exp(Ωx − ‖x‖²/2)"
    estimates = "softmax e^{x·y}"
    origin = "Performer (ICLR 2021), arXiv:2009.14794 (FAVOR+)"
    estimates_softmax = True
    deterministic = True


@register("hyp")
class Hyp(Favor):
    """Positive features in pairs ±Ω: the estimate of softmax with half the variance, and the default for accuracy."""

    formula = "(2m)^-½ exp(±Ωx − ‖x‖²/2)"
    estimates = "softmax e^{x·y}"
    origin = "Performer (ICLR 2021), arXiv:2009.14794"
    estimates_softmax = True
    symmetric = True


@register("smreg")
class Smreg(Favor):
    """Positive features with rows of length √d: a regularised softmax, never above it."""

    formula = "m^-½ exp(Ωx − ‖x‖²/2), ‖ω‖ = √d"
    estimates = "e^{−(‖x‖²+‖y‖²)/2} ₀F₁(; d/2; d‖x+y‖²/4)"
    origin = "Performer (ICLR 2021), arXiv:2009.14794"

    @dataclass(frozen=True, kw_only=True)
    class Options(Favor.Options):
        norms: Norms = "sqrt"


@register("oprf")
class Oprf(Exponential):
    """Optimal positive features (FAVOR++): Ω is tilted by A, chosen from the data's s = mean‖x_i + y_j‖²."""

    formula = "(1−4A)^{d/4} m^-½ exp(A‖ω‖² + √(1−4A) Ωx − ‖x‖²/2)"
    estimates = "softmax e^{x·y}"
    origin = "Chefs' Random Tables (NeurIPS 2022), arXiv:2205.15317 (FAVOR++)"
    estimates_softmax = True
    spread: Tensor

    def __init__(self, site: Site, **options):
        super().__init__(site, **options)
        # s of unit normal q and k: what a causal attention uses, which may not look at all tokens
        self.register_buffer("spread", torch.tensor(2.0 * math.sqrt(site.head_dim)))

    def tilt(self, s: Tensor) -> Tensor:
        d = self.site.head_dim
        rho = 2 * d / (((2 * s + d).square() + 8 * d * s).sqrt() + 2 * s + d)  # 1 for s = 0
        return (1 - 1 / rho) / 8

    def phi(self, x: Tensor, s: Tensor | None = None) -> Tensor:
        omega = self.matrix()
        assert omega is not None
        omega, d = omega.to(x), x.shape[-1]
        a = self.tilt((self.spread if s is None else s).to(x))
        log = a * omega.square().sum(-1) + (1 - 4 * a).sqrt() * (x @ omega.t()) - 0.5 * square_norm(x)
        return log.exp() * (1 - 4 * a) ** (d / 4) / math.sqrt(self.width)

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        prepared = super().prepare(q, k, keep)
        q, k, omega = prepared.q, prepared.k, prepared.features.omega
        assert omega is not None
        if self.site.causal:
            s = self.spread.to(q).reshape(1, 1, 1)
        else:  # mean‖x_i + y_j‖² over all pairs, from sums over tokens
            squares = masked_mean(square_norm(q) + square_norm(k), keep)
            cross = (masked_mean(q, keep) * masked_mean(k, keep)).sum(-1, keepdim=True)
            s = (self.scale**2 * (squares + 2 * cross)).clamp_min(0)
        a = self.tilt(s)
        stretch = (1 - 4 * a).sqrt()
        # less d, the mean of ‖ω‖²: a constant cancels, and small numbers round less
        bias = 2 * a * (omega.square().sum(-1) / self.scale**2 - q.shape[-1])
        weight = prepared.features.norm * square_norm(k)
        weight = weight if prepared.weight is None else prepared.weight + weight
        return Prepared(q * stretch, k * stretch, Features(omega), weight, bias)
