"""Kernels φ(x) = m^-½ (f(Ωx) + ε) for an elementwise f, random or (projection=none) deterministic.

A new one is a class with a name, a formula and `f`. If f can be negative, the denominator Σ_j φ(q)·φ(k_j) can vanish;
`negative` says what then: `shift` subtracts f's minimum, `clamp` keeps the denominator away from zero, `rms` replaces
the division by an RMS norm, `literal` does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.kernels.base import NOT_BY_CONTENT, Features, Prepared, Size, clamped, register, square_norm
from linvit.kernels.projections import Norms, Projected
from linvit.site import Site

Negative = Literal["auto", "shift", "clamp", "rms", "literal"]
LEAST = 1e-3  # least |denominator| per key and feature under negative=clamp: as much as the default ε adds to f = 1


class Pointwise(Projected):
    estimates = "E f(ω·x) f(ω·y)"
    origin = "Performer (ICLR 2021), arXiv:2009.14794 (generalised attention)"
    f: Any  # the elementwise function of u = Ωx, a method; autograd differentiates it
    minimum: float | None = 0.0  # of f; None: f has none
    pull: Callable[[Tensor, Tensor], Tensor] | None = None  # see Features
    norm: ClassVar[float] = 0.0

    @dataclass(frozen=True, kw_only=True)
    class Options(Projected.Options):
        norms: Norms = "chi"  # lengths of Ω's rows
        eps: float = 1e-3  # ε, added to f
        negative: Negative = "auto"  # treatment of an f that can be negative
        clamp: float | None = None  # bounds |Ωx|

    def __init__(self, site: Site, **options):
        super().__init__(site, **options)
        self.eps, self.negative, self.clamp = self.options.eps, self.options.negative, self.options.clamp
        name = type(self).__name__.lower()
        if self.minimum is not None and self.minimum >= 0:
            self.no_effect(f"{name} is never negative", "negative")
        if self.negative == "shift" and self.minimum is None:
            raise ValueError(f"negative=shift: {name} has no minimum; choose clamp, rms or literal")
        if self.negative == "auto":
            self.negative = "clamp" if self.minimum is None else "shift"
        self.signed = self.negative != "shift" and (self.minimum is None or self.minimum < 0)
        straight = type(self).prepare is Pointwise.prepare and self.negative != "rms"
        self.direct = straight and self.omega is not None and self.clamp is None

    @property
    def floor(self) -> float:
        """What is added to f: ε, and the shift that makes f non-negative."""
        return self.eps - (self.minimum or 0.0 if self.negative == "shift" else 0.0)

    def phi(self, x: Tensor) -> Tensor:
        if self.omega is None:
            return self.f(x.clone()) + self.floor
        return (self.f(x @ self.omega.rows.to(x).t()) + self.floor) / math.sqrt(len(self.omega.rows))

    def make_features(self, x: Tensor) -> Features:
        return Features(
            omega=None if self.omega is None else self.scale * self.omega.rows.to(x),
            f=self.f,
            pull=self.pull,
            floor=self.floor,
            norm=self.norm * self.scale**2,
            divide=self.negative != "rms",
            least=LEAST if self.negative == "clamp" else 0.0,
            positive=self.minimum is not None and self.minimum + self.floor > 0,
            name=type(self).__name__.lower(),
        )

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        if self.omega is None:  # no Ω to scale
            q, k = q * self.scale, k * self.scale
        prepared = Prepared(q, k, self.features(q))
        return prepared if self.clamp is None else clamped(prepared, self.clamp)

    def exact(self, x: Tensor, y: Tensor) -> Tensor | None:
        """E f(ω·x) f(ω·y) for ε = 0, by closed form where `moment` has one, else by Gauss–Hermite quadrature; None for
        rows of equal length (norms=sqrt), which are not Gaussian."""
        shift = -(self.minimum or 0.0) if self.negative == "shift" else 0.0
        if self.omega is None:
            return ((self.f(x.clone()) + shift) * (self.f(y.clone()) + shift)).sum(-1)
        if self.omega.norms == "sqrt":
            return None
        closed = None if shift else self.moment(x, y)
        return gauss_hermite(lambda u: self.f(u) + shift, x, y) if closed is None else closed

    def moment(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Closed form of E f(ω·x) f(ω·y), unshifted."""
        return None


def gauss_hermite(f, x: Tensor, y: Tensor, nodes: int = 160) -> Tensor:
    """E f(ω·x) f(ω·y), ω ~ N(0, I): (ω·x, ω·y) is a bivariate normal, so two dimensions suffice."""
    at, weights = np.polynomial.hermite_e.hermegauss(nodes)
    t = torch.as_tensor(at, dtype=torch.float64)
    w = torch.as_tensor(weights / weights.sum(), dtype=torch.float64)
    x64, y64 = x.cpu().double(), y.cpu().double()
    nx, ny = x64.norm(dim=-1), y64.norm(dim=-1)
    c = ((x64 * y64).sum(-1) / (nx * ny).clamp_min(1e-300)).clamp(-1, 1)
    u = nx[..., None, None] * t[:, None]
    v = ny[..., None, None] * (c[..., None, None] * t[:, None] + (1 - c.square()).sqrt()[..., None, None] * t[None, :])
    values = f(u.expand_as(v).clone()) * f(v.clone())
    return torch.einsum("...ab,a,b->...", values, w, w).to(x)


