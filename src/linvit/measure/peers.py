"""Attentions of other packages next to ours: on the same q, k and v, in one process, from PyPI as they are.

A peer's spec is that of an attention with the package's version, `performer-pytorch==1.1.4:m=64`, and is what records
call it. Every peer carries its `definition`: what the package says that it computes, in a few quadratic lines that use
none of its code. `measure.gate` compares the two, and what is wrong is neither timed nor measured.
"""

from __future__ import annotations

import importlib
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from linvit.attention import Attention, attention_cost, build_attention, size_option
from linvit.errors import choices
from linvit.kernels.base import positive
from linvit.randomness import generator
from linvit.registry import Spec, check_options, parse, signature_options
from linvit.site import Site

PIN = "=="


class Peer(Attention):
    """A package's attention, called in the dtype that it is given; it takes no mask."""

    package: ClassVar[str]
    extra: ClassVar[str] = "peers"  # of linvit, that installs it
    precision = "input"
    size_option: ClassVar[str | None] = None
    counterparts: ClassVar[Mapping[str, Mapping[str, str]]] = {}  # ours → the options with which it computes the same

    @classmethod
    def alike(cls, specs: Iterable[str], site: Site) -> list[Mapping[str, Any]]:
        """The options with which it computes what these do, with as many features; empty if it does nothing alike."""
        found: list[Mapping[str, Any]] = []
        for spec in specs:
            if (options := cls.counterparts.get(parse(spec).name)) is not None:
                features = attention_cost(spec, site).features
                if size_option(spec):
                    found.append({str(cls.size_option): features, **options})
                elif not features:  # else they are those of no projection, which no peer has
                    found.append(options)
        return found

    @abstractmethod
    def definition(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, N, N): the matrix that the package says it multiplies v with."""

    def defined(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.definition(q, k) @ v


class PerformerPytorch(Peer):
    """FastAttention. exp is FAVOR+ with a maximum on one side and ε; relu its generalised attention; efficient its
    no_projection."""

    package = "performer-pytorch"
    size_option = "m"
    counterparts: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **{f"performer-{kernel}": {} for kernel in ("exp", "hyp", "smreg", "oprf", "theta", "trig")},
        "performer-relu": {"kernel": "relu"},
        "efficient": {"kernel": "efficient"},
    }
    eps: ClassVar[dict[str, float]] = {"exp": 1e-4, "relu": 1e-3}

    def __init__(self, site: Site, *, m: int = 64, kernel: Literal["exp", "relu", "efficient"] = "exp"):
        super().__init__(site)
        positive("m", m, at_least=1)
        self.kernel = kernel
        fast = _module(self, "performer_pytorch.performer_pytorch").FastAttention
        with torch.random.fork_rng([]):  # it draws from the global generator
            torch.manual_seed(generator(self.package, site.seed, site.layer).initial_seed())
            self.module: Any = fast(
                site.head_dim,
                m,
                causal=site.causal,
                generalized_attention=kernel == "relu",
                no_projection=kernel == "efficient",
            )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.module(q, k, v)

    def definition(self, q: Tensor, k: Tensor) -> Tensor:
        if self.kernel == "efficient":
            return q.softmax(-1) @ k.softmax(-2).transpose(-1, -2)
        scores = self._features(q, (-1,)) @ self._features(k, (-1, -2)).transpose(-1, -2)
        scores = scores.tril() if self.site.causal else scores
        return scores / scores.sum(-1, keepdim=True)

    def _features(self, x: Tensor, over: tuple[int, ...]) -> Tensor:
        """relu(Ωx) + ε, or e^{Ωx − ‖x‖²/2 − max Ωx} + ε, for x = q·d^-¼; its factor m^-½ cancels."""
        x = x * self.site.head_dim**-0.25
        u, eps = x @ self.module.projection_matrix.to(x).t(), self.eps[self.kernel]
        if self.kernel == "relu":
            return u.relu() + eps
        return torch.exp(u - 0.5 * x.square().sum(-1, keepdim=True) - u.detach().amax(over, keepdim=True)) + eps


class LinformerPackage(Peer):
    """LinformerSelfAttention without its projections of the input, which others make here. It takes and gives heads
    side by side, so that they are merged and split for it."""

    package = "linformer"
    size_option = "k"
    counterparts: ClassVar[Mapping[str, Mapping[str, str]]] = {"linformer": {}}
    can_be_causal = False
    why_not_causal = "each projected key is a mixture of all tokens, later ones too"

    def __init__(self, site: Site, *, k: int | None = None):
        super().__init__(site)
        layer = _module(self, "linformer.linformer").LinformerSelfAttention
        k = min(64, site.tokens) if k is None else k
        positive("k", k, at_least=1)
        width = site.heads * site.head_dim
        with torch.random.fork_rng([]):
            torch.manual_seed(generator(self.package, site.seed, site.layer).initial_seed())
            self.module: Any = layer(width, site.tokens, k=k, heads=site.heads, dim_head=site.head_dim)
        self.module.to_q = self.module.to_out = nn.Identity()
        self.module.to_k, self.module.to_v = _Held(), _Held()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        d, wide = self.site.head_dim, v.shape[-1]
        if wide != d:  # v = I, for its matrix: a head's width of columns at a time
            parts = nn.functional.pad(v, (0, -wide % d)).split(d, -1)
            return torch.cat([self.attend(q, k, part, mask) for part in parts], -1)[..., :wide]
        q, self.module.to_k.value, self.module.to_v.value = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
        out = self.module(q)
        self.module.to_k.value = self.module.to_v.value = None
        return out.unflatten(-1, (-1, d)).transpose(1, 2)

    def definition(self, q: Tensor, k: Tensor) -> Tensor:
        project_k, project_v = (p.to(q)[: k.shape[2]].t() for p in (self.module.proj_k, self.module.proj_v))
        return torch.softmax(q @ (project_k @ k).transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ project_v


class _Held(nn.Module):
    """In place of a projection of the input: gives what it was told to."""

    value: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor | None:
        return self.value


class Transformers(Peer):
    """The softmax of its ViT: eager is three operations with all scores in memory, sdpa PyTorch's fused one."""

    package = "transformers"
    extra = "hf"

    def __init__(self, site: Site, *, implementation: Literal["eager", "sdpa"] = "eager"):
        super().__init__(site)
        if site.causal:
            raise ValueError("the softmax of transformers' ViT is not causal")
        self.is_causal = False  # as its ViT's modules say
        if implementation == "eager":
            self.function = _module(self, "transformers.models.vit.modeling_vit").eager_attention_forward
        else:
            self.function = _module(self, "transformers.integrations.sdpa_attention").sdpa_attention_forward

    @classmethod
    def alike(cls, specs: Iterable[str], site: Site) -> list[Mapping[str, Any]]:
        return [{"implementation": "eager"}, {"implementation": "sdpa"}]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.function(self, q, k, v, None)[0].transpose(1, 2)

    def definition(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)


