"""Attention: (q, k, v, mask) → out, all (batch, heads, tokens, head_dim); True in a mask means keep.

`Attention.forward` checks its inputs and applies the options that every attention has; a subclass implements `attend`.
Class attributes and class methods state what other modules need to know: role, cost, random features, and how weights
move to another grid.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.grid import DepthwiseConvolution, Rotation
from linvit.kernels.base import tracing
from linvit.registry import Registry
from linvit.site import Cost, Site

PRECISE = (torch.float32, torch.float64)  # dtypes that attention is computed in

# A comparison has candidates, the baseline that they are compared with, the limit that none can pass in speed, and the
# control that mixes tokens without looking at them.
Role = Literal["candidate", "baseline", "limit", "control"]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Options of every attention."""

    # RMS norm of q and k over each head or over all channels, with learned gains: bounds their length
    qk_norm: Literal["head", "all"] | None = None
    rope: Literal["2d"] | None = None  # rotary positions: q and k are rotated by their row and column
    dwc: int = 0  # size of a depthwise convolution of v on the grid, added to the output
    gate: Literal["linear", "silu"] | None = None  # multiply the output by a projection of the tokens, or its SiLU
    cpe: int = 0  # size of a depthwise convolution of the tokens, added to them before the block: positions
    exact_cls: bool = False  # softmax for the queries of the prefix tokens, O(Nd)
    debug: bool = os.environ.get("LINVIT_DEBUG", "") not in ("", "0")  # name the input that holds a NaN

    def cost(self, site: Site) -> Cost:
        """Cost of the options, added to that of the attention; without `gate` and `cpe`."""
        width = site.heads * site.head_dim
        gains = {None: 0, "head": 2 * site.head_dim, "all": 2 * width}[self.qk_norm]
        exact = 2 * site.prefix * site.tokens * width if self.exact_cls else 0
        table = 2 * site.tokens * site.head_dim if self.rope else 0
        return _convolution(width, self.dwc, site) + Cost(gains, exact, kept=table)

    def cost_around(self, dim: int, site: Site) -> Cost:
        """Cost of `gate` and `cpe`, which work on tokens, not on q, k and v."""
        inner = site.heads * site.head_dim
        gate = Cost((dim + 1) * inner, site.tokens * dim * inner, 2 * site.tokens * inner) if self.gate else Cost()
        return gate + _convolution(dim, self.cpe, site)


def _convolution(channels: int, size: int, site: Site) -> Cost:
    """Of a depthwise convolution over the image tokens."""
    filters = channels * size**2
    return Cost(filters, (site.tokens - site.prefix) * filters)


