"""How fast an attention is relative to fused softmax and `identity`: alone (`attention_speed`), or as the layers of
models (`layer_speed`).

Nothing is timed whose output or gradients are wrong: they must be finite and match the same attention in float64 (at
the lengths that doubling adds, be finite).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from linvit.attention import BASELINE, LIMIT
from linvit.measure.gate import both, wrong
from linvit.measure.memory import Growth, Limits, bounded, extra_memory, is_out_of_memory
from linvit.measure.provenance import provenance
from linvit.measure.race import BASELINES, MIN_ROUNDS, Call, Times, over_rounds, quartiles, race, ratios
from linvit.measure.timing import GRAPH, MODES, Timing, graphed
from linvit.metrics import size
from linvit.progress import Progress, ignore
from linvit.records import Record, Tag
from linvit.site import Site

LADDER = (64, 256, 1024, 4096, 16384, 65536)  # lengths at which what is asked for at a greater one is tried first

Layer = tuple[str, Site]  # its spec and where it is (`_anywhere`)
Subject = tuple[Mapping[str, Tag], Sequence[Layer]]  # tags that name it, and its layers
Timed = tuple[str, Site, str]  # a layer, and the mode


def attention_speed(
    specs: Iterable[str],
    site: Site,
    *,
    tokens: Sequence[int] = (64, 256, 1024, 4096),
    timing: Timing = Timing(),  # noqa: B008 (frozen)
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    progress: Progress = ignore,
) -> Iterator[Record]:
    """One layer of each attention and of the baselines: times and ratios at each length (its prefix included), then
    from which on it is faster than softmax. Each record carries its spec as the tag `attention`; what cannot be timed
    at a length gets one that says why. What cannot be built at the greatest is an error before anything is measured.

    The limits are those of one check of an attention (`measure.gate`), which calls it forward and backward, and once
    more in float64. Lengths that doubling adds are called without that: what they end by is the attention, not its
    check. Of the site, only the tokens are replaced.
    """
    specs, site = list(dict.fromkeys([*BASELINES, *specs])), _anywhere(site, site.seed)
    for spec in specs:
        timing.attention(spec, site.at(max(tokens, default=1)))
    limits = replace(limits, memory=limits.bytes(timing.device))
    subjects: list[Subject] = [({"attention": spec}, [(spec, site)]) for spec in specs]
    return _Bench(site, timing, limits, None, progress).records(subjects, tokens)


def layer_speed(
    layers: Mapping[str, Sequence[str]],
    site: Site,
    *,
    tokens: Sequence[int],
    timing: Timing = Timing(),  # noqa: B008 (frozen)
    sites: Mapping[str, Site] | None = None,
    progress: Progress = ignore,
    deadline: float | None = None,
) -> Iterator[Record]:
    """All attention layers of each variant: `attention_time` at each length, then `break_even_tokens`, in both MODES.

    `layers`: variant → the spec of each of its layers, e.g. {"mixed": ["softmax", "performer-relu:m=32,dwc=3"]}. A time
    is the sum over layers, each distinct layer being timed once a round; the break-even is with as many layers of
    softmax, at `site`, in the same rounds. Records carry the tags `variant` (the key) and `layers` (how many). Softmax
    always has times: with as many layers as the deepest variant, and the tag `baseline="softmax"` instead of `variant`,
    so that a variant may have any id.

    `sites`: variants with heads, head_dim or a prefix of their own. `tokens` include site.prefix, in whose place a
    variant has its own: for a model with a CLS token, prefix=1 and lengths of 1 + a square let `exact_cls` and `dwc` be
    timed too. What cannot be timed at a length has a record without a value, whose tag `refused` says why. To end near
    a `deadline` (of time.monotonic) there are fewer rounds, and the longest lengths have no records.
    """
    sites, depth = sites or {}, max([1, *map(len, layers.values())])
    site = _anywhere(site)
    subjects: list[Subject] = [({"baseline": BASELINE, "layers": depth}, [(BASELINE, site)] * depth)]
    for name, specs in layers.items():
        if specs:
            mine = [(spec, _anywhere(sites.get(name, site))) for spec in specs]
            subjects.append(({"variant": name, "layers": len(specs)}, mine))
    records = _Bench(site, timing, None, deadline, progress).records(subjects, tokens)
    return (record for record in records if record.metric in ("attention_time", "break_even_tokens"))


def _anywhere(site: Site, seed: int = 0) -> Site:
    """What does not change with the number of tokens: of two models with the same, a layer is timed once."""
    return Site(site.heads, site.head_dim, max(1, site.prefix), prefix=site.prefix, seed=seed, causal=site.causal)


class _Bench:
    """Lengths one after the other: every layer is checked, and those that pass are timed side by side."""

    def __init__(
        self, site: Site, timing: Timing, limits: Limits | None, deadline: float | None, progress: Progress = ignore
    ):
        self.site, self.timing, self.limits, self.deadline, self.progress = site, timing, limits, deadline, progress
        self.doubles = limits is not None and limits.double
        self.graphs = limits is not None and timing.device.type == "cuda"  # a column of `bench speed`

    def at(self, site: Site, tokens: int) -> Site:
        """With this many tokens at the bench's own site, the prefix of one being replaced by the other's."""
        return site.at(tokens - self.site.prefix + site.prefix)

    def records(self, subjects: list[Subject], tokens: Sequence[int]) -> Iterator[Record]:
        common = provenance(self.timing.device, self.timing.dtype)
        faster: dict[tuple[int, str], dict[int, float]] = {}  # subject, mode → tokens → how many times, than softmax
        rounds = self.timing.rounds
        every, limits = [layer for _, layers in subjects for layer in layers], [(base, self.site) for base in BASELINES]
        for n, times, refused in self.lengths(every, tokens):
            for (i, (names, layers)), mode in itertools.product(enumerate(subjects), (*MODES, GRAPH)):
                there = n - self.site.prefix + layers[0][1].prefix
                tags: dict[str, Tag] = {**names, "mode": mode, "tokens": there, **self.timing.tags(layers[0][1])}
                if mode == GRAPH and not all((*layer, GRAPH) in times.seconds for layer in (*layers, *limits)):
                    continue
                if why := [refused[layer] for layer in layers if layer in refused]:
                    yield Record("attention_time", None, "s", 0, **common, tags=tags | {"refused": why[0]})
                    continue
                keys, by = [(*layer, mode) for layer in layers], times.ratio_clock
                timed_tags = {**tags, "clock": times.clock, **times.launch_bound(*keys)}
                yield over_rounds("attention_time", times.of(*keys), "s", common, timed_tags)
                for base in BASELINES:
                    if (base, self.site) in refused:
                        continue
                    theirs = times.of(*[(base, self.site, mode)] * len(keys), by=by)
                    found = ratios(theirs, times.of(*keys, by=by))
                    rounds = min(rounds, len(found))
                    if base == BASELINE:
                        faster.setdefault((i, mode), {})[there] = quartiles(found)[1]
                    yield over_rounds(f"attention_vs_{base}", found, "×", common, tags | {"clock": by})
        for (i, mode), found in faster.items():
            names, layers = subjects[i]
            if set(layers) != {(BASELINE, self.site)}:
                tags = {**names, "mode": mode, **self.timing.tags(layers[0][1]), "from": min(found), "to": max(found)}
                even = break_even(found)
                if even is not None and even != min(found):  # between lengths it is an estimate: no more digits
                    even = float(f"{even:.3g}")
                yield Record("break_even_tokens", even, "tokens", rounds, **common, tags=tags)
        self.progress(100, 100, "done")

    def lengths(
        self, layers: Iterable[Layer], tokens: Sequence[int]
    ) -> Iterator[tuple[int, Times[Timed], dict[Layer, str]]]:
        """At each length: the times of every layer and mode, side by side, and why other layers are refused."""
        limits, lengths, expected = self.limits, (self.limits or Limits()).lengths(tokens), 0.0
        layers = dict.fromkeys([*((name, self.site) for name in BASELINES), *layers])
        checks = {layer: _Check(layer[0], self.timing, limits, max(tokens)) for layer in layers}
        weights = [1 if self.doubles else n for n in lengths]  # with a limit of time, one length takes as long
        for n in [n for n in LADDER if n < lengths[0]] if limits else []:
            for (spec, site), check in checks.items():
                self.progress(0, 100, f"trying {spec} at N = {n:,}")
                check.refused(partial(self.at, site, n), self.timing.inputs)
        for i, n in enumerate(lengths):
            begun = time.monotonic()
            if self.deadline is not None and begun + expected >= self.deadline:
                return

            def show(done: int, total: int, what: str, i: int = i, n: int = n) -> None:
                share = (sum(weights[:i]) + weights[i] * done / total) / sum(weights)
                self.progress(int(100 * share), 100, f"N = {n:,}: {what}")

            calls, refused = self.calls(checks, n, show)
            for layer in [(name, self.site) for name in BASELINES]:
                if layer in refused and not (i and checks[layer].ended):
                    raise ValueError(f"nothing to compare with at N = {n}: {layer[0]} is refused ({refused[layer]})")
            until = None if self.deadline is None else begun + (self.deadline - begun) * n / sum(lengths[i:])
            until = begun + 10 * limits.seconds if limits is not None and self.doubles else until
            times = race(calls, device=self.timing.device, rounds=self.timing.rounds, progress=show, deadline=until)
            yield n, times, refused
            if self.doubles and all(check.ended for (spec, _), check in checks.items() if spec != LIMIT):
                return
            if i + 1 < len(lengths) and calls:  # of the fewest rounds, if time grows as N²
                spent, rounds = time.monotonic() - begun, len(times.of(next(iter(calls))))
                expected = spent * min(1.0, (MIN_ROUNDS + 3) / (rounds + 3)) * (lengths[i + 1] / n) ** 2

    def calls(
        self, checks: Mapping[Layer, _Check], tokens: int, show: Progress
    ) -> tuple[dict[Timed, Call], dict[Layer, str]]:
        """What is to be timed, and why the rest is not."""
        calls: dict[Timed, Call] = {}
        refused: dict[Layer, str] = {}
        made: dict[tuple[int, int, int], Tensor] = {}  # shared by those that have the same

        def inputs(site: Site) -> Tensor:
            key = site.heads, site.head_dim, site.tokens
            if key not in made:
                made[key] = self.timing.inputs(site)
            return made[key]

        for (spec, site), check in checks.items():
            show(0, 1, f"checking {spec}")
            if why := check.refused(partial(self.at, site, tokens), inputs):
                refused[spec, site] = why
                continue
            there = self.at(site, tokens)
            attention, (q, k, v, gradient) = self.timing.attention(spec, there), inputs(there)
            calls[spec, site, "forward"] = forward = torch.no_grad()(partial(attention, q, k, v))
            if self.graphs and (graph := graphed(forward)) is not None:
                calls[spec, site, GRAPH] = graph
            calls[spec, site, "both"] = partial(both, attention, q, k, v, gradient)
        return calls, refused


class _Check:
    """Of one layer at one length after the other: whether it is right and, if there are limits, within them."""

    def __init__(self, spec: str, timing: Timing, limits: Limits | None, compared: int):
        self.spec, self.timing, self.limits, self.compared = spec, timing, limits, compared
        self.costs = {compare: (Growth(), Growth()) for compare in (True, False)}  # bytes and seconds
        self.ended = ""  # why it is tried at no greater length

    def refused(self, where: Callable[[], Site], inputs: Callable[[Site], Tensor]) -> str:
        """Why it is not timed there; empty if it may be."""
        try:
            site = where()
            if self.limits is None:
                return self._wrong(site, inputs(site), True)
            exact = not self.limits.double or site.tokens <= self.compared
            passes = [True] * exact + [False] * self.limits.double
            found = [self._within(self.limits, site, inputs, compare) for compare in passes]
        except ValueError as error:
            return str(error)
        why = next(filter(None, found), "")
        if self.limits.double:  # where nothing is compared, what was wrong before is not timed either
            self.ended = self.ended or why
        return self.ended or why

    def _wrong(self, site: Site, inputs: Tensor, compare: bool) -> str:
        return wrong(self.timing.attention(self.spec, site), *inputs, compare=compare) or ""

    def _within(self, limits: Limits, site: Site, inputs: Callable[[Site], Tensor], compare: bool) -> str:
        """Why it is wrong, if it is; `ended` is why it was not looked at."""
        memory, seconds = self.costs[compare]
        if not self.ended:
            expected = self.timing.input_bytes(site) + memory.at(site.tokens)
            self.ended = limits.refusal(expected, seconds.at(site.tokens))
        if self.ended:
            return ""
        device, found, most = self.timing.device, [""], limits.bytes(self.timing.device)
        try:
            with bounded(most, device):
                given = inputs(site)

                def check() -> None:
                    found.append(self._wrong(site, given, compare))

                if not seconds.found:
                    check()  # libraries take their own time and memory
                begun = time.monotonic(), time.process_time()
                memory.add(site.tokens, extra_memory(check, device))
                # other programs stretch the one, several threads the other
                seconds.add(site.tokens, min(time.monotonic() - begun[0], time.process_time() - begun[1]))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.ended = f"it takes more than {size(most)}"
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
