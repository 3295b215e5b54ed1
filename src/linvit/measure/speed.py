"""How fast an attention is beside fused softmax and `identity`: alone (`measure`), or as a model's layers (`curve`).

No op is timed whose output or gradients are wrong: they must be finite and match the same attention in float64.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from linvit.attention import Attention, create_attention
from linvit.measure.cost import squarest
from linvit.measure.provenance import provenance
from linvit.measure.race import BASELINES, FEWEST, ROUNDS, Call, Times, over_rounds, quartiles, race, ratios
from linvit.progress import Progress, ignore
from linvit.randomness import generator
from linvit.records import Record, Tag

MODES = ("forward", "both")  # both: forward and backward
TOLERANCE = 1e-3  # of the norm


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where attentions are timed: all but the number of tokens."""

    heads: int = 8
    head_dim: int = 64
    prefix: int = 0  # how many of the tokens come before the image's
    causal: bool = False
    batch: int = 1
    rounds: int = ROUNDS
    seed: int = 0
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name, least in {"heads": 1, "head_dim": 1, "prefix": 0, "batch": 1, "rounds": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")

    def attention(self, spec: str, tokens: int) -> Attention:
        """With the grid that is nearest to a square, if the tokens after the prefix make one of several rows."""
        image = tokens - self.prefix
        rows, columns = squarest(image) if image > 0 else (0, 0)
        grid = (rows, columns) if rows > 1 or image == 1 else None
        return create_attention(
            spec,
            heads=self.heads,
            head_dim=self.head_dim,
            tokens=tokens,
            grid=grid,
            prefix=self.prefix,
            seed=self.seed,
            causal=self.causal,
        ).to(self.device)

    def shape(self) -> dict[str, Tag]:
        return {name: getattr(self, name) for name in ("heads", "head_dim", "prefix", "batch", "seed")}


# tags that name it, the specs of its layers, and where they are timed
Subject = tuple[Mapping[str, Tag], Sequence[str], Setting]
Timed = tuple[str, Setting, str]  # a layer's spec, where it is timed, and the mode


def measure(
    specs: Iterable[str], *, tokens: Sequence[int] = (64, 256, 1024, 4096), progress: Progress = ignore, **where: Any
) -> Iterator[Record]:
    """One layer of each attention and of the baselines: times and ratios at each length (its prefix included), then
    from which on it is faster than softmax. Each record carries its spec as the tag `attention`; what cannot be timed
    at a length gets one that says why. What cannot be built at the greatest is an error before anything is measured.
    `where` are the fields of a Setting.
    """
    setting = Setting(**where)
    specs = list(dict.fromkeys([*BASELINES, *specs]))
    for spec in specs:
        setting.attention(spec, max(tokens, default=1))
    yield from _records([({"attention": spec}, [spec], setting) for spec in specs], tokens, setting, progress)


def curve(
    layers: Mapping[str, Sequence[str]], *, tokens: Sequence[int], setting: Setting,
    own: Mapping[str, Setting] | None = None, progress: Progress = ignore, deadline: float | None = None,
) -> Iterator[Record]:  # fmt: skip
    """All attention layers of each variant: `attention_time` at each length, then `break_even_tokens`, in both MODES.

    `layers`: variant → the spec of each of its layers, e.g. {"mixed": ["softmax", "performer-relu:m=32,dwc=3"]}. A time
    is the sum over layers, each distinct layer being timed once a round; the break-even is with as many layers of
    softmax, in `setting`, in the same rounds. Records carry the tags `variant` (the key) and `layers` (how many).
    Softmax always has times: with as many layers as the deepest variant, and the tag `baseline="softmax"` instead of
    `variant`, so that a variant may have any id.

    `own`: variants with heads, head_dim or a prefix of their own. `tokens` include setting.prefix, in whose place a
    variant has its own: for a model with a CLS token, prefix=1 and lengths of 1 + a square let `exact_cls` and `dwc` be
    timed too. What cannot be timed at a length has a record without a value, whose tag `refused` says why. To end near
    a `deadline` (of time.monotonic) there are fewer rounds, and the longest lengths have no records.
    """
    own, depth = own or {}, max([1, *map(len, layers.values())])
    subjects: list[Subject] = [({"baseline": "softmax", "layers": depth}, ["softmax"] * depth, setting)]
    subjects += [
        ({"variant": name, "layers": len(specs)}, specs, own.get(name, setting))
        for name, specs in layers.items() if specs
    ]  # fmt: skip
    records = _records(subjects, tokens, setting, progress, deadline)
    return (record for record in records if record.metric in ("attention_time", "break_even_tokens"))


def _records(
    subjects: list[Subject], tokens: Sequence[int], setting: Setting, progress: Progress, deadline: float | None = None
) -> Iterator[Record]:
    common = provenance(torch.device(setting.device), setting.dtype)
    faster: dict[tuple[int, str], dict[int, float]] = {}  # subject, mode → tokens → how many times, than softmax
    rounds = setting.rounds
    every = dict.fromkeys((spec, where) for _, specs, where in subjects for spec in specs)
    for n, times, refused in _lengths(every, tokens, setting, progress, deadline):
        for (i, (names, specs, where)), mode in itertools.product(enumerate(subjects), MODES):
            mine = n - setting.prefix + where.prefix
            tags: dict[str, Tag] = {**names, "mode": mode, "tokens": mine, **where.shape()}
            if why := [refused[spec, where] for spec in specs if (spec, where) in refused]:
                yield Record("attention_time", None, "s", 0, **common, tags=tags | {"refused": why[0]})
                continue
            keys = [(spec, where, mode) for spec in specs]
            yield over_rounds("attention_time", times.of(*keys), "s", common, tags | {"clock": times.clock})
            by = times.ratio_clock
            for base in BASELINES:
                found = ratios(times.of(*[(base, setting, mode)] * len(keys), by=by), times.of(*keys, by=by))
                rounds = min(rounds, len(found))
                if base == "softmax":
                    faster.setdefault((i, mode), {})[mine] = quartiles(found)[1]
                yield over_rounds(f"attention_vs_{base}", found, "×", common, tags | {"clock": by})
    for (i, mode), found in faster.items():
        names, specs, where = subjects[i]
        if where != setting or set(specs) != {"softmax"}:
            tags = {**names, "mode": mode, **where.shape(), "from": min(found), "to": max(found)}
            yield Record("break_even_tokens", break_even(found), "tokens", rounds, **common, tags=tags)
    progress(100, 100, "done")


def _lengths(
    layers: Iterable[tuple[str, Setting]], tokens: Sequence[int], setting: Setting, progress: Progress,
    deadline: float | None,
) -> Iterator[tuple[int, Times[Timed], dict[tuple[str, Setting], str]]]:  # fmt: skip
    """At each length: the times of every layer and mode, side by side, and why other layers are refused."""
    lengths, expected = sorted(set(tokens)), 0.0
    if min(lengths, default=0) < 1:
        raise ValueError(f"tokens={list(tokens)} must be at least 1")
    for i, n in enumerate(lengths):
        begun = time.monotonic()
        if deadline is not None and begun + expected >= deadline:
            return

        def show(done: int, total: int, what: str, i: int = i, n: int = n) -> None:
            progress(int(100 * (sum(lengths[:i]) + n * done / total) / sum(lengths)), 100, f"N = {n}: {what}")

        @cache
        def inputs(heads: int, n: int, head_dim: int) -> Tensor:
            shape = 4, setting.batch, heads, n, head_dim
            made = torch.randn(shape, generator=generator("speed", setting.seed, n))
            return made.to(setting.device, setting.dtype)

        calls: dict[Timed, Call] = {}
        refused: dict[tuple[str, Setting], str] = {}
        for spec, where in dict.fromkeys([*((name, setting) for name in BASELINES), *layers]):
            show(0, 1, f"checking {spec}")
            mine = n - setting.prefix + where.prefix
            try:
                attention = where.attention(spec, mine)
                q, k, v, gradient = inputs(where.heads, mine, where.head_dim)
                why = wrong(attention, q, k, v, gradient)
            except ValueError as error:
                why = str(error)
            if why:
                refused[spec, where] = why
            else:
                calls[spec, where, "forward"] = torch.no_grad()(partial(attention, q, k, v))
                calls[spec, where, "both"] = partial(_both, attention, q, k, v, gradient)
        if lost := [spec for spec in BASELINES if (spec, setting) in refused]:
            why = refused[lost[0], setting]
            raise ValueError(f"nothing to compare with at N = {n}: {lost[0]} is refused ({why})")
        until = None if deadline is None else begun + (deadline - begun) * n / sum(lengths[i:])
        times = race(calls, device=torch.device(setting.device), rounds=setting.rounds, progress=show, deadline=until)
        yield n, times, refused
        if i + 1 < len(lengths):  # of the fewest rounds, if time grows as N²
            spent, rounds = time.monotonic() - begun, len(times.of(next(iter(calls))))
            expected = spent * min(1.0, (FEWEST + 3) / (rounds + 3)) * (lengths[i + 1] / n) ** 2


def wrong(attention: Attention, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> str | None:
    """Why this attention must not be timed, or None: output and gradients are compared with itself in float64."""
    found = _both(attention, q, k, v, gradient)
    if q.device.type == "mps":  # has no float64
        return None if all(bool(x.isfinite().all()) for x in found) else "not finite"
    oracle = _both(copy.deepcopy(attention).double(), q.double(), k.double(), v.double(), gradient.double())
    allowed = TOLERANCE + 8 * torch.finfo(q.dtype).eps
    for name, x, exact in zip(("output", "∂q", "∂k", "∂v"), found, oracle, strict=True):
        if not x.isfinite().all():
            return f"its {name} is not finite"
        # rounding may move an element across a kink of relu, which shows in one row of a gradient
        rows = (x.double() - exact).norm(dim=-1).flatten().sort().values[: None if name == "output" else -1]
        error = (rows.norm() / exact.norm().clamp_min(1e-6)).item()
        if not error <= allowed:
            return f"its {name} differs from float64 by {error:.1e} of its norm (allowed {allowed:.1e})"
    return None


def _both(attention: Attention, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """The output and its gradients by q, k and v; parameters get theirs too."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    weights = [weight for weight in attention.parameters() if weight.requires_grad]
    out = attention(q, k, v)
    found = torch.autograd.grad(out, [q, k, v, *weights], gradient, allow_unused=True, materialize_grads=True)
    return [out.detach(), *found[:3]]


def break_even(faster: Mapping[int, float]) -> float | None:
    """Tokens from which an attention stays faster than softmax (ratio > 1), between the lengths by a power law.

    The smallest length if it is faster everywhere; None if it is not at the largest.
    """
    points = sorted(faster.items())
    slower = [i for i, (_, ratio) in enumerate(points) if ratio <= 1]
    if not slower:
        return float(points[0][0])
    if slower[-1] == len(points) - 1:
        return None
    (n0, r0), (n1, r1) = points[slower[-1]], points[slower[-1] + 1]
    return n0 * (n1 / n0) ** (math.log(1 / r0) / math.log(r1 / r0))
