"""Kernels whose features are exponentials: FAVOR+ and its relatives, estimates of softmax's e^{x·y}.

The attention stabilises them exactly (attention/linear.py), so nothing here subtracts a maximum or adds an ε.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from scipy.special import hyp0f1
from torch import Tensor

from linvit.kernels.base import FeatureMap, Features, Prepared, Site, masked_mean, positive, register, square_norm
from linvit.kernels.projections import Norms, Omega, Projection


class Exponential(FeatureMap):
    """φ(x) = rows^-½·exp(Ωx − ‖x‖²/2).

    `center` moves the means of q and k out of the estimate, which is exact: with x̄, ȳ any fixed vectors,
    e^{x·y} = e^{(x−x̄)·(y−ȳ)} · e^{x̄·y} · [a constant of the row x], and x̄·y_j joins the keys' log-weights.
    `stabilizer=reference` is the one-sided maximum plus ε of other packages, for parity: its attention tends to uniform
    as norms grow.
    """

    symmetric: ClassVar[bool] = False  # Ω and −Ω
    norm: ClassVar[float] = -0.5  # coefficient of ‖x‖² in log φ
    norms_choice: ClassVar[Norms | None] = None
    deterministic: ClassVar[bool] = False  # whether projection=none makes sense

    def __init__(
        self,
        site: Site,
        *,
        m: int = 64,
        projection: Projection = "orthogonal",
        norms: Norms | None = None,
        center: bool | None = None,
        stabilizer: Literal["exact", "reference"] = "exact",
        eps: float = 1e-4,
        scale: float | None = None,
        clamp: float | None = None,
    ):
        """eps belongs to stabilizer=reference; scale multiplies q and k (d^-¼); clamp bounds |Ωx|."""
        super().__init__()
        positive("m", m, at_least=1)
        d = site.head_dim
        if projection == "none" and not self.deterministic:
            raise ValueError(f"projection=none is not defined for {type(self).__name__.lower()}: its Ω must be random")
        if center and site.causal:
            raise ValueError("center=true needs the mean over all tokens, which a causal attention may not see")
        if stabilizer == "reference" and (center or projection == "none"):
            raise ValueError("stabilizer=reference goes with neither center=true nor projection=none")
        if stabilizer == "reference" and site.causal:
            raise ValueError("stabilizer=reference needs a maximum over all keys, which a causal attention may not see")
        positive("eps", eps, at_least=0)
        if clamp is not None:
            positive("clamp", clamp)
        self.site, self.stabilizer, self.eps, self.clamp = site, stabilizer, eps, clamp
        self.scale = d**-0.25 if scale is None else scale
        natural = self.symmetric and not site.causal and stabilizer == "exact"
        self.center = natural if center is None else center
        self.omega = None
        if projection != "none":
            self.omega = Omega(m, d, projection, norms or self.norms_choice or "chi", site.seed, site.layer)
        self.rows = 0 if self.omega is None else m * (2 if self.symmetric else 1)
        self.width = self.rows or d

    def redraw(self, step: int) -> None:
        if self.omega is not None:
            self.omega.redraw(step)

    def matrix(self) -> Tensor | None:
        """Ω as the features use it."""
        if self.omega is None:
            return None
        rows = self.omega.rows
        return torch.cat([rows, -rows]) if self.symmetric else rows

    def phi(self, x: Tensor) -> Tensor:
        omega = self.matrix()
        if omega is None:
            return x.exp()
        return torch.exp(x @ omega.to(x).t() + self.norm * square_norm(x)) / math.sqrt(self.width)

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        if self.stabilizer == "reference":
            return self._reference(q, k, keep)
        scale, omega, weight = self.scale, self.matrix(), None
        if self.center:
            q_mean = masked_mean(q, keep)
            weight = scale**2 * (k @ q_mean.transpose(1, 2))
            q, k = q - q_mean, k - masked_mean(k, keep)
        if omega is None:  # φ(x) = exp(x)
            return Prepared(self._clamped(q * scale), self._clamped(k * scale), Features(), weight)
        omega, norm = scale * omega.to(q), self.norm * scale**2
        if self.clamp is None:
            return Prepared(q, k, Features(omega, norm=norm), weight)
        norms = norm * square_norm(k)
        weight = norms if weight is None else weight + norms
        return Prepared(self._clamped(q @ omega.t()), self._clamped(k @ omega.t()), Features(), weight)

    def _clamped(self, u: Tensor) -> Tensor:
        return u if self.clamp is None else u.clamp(-self.clamp, self.clamp)

    def _reference(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        """exp(Ωx − ‖x‖²/2 − max Ωx) + ε with the maximum over a query's features, and over all of a head's keys."""
        omega = self.matrix()
        assert omega is not None

        def side(x: Tensor, axes: tuple[int, ...], kept: Tensor | None) -> Tensor:
            x = x * self.scale
            u = self._clamped(x @ omega.to(x).t())
            seen = u if kept is None else u.masked_fill(~kept.bool(), -torch.inf)
            top = seen.amax(axes, keepdim=True).detach()
            top = top.masked_fill(top == -torch.inf, 0.0)  # every key is masked
            return torch.exp(u + self.norm * square_norm(x) - top) + self.eps

        return Prepared(side(q, (-1,), None), side(k, (-2, -1), keep), Features(f=torch.clone))

    def exact(self, x: Tensor, y: Tensor) -> Tensor:
        """E e^{ω·(x+y)} e^{norm(‖x‖²+‖y‖²)}: softmax for Gaussian rows and norm = −½, less than it for ‖ω‖ = √d."""
        z = x + y
        if self.omega is None:
            return z.exp().sum(-1)
        log, d = self.norm * (x.square() + y.square()).sum(-1), x.shape[-1]
        if self.omega.norms == "chi":
            return (log + 0.5 * z.square().sum(-1)).exp()
        sphere = hyp0f1(d / 2, (d * z.square().sum(-1) / 4).double().cpu().numpy())
        return torch.as_tensor(sphere).to(x) * log.exp()


@register("exp")
class Exp(Exponential):
    """Positive random features, the FAVOR+ estimate of softmax; projection=none is φ(x) = exp(x)."""

    formula = "m^-½ exp(Ωx − ‖x‖²/2)"
    estimates = "softmax e^{x·y}"
    deterministic = True


@register("hyp")
class Hyp(Exponential):
    """Positive features in pairs ±Ω: the estimate of softmax with half the variance, and the default for accuracy."""

    formula = "(2m)^-½ exp(±Ωx − ‖x‖²/2)"
    estimates = "softmax e^{x·y}"
    symmetric = True


@register("smreg")
class Smreg(Exponential):
    """Positive features with rows of length √d: a regularised softmax, never above it."""

    formula = "m^-½ exp(Ωx − ‖x‖²/2), ‖ω‖ = √d"
    estimates = "e^{−(‖x‖²+‖y‖²)/2} ₀F₁(; d/2; d‖x+y‖²/4)"
    norms_choice = "sqrt"


@register("gexp")
class Gexp(Exponential):
    """The generalised kernel f = exp with h = 1: not softmax, since keys gain weight e^{‖y‖²/2}."""

    formula = "m^-½ (exp(Ωx) + ε)"
    estimates = "e^{‖x+y‖²/2}"
    norm = 0.0
    deterministic = True

    def __init__(
        self,
        site: Site,
        *,
        m: int = 64,
        projection: Projection = "orthogonal",
        norms: Norms | None = None,
        eps: float = 1e-3,
        scale: float | None = None,
        clamp: float | None = None,
    ):
        super().__init__(site, m=m, projection=projection, norms=norms, eps=eps, scale=scale, clamp=clamp)

    def phi(self, x: Tensor) -> Tensor:
        omega = self.matrix()
        return x.exp() + self.eps if omega is None else super().phi(x) + self.eps / math.sqrt(self.width)

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        plan = super().prepare(q, k, keep)
        if not self.eps:
            return plan
        omega, floor = plan.features.omega, q.new_tensor(self.eps).log()
        u_q, u_k = (torch.logaddexp(x if omega is None else x @ omega.t(), floor) for x in plan[:2])
        return Prepared(u_q, u_k, Features())


@register("oprf")
class Oprf(Exponential):
    """Optimal positive features (FAVOR++): Ω is tilted by A, chosen from the data's s = mean‖x_i + y_j‖²."""

    formula = "(1−4A)^{d/4} m^-½ exp(A‖ω‖² + √(1−4A) Ωx − ‖x‖²/2)"
    estimates = "softmax e^{x·y}"
    spread: Tensor

    def __init__(
        self,
        site: Site,
        *,
        m: int = 64,
        projection: Projection = "orthogonal",
        center: bool | None = None,
        scale: float | None = None,
    ):
        super().__init__(site, m=m, projection=projection, center=center, scale=scale)
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
        plan = super().prepare(q, k, keep)
        q, k, omega = plan.q, plan.k, plan.features.omega
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
        weight = plan.features.norm * square_norm(k)
        weight = weight if plan.weight is None else plan.weight + weight
        return Prepared(q * stretch, k * stretch, Features(omega), weight, bias)
