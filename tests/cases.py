"""What the common tests run on: everything registered, and each choice an option offers.

A variant is a spec that differs from the default in one option. Lists come from the registry and from signatures, so
that a kernel or an attention registered tomorrow, and each of its choices, is tested tomorrow. Kernels of one family
share the code of their choices, so of ours only one of each family is tested with all of them.
"""

from __future__ import annotations

import dataclasses
import typing
from functools import cache

import torch
from torch import Tensor

from linvit.attention import ATTENTIONS, PERFORMER, attention_names, attention_options, build_attention
from linvit.attention.base import Attention, Switches
from linvit.attention.performer import Performer
from linvit.kernels import KERNELS
from linvit.registry import parse
from linvit.site import Site, squarest

SMALL = {"m": 11, "k": 5, "n": 5, "cell": 2}  # small, most of them primes; whoever has these options gets them
SITE = {"heads": 3, "head_dim": 7, "tokens": 13}
BATCH = 2
SWITCHES = {field.name for field in dataclasses.fields(Switches)}

# Facts that no signature tells.
FAMILIES = {"relu", "gelu", "trig", "exp", "theta", "theta-linear"}  # non-negative, signed, with a norm, exponential, …
SWITCHED = {"softmax", "performer-exp"}  # have the options of every attention; tests/attention/test_switches.py, all
ORDERED = {"linformer", "window", "agent", "mhla", "twoscale"}  # tokens have places: not permutation-equivariant
GRIDDED = {"window", "twoscale"}  # cannot be without a grid
DRAWN = {"iid", "hadamard", "chi", "sqrt"}  # how Ω is drawn, which no attention sees: tests/kernels has them
ROUNDED = {"autocast", "everywhere"}  # to float16, with exact gradients: tests/attention/test_literal.py
NOT_AVERAGES = {"literal:", "linformer", "normaliser=released", "vit3"}  # rows of the matrix need not sum to one
HALVED = {"pola"}  # halves of v have matrices of their own, and the mean of them is given


def spec_of(name: str, **options: object) -> str:
    allowed = attention_options(name)
    chosen = {key: value for key, value in SMALL.items() if key in allowed} | options
    if options.get("projection") == "none":
        del chosen["m"]  # without effect
    pairs = ",".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in chosen.items()
    )
    return f"{name}:{pairs}" if pairs else name


@cache
def specs() -> list[str]:
    """Every attention by its default, and by each value of each option that is a choice."""
    found: list[str] = []
    for name in attention_names():
        candidates = [spec_of(name)]
        for key, parameter in attention_options(name).items() if _varied(name) else ():
            if key in SWITCHES and name not in SWITCHED:
                continue
            for value in _choices(parameter.annotation):
                if value not in (
                    parameter.default,
                    "auto",
                    *DRAWN,
                    *ROUNDED,
                ):  # auto is another name for one of the others
                    candidates.append(spec_of(name, **{key: value}))
        found += [spec for spec in dict.fromkeys(candidates) if can(spec)]
    return found


def _varied(name: str) -> bool:
    kernel = name.removeprefix(PERFORMER)
    ours = name != kernel and KERNELS[kernel].__module__.startswith("linvit.")
    return not ours or kernel in FAMILIES


def defaults() -> list[str]:
    return [spec_of(name) for name in attention_names()]


def _choices(annotation: object) -> list[object]:
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return list(parts)
    return [value for part in parts for value in _choices(part)]


def site_of(spec: str, **site: typing.Any) -> Site:
    """Where `build` puts it."""
    site = SITE | site
    if parse(spec).name in GRIDDED and "grid" not in site:
        prefix = min(1, site["tokens"] - 1)
        site |= {"prefix": prefix, "grid": squarest(site["tokens"] - prefix)}
    return Site(**site)


def build(spec: str, **site: typing.Any) -> Attention:
    return build_attention(spec, site_of(spec, **site))


@cache
def can(spec: str, causal: bool = False) -> bool:
    """Whether this can be built: a choice may be refused, as a ValueError."""
    try:
        build(spec, causal=causal)
    except ValueError:
        return False
    return True


def modes() -> list[tuple[str, bool]]:
    """(spec, causal) for all that can be built."""
    return [(spec, causal) for spec in specs() for causal in (False, True) if can(spec, causal)]


def performers() -> list[tuple[str, bool]]:
    return [(spec, causal) for spec, causal in modes() if parse(spec).name not in ATTENTIONS]


def inputs(
    seed: int = 0,
    *,
    sigma: float = 1.0,
    dtype: torch.dtype = torch.float64,
    batch: int = BATCH,
    heads: int = SITE["heads"],
    tokens: int = SITE["tokens"],
    head_dim: int = SITE["head_dim"],
    grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    shape = batch, heads, tokens, head_dim
    q, k, v = (torch.randn(shape, generator=source, dtype=torch.float64) * s for s in (sigma, sigma, 1.0))
    q, k, v = (x.to(dtype).requires_grad_(grad) for x in (q, k, v))
    return q, k, v


def ragged(batch: int = BATCH, tokens: int = SITE["tokens"]) -> Tensor:
    """A mask that drops the first tokens of one row and scattered ones of the others."""
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    mask[0, :3] = False
    mask[1:, 1::3] = False
    return mask


def is_rms(attention: Attention) -> bool:
    """Whether the output is an RMS norm of Av instead of Av."""
    return isinstance(attention, Performer) and getattr(attention.kernel, "negative", "") == "rms"


def is_average(spec: str) -> bool:
    """Whether the rows of its matrix sum to one."""
    return not any(words in spec for words in NOT_AVERAGES)


def rounding(attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> float:
    """How far two float64 ways to the same output may be apart.

    The error of the float32 computation against the float64 one shows how ill-conditioned these inputs are (signed
    kernels divide by sums that nearly vanish). It shrinks with the machine epsilon; 100 is for another order of sums.
    """
    with torch.no_grad():
        fine = attention(q.double(), k.double(), v.double(), mask)
        coarse = attention(q.float(), k.float(), v.float(), mask)
    epsilon = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}
    floor = epsilon[torch.float32] * float(fine.abs().max())
    worst = max(float((fine - coarse).abs().max()), floor)
    return 100 * worst * epsilon[torch.float64] / epsilon[torch.float32]
