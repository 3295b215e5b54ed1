"""How fast an attention is, as ratios to fused softmax and to `identity`, measured side by side in one run.

Each round times every attention once, in a random order, so that whatever else the machine does hits all alike; a ratio
is taken inside a round, and its median and quartiles over rounds are reported. `timing` says which clock.

No op is timed whose output or gradients are wrong: they must be finite and match the same attention in float64.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from linvit.attention import Attention, create_attention
from linvit.measure.provenance import provenance
from linvit.measure.timing import ROUNDS, clock, quartiles, ratio_clock, repeats, timed
from linvit.progress import Progress, ignore
from linvit.randomness import generator
from linvit.records import Record, Tag

BASELINES = ("softmax", "identity")
MODES = ("forward", "both")  # both: forward and backward
TOLERANCE = 1e-3  # of the norm: rounding may move an element across a kink of relu, so its largest change says little


@dataclass
class Case:
    """One attention at one length, and its times per call of each mode: by either clock, for each round."""

    spec: str
    calls: dict[str, Callable[[], object]]
    repeat: dict[str, int] = field(default_factory=dict)
    times: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {mode: [] for mode in MODES})


def measure(
    specs: Iterable[str],
    *,
    tokens: Sequence[int] = (64, 256, 1024, 4096),
    heads: int = 8,
    head_dim: int = 64,
    batch: int = 1,
    rounds: int = ROUNDS,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Progress = ignore,
) -> Iterator[Record]:
    """Times and ratios at each length, then the length from which each attention is faster than softmax.

    The baselines are measured always. An attention that cannot be timed gets records without a value that say why.
    """
    sizes = {"tokens": min(tokens, default=0), "heads": heads, "head_dim": head_dim, "batch": batch, "rounds": rounds}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    device = torch.device(device)
    specs = list(dict.fromkeys([*BASELINES, *specs]))
    lengths = sorted(set(tokens))
    for spec in specs:  # a bad spec is an error before anything is measured
        create_attention(spec, heads=heads, head_dim=head_dim, tokens=lengths[-1])
    ratios: dict[tuple[str, str], dict[int, float]] = {(spec, mode): {} for spec in specs for mode in MODES}
    common = provenance(device, dtype)
    before, whole = 0, sum(lengths)
    for n in lengths:
        place: dict[str, Tag] = {"tokens": n, "heads": heads, "head_dim": head_dim, "batch": batch, "seed": seed}
        inputs = torch.randn(4, batch, heads, n, head_dim, generator=generator("speed", seed, n))
        q, k, v, gradient = inputs.to(device, dtype)
        cases, refused = [], {}
        for spec in specs:
            progress(int(100 * before / whole), 100, f"N = {n}: checking {spec}")
            try:
                attention = create_attention(spec, heads=heads, head_dim=head_dim, tokens=n, seed=seed).to(device)
                why = wrong(attention, q, k, v, gradient)
            except ValueError as error:
                why = str(error)
            if why:
                refused[spec] = why
            else:
                cases.append(Case(spec, _calls(attention, q, k, v, gradient)))
        if lost := [spec for spec in BASELINES if spec in refused]:
            raise ValueError(f"nothing to compare with at N = {n}: {lost[0]} is refused ({refused[lost[0]]})")
        shuffle = random.Random(seed)
        for case in cases:
            for mode in MODES:
                case.repeat[mode] = repeats(case.calls[mode], device)
        for turn in range(rounds):
            progress(int(100 * (before + n * turn / rounds) / whole), 100, f"N = {n}: round {turn + 1} of {rounds}")
            work = [(case, mode) for case in cases for mode in MODES]
            shuffle.shuffle(work)
            for case, mode in work:
                case.times[mode].append(timed(case.calls[mode], case.repeat[mode], device))
        for record in _summarise(cases, device, ratios, n):
            yield Record(record.metric, record.value, record.unit, rounds, **common, tags=record.tags | place)
        for spec, why in refused.items():
            for mode in MODES:
                tags: dict[str, Tag] = {"attention": spec, "mode": mode, "refused": why}
                yield Record("attention_time", None, "s", 0, **common, tags=tags | place)
        before += n
    for (spec, mode), found in ratios.items():
        if spec not in BASELINES and found:
            tags = {"attention": spec, "mode": mode, "heads": heads, "head_dim": head_dim, "batch": batch}
            tags |= {"from": min(found), "to": max(found)}
            yield Record("break_even_tokens", break_even(found), "tokens", rounds, **common, tags=tags)
    progress(100, 100, "done")


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
        error = ((x.double() - exact).norm() / exact.norm().clamp_min(1e-6)).item()
        if not error <= allowed:
            return f"its {name} differs from float64 by {error:.1e} of its norm (allowed {allowed:.1e})"
    return None


def _both(attention: Attention, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """The output and its gradients by q, k and v; parameters get theirs too."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    weights = [weight for weight in attention.parameters() if weight.requires_grad]
    out = attention(q, k, v)
    found = torch.autograd.grad(out, [q, k, v, *weights], gradient, allow_unused=True)
    zeros = (torch.zeros_like(q) if x is None else x for x in found[:3])
    return [out.detach(), *zeros]


def _calls(attention: Attention, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> dict[str, Callable[[], object]]:
    def forward() -> object:
        with torch.no_grad():
            return attention(q, k, v)

    return {"forward": forward, "both": lambda: _both(attention, q, k, v, gradient)}


def _summarise(
    cases: list[Case], device: torch.device, ratios: dict[tuple[str, str], dict[int, float]], n: int
) -> Iterator[Record]:
    by = ratio_clock(device)
    base = {case.spec: case for case in cases if case.spec in BASELINES}
    for case in cases:
        for mode in MODES:
            times = case.times[mode]
            own = clock(device)
            tags: dict[str, Tag] = {"attention": case.spec, "mode": mode}
            yield _median("attention_time", [t[own] for t in times], "s", tags | {"clock": own})
            for name, other in base.items():
                quotients = [b[by] / a[by] for a, b in zip(times, other.times[mode], strict=True)]
                record = _median(f"attention_vs_{name}", quotients, "×", tags | {"clock": by})
                if name == "softmax" and isinstance(record.value, float):
                    ratios[case.spec, mode][n] = record.value
                yield record


def _median(metric: str, values: list[float], unit: str, tags: dict[str, Tag]) -> Record:
    low, middle, high = quartiles(values)
    return Record(metric, middle, unit, tags=tags | {"low": low, "high": high})


def break_even(ratios: dict[int, float]) -> float | None:
    """Tokens from which an attention stays faster than softmax (ratio > 1), between the lengths by a power law.

    The smallest length if it is faster everywhere; None if it is not at the largest.
    """
    points = sorted(ratios.items())
    slower = [i for i, (_, ratio) in enumerate(points) if ratio <= 1]
    if not slower:
        return float(points[0][0])
    if slower[-1] == len(points) - 1:
        return None
    (n0, r0), (n1, r1) = points[slower[-1]], points[slower[-1] + 1]
    return n0 * (n1 / n0) ** (math.log(1 / r0) / math.log(r1 / r0))
