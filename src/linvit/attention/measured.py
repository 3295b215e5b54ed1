"""The cost of an attention that does not state it: built, called once, and counted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from linvit.attention.base import Attention, Switches
from linvit.randomness import generator
from linvit.site import Cost, Site, squarest

LONGEST = 1024  # tokens; beyond, what is measured with as many is scaled: a model that does not fit is never built


def measured_cost(kind: type[Attention], site: Site, **options: Any) -> Cost:
    more = site.tokens / LONGEST
    found = _counted(kind, site if more <= 1 else site.at(LONGEST), tuple(options.items()))
    return found if more <= 1 else replace(found, macs=round(found.macs * (more if kind.linear else more**2)))


@cache
def _counted(kind: type[Attention], site: Site, options: tuple[tuple[str, Any], ...]) -> Cost:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    if site.grid is None and site.tokens > site.prefix:  # which it may need
        site = replace(site, grid=squarest(site.tokens - site.prefix))
    made = kind.build(site, Switches(), **dict(options))
    shape = 1, site.heads, site.tokens, site.head_dim
    q, k, v = (torch.randn(shape, generator=generator("cost", name)) for name in "qkv")
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # fused: uncounted
        made(q, k, v)
    macs = counter.get_total_flops() // 2 or q.numel()  # without products it passes over its inputs at least
    before = {key: value.clone() for key, value in made.state_dict().items()}
    made.redraw(-1)
    drawn = sum(value.numel() for key, value in made.state_dict().items() if not torch.equal(value, before[key]))
    kept = sum(buffer.numel() for buffer in made.buffers())
    return Cost(sum(weight.numel() for weight in made.parameters()), macs, kept=kept, drawn=drawn)
