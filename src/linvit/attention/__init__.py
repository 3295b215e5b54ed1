"""Attentions by name: `create_attention("performer-exp:m=128", heads=8, head_dim=64, tokens=4096)`.

What is to be known of an attention follows from its spec: its role, its cost at a site, its random features.
"""

from __future__ import annotations

import bisect
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from linvit.attention.base import ATTENTIONS, Attention, Role, Switches, register
from linvit.errors import choices
from linvit.kernels import KERNELS
from linvit.registry import Spec, check_options, parse, signature_options
from linvit.site import Cost, Site

__all__ = [
    "ATTENTIONS",
    "Attention",
    "Cost",
    "Role",
    "Site",
    "Switches",
    "attention_cost",
    "attention_names",
    "attentions",
    "build_attention",
    "create_attention",
    "register",
    "role_of",
]

PERFORMER = "performer-"
BASELINE, LIMIT, CONTROL = "softmax", "identity", "uniform"  # by their roles: what everything is compared with
MANY = 1 << 23  # tokens; no break-even is looked for beyond


def attention_names(*roles: Role) -> list[str]:
    """Every attention: the registered ones, and a performer for each kernel; or those with one of these roles."""
    names = [*ATTENTIONS.names(), *(PERFORMER + kernel for kernel in KERNELS.names())]
    return [name for name in names if not roles or role_of(name) in roles]


def attentions(module: nn.Module) -> list[Attention]:
    """All attentions inside a module, in order."""
    return [part for part in module.modules() if isinstance(part, Attention)]


def attention_options(name: str) -> dict[str, inspect.Parameter]:
    """The options a spec of this name takes, from the constructors' signatures."""
    kind, own = _kind(name)
    return {**signature_options(own.get("kernel", kind)), **signature_options(Switches)}


def _kind(name: str) -> tuple[type[Attention], dict[str, Any]]:
    """The class, and the kernel of a performer."""
    if name.startswith(PERFORMER) and name.removeprefix(PERFORMER) in KERNELS:
        from linvit.attention.performer import Performer

        return Performer, {"kernel": KERNELS[name.removeprefix(PERFORMER)]}
    if name in ATTENTIONS:
        return ATTENTIONS[name], {}
    raise ValueError(f"unknown attention '{name}'" + choices(name, attention_names()))


class Resolved(NamedTuple):
    """A spec as the class that it names and what its class methods take."""

    kind: type[Attention]
    switches: Switches
    options: dict[str, Any]


def resolve(spec: str | Spec) -> Resolved:
    spec = parse(spec)
    kind, own = _kind(spec.name)
    options: dict[str, Any] = check_options(spec, attention_options(spec.name))
    shared = {field.name: options.pop(field.name) for field in dataclasses.fields(Switches) if field.name in options}
    return Resolved(kind, Switches(**shared), own | options)


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
    """The attention that a spec names, for one layer of a model. `tokens` counts prefix and image tokens."""
    return build_attention(spec, Site(heads, head_dim, tokens, grid, prefix, layer, seed, causal))


def build_attention(spec: str | Spec, site: Site, *, inside: bool = False) -> Attention:
    """The same for a Site. `inside` a MultiHead, which sees the tokens, a spec may have a gate and positions by cpe."""
    kind, switches, options = resolve(spec)
    try:
        for name in () if inside else ("gate", "cpe"):
            if value := getattr(switches, name):
                raise ValueError(f"{name}={value} works on tokens, which an attention alone does not see: use a model")
        return kind.build(site, switches, **options)
    except ValueError as error:
        raise ValueError(f"spec '{parse(spec)}': {error}") from None


def attention_cost(spec: str | Spec, site: Site, dim: int | None = None) -> Cost:
    """Parameters, multiply–accumulates and memory of one layer; it is not built. With the tokens' width `dim`, those of
    a gate and of positions by cpe, too."""
    kind, switches, options = resolve(spec)
    cost = kind.cost(site, switches, **options)
    return cost if dim is None else cost + switches.cost_around(dim, site)


def break_even(spec: str | Spec, site: Site) -> int | None:
    """The number of tokens above which it takes fewer multiply–accumulates than the baseline; None if never."""

    def cheaper(tokens: int) -> bool:
        here = dataclasses.replace(site, tokens=max(1, tokens), grid=None)
        return attention_cost(spec, here).macs < attention_cost(BASELINE, here).macs

    first = bisect.bisect_left(range(MANY), True, key=cheaper)
    return None if first == MANY else max(1, first - 1)


def regridded(spec: str | Spec, weights: Mapping[str, Tensor], old: Site, new: Site) -> dict[str, Tensor]:
    """An attention's weights, by their names inside it, for another grid of image tokens."""
    kind, _, options = resolve(spec)
    return kind.regridded(weights, old, new, **options)


def _parts(spec: str | Spec) -> list[Spec]:
    """The specs of a text that may be for several layers, `softmax@2+performer-relu:m=32@4`."""
    return [spec] if isinstance(spec, Spec) else [parse(part.partition("@")[0]) for part in str(spec).split("+")]


def role_of(spec: str | Spec) -> Role:
    """Of one attention, or of several layers' if they all have the same role."""
    roles: set[Role] = {_kind(part.name)[0].role for part in _parts(spec)}
    return roles.pop() if len(roles) == 1 else "candidate"


def caution(spec: str | Spec) -> str:
    """What tests of linvit found against it, or against one of several layers' attentions."""
    found = (resolve(part) for part in _parts(spec))
    return next(filter(None, (one.options.get("kernel", one.kind).caution for one in found)), "")


def is_linear(spec: str | Spec) -> bool:
    """Whether its time grows in proportion to the number of tokens."""
    return all(_kind(part.name)[0].linear for part in _parts(spec))


def has_random_features(spec: str | Spec) -> bool:
    """Whether a redraw changes anything, in one layer at least."""
    site = Site(1, 8, 4097, (64, 64), 1)  # any will do
    return any(attention_cost(part, site).drawn for part in _parts(spec))


def estimates_softmax(spec: str | Spec) -> bool:
    """Whether it tends to softmax with the number of its random features."""
    return has_random_features(spec) and getattr(resolve(spec).options.get("kernel"), "estimates_softmax", False)


def size_option(spec: str | Spec) -> str | None:
    """The option that sets the number of features, or of projected keys, if there is such a number to set."""
    kind, _, options = resolve(spec)
    return None if options.get("projection") == "none" else options.get("kernel", kind).size_option


def with_size(spec: str | Spec, size: int, tokens: int | None = None) -> str:
    """The spec with this value of its `size_option`, if it has one and leaves it open; of projected keys, no more than
    there are tokens."""
    given, option = parse(spec), size_option(spec)
    if tokens is not None and resolve(spec).kind.size_option is not None:
        size = min(size, tokens)
    return str(given if option is None else Spec(given.name, {option: size, **given.options}))
