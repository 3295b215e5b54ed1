"""Every attention and kernel: formula, cost, options, origin, invariants."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping

from md import comment, page, table, words

from linvit.attention import (
    ATTENTIONS,
    PERFORMER,
    Attention,
    Switches,
    attention_cost,
    attention_options,
    break_even,
    resolve,
)
from linvit.cli.list import macs_formula
from linvit.kernels import KERNELS, FeatureMap
from linvit.registry import signature_options
from linvit.site import Site

SITE = Site(8, 64, 1024, (32, 32))

ROLES = {
    "candidate": "",
    "baseline": "the baseline, with which all others are compared",
    "limit": "the speed limit: a control that mixes no tokens",
    "control": "the control: it mixes tokens without looking at them",
}

INTRODUCTION = """An attention is named by a spec, `name[:key=value,…]`, for example `performer-exp:m=128` or
`linformer:k=64,dwc=3`. One spec for each layer is written `softmax@2+performer-relu:m=32@4`.
[Mathematics](../explanation/mathematics.md) derives what is stated here.

N tokens, d channels of a head (head_dim), q, k and v of one head; A is the matrix that multiplies v. *MACs* are
multiply–accumulates of one head, without the projections of the model. *Break-even* is the number of tokens above which
the attention takes fewer MACs than softmax with 8 heads of 64 channels and default options; for time, see
`linvit advise` and `linvit bench speed`. An option without a default is chosen automatically."""

PERFORMERS = """`performer-NAME` is linear attention with one of the kernels φ below:

    out_i = φ(x_i) [Σ_j φ(y_j) v_jᵀ] / φ(x_i)·Σ_j φ(y_j)        x = q·d^-¼, y = k·d^-¼, so that x·y = q·k/√d

Rows of A sum to one (except with `negative=literal` or `rms`), and its rank is at most the number of features F. With
positive features they are not negative. All can be causal, and then decode token by token with a state of F × (d + 1)
numbers per head. Ω has m random rows, redrawn only by `redraw`; `projection` is `orthogonal`, `iid`, `hadamard`, or
`none` for φ(x) = f(x) without random features, where the kernel allows it. An option that would have no effect is
refused."""


def attentions_page() -> str:
    switches = [f"`{name}`" for name in signature_options(Switches)]
    shared = table(["option", "default", ""], [_option(name.strip("`"), Switches()) for name in switches])
    return page(
        "Attentions",
        INTRODUCTION,
        "## Options of every attention",
        shared,
        "## Attentions",
        *(_attention(name, ATTENTIONS[name]) for name in sorted(ATTENTIONS.names())),
        "## Performers",
        PERFORMERS,
        table(["option", ""], _kernel_options()),
        *(_kernel(name, kernel) for name, kernel in KERNELS.items()),
    )


def _option(name: str, switches: Switches) -> list[str]:
    kind, about = comment(Switches, name)
    value = getattr(switches, name)
    choices = ", ".join(re.findall(r'"(\w+)"', kind))
    shown = name if not choices else f"{name}={choices.replace(', ', '|')}"
    return [f"`{shown}`", "" if value is None else f"`{str(value).lower()}`", about]


def _kernel_options() -> list[list[str]]:
    """What the options of all kernels mean, in the order in which they appear."""
    found: dict[str, str] = {}
    for _, kernel in KERNELS.items():
        for field in dataclasses.fields(kernel.Options):
            found[field.name] = found.get(field.name) or comment(kernel.Options, field.name)[1]
    return [[f"`{name}`", about] for name, about in found.items()]


def _attention(name: str, kind: type[Attention]) -> str:
    facts = {
        "formula": f"`{kind.formula}`",
        "estimates": "" if kind.estimates == "itself" or kind.role != "candidate" else kind.estimates,
        "role": ROLES[kind.role],
        "invariants": kind.invariants,
        "caution": kind.caution,
        **_costs(name),
        "causal": "yes" if kind.can_be_causal else f"no: {kind.why_not_causal}",
        "options": _options(name),
        "origin": _linked(kind.origin),
    }
    module = sys.modules[kind.__module__]
    alone = sum(one.__module__ == kind.__module__ for _, one in ATTENTIONS.items()) == 1
    return "\n\n".join(filter(None, (f"### {name}", words(module) if alone else "", words(kind), _list(facts))))


def _kernel(name: str, kernel: type[FeatureMap]) -> str:
    width = resolve(PERFORMER + name).kind.cost(SITE, kernel=kernel).features
    facts = {
        "φ(x)": f"`{kernel.formula}`",
        "φ(x)·φ(y) estimates": kernel.estimates,
        "caution": kernel.caution,
        "features": str(width),
        **_costs(PERFORMER + name),
        "options": _options(PERFORMER + name),
        "origin": _linked(kernel.origin),
    }
    return "\n\n".join(filter(None, (f"### {PERFORMER}{name}", words(kernel), _list(facts))))


def _costs(name: str) -> dict[str, str]:
    tokens = break_even(name, SITE)
    counted = attention_cost(name, SITE).macs // SITE.heads
    return {
        "MACs per head": macs_formula(name) or f"{counted / 1e6:.1f} M with 32 × 32 tokens of 64 channels",
        "break-even": "never" if tokens is None else f"{tokens:,} token{'s' * (tokens != 1)}",
    }


def _options(name: str) -> str:
    shared = signature_options(Switches)
    own: Mapping[str, inspect.Parameter] = attention_options(name)
    defaults = {key: parameter.default for key, parameter in own.items() if key not in shared}
    return ", ".join(f"`{key}`" if v is None else f"`{key}={str(v).lower()}`" for key, v in defaults.items())


def _linked(origin: str) -> str:
    return re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", origin) or "linvit"


def _list(facts: Mapping[str, str]) -> str:
    return "\n".join(f"- **{name}**: {fact}" for name, fact in facts.items() if fact)