def _angle(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """‖x‖‖y‖ and the cosine between them."""
    lengths = x.norm(dim=-1) * y.norm(dim=-1)
    return lengths, ((x * y).sum(-1) / lengths.clamp_min(1e-30)).clamp(-1, 1)


@register("relu")
class Relu(Pointwise):
    """Cheapest, and a good default: an arc-cosine kernel."""

    formula = "m^-½ (relu(Ωx) + ε)"
    estimates = "‖x‖‖y‖ (sin θ + (π−θ) cos θ) / 2π"

    def f(self, u: Tensor) -> Tensor:
        return u.relu() if u.requires_grad else u.relu_()

    def pull(self, gradient: Tensor, value: Tensor) -> Tensor:
        return torch.ops.aten.threshold_backward.grad_input(gradient, value, self.floor, grad_input=gradient)

    def moment(self, x: Tensor, y: Tensor) -> Tensor:
        lengths, c = _angle(x, y)
        angle = c.acos()
        return lengths * (angle.sin() + (math.pi - angle) * c) / (2 * math.pi)


@register("elu")
class Elu(Pointwise):
    formula = "m^-½ (elu(Ωx; α) + α + ε)"

    @dataclass(frozen=True, kw_only=True)
    class Options(Pointwise.Options):
        alpha: float = 1.0  # α of elu

    def __init__(self, site: Site, **options):
        self.minimum = -self.Options(**options).alpha
        super().__init__(site, **options)

    def f(self, u: Tensor) -> Tensor:
        return F.elu(u, self.options.alpha)


@register("gelu")
class Gelu(Pointwise):
    formula = "m^-½ (gelu(Ωx) + 0.17 + ε)"
    minimum = -0.16997120747990369
    f = staticmethod(F.gelu)


@register("sigmoid")
class Sigmoid(Pointwise):
    formula = "m^-½ (σ(Ωx) + ε)"
    caution = NOT_BY_CONTENT
    f = staticmethod(torch.sigmoid)


@register("abs")
class Abs(Pointwise):
    formula = "m^-½ (|Ωx| + ε)"
    estimates = "(2/π) ‖x‖‖y‖ (√(1−c²) + c asin c), c = cos θ"
    caution = NOT_BY_CONTENT
    f = staticmethod(torch.abs)

    def moment(self, x: Tensor, y: Tensor) -> Tensor:
        lengths, c = _angle(x, y)
        return 2 / math.pi * lengths * ((1 - c.square()).sqrt() + c * c.asin())


@register("cos")
class Cos(Pointwise):
    formula = "m^-½ (cos(Ωx) + 1 + ε)"
    estimates = "½(e^{−‖x−y‖²/2} + e^{−‖x+y‖²/2}), shifted"
    caution = NOT_BY_CONTENT
    minimum = -1.0
    f = staticmethod(torch.cos)

    def moment(self, x: Tensor, y: Tensor) -> Tensor:
        near, far = ((-0.5 * z.square().sum(-1)).exp() for z in (x - y, x + y))
        return 0.5 * (near + far)


@register("tanh")
class Tanh(Pointwise):
    formula = "m^-½ (tanh(Ωx) + 1 + ε)"
    caution = NOT_BY_CONTENT
    minimum = -1.0
    f = staticmethod(torch.tanh)


@register("identity")
class Identity(Pointwise):
    formula = "m^-½ (Ωx + ε)"
    estimates = "x·y"
    caution = NOT_BY_CONTENT
    minimum = None
    f = staticmethod(torch.clone)

    def moment(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(-1)


@register("elu1")
class Elu1(Pointwise):
    """With projection=none, the Linear Transformer's map."""

    formula = "m^-½ (elu(Ωx) + 1 + ε)"
    origin = "Linear Transformer (ICML 2020), arXiv:2006.16236"

    def f(self, u: Tensor) -> Tensor:
        return F.elu(u) + 1


@register("gexp")
class Gexp(Pointwise):
    """The generalised kernel f = exp with h = 1: not softmax, since keys gain weight e^{‖y‖²/2}."""

    formula = "m^-½ (exp(Ωx) + ε)"
    estimates = "e^{‖x+y‖²/2}"
    f = staticmethod(torch.exp)

    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        """In log-space, where exponentials cannot overflow: log(e^u + ε)."""
        q, k, φ, _, _ = super().prepare(q, k, keep)
        if not self.eps:
            return Prepared(q, k, Features(φ.omega))
        floor = q.new_full((), self.eps).log()  # without a copy from the host
        u_q, u_k = (torch.logaddexp(x if φ.omega is None else x @ φ.omega.t(), floor) for x in (q, k))
        return Prepared(u_q, u_k, Features())

    def moment(self, x: Tensor, y: Tensor) -> Tensor:
        return (0.5 * (x + y).square().sum(-1)).exp()


@register("trig")
class Trig(Pointwise):
    """Sines and cosines: unbiased for softmax, but signed, with a variance that grows where softmax is small."""

    formula = "m^-½ e^{‖x‖²/2} [sin Ωx; cos Ωx]"
    estimates = "softmax e^{x·y}"
    caution = NOT_BY_CONTENT
    origin = "Performer (ICLR 2021), arXiv:2009.14794"
    estimates_softmax = True
    minimum = None
    norm = 0.5
    deterministic = False

    @dataclass(frozen=True, kw_only=True)
    class Options(Pointwise.Options):
        eps: float = 0.0

    @classmethod
    def size(cls, site: Site, options: Pointwise.Options) -> Size:
        one = super().size(site, options)
        return one._replace(width=2 * one.width)

    def f(self, u: Tensor) -> Tensor:
        return torch.cat([u.sin(), u.cos()], -1)

    def phi(self, x: Tensor) -> Tensor:
        return super().phi(x) * (0.5 * square_norm(x)).exp()

    def moment(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(-1).exp()
