"""How many features bring an attention near softmax: its error over their number, on a model's own q and k or on drawn
ones, with uniform attention beside it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linvit.attention import PERFORMER, create_attention
from linvit.attention.performer import Performer
from linvit.kernels import KERNELS
from linvit.measure import error
from linvit.measure.advice import Shape, kind_of, sized
from linvit.measure.provenance import provenance
from linvit.measure.trained import captured
from linvit.progress import Progress, ignore
from linvit.records import Record
from linvit.registry import parse

COUNTS = (8, 16, 32, 64, 128, 256, 512)
ALWAYS = ("performer-hyp",)  # looked at whatever is asked about: the closest to softmax for its features
LONGEST = 1024  # tokens of drawn q and k: the error changes little beyond, and takes N² numbers
LAYERS = 4  # of a model, at most


@dataclass(frozen=True)
class Enough:
    """The fewest features, of those tried, with which a kind of attention is as near softmax as was asked for."""

    kind: str
    count: int | None  # None: not even the most that were tried
    error: float  # with as many, or with the most
    tried: int  # the most

    @property
    def spec(self) -> str | None:
        return None if self.count is None else sized(self.kind, self.count, self.count)

    @property
    def features(self) -> int:
        """That so many rows of Ω, or the most, make: of some kernels one makes two."""
        rows = self.count or self.tried
        made = Shape(50, 1, 8, prefix=1).attention(sized(self.kind, rows, rows))
        return made.kernel.width if isinstance(made, Performer) else rows


def estimators(specs: Iterable[str]) -> list[str]:
    """The kinds among these, and those always looked at, that more features bring to softmax; no number of them does
    that for another kernel."""
    kinds = dict.fromkeys([*map(kind_of, specs), *ALWAYS])
    drawn = [kind for kind in kinds if parse(kind).options.get("projection") != "none"]
    return [kind for kind in drawn if _estimates(parse(kind).name).startswith("softmax e")]


def _estimates(name: str) -> str:
    return KERNELS[name.removeprefix(PERFORMER)].estimates if name.startswith(PERFORMER) else ""


def drawn(
    kinds: Iterable[str], *, sigma: float, tokens: int, heads: int, head_dim: int, progress: Progress = ignore
) -> list[Record]:
    """The errors for q, k ~ N(0, σ²), of two draws of the features, with at most LONGEST tokens."""
    specs = [sized(kind, count, tokens) for kind in kinds for count in COUNTS]
    found = list(error.measure(specs, sigmas=[sigma], tokens=min(tokens, LONGEST), heads=min(heads, 2),
                               head_dim=head_dim, draws=2, progress=progress))  # fmt: skip
    for record in found:
        if record.value is None or not math.isfinite(record.value):
            raise ValueError(f"sigma={sigma:g} is too large: the distance of {record.tags['attention']} from softmax "
                             "is no number")  # fmt: skip
    return found


def seen(
    model: nn.Module, x: Tensor, kinds: Iterable[str], seconds: float, progress: Progress = ignore
) -> list[Record]:
    """The errors on the q and k that a model has for images x, a mean over some of its layers, evenly chosen.

    To end after about so many seconds, the highest counts of features are left out."""
    every = [layer for part in captured(model, x) for layer in part]
    some = [every[i * (len(every) - 1) // max(1, LAYERS - 1)] for i in range(LAYERS)] if len(every) > LAYERS else every
    layers = [(*attention.normalised(q.float(), k.float()), v.float()) for attention, q, k, v in some]
    return list(_errors(layers, list(kinds), time.monotonic() + seconds, progress))


@torch.no_grad()
def _errors(
    layers: Sequence[tuple[Tensor, Tensor, Tensor]], kinds: Sequence[str], until: float, progress: Progress
) -> Iterator[Record]:
    heads, tokens, head_dim = layers[0][0].shape[1:]
    where = provenance(layers[0][0].device, torch.float64)
    specs = [error.CONTROL, *(sized(kind, count, tokens) for count in COUNTS for kind in kinds)]
    for i, spec in enumerate(specs):
        if time.monotonic() > until and i > 2 * len(kinds):
            break
        progress(i, len(specs), f"distance from softmax: {spec}")
        found = []
        for layer, (q, k, v) in enumerate(layers):
            attention = create_attention(spec, heads=heads, head_dim=head_dim, tokens=tokens, layer=layer).eval()
            found.append(error.attention_error(attention, q, k, v)["attention_error"])
        tags = {"attention": spec, "tokens": tokens, "heads": heads, "head_dim": head_dim, "seed": 0,
                "low": min(found), "high": max(found)}  # fmt: skip
        yield Record("attention_error", statistics.fmean(found), "fraction", len(found), **where, tags=tags)
    progress(len(specs), len(specs), "distance from softmax")


def enough(records: Iterable[Record], kinds: Iterable[str], target: float) -> list[Enough]:
    """For each kind, from what was measured of it."""
    errors = {str(r.tags["attention"]): r.value for r in records if r.metric == "attention_error"}
    found = []
    for kind in kinds:
        mine = {int(parse(spec).options["m"]): value if value is not None else math.inf  # type: ignore[arg-type]
                for spec, value in errors.items() if kind_of(spec) == kind}  # fmt: skip
        first = next((count for count in sorted(mine) if mine[count] <= target), None)
        found.append(Enough(kind, first, mine[first or max(mine)], max(mine)))
    return found


def control(records: Iterable[Record]) -> float:
    """The error of uniform attention on the same q and k."""
    return next(
        float(r.value or 0.0)
        for r in records if r.metric == "attention_error" and r.tags["attention"] == error.CONTROL
    )  # fmt: skip