PEERS: dict[str, type[Peer]] = {peer.package: peer for peer in (PerformerPytorch, LinformerPackage, Transformers)}


def create(spec: str | Spec, site: Site) -> Attention:
    """The attention that a spec names, ours (as `build_attention`) or a peer's."""
    spec = parse(spec)
    if PIN not in spec.name:
        return build_attention(spec, site)
    name, _, pinned = spec.name.partition(PIN)
    kind = _kind(name)
    if pinned != (there := installed(kind)):
        raise ValueError(f"spec '{spec}': {name} {there} is installed here, not {pinned}")
    options: dict[str, Any] = check_options(spec, signature_options(kind))
    try:
        return kind(site, **options)
    except ValueError as error:
        raise ValueError(f"spec '{spec}': {error}") from None


def peer_specs(text: str, specs: Iterable[str], site: Site) -> list[str]:
    """Specs of the peers in a text (`performer-pytorch:m=16,kernel=relu,linformer`), with their versions. One without
    options is given those with which it computes each of `specs` (its `alike`), or its defaults."""
    peers = [parse(peer) for peer in _listed(text)]
    kinds, ours, found = [_kind(peer.name) for peer in peers], list(specs), []
    for spec in ours:
        create(spec, site)  # a bad spec is an error before anything is measured
    for peer, kind in zip(peers, kinds, strict=True):
        options = [peer.options] if peer.options else kind.alike(ours, site) or [{}]
        found += [str(Spec(f"{peer.name}{PIN}{installed(kind)}", one)) for one in options]
    for spec in (found := list(dict.fromkeys(found))):
        create(spec, site)
    return found


def _listed(text: str) -> list[str]:
    """`performer-pytorch:m=16,kernel=relu,linformer` → its specs: what has no `=` begins another, or what has a `:`."""
    found: list[str] = []
    for piece in text.split(","):
        if found and "=" in piece and ":" not in piece:
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found


def _kind(name: str) -> type[Peer]:
    if name not in PEERS:
        raise ValueError(f"unknown peer '{name}'" + choices(name, PEERS))
    return PEERS[name]


def installed(kind: type[Peer]) -> str:
    """The version of its package."""
    try:
        return version(kind.package)
    except PackageNotFoundError:
        raise ValueError(f"{kind.package} is not installed: pip install 'linvit[{kind.extra}]'") from None


def _module(peer: Peer, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        why = f"{peer.package} cannot be imported ({error}): pip install 'linvit[{peer.extra}]'"
        raise ValueError(why) from None
