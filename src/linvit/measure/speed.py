"""How fast an attention is beside fused softmax and `identity`: alone (`measure`), or as a model's layers (`curve`).

No op is timed whose output or gradients are wrong: they must be finite and match the same attention in float64 (at the
lengths that `until_limit` adds, be finite).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linvit.measure.gate import both, wrong
from linvit.measure.memory import Forecast, bounded, doubled, extra_memory_on, free_memory, is_out_of_memory, refusal
from linvit.measure.provenance import provenance
from linvit.measure.race import BASELINES, FEWEST, Call, Times, over_rounds, quartiles, race, ratios
from linvit.measure.setting import MODES, Setting
from linvit.metrics import size
from linvit.progress import Progress, ignore
from linvit.records import Record, Tag

LADDER = (64, 256, 1024, 4096, 16384, 65536)  # lengths at which what is asked for at a greater one is tried first


@dataclass(frozen=True)
class Limits:
    """Beyond which an attention is not tried: bytes and seconds of one check of it (`measure.gate`), which calls it
    forward and backward, and once more in float64. Where lengths go on until nothing is within the limits, the longer
    ones than `compared` tokens are called without that: what they end by is the attention, not its check."""

    memory: int
    seconds: float
    compared: int | None = None  # lengths go on beyond it; None: all are compared, and none is added


# tags that name it, the specs of its layers, and where they are timed
Subject = tuple[Mapping[str, Tag], Sequence[str], Setting]
Timed = tuple[str, Setting, str]  # a layer's spec, where it is timed, and the mode


def measure(
    specs: Iterable[str], *, tokens: Sequence[int] = (64, 256, 1024, 4096), until_limit: bool = False,
    most_memory: int | None = None, most_seconds: float = 60.0, progress: Progress = ignore, **where: Any,
) -> Iterator[Record]:  # fmt: skip
    """One layer of each attention and of the baselines: times and ratios at each length (its prefix included), then
    from which on it is faster than softmax. Each record carries its spec as the tag `attention`; what cannot be timed
    at a length gets one that says why. What cannot be built at the greatest is an error before anything is measured.

    What would take more than `most_memory` bytes (half of what is free without it), or more than `most_seconds` to be
    checked, is refused. `until_limit` doubles the lengths until all is; those it adds are not compared in float64.
    `where` are the fields of a Setting.
    """
    setting = Setting(**where)
    specs = list(dict.fromkeys([*BASELINES, *specs]))
    for spec in specs:
        setting.attention(spec, max(tokens, default=1))
    memory = free_memory(torch.device(setting.device)) // 2 if most_memory is None else most_memory
    limits = Limits(memory, most_seconds, max(tokens, default=1) if until_limit else None)
    yield from _records([({"attention": spec}, [spec], setting) for spec in specs], tokens, setting, progress,
                        limits=limits)  # fmt: skip


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
    subjects: list[Subject], tokens: Sequence[int], setting: Setting, progress: Progress, deadline: float | None = None,
    limits: Limits | None = None,
) -> Iterator[Record]:  # fmt: skip
    common = provenance(torch.device(setting.device), setting.dtype)
    faster: dict[tuple[int, str], dict[int, float]] = {}  # subject, mode → tokens → how many times, than softmax
    rounds = setting.rounds
    every = dict.fromkeys((spec, where) for _, specs, where in subjects for spec in specs)
    for n, times, refused in _lengths(every, tokens, setting, progress, deadline, limits):
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
                if (base, setting) in refused:
                    continue
                found = ratios(times.of(*[(base, setting, mode)] * len(keys), by=by), times.of(*keys, by=by))
                rounds = min(rounds, len(found))
                if base == "softmax":
                    faster.setdefault((i, mode), {})[mine] = quartiles(found)[1]
                yield over_rounds(f"attention_vs_{base}", found, "×", common, tags | {"clock": by})
    for (i, mode), found in faster.items():
        names, specs, where = subjects[i]
        if where != setting or set(specs) != {"softmax"}:
            tags = {**names, "mode": mode, **where.shape(), "from": min(found), "to": max(found)}
            even = break_even(found)
            if even is not None and even != min(found):  # between lengths it is an estimate: no more digits than that
                even = float(f"{even:.3g}")
            yield Record("break_even_tokens", even, "tokens", rounds, **common, tags=tags)
    progress(100, 100, "done")


def _lengths(
    layers: Iterable[tuple[str, Setting]], tokens: Sequence[int], setting: Setting, progress: Progress,
    deadline: float | None, limits: Limits | None,
) -> Iterator[tuple[int, Times[Timed], dict[tuple[str, Setting], str]]]:  # fmt: skip
    """At each length: the times of every layer and mode, side by side, and why other layers are refused."""
    on = limits is not None and limits.compared is not None
    lengths, expected = doubled(tokens, on), 0.0
    layers = dict.fromkeys([*((name, setting) for name in BASELINES), *layers])
    checks = {layer: _Check(*layer, limits) for layer in layers}
    weights = [1 if on else n for n in lengths]  # with a limit of time, one length takes as long as another
    for n in [n for n in LADDER if n < lengths[0]] if limits else []:
        for (spec, where), check in checks.items():
            progress(0, 100, f"trying {spec} at N = {n:,}")
            check.refused(n - setting.prefix + where.prefix, where.inputs)
    for i, n in enumerate(lengths):
        begun = time.monotonic()
        if deadline is not None and begun + expected >= deadline:
            return

        def show(done: int, total: int, what: str, i: int = i, n: int = n) -> None:
            share = (sum(weights[:i]) + weights[i] * done / total) / sum(weights)
            progress(int(100 * share), 100, f"N = {n:,}: {what}")

        calls: dict[Timed, Call] = {}
        refused: dict[tuple[str, Setting], str] = {}
        made: dict[tuple[int, int, int], Tensor] = {}  # shared by those that have the same
        for (spec, where), check in checks.items():
            show(0, 1, f"checking {spec}")
            mine = n - setting.prefix + where.prefix
            inputs = made.get(shape := (where.heads, where.head_dim, mine))
            if why := check.refused(mine, where.inputs if inputs is None else lambda _, made=inputs: made):
                refused[spec, where] = why
                continue
            made[shape] = q, k, v, gradient = where.inputs(mine) if inputs is None else inputs
            attention = where.attention(spec, mine)
            calls[spec, where, "forward"] = torch.no_grad()(partial(attention, q, k, v))
            calls[spec, where, "both"] = partial(both, attention, q, k, v, gradient)
        bad = [spec for spec in BASELINES if (spec, setting) in refused and not (i and checks[spec, setting].ended)]
        if bad:
            why = refused[bad[0], setting]
            raise ValueError(f"nothing to compare with at N = {n}: {bad[0]} is refused ({why})")
        until = None if deadline is None else begun + (deadline - begun) * n / sum(lengths[i:])
        until = begun + 10 * limits.seconds if on and limits is not None else until
        times = race(calls, device=torch.device(setting.device), rounds=setting.rounds, progress=show, deadline=until)
        yield n, times, refused
        if on and all(check.ended for (spec, _), check in checks.items() if spec != "identity"):
            return
        if i + 1 < len(lengths) and calls:  # of the fewest rounds, if time grows as N²
            spent, rounds = time.monotonic() - begun, len(times.of(next(iter(calls))))
            expected = spent * min(1.0, (FEWEST + 3) / (rounds + 3)) * (lengths[i + 1] / n) ** 2


class _Check:
    """Of one layer at one length after the other: whether it is right and, if there are limits, within them."""

    def __init__(self, spec: str, setting: Setting, limits: Limits | None):
        self.spec, self.setting, self.limits = spec, setting, limits
        self.costs = {compare: (Forecast(), Forecast()) for compare in (True, False)}  # bytes and seconds
        self.ended = ""  # why it is tried at no greater length

    def refused(self, tokens: int, inputs: Callable[[int], Tensor]) -> str:
        """Why it is not timed at this length; empty if it may be."""
        try:
            if self.limits is None:
                return self._wrong(tokens, inputs(tokens), True)
            alone = self.limits.compared is not None
            exact = self.limits.compared is None or tokens <= self.limits.compared
            found = [self._within(self.limits, tokens, inputs, compare) for compare in [True] * exact + [False] * alone]
        except ValueError as error:
            return str(error)
        why = next(filter(None, found), "")
        if alone:  # where nothing is compared, what was wrong before is not timed either
            self.ended = self.ended or why
        return self.ended or why

    def _wrong(self, tokens: int, inputs: Tensor, compare: bool) -> str:
        return wrong(self.setting.attention(self.spec, tokens), *inputs, compare=compare) or ""

    def _within(self, limits: Limits, tokens: int, inputs: Callable[[int], Tensor], compare: bool) -> str:
        """Why it is wrong, if it is; `ended` is why it was not looked at."""
        memory, seconds = self.costs[compare]
        if not self.ended:
            expected = self.setting.input_bytes(tokens) + memory.at(tokens)
            self.ended = refusal(expected, seconds.at(tokens), limits.memory, limits.seconds)
        if self.ended:
            return ""
        device, found = torch.device(self.setting.device), [""]
        try:
            with bounded(limits.memory, device):
                given = inputs(tokens)

                def check() -> None:
                    found.append(self._wrong(tokens, given, compare))

                if not seconds.found:
                    check()  # libraries take their own time and memory
                begun = time.monotonic(), time.process_time()
                memory.add(tokens, extra_memory_on(device, check))
                # other programs stretch the one, several threads the other
                seconds.add(tokens, min(time.monotonic() - begun[0], time.process_time() - begun[1]))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.ended = f"it takes more than {size(limits.memory)}"
        return found[-1]


def break_even(faster: Mapping[int, float]) -> float | None:
    """Tokens from which an attention stays faster than softmax (ratio > 1), between the lengths by a power law.

    The smallest length if it is faster everywhere, and then it may be so with fewer; None if it is not at the largest.
    """
    points = sorted(faster.items())
    slower = [i for i, (_, ratio) in enumerate(points) if ratio <= 1]
    if not slower:
        return float(points[0][0])
    if slower[-1] == len(points) - 1:
        return None
    (n0, r0), (n1, r1) = points[slower[-1]], points[slower[-1] + 1]
    return n0 * (n1 / n0) ** (math.log(1 / r0) / math.log(r1 / r0))
