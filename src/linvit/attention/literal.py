"""Attention as report 002 wrote it (its Algorithms 2 and 4), only for the literal column of its studies.

    φ(x) = f(Ωx/√d) + ε        out = φ(q) [φ(k)ᵀ v] · 1 / (φ(q)·Σφ(k) + ε)        ε = 1e-6

f is neither shifted nor divided by √m, ε is added to a denominator that may be negative or vanish, q and k are both
divided by √d, and Ω is `torch.nn.init.orthogonal_`. Algorithm 4 (f=exp) adds ε to the denominator alone. Use
`performer-<kernel>` instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import Attention, Switches, register
from linvit.devices import to_device
from linvit.kernels.base import positive
from linvit.kernels.learned import ThetaMixture, ThetaMlp
from linvit.kernels.projections import Omega
from linvit.randomness import generator
from linvit.site import Cost, Site

EPS = 1e-6
LEARNED = {"mixture": ThetaMixture, "mlp": ThetaMlp}


class Orthogonal(Omega):
    """Rows as `torch.nn.init.orthogonal_` draws them, all of length one."""

    @torch.no_grad()
    def redraw(self, step: int) -> None:
        source = generator("literal", *self.key, int(step))
        rows = nn.init.orthogonal_(torch.empty(self.rows.shape, dtype=torch.float64), generator=source)
        self.rows.copy_(to_device(rows.to(self.rows.dtype), self.rows.device))


@register("literal")
class AsReported(Attention):
    """f: relu, elu, gelu or exp of random features, or one of two learned maps. m: features; alpha: of f=elu; clamp:
    bounds |Ωx/√d| of f=exp.

    half: float16 as on a GPU, rounded here step by step with products summed in float32, so that it can be seen on a
    CPU. `autocast` is what `torch.autocast` does there, where 1/D is float32 and is infinite where D is rounded to
    zero; `everywhere` also rounds 1/D, which overflows below |D| = 1.5e-5. Gradients pass as if nothing was rounded.
    """

    formula = "φ(q) [φ(k)ᵀ v] / (φ(q)·Σφ(k) + ε), φ(x) = f(Ωx/√d) + ε, of exp without ε"
    estimates = "itself"
    origin = "report 002, Algorithms 2 and 4"
    invariants = "none: rows do not sum to one, and the denominator may vanish"
    size_option = "m"
    can_be_causal = False
    why_not_causal = "report 002 has no causal form of it"

    @dataclass(frozen=True, kw_only=True)
    class Options:
        f: Literal["relu", "elu", "gelu", "exp", "mixture", "mlp"] = "relu"
        m: int = 128
        alpha: float = 1.0
        clamp: float | None = None
        half: Literal["autocast", "everywhere"] | None = None

        def check(self) -> None:
            positive("m", self.m, at_least=1)
            positive("alpha", self.alpha)
            if self.clamp is not None:
                positive("clamp", self.clamp)
            for name, owner, default in (("alpha", "elu", 1.0), ("clamp", "exp", None)):
                if self.f != owner and (value := getattr(self, name)) != default:
                    raise ValueError(f"{name}={value} has no effect: only f={owner} has it")
            if self.f == "mixture" and self.m != type(self).m:
                raise ValueError(f"m={self.m} has no effect: f=mixture has as many features as a head has channels")

    def __init__(self, site: Site, switches: Switches = Switches(), **options: Any):  # noqa: B008 (frozen)
        super().__init__(site, switches)
        self.options = self.Options(**options)
        self.options.check()
        self.kernel: ThetaMixture | ThetaMlp | None = None
        self.omega: Orthogonal | None = None
        if self.options.f in LEARNED:
            own = {"eps": EPS} if self.options.f == "mixture" else {"m": self.options.m}
            self.kernel = LEARNED[self.options.f](site, **own)
        else:
            self.omega = Orthogonal(self.options.m, site.head_dim, "orthogonal", "chi", site.seed, site.layer)
        if self.options.half:
            self.precision = "input"

    @classmethod
    def own_cost(cls, site: Site, **options: Any) -> Cost:
        given, d = cls.Options(**options), site.head_dim
        given.check()
        width, macs, parameters, drawn = given.m, given.m * d, 0, given.m * d
        if given.f in LEARNED:
            kind = LEARNED[given.f]
            size = kind.size(site, kind.Options(**({} if given.f == "mixture" else {"m": given.m})))
            width, macs, parameters, drawn = size.width, size.macs, size.parameters, 0
        total = 2 * site.heads * site.tokens * (macs + width * d)
        return Cost(parameters, total, 2 * parameters, drawn, drawn, features=width)

    def redraw(self, step: int) -> None:
        if self.omega is not None:
            self.omega.redraw(step)

    def kernel_parameters(self) -> list[nn.Parameter]:
        return [] if self.kernel is None else list(self.kernel.parameters())

    def learned(self) -> dict[str, Tensor]:
        return {} if self.kernel is None else self.kernel.learned()

    def rounded(self, x: Tensor) -> Tensor:
        """As float16 holds it."""
        return _Rounded.apply(x) if self.options.half else x

    def phi(self, x: Tensor) -> Tensor:
        x = self.rounded(x / math.sqrt(self.site.head_dim))
        if self.kernel is not None:
            return self.rounded(self.kernel.phi(x))
        assert self.omega is not None
        u = self.rounded(x @ self.rounded(self.omega.rows.to(x)).t())
        found = self.rounded(self._f(u))
        return found if self.options.f == "exp" else self.rounded(found + EPS)

    def _f(self, u: Tensor) -> Tensor:
        match self.options.f:
            case "relu":
                return u.relu()
            case "elu":
                return F.elu(u, self.options.alpha)
            case "gelu":
                return F.gelu(u)
        return (u if self.options.clamp is None else u.clamp(-self.options.clamp, self.options.clamp)).exp()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        a, b = (self.phi(self.rounded(x)) for x in (q, k))
        if mask is not None:
            b = b.masked_fill(~mask[:, None, :, None], 0.0)
        return self.mixed(a, b, v, self.denominators(a, b))

    def denominators(self, a: Tensor, b: Tensor) -> Tensor:
        """D = φ(q)·Σφ(k) + ε, (B, H, N, 1), of features a of the queries and b of the keys."""
        total = self.rounded(b.sum(2, keepdim=True))
        return self.rounded(self.rounded(a @ total.transpose(2, 3)) + EPS)

    def mixed(self, a: Tensor, b: Tensor, v: Tensor, d: Tensor) -> Tensor:
        """The output of these features and denominators."""
        inverse, out = 1 / d, self.rounded(a @ self.rounded(b.transpose(2, 3) @ self.rounded(v)))
        return self.rounded(out * self.rounded(inverse)) if self.options.half == "everywhere" else out * inverse


class _Rounded(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.half().to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