class Attention(nn.Module, ABC):
    """A subclass gives `formula`, `estimates`, `origin` and `invariants` for the documentation, implements `attend`,
    and states `own_cost`, so that its cost is known without building it."""

    formula: ClassVar[str] = ""
    estimates: ClassVar[str] = ""
    origin: ClassVar[str] = ""  # where it was published; empty: here
    caution: ClassVar[str] = ""  # what tests of linvit found against it: "it …"; a kernel has its own
    invariants: ClassVar[str] = ""  # what holds for its attention matrix; tests check it
    role: ClassVar[Role] = "candidate"
    linear: ClassVar[bool] = True  # in the number of tokens
    size_option: ClassVar[str | None] = None  # sets the number of projected keys; that of features is a kernel's
    # Of the computation. float32: float32 or float64. half: on a GPU the dtype of the inputs, on a CPU as float32.
    # input: the dtype of the inputs, with autocast.
    precision: Literal["float32", "half", "input"] = "float32"
    can_be_causal: ClassVar[bool] = True
    why_not_causal: ClassVar[str] = ""
    no_matrix: ClassVar[str] = ""  # why there is no attention matrix, where there is none
    without_effect: ClassVar[dict[str, str]] = {}  # options that would change nothing, and why
    is_softmax: bool = False  # whether it computes exact softmax attention at this site
    layerwise: bool = False  # whether all such layers of a model share weights: `share` is then implemented
    shared: Sequence[Attention] = ()  # the one whose weights this uses; a list, so that it is not a submodule

    def __init__(self, site: Site, switches: Switches = Switches()):
        super().__init__()
        if site.causal and not self.can_be_causal:
            raise ValueError(f"{type(self).__name__.lower()} cannot be causal: {self.why_not_causal}")
        self.site, self.switches = site, switches
        self.q_norm = self.k_norm = self.dwc = self.rope = None
        for name, why in self.without_effect.items():
            if value := getattr(switches, name):
                raise ValueError(f"{name}={str(value).lower()} has no effect: {why}")
        if switches.qk_norm:
            width = site.head_dim * (site.heads if switches.qk_norm == "all" else 1)
            self.q_norm, self.k_norm = (nn.Parameter(torch.ones(width)) for _ in "qk")
        if switches.rope:
            self.rope = Rotation(site)
        if switches.exact_cls and (site.causal or not site.prefix):
            raise ValueError("exact_cls=true needs prefix tokens (prefix ≥ 1) and a bidirectional attention")
        if switches.dwc:
            self.dwc = DepthwiseConvolution(site, switches.dwc)
        self.bare = not (switches.qk_norm or switches.rope or switches.exact_cls or switches.dwc)  # `attend` is all

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, D), v of any width, float32 or float64; on a GPU also in half precision, if `precision` says so;
        mask bool (B, N) over keys."""

    @classmethod
    def build(cls, site: Site, switches: Switches, **options: Any) -> Self:
        """Build the attention with the options of its constructor or `Options`."""
        return cls(site, switches, **options)

    @classmethod
    def cost(cls, site: Site, switches: Switches = Switches(), **options: Any) -> Cost:
        """Cost for one sequence and all heads, without the model's projections. Nothing is built."""
        return cls.own_cost(site, **options) + switches.cost(site)

    @classmethod
    def own_cost(cls, site: Site, **options: Any) -> Cost:
        """Cost without the options that every attention has. By default the attention is built and measured."""
        from linvit.attention.measured import measured_cost

        return measured_cost(cls, site, **options)

    @classmethod
    def regridded(cls, weights: Mapping[str, Tensor], old: Site, new: Site, **options: Any) -> dict[str, Tensor]:
        """Its weights, by name, converted to another grid of image tokens. Most do not depend on the grid."""
        return dict(weights)

    def share(self, owner: Attention) -> None:
        """Use the owner's weights instead of its own; they are stored once, with the owner."""
        raise NotImplementedError

    def redraw(self, step: int) -> None:
        """New random features, where there are any; called from the training loop, never from `forward`."""

    @torch.no_grad()
    def near_softmax(self) -> None:
        """Initialise as close as possible to softmax attention with the same weights: a convolution adds nothing."""
        if self.dwc is not None:
            self.dwc.weight.zero_()

    def kernel_parameters(self) -> list[nn.Parameter]:
        """Parameters of a learned kernel, which a conversion fits to the teacher's attention first."""
        return []

    def learned(self) -> dict[str, Tensor]:
        """Single numbers that are learned and mean something, by name: a training logs them."""
        return {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention output, computed in `precision` and returned in v's dtype."""
        usual, dtype, cast = self._check(q, k, v, mask), v.dtype, self._casts(q, k, v)
        as_given = self.precision == "input" or not autocasts(q)
        if usual and self.bare and as_given and (not cast or dtype in PRECISE):
            return self.attend(q, k, v, None)  # the rest would change nothing, and takes as long as a matrix product
        with nullcontext() if as_given else full_precision(q):
            q, k, v = kept(mask, *(precise(q, k, v) if cast else (q, k, v)))
            out = self._mix(q, k, v, mask)
            if self.dwc is not None:
                out = out + self.dwc(v)
        return out if out.dtype == dtype else out.to(dtype)

    def _casts(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether inputs in half precision are computed in float32."""
        if self.precision == "half":
            return q.device.type == "cpu" or not q.dtype == k.dtype == v.dtype
        return self.precision == "float32"

    def step(self, q: Tensor, k: Tensor, v: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Decode one or a few tokens (B, H, t, D) that follow those of `state` → their outputs, and the new state."""
        if not self.site.causal:
            raise ValueError("step() decodes causally: build the attention with causal=True")
        self._check(q, k, v, None)
        dtype = v.dtype
        with full_precision(q):
            q, k, v = precise(q, k, v)
            out, state = self.decode(*self.normalised(q, k), v, state)
        return out.to(dtype), state

    def decode(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> tuple[Tensor, Any]:
        """`step` with inputs as `attend` gets them. The default keeps all earlier q, k and v, which works for any
        attention; a subclass may have a smaller state."""
        new = q.shape[2]
        if state is not None:
            q, k, v = (torch.cat(pair, 2) for pair in zip(state, (q, k, v), strict=True))
        return self.attend(q, k, v, None)[:, :, -new:], (q, k, v)

    def attention_matrix(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        """The matrix (B, H, N, N) that multiplies v, computed by attending to v = I. Attentions that are not linear in
        v raise a ValueError."""
        self._check(q, k, q, mask)
        self.require_matrix()
        with full_precision(q):
            q, k = kept(mask, *precise(q, k))
            identity = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device).expand(*q.shape[:2], -1, -1)
            return self._mix(q, k, identity, mask)

    def require_matrix(self) -> None:
        """Raise a ValueError if there is no attention matrix."""
        if self.no_matrix:
            raise ValueError(f"{type(self).__name__.lower()} has no attention matrix: {self.no_matrix}")

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k = self.normalised(q, k)
        out = self.attend(q, k, v, mask)
        if self.switches.exact_cls:
            first = self.site.prefix
            out = torch.cat([softmax_attention(q[:, :, :first], k, v, mask), out[:, :, first:]], 2)
        return out

    def normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k with the norms and rotations of `qk_norm` and `rope`."""
        if self.q_norm is not None and self.k_norm is not None:
            over, shape = ((1, 3), (-1, 1, q.shape[3])) if self.switches.qk_norm == "all" else (3, (-1,))
            q, k = _rms_norm(q, self.q_norm.view(shape), over), _rms_norm(k, self.k_norm.view(shape), over)
        return (q, k) if self.rope is None else (self.rope(q), self.rope(k))

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
        """Raise a ValueError for inputs that do not fit. Returns whether they are of one dtype and without a mask."""
        site, shape = self.site, q.shape
        if (
            shape == k.shape == v.shape
            and q.dtype is k.dtype is v.dtype
            and q.is_floating_point()
            and len(shape) == 4
            and shape[2]
            and (shape[1], shape[3]) == (site.heads, site.head_dim)
            and mask is None
            and not self.switches.debug
        ):  # the usual input passes quickly
            return True
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 4:
                raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be (batch, heads, tokens, head_dim)")
            if not x.is_floating_point():
                raise ValueError(f"{name} has dtype {x.dtype}: it must be a float")
            batch, heads, tokens, head_dim = x.shape
            if heads != site.heads:
                raise ValueError(f"{name} has {heads} heads, but the attention was built for heads={site.heads}")
            if head_dim != site.head_dim:
                raise ValueError(f"{name} has head_dim {head_dim}, but the attention was built for {site.head_dim}")
            if batch != q.shape[0] or tokens != q.shape[2]:
                raise ValueError(f"{name} has batch × tokens {batch} × {tokens}, but q has {q.shape[0]} × {q.shape[2]}")
            if tokens == 0:
                raise ValueError(f"{name} has no tokens")
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"mask has dtype {mask.dtype}: it must be bool, True where a key is kept")
        if mask is not None and mask.shape != (wanted := (q.shape[0], q.shape[2])):
            raise ValueError(f"mask has shape {tuple(mask.shape)}: it must be (batch, tokens) = {wanted}")
        for name, x in (("q", q), ("k", k), ("v", v)) if self.switches.debug and not tracing() else ():
            seen = x if mask is None else x.transpose(1, 2)[mask]
            if not torch.isfinite(seen).all():
                kind = "NaN" if torch.isnan(seen).any() else "infinity"
                raise ValueError(f"{name} holds {kind} (layer {site.layer})")
        return False

    def extra_repr(self) -> str:
        return f"heads={self.site.heads}, head_dim={self.site.head_dim}, tokens={self.site.tokens}"


def _rms_norm(x: Tensor, gain: Tensor, over: int | tuple[int, ...]) -> Tensor:
    wide = x if x.dtype in PRECISE else x.float()
    mean = wide.square().mean(over, keepdim=True)
    return (wide * torch.rsqrt(mean + torch.finfo(wide.dtype).eps) * gain).to(x.dtype)


def share_layerwise(attentions: Iterable[Attention]) -> None:
    """Weights that layers have in common belong to the model: the first layer that has them owns them."""
    common = [attention for attention in attentions if attention.layerwise]
    for other in common[1:]:
        other.share(common[0])


def interpolated(value: Tensor, old: Site, new: Site, mode: str, scale: float = 1.0, antialias: bool = True) -> Tensor:
    """(…, prefix + image tokens) of one grid → the same of another, in float32; what belongs to the prefix stays."""
    assert old.grid is not None
    assert new.grid is not None
    first, image = value[..., : old.prefix], value[..., old.prefix :].float()
    plane = image.reshape(-1, 1, *old.grid)
    moved = F.interpolate(plane, new.grid, mode=mode, align_corners=False, antialias=antialias) * scale
    return torch.cat([first, moved.reshape(*image.shape[:-1], -1).to(value.dtype)], -1)


def kept(mask: Tensor | None, *tensors: Tensor) -> Sequence[Tensor]:
    """Zero where the mask drops a token: what padding holds, even NaN, must not matter."""
    return tensors if mask is None else [x.masked_fill(~mask[:, None, :, None], 0.0) for x in tensors]


def full_precision(x: Tensor) -> AbstractContextManager:
    """Without autocast; nothing where there is none, so that exported graphs are free of it."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def autocasts(x: Tensor) -> bool:
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def precise(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All in float64 if one of them is, else in float32."""
    dtypes = [x.dtype for x in tensors]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    return tensors if dtypes.count(dtype) == len(dtypes) else tuple(x.to(dtype) for x in tensors)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """Fused softmax attention; a row with no key left gives zero."""
    if mask is None and k.shape[-2] == 1:  # nothing to choose from: v, which the fused backward pass would round
        return v.expand(*q.shape[:-1], v.shape[-1])
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    keep = mask[:, None, None, :]
    if causal:
        keep = keep & torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    return torch.where(keep.any(-1, keepdim=True), out, 0.0)


ATTENTIONS: Registry[type[Attention]] = Registry("attention", "linvit.attention")
register = ATTENTIONS.register
