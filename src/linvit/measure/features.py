"""How many features bring an attention near softmax: its error over their number, on a model's own q and k or on random
ones, with uniform attention as the control."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from linvit.attention import CONTROL, Attention, attention_cost, estimates_softmax, size_option, with_size
from linvit.measure.advice import kind_of
from linvit.measure.error import Draws, attention_error, over_draws, random_errors
from linvit.measure.trained import captured
from linvit.progress import Progress, ignore
from linvit.records import Record, Tag
from linvit.registry import parse
from linvit.site import Site

COUNTS = (8, 16, 32, 64, 128, 256, 512)
ALWAYS = ("performer-hyp",)  # looked at whatever is asked about: the closest to softmax for its features
MAX_TOKENS = 1024  # of random q and k: the error changes little beyond, and takes N² numbers
MAX_LAYERS = 4  # of a model


@dataclass(frozen=True)
class Enough:
    """The fewest features, of those tried, with which a kind of attention is as near softmax as was asked for."""

    kind: str
    count: int | None  # None: not even the most that were tried
    error: float  # with as many, or with the most
    tried: int  # the most

    @property
    def spec(self) -> str | None:
        return None if self.count is None else with_size(self.kind, self.count)

    @property
    def features(self) -> int:
        """That this many rows of Ω, or the most, make: of some kernels one makes two."""
        return attention_cost(with_size(self.kind, self.count or self.tried), Site(1, 8, 50, (7, 7), 1)).features


def estimators(specs: Iterable[str]) -> list[str]:
    """The kinds among these, and those always looked at, that more features bring to softmax; no number of them does
    that for another kernel."""
    return [kind for kind in dict.fromkeys([*map(kind_of, specs), *ALWAYS]) if estimates_softmax(kind)]


def errors_at_random(kinds: Iterable[str], site: Site, sigma: float, progress: Progress = ignore) -> list[Record]:
    """For q, k ~ N(0, σ²), of two draws of the features, with a few heads and at most MAX_TOKENS tokens."""
    specs = [with_size(kind, count) for kind in kinds for count in COUNTS]
    small = Site(min(site.heads, 2), site.head_dim, min(site.tokens, MAX_TOKENS))
    found = list(random_errors(specs, small, sigmas=[sigma], draws=Draws(2), progress=progress))
    for record in found:
        if record.value is None or not math.isfinite(record.value):
            raise ValueError(
                f"sigma={sigma:g} is too large: the distance of {record.tags['attention']} from softmax is not finite"
            )
    return found


def errors_in_model(
    model: nn.Module, x: Tensor, kinds: Iterable[str], seconds: float, progress: Progress = ignore
) -> list[Record]:
    """On the q and k that a model has for images x, a mean over some of its layers, evenly chosen.

    To end after about this many seconds, the highest counts of features are left out."""
    every = [layer for part in captured(model, x) for layer in part]
    last = max(1, MAX_LAYERS - 1)
    some = every if len(every) <= MAX_LAYERS else [every[i * (len(every) - 1) // last] for i in range(MAX_LAYERS)]
    return list(_errors(some, list(kinds), time.monotonic() + seconds, progress))


@torch.no_grad()
def _errors(
    layers: Sequence[tuple[Attention, Tensor, Tensor, Tensor]], kinds: Sequence[str], until: float, progress: Progress
) -> Iterator[Record]:
    inputs = [(*attention.normalised(q.float(), k.float()), v.float()) for attention, q, k, v in layers]
    _, heads, tokens, head_dim = inputs[0][0].shape
    site, draws = Site(heads, head_dim, tokens), Draws(device=inputs[0][0].device)
    specs = [CONTROL, *(with_size(kind, count) for count in COUNTS for kind in kinds)]
    for i, spec in enumerate(specs):
        if time.monotonic() > until and i > 2 * len(kinds):
            break
        progress(i, len(specs), f"distance from softmax: {spec}")
        made = (draws.attention(spec, replace(site, layer=layer)) for layer in range(len(inputs)))
        found = [attention_error(one, *qkv)["attention_error"] for one, qkv in zip(made, inputs, strict=True)]
        tags: dict[str, Tag] = {"attention": spec, **draws.tags(site)}
        yield over_draws("attention_error", found, draws.where, tags)
    progress(len(specs), len(specs), "distance from softmax")


def enough(records: Iterable[Record], kinds: Iterable[str], target: float) -> list[Enough]:
    """For each kind, from what was measured of it."""
    errors = {str(r.tags["attention"]): r.value for r in records if r.metric == "attention_error"}
    found = []
    for kind in kinds:
        mine = {
            int(parse(spec).options[str(size_option(spec))]): value if value is not None else math.inf  # type: ignore[arg-type]
            for spec, value in errors.items()
            if kind_of(spec) == kind
        }
        first = next((count for count in sorted(mine) if mine[count] <= target), None)
        found.append(Enough(kind, first, mine[first or max(mine)], max(mine)))
    return found


def control(records: Iterable[Record]) -> float:
    """The error of uniform attention on the same q and k."""
    own = (r for r in records if r.metric == "attention_error" and r.tags["attention"] == CONTROL)
    return next(float(record.value or 0.0) for record in own)
