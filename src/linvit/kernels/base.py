"""FeatureMap φ: the only thing that tells one Performer from another.

A kernel says what it does with q and k in `prepare`: it hands back inputs, log-weights and the `Features` to make of
them, φ(x)_f = e^{w(x)}·(f(ω_f·x) + floor), and the attention does the rest. It carries `exact(x, y)`, the kernel that
φ(x)·φ(y) estimates for x = q·d^-¼ and y = k·d^-¼, so that bias tests, error benchmarks and documentation come free.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from linvit.registry import Registry
from linvit.site import Site


class Features(NamedTuple):
    """φ(x)_f = e^{norm·‖x‖²}·(f(ω_f·x) + floor). f=None is exp, which is stabilised exactly and has no floor."""

    omega: Tensor | None = None  # (F, d), scale included; None: the inputs are Ωx already
    f: Callable[[Tensor], Tensor] | None = None  # elementwise, or widening the last axis
    # (∂φ, f + floor) → ∂u in place, where f's value tells its derivative; f may then overwrite u. None: by autograd.
    pull: Callable[[Tensor, Tensor], Tensor] | None = None
    floor: float = 0.0
    norm: float = 0.0
    divide: bool = True  # by the denominator
    least: float = 0.0  # the least |denominator| per key and feature; smaller ones are moved to ±least
    positive: bool = False  # every f + floor is above zero, and so is a denominator
    name: str = ""  # of f, for compiled kernels that know it

    @property
    def exponential(self) -> bool:
        return self.f is None


class Prepared(NamedTuple):
    """What a kernel makes of q and k, all (G, N, ·) with G = batch·heads."""

    q: Tensor
    k: Tensor
    features: Features
    weight: Tensor | None = None  # (G, N, 1) log-weights of the keys
    bias: Tensor | None = None  # (G or 1, 1, F) log-constants of exponential features, both sides together


class Size(NamedTuple):
    """How large a kernel is."""

    width: int  # features of a token
    macs: int  # multiply–accumulates that make them, for one token of one head
    parameters: int = 0
    drawn: int = 0  # random numbers, in Ω


# Found by benchmarks/every_attention.py, where softmax is right on 99.5 % of the images and these on 23 to 35 %.
NOT_BY_CONTENT = "it did not learn to match tokens by content in a test on synthetic images"


class FeatureMap(nn.Module, ABC):
    """Base of all kernels. A subclass registers a name, gives `formula` and `estimates`, and implements `prepare`.

    Its options are the fields of `Options`, which a subclass extends or replaces.
    """

    formula: ClassVar[str] = ""
    estimates: ClassVar[str] = ""
    origin: ClassVar[str] = ""  # where it was published; empty: here
    caution: ClassVar[str] = ""  # what tests of linvit found against it: "it …"
    estimates_softmax: ClassVar[bool] = False  # whether it tends to softmax with the number of random features
    size_option: ClassVar[str | None] = None  # the option that sets the number of features
    width: int  # features
    signed: bool = True  # whether a feature can be negative: it is then never rounded to half precision
    direct: bool = False  # whether `prepare` leaves q and k as they are, and all it adds is `features(q)`

    @dataclass(frozen=True, kw_only=True)
    class Options:
        scale: float | None = None  # factor of q and k; d^-¼ by default

    def __init__(self, site: Site, **options):
        super().__init__()
        self.site = site
        self.options: Any = self.Options(**options)
        scale = getattr(self.options, "scale", None)
        self.scale = site.head_dim**-0.25 if scale is None else float(scale)
        for name, least in {"m": 1, "eps": 0, "clamp": None, "alpha": None, "tau": None}.items():
            if (value := getattr(self.options, name, None)) is not None:
                positive(name, value, at_least=least)
        if (size := self.size(site, self.options)) is not None:
            self.width = size.width

    @classmethod
    def size(cls, site: Site, options: Any) -> Size | None:
        """Size for an instance of `Options`, without building it. None: a Performer is built and measured, and the
        constructor sets `width`."""
        return None

    def no_effect(self, why: str, *names: str) -> None:
        """Raise a ValueError for options that differ from their defaults without effect."""
        for field in fields(self.options):
            if field.name in names and (value := getattr(self.options, field.name)) != field.default:
                raise ValueError(f"{field.name}={value} has no effect: {why}")

    def affordable(self, numbers: int, what: str) -> None:
        """Raise a ValueError for an m whose float64 matrix would take more than 1 GiB."""
        if 8 * numbers > 1 << 30:
            size = f"{8 * numbers / (1 << 30):,.1f} GiB"
            raise ValueError(f"m={self.options.m} needs {size} for {what} in float64: the limit is 1 GiB")

    @abstractmethod
    def prepare(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Prepared:
        """Raw q, k (G, N, d) and the keys to keep (G, N, 1) → inputs of the linear attention."""

    def features(self, x: Tensor) -> Features:
        """The features to compute from inputs like x."""
        raise NotImplementedError

    @abstractmethod
    def phi(self, x: Tensor) -> Tensor:
        """φ(x) as written in `formula`, unstabilised: (…, d) → (…, width)."""

    def exact(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The kernel that φ(x)·φ(y) estimates, for rows of x and y; None if it is learned."""
        return None

    def redraw(self, step: int) -> None:
        """New random features for this step, in place; deterministic and learned maps have nothing to draw."""

    def learned(self) -> dict[str, Tensor]:
        """Single numbers that are learned and mean something, by name: a training logs them."""
        return {}


KERNELS: Registry[type[FeatureMap]] = Registry("kernel", "linvit.kernels")
register = KERNELS.register


def positive(name: str, value: float, at_least: float | None = None) -> None:
    """Raise a ValueError unless value > 0 (or ≥ at_least)."""
    if not math.isfinite(value) or (value < at_least if at_least is not None else value <= 0):
        raise ValueError(f"{name}={value} must be " + (f"at least {at_least}" if at_least is not None else "above 0"))


def tracing() -> bool:
    """Whether this is being exported or compiled: no branch may then depend on what tensors hold."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def clamped(prepared: Prepared, bound: float) -> Prepared:
    """The same with |Ωx| bounded."""
    q, k, φ, weight, bias = prepared
    norms = φ.norm * square_norm(k) if φ.norm else None
    weight = norms if weight is None else weight if norms is None else weight + norms
    u_q, u_k = ((x if φ.omega is None else x @ φ.omega.t()).clamp(-bound, bound) for x in (q, k))
    return Prepared(u_q, u_k, φ._replace(omega=None, norm=0.0), weight, bias)


def centred(x: Tensor, y: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """x − x̄, y − ȳ (G, N, d) and the log-weights x̄·y_j of the keys (G, N, 1), over tokens that are kept.

    e^{x·y} = e^{(x−x̄)·(y−ȳ)} · e^{x̄·y} · [a constant of the row x], so that softmax is left as it is.
    """
    mean = masked_mean(x, keep)
    return x - mean, y - masked_mean(y, keep), y @ mean.transpose(1, 2)


def masked_mean(x: Tensor, keep: Tensor | None) -> Tensor:
    """Mean over tokens that are kept, (G, 1, d); zero where none is."""
    if keep is None:
        return x.mean(1, keepdim=True)
    return (x * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True).clamp_min(1)


def square_norm(x: Tensor) -> Tensor:
    return torch.linalg.vecdot(x, x).unsqueeze(-1)
