"""Attentions by name: `create_attention("performer-exp:m=128", heads=8, head_dim=64, tokens=4096)`."""

from __future__ import annotations

import dataclasses
import inspect
import typing

from torch import nn

from linvit.attention.base import ATTENTIONS, Attention, Switches, register
from linvit.errors import choices
from linvit.kernels import KERNELS, Site
from linvit.registry import Spec, check_options, parse, signature_options

__all__ = [
    "ATTENTIONS", "Attention", "Site", "Switches", "attention_names", "attentions", "create_attention", "register",
]  # fmt: skip

PERFORMER = "performer-"


def attention_names() -> list[str]:
    """Every attention: the registered ones, and a performer for each kernel."""
    return [*ATTENTIONS.names(), *(PERFORMER + kernel for kernel in KERNELS.names())]


def attentions(module: nn.Module) -> list[Attention]:
    """All attentions inside a module, in order."""
    return [part for part in module.modules() if isinstance(part, Attention)]


def attention_options(name: str) -> dict[str, inspect.Parameter]:
    """The options a spec of this name takes, from the constructors' signatures."""
    return signature_options(_factory(name)) | signature_options(Switches)


def _factory(name: str) -> type:
    if name.startswith(PERFORMER) and name.removeprefix(PERFORMER) in KERNELS:
        return KERNELS[name.removeprefix(PERFORMER)]
    if name in ATTENTIONS:
        return ATTENTIONS[name]
    raise ValueError(f"unknown attention '{name}'" + choices(name, attention_names()))


def create_attention(
    spec: str | Spec,
    *,
    heads: int,
    head_dim: int,
    tokens: int,
    grid: tuple[int, int] | None = None,
    prefix: int = 0,
    layer: int = 0,
    seed: int = 0,
    causal: bool = False,
) -> Attention:
    """The attention a spec names, for this place in a model. `tokens` counts prefix and image tokens."""
    spec = parse(spec)
    factory = _factory(spec.name)
    options = check_options(spec, attention_options(spec.name))
    site = Site(heads, head_dim, tokens, grid, prefix, layer, seed, causal)
    shared = {field.name for field in dataclasses.fields(Switches)}
    switches = Switches(**{key: typing.cast(typing.Any, v) for key, v in options.items() if key in shared})
    options = {key: value for key, value in options.items() if key not in shared}
    try:
        if issubclass(factory, Attention):
            return factory(site, switches, **options)
        from linvit.attention.performer import Performer

        return Performer(site, factory(site, **options), switches)
    except ValueError as error:
        raise ValueError(f"spec '{spec}': {error}") from None
