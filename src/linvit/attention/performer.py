"""Performer: linear attention with a kernel's features. Its mathematics is in linear.py, its variety in kernels/."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.accelerated import accelerated_attention
from linvit.attention.base import PRECISE, Attention, Switches, precise
from linvit.attention.causal import causal_attention
from linvit.attention.halves import transformed
from linvit.attention.linear import FEW_FEATURES, linear_attention, short
from linvit.attention.plain import State, plain_attention, plain_causal
from linvit.kernels.base import FeatureMap, Features, Prepared, tracing
from linvit.site import Cost, Site


class Performer(Attention):
    """φ(q) [φ(k)ᵀv] / φ(q) [φ(k)ᵀ1] for any FeatureMap φ."""

    plain = False  # set it for ordinary operations in place of the fast paths; when exporting or compiling it always is
    _short: tuple[Any, Any] = None, None  # features, and their short path

    def __init__(self, site: Site, kernel: FeatureMap, switches: Switches = Switches()):  # noqa: B008 (frozen)
        super().__init__(site, switches)
        self.kernel = kernel
        self._at_once = kernel.direct and not site.causal
        self.precision = "float32" if kernel.signed or site.causal else "half"

    @classmethod
    def build(cls, site: Site, switches: Switches, *, kernel: type[FeatureMap], **options: Any) -> Self:
        return cls(site, kernel(site, **options), switches)

    @classmethod
    def own_cost(cls, site: Site, *, kernel: type[FeatureMap], **options: Any) -> Cost:
        if (size := kernel.size(site, kernel.Options(**options))) is None:
            return super().own_cost(site, kernel=kernel, **options)
        macs = 2 * site.heads * site.tokens * (size.macs + size.width * site.head_dim)
        return Cost(size.parameters, macs, 2 * size.parameters, size.drawn, size.drawn, features=size.width)

    def prepare(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Prepared:
        """(B, H, N, D) → what the kernel makes of them, (G, N, ·); a masked key gets the log-weight −∞. In float32 or
        better; but where the kernel uses q and k as they are, inputs in half precision stay (B, H, N, D) as given."""
        keep = None
        if mask is not None:
            b, h, n, _ = q.shape
            keep = mask[:, None, :, None].expand(b, h, n, 1).reshape(b * h, n, 1)
        if self.kernel.direct and q.dtype not in PRECISE:
            wide = q.new_empty(0, dtype=torch.float32)
            prepared = Prepared(q, k, self.kernel.features(wide))  # accelerated.py brings heads together
        else:
            wide, k = precise(q, k)
            kept = None if keep is None else keep.to(wide)
            prepared = self.kernel.prepare(wide.flatten(0, 1), k.flatten(0, 1), kept)
        if keep is None:
            return prepared
        weight = wide.new_zeros(keep.shape) if prepared.weight is None else prepared.weight
        return prepared._replace(weight=weight.masked_fill(~keep, float("-inf")))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None and not torch.is_grad_enabled() and (out := self._of_one_image(q, k, v)) is not None:
            return out
        prepared, path = self.prepare(q, k, mask), self._path(q.device.type)
        if v.shape[2] == 1 and mask is None and (prepared.features.exponential or prepared.features.positive):
            return v  # a token alone: φ(q)·φ(k) v / φ(q)·φ(k), which computing would only round
        out = path(prepared, v if path is accelerated_attention else v.flatten(0, 1))  # the others need one dimension
        if not prepared.features.divide:
            out = F.rms_norm(out, out.shape[-1:])
        return out.view_as(v)

    def _path(self, device: str) -> Callable[[Prepared, Tensor], Tensor]:
        """Which implementation of the same formulas: blocks that fit the cache of a CPU, few operations for a GPU, or
        ordinary operations where gradients must not be hand-written."""
        plain = self.plain or tracing() or transformed()
        if self.site.causal:  # causal_attention looks at the range of the keys, for which a GPU would have to wait
            return partial(plain_attention, causal=True) if plain or device != "cpu" else causal_attention
        if device != "cpu" and not self.plain:
            return accelerated_attention
        return plain_attention if plain else linear_attention

    def _of_one_image(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """What `attend` comes to, without its preparations: they take as long as the products of 64 tokens. None for
        more images, and where the kernel has to prepare q and k."""
        (batch, heads, tokens, _), kernel = q.shape, self.kernel
        if (
            batch != 1
            or tokens == 1
            or not q.is_cpu
            or not self._at_once
            or heads * tokens * kernel.width > FEW_FEATURES
            or self.plain
            or tracing()
        ):
            return None
        φ = kernel.features(q)
        made_for, attend = self._short
        if φ is not made_for:
            attend = short(φ, heads)
            self._short = φ, attend
        return attend(q.squeeze(0), k.squeeze(0), v.squeeze(0), None, None).unsqueeze(0)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_short": (None, None)}  # copies have features of their own

    def decode(self, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> tuple[Tensor, State]:
        """At a cost, and with a state, independent of how many tokens came before."""
        prepared = self.prepare(q, k)
        out, state = plain_causal(prepared, v.flatten(0, 1), state)
        if not prepared.features.divide:
            out = F.rms_norm(out, out.shape[-1:])
        return out.view_as(v), state

    def redraw(self, step: int) -> None:
        self.kernel.redraw(step)

    def kernel_parameters(self) -> list[nn.Parameter]:
        return list(self.kernel.parameters())

    def learned(self) -> dict[str, Tensor]:
        return self.kernel.learned()


class OwnKernel(Performer):
    """A Performer whose kernel belongs to it alone: a subclass registers a name and sets `own`, and `Options` where the
    kernel has options."""

    own: ClassVar[type[FeatureMap]]

    def __init__(self, site: Site, switches: Switches = Switches(), **options: Any):  # noqa: B008 (frozen)
        super().__init__(site, self.own(site, **options), switches)

    @classmethod
    def build(cls, site: Site, switches: Switches, **options: Any) -> Self:
        return cls(site, switches, **options)

    @classmethod
    def own_cost(cls, site: Site, **options: Any) -> Cost:
        return super().own_cost(site, kernel=cls.own, **options)


def ready_made() -> Features:
    """For a kernel that prepares positive features itself: they are used as they are."""
    return Features(f=_unchanged, pull=_gradient, positive=True)


def _unchanged(features: Tensor) -> Tensor:
    return features


def _gradient(gradient: Tensor, features: Tensor) -> Tensor:
    return gradient
