"""Seconds of attention at shapes that were never measured, from a few that were: what `linvit advise` stands on.

How much a layer does is known by arithmetic; what a machine takes for it is not. With G = batch·heads, N tokens,
d = head_dim and M the layer's multiply–accumulates (`attention_cost`, of the whole batch), a `Forecast` is

    seconds = c₀ + c₁·G + c₂·G·N + c₃·G·N·d + c₄·M/d + c₅·M        with all c ≥ 0

for calls, heads, tokens, numbers read and written, numbers that are passed over one by one, and products. M/(2·G·N·d)
is how many keys a query meets: N of softmax, 2m of a Performer, 2k of a Linformer; so M/d counts softmax's scores and a
Performer's features alike, and one form serves every attention, those of plugins too. A kind of attention (its spec
without m or k) has its own c in each mode, found by non-negative least squares of the *relative* error: a forecast that
is 10 % off is as bad at 50 µs as at 50 ms. Six numbers that cannot be negative need few points and do not swing between
them, which is why this is no table to interpolate in and no smoother of more freedom.

A layer is timed as a model has it: q, k and v are views of one projection, the heads are joined again, and in training
the gradients return to the projection. So copies that an attention makes, and another need not, count. A model that is
not measured whole is then

    seconds(model) = seconds(model with `identity`) + depth · (seconds(layer) − seconds(layer of `identity`))

of which the first is measured, and the layers too where somebody asks about one model: the truth beats a forecast,
and the forecast for the lengths around it is scaled to pass through it. Times of one place are of one race
(`race.py`), and by its clock.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from linvit.attention import (
    BASELINE,
    LIMIT,
    Attention,
    attention_cost,
    build_attention,
    resolve,
    size_option,
    with_size,
)
from linvit.data.cache import cache_root
from linvit.devices import amp_dtype
from linvit.files import write_atomically
from linvit.measure.gate import wrong
from linvit.measure.memory import bounded, free_memory, is_out_of_memory
from linvit.measure.models import side_by_side
from linvit.measure.provenance import Provenance, machine, provenance
from linvit.measure.race import BASELINES, Call, over_rounds, race, timed
from linvit.measure.speed import break_even
from linvit.measure.timing import MODES, Timing
from linvit.metrics import size as in_bytes
from linvit.models import ModelConfig
from linvit.models.cost import frame
from linvit.progress import Progress, ignore
from linvit.randomness import generator
from linvit.records import Record, Records, Tag, commit, versions
from linvit.registry import Spec, parse
from linvit.site import Site

FORMAT = 2  # of what is cached; raise it when something else is measured
POINTS, MIN_POINTS = 28, 14  # places that are measured; the least number even where that takes longer than it should
ROUNDS = 3
SECONDS, LAYER_SECONDS = 16.0, 4.0  # for the points, and for the layers of a model
SIDES, HEAD_DIMS, WIDTHS, HEADS = (6, 72), (16, 96), (8, 256), (1, 16)  # of the points: from, to
MAX_GROUPS, MAX_MACS = 512, 6e8  # heads of a whole batch; the work of softmax or a Performer
STEPS = 20  # lengths at which a forecast is asked for where it crosses another
PREFIX = 1  # tokens before the grid's, so that every switch of an attention can be timed
IMAGES_MACS = 6e9  # of a batch that a model without attention is measured with, forward
MAX_BATCH = 64
LEAST_WORK = 2e-3  # seconds of a device that a point of the forecast takes
TASKS = ("latency", "inference", "training")  # one image; a batch; a step of a batch


class Workload(NamedTuple):
    """All that the time of a layer depends on, but the attention itself."""

    site: Site
    batch: int = 1
    mode: str = "forward"  # or both: forward and backward

    def at(self, tokens: int) -> Workload:
        return self._replace(site=self.site.at(tokens))

    def tags(self) -> dict[str, Tag]:
        own: dict[str, Tag] = {name: getattr(self.site, name) for name in ("tokens", "heads", "head_dim", "prefix")}
        return own | {"batch": self.batch, "mode": self.mode}

    @classmethod
    def of(cls, record: Record) -> Workload:
        tags: dict[str, Any] = dict(record.tags)
        site = Site(tags["heads"], tags["head_dim"], tags["tokens"], prefix=tags["prefix"])
        return cls(site.at(site.tokens), tags["batch"], tags["mode"])


def kind_of(spec: str) -> str:
    """The spec without its number of features or projected keys."""
    parsed, open_ = parse(spec), size_option(spec)
    return str(Spec(parsed.name, {key: value for key, value in parsed.options.items() if key != open_}))


def terms(spec: str, load: Workload) -> list[float]:
    """What a layer has to do, by kind of work: the terms of a forecast."""
    groups, d = load.batch * load.site.heads, load.site.head_dim
    rows, macs = groups * load.site.tokens, load.batch * _macs(spec, load.site)
    return [1.0, groups, rows, rows * d, macs / d, macs]


_macs = cache(lambda spec, site: attention_cost(spec, site).macs)


class Forecast:
    """Seconds of one layer of any kind that was measured, at any shape."""

    def __init__(self, records: Iterable[Record]):
        self.records = _device_times([record for record in records if record.metric == "attention_time"])
        points: dict[tuple[str, str], list[tuple[list[float], float]]] = defaultdict(list)
        for record in self.records:
            load, spec = Workload.of(record), str(record.tags["attention"])
            points[kind_of(spec), load.mode].append((terms(spec, load), quick(record)))
        self.points = {
            key: (np.array([each for each, _ in found]), np.array([seconds for _, seconds in found]))
            for key, found in points.items()
        }
        self.rates = {key: fit(*found) for key, found in self.points.items()}

    @cached_property
    def lengths(self) -> tuple[int, int]:
        """The fewest and the most tokens that were measured."""
        tokens = [int(record.tags["tokens"] or 0) for record in self.records]
        return min(tokens), max(tokens)

    def seconds(self, spec: str, load: Workload) -> float:
        return float(np.dot(terms(spec, load), self.rates[kind_of(spec), load.mode]))

    def squares(self, spec: str, prefix: int) -> list[int]:
        """Lengths of square grids behind a prefix, evenly from the fewest to the most tokens that were measured; where
        keys are projected, from as many tokens on."""
        (fewest, most), (kind, _, options) = self.lengths, resolve(spec)
        fewest = max(fewest, options.get(kind.size_option or "") or 1)
        first, last = (math.sqrt(max(1, n - prefix)) for n in (fewest, most))
        sides = {round(side) for side in np.geomspace(math.ceil(first), max(math.floor(last), math.ceil(first)), STEPS)}
        return [side**2 + prefix for side in sorted(sides)]

    @cached_property
    def error(self) -> float:
        """The median of |forecast / measured − 1| over all that was measured, each forecast without its own point: at
        points that it was fitted to, a forecast looks better than it is."""
        found = []
        for every, seconds in self.points.values():
            for i, own in enumerate(every):
                others = np.arange(len(every)) != i
                found.append(np.dot(own, fit(every[others], seconds[others])) / seconds[i] - 1)
        return float(np.median(np.abs(found)))

    @property
    def spread(self) -> float:
        """By how much the quartiles of the rounds differ, in the median: those of a busy machine do."""
        return float(np.median([float(r.tags.get("high") or 0) / quick(r) - 1 for r in self.records]))


def _device_times(records: list[Record]) -> list[Record]:
    """Without those that show how fast operations are launched, unless too few are left of a kind of attention."""

    def kind(record: Record) -> tuple[str, Tag]:
        return kind_of(str(record.tags["attention"])), record.tags["mode"]

    left = Counter(kind(record) for record in records if not record.tags.get("launch_bound"))
    return [record for record in records if not record.tags.get("launch_bound") or left[kind(record)] < MIN_POINTS // 2]


def quick(record: Record) -> float:
    """Its seconds in the quicker rounds: what else a machine does only ever adds to them."""
    return float(record.tags.get("low") or record.value or math.nan)


def fit(every: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The c ≥ 0 with the least Σ (c·terms / seconds − 1)²."""
    from scipy.optimize import nnls

    relative = every / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    return nnls(relative / scale, np.ones(len(seconds)))[0] / scale


def points() -> list[tuple[Workload, int]]:
    """Where attentions are measured, with how many features: even in the logarithm of everything, however many of the
    list are taken. Multiples of the powers of 1/g, with g⁶ = g + 1, are spread so (the golden ratio's, in five
    dimensions)."""
    g, found = 1.1347241384015194, []
    for side, head_dim, width, heads, groups in (0.5 + np.outer(np.arange(POINTS), g ** -np.arange(1.0, 6.0))) % 1:
        n, d = round(_geometric(*SIDES, side)) ** 2 + PREFIX, 8 * round(_geometric(*HEAD_DIMS, head_dim) / 8)
        m = 8 * round(_geometric(*WIDTHS, width) / 8)
        together = _geometric(1, max(1.0, min(MAX_GROUPS, MAX_MACS / (2 * n * d * max(n, 2 * m)))), groups)
        h = max(1, min(round(together), round(_geometric(*HEADS, heads))))
        found.append((Workload(Site(h, d, n, prefix=PREFIX).at(n), max(1, round(together / h))), m))
    return found


def _geometric(low: float, high: float, share: float) -> float:
    return low * (high / low) ** share


def forecast(
    specs: Iterable[str],
    *,
    device: torch.device,
    fresh: bool = False,
    cache: str | Path | None = None,
    seconds: float = SECONDS,
    progress: Progress = ignore,
) -> Forecast:
    """For these kinds of attention and the baselines: as measured on this machine with these versions, now or before.

    cache: the folder in which it is kept, by default the user's; fresh: measured again.
    """
    kinds = list(dict.fromkeys([*BASELINES, *map(kind_of, specs)]))
    key = [kinds, seconds, [str(point) for point in points()]]

    def make() -> list[Record]:
        return list(_timed_points(kinds, device, seconds, progress))

    return Forecast(cached(key, make, device=device, fresh=fresh, cache=cache))


def _timed_points(kinds: Sequence[str], device: torch.device, seconds: float, progress: Progress) -> Iterator[Record]:
    """One layer of each kind, in both modes, side by side at each of the points that the time is enough for."""
    small = Site(2, 16, 50, (7, 7), PREFIX)
    for kind in kinds:  # nothing is timed that computes something else than it says
        given = torch.randn(4, 1, 2, 50, 16, generator=generator("advice", 0))
        if why := wrong(build_attention(with_size(kind, 8, small.tokens), small), *given):
            raise ValueError(f"{kind} is not timed: {why}")
    begun, where = time.monotonic(), provenance(device, amp_dtype("auto", device))
    for i, (load, size) in enumerate(points()):
        spent = (time.monotonic() - begun) / seconds
        if i >= MIN_POINTS and spent >= 1:
            break
        done, site = max(i / POINTS, min(spent, i / MIN_POINTS)), load.site  # whichever ends it
        load = filling(load, device)
        progress(int(100 * done), 100, f"timing attention at {site.tokens} tokens, {site.heads} × {site.head_dim}")
        specs = [with_size(kind, size, site.tokens) for kind in kinds]
        yield from _timed(specs, [load._replace(mode=mode) for mode in MODES], device, where)
    progress(100, 100, "timing attention")


def filling(load: Workload, device: torch.device) -> Workload:
    """With enough images that softmax's forward pass takes an accelerator LEAST_WORK seconds, if its memory holds
    them: what is shorter shows how fast operations are launched. On a CPU the workload as it is."""
    if device.type == "cpu":
        return load
    most = free_memory(device) / 8
    while True:
        projection, gradient = inputs(load, device)
        call = layer_call(build_attention(BASELINE, load.site).to(device), load, projection, gradient)
        timed(call, 1, device)
        seconds = timed(call, 3, device)["wall"]
        larger = load.batch * max(2, math.ceil(LEAST_WORK / max(seconds, 1e-6) / 2))
        bytes_needed = larger / load.batch * (projection.nbytes + gradient.nbytes)
        if seconds >= LEAST_WORK or bytes_needed > most:
            return load
        load = load._replace(batch=larger)


def _timed(
    specs: Iterable[str], loads: Sequence[Workload], device: torch.device, where: Provenance
) -> Iterator[Record]:
    """`attention_time` of every spec at every workload, all side by side."""
    given = {load: inputs(load, device) for load in loads}
    calls = {
        (spec, load): layer_call(build_attention(spec, load.site).to(device), load, *given[load])
        for spec in specs
        for load in loads
    }
    times = race(calls, device=device, rounds=ROUNDS)
    for spec, load in calls:
        bound = times.launch_bound((spec, load))
        tags: dict[str, Tag] = {"attention": spec, **load.tags(), "seed": 0, "clock": times.clock, **bound}
        yield over_rounds("attention_time", times.of((spec, load)), "s", where, tags)


def inputs(load: Workload, device: torch.device) -> tuple[Tensor, Tensor]:
    """A projection (B, N, 3·H·D) and the gradient of what becomes of it (B, N, H·D)."""
    size, tokens = load.site.heads * load.site.head_dim, load.site.tokens
    made = torch.randn(load.batch, tokens, 4 * size, generator=generator("advice", tokens))
    made = made.to(device, amp_dtype("auto", device))  # as a model computes there
    return made[..., : 3 * size].clone(), made[..., 3 * size :].clone()


def layer_call(attention: Attention, load: Workload, projection: Tensor, gradient: Tensor) -> Call:
    """The attention as a model's layer calls it: from one projection to the joined heads, in training and back."""
    if load.mode == "both":
        projection = projection.detach().requires_grad_()

    def joined() -> Tensor:
        q, k, v = projection.unflatten(-1, (3, load.site.heads, load.site.head_dim)).permute(2, 0, 3, 1, 4).unbind()
        return attention(q, k, v).transpose(1, 2).flatten(2)

    if load.mode == "forward":
        return torch.no_grad()(joined)
    weights = [projection, *(weight for weight in attention.parameters() if weight.requires_grad)]
    return lambda: torch.autograd.grad(joined(), weights, gradient, allow_unused=True)


def cached(
    key: object, make: Callable[[], list[Record]], *, device: torch.device, fresh: bool, cache: str | Path | None
) -> list[Record]:
    """Records that were made before on this machine, with these versions, settings and as many threads; else made
    now."""
    where = provenance(device, amp_dtype("auto", device))
    known = [FORMAT, key, machine(), versions(), commit(), *where.values()]
    name = hashlib.sha256(json.dumps(known, default=str).encode()).hexdigest()[:24]
    path = cache_root(cache) / "advice" / f"{name}.jsonl"
    if not fresh:
        try:
            if found := list(Records(path)):
                return found
        except ValueError:  # damaged: it is made again
            pass
    made = make()
    write_atomically(path, "".join(record.line() + "\n" for record in made))
    return made


def suitable_batch(config: ModelConfig) -> int:
    """As many images as a few tenths of a second are enough for."""
    return max(1, min(MAX_BATCH, int(IMAGES_MACS / max(1, frame(config).macs))))


def workloads(config: ModelConfig, batch: int) -> dict[str, Workload]:
    """Those of the model's attention layers, by task."""
    site = Site(config.heads, config.site.head_dim, config.tokens, prefix=config.prefix_tokens).at(config.tokens)
    loads = Workload(site), Workload(site, batch), Workload(site, batch, "both")
    return dict(zip(TASKS, loads, strict=True))


def step_bytes(config: ModelConfig, batch: int) -> int:
    """What a training step takes at least: the images, and what the blocks keep for the gradients."""
    inner = config.heads * config.site.head_dim
    kept = config.depth * config.tokens * (5 * config.dim + 4 * inner + config.mlp_inner + config.mlp_dim)
    return 4 * batch * (math.prod(config.image_shape) + kept)


def measure_model(
    config: ModelConfig,
    specs: Sequence[str],
    known: Forecast,
    *,
    batch: int,
    device: torch.device,
    fresh: bool = False,
    cache: str | Path | None = None,
    seconds: float = LAYER_SECONDS,
    progress: Progress = ignore,
) -> Model:
    """The model with `identity` for its attention, and its layers with each spec, where the time is enough for them."""
    specs, loads = list(dict.fromkeys([*BASELINES, *specs])), list(dict.fromkeys(workloads(config, batch).values()))
    each = sum(known.seconds(spec, load) for spec in specs for load in loads)

    def make() -> list[Record]:
        still = {LIMIT: config.model_copy(update={"attention": LIMIT})}
        progress(0, 2, "timing the model without attention")
        rounds = ROUNDS if batch * frame(config).macs <= IMAGES_MACS else 1
        timing = Timing(batch=batch, rounds=rounds, device=device, dtype=amp_dtype("auto", device))
        found = list(side_by_side(still, baselines={}, timing=timing))
        progress(1, 2, "timing its attention layers")
        if each * (ROUNDS + 2) <= seconds:
            found += _timed(specs, loads, device, provenance(device, amp_dtype("auto", device)))
        progress(2, 2, "timing its attention layers")
        return found

    key = ["model", config.model_dump(mode="json", exclude={"attention", "seed"}), specs, batch, seconds]
    free = free_memory(device)
    try:
        with bounded(free, device):  # where an estimate (`step_bytes`) was too low
            found = cached(key, make, device=device, fresh=fresh, cache=cache)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(f"batch={batch}: timing it takes more than the {in_bytes(free)} of memory free") from None
    return Model(config, batch, known, found)


@dataclass(frozen=True)
class Model:
    """Seconds of one model with any attention in all of its layers, at its own size and at others."""

    config: ModelConfig
    batch: int
    known: Forecast
    records: Sequence[Record]

    @cached_property
    def loads(self) -> dict[str, Workload]:
        return workloads(self.config, self.batch)

    @cached_property
    def without(self) -> dict[str, float]:
        """Seconds of the model with `identity`, which no attention can beat, by task."""
        found = {record.metric: record for record in self.records}
        rate = found["inference_throughput"]
        return {
            "latency": quick(found["inference_latency"]),
            "training": quick(found["train_step"]),
            "inference": self.batch / float(rate.tags.get("high") or rate.value or math.nan),
        }

    @cached_property
    def measured(self) -> Mapping[tuple[str, Workload], float]:
        return {
            (str(record.tags["attention"]), Workload.of(record)): quick(record)
            for record in self.records
            if record.metric == "attention_time"
        }

    @cached_property
    def launch_bound(self) -> list[str]:
        """Tasks in which the device mostly waits for operations to be launched, with softmax or without attention:
        another attention changes how many there are, more than how long they take."""
        metrics = dict(zip(("inference_latency", "inference_throughput", "train_step"), TASKS, strict=True))
        return [
            task
            for metric, task in metrics.items()
            for record in self.records
            if record.metric == metric and record.tags.get("launch_bound")
        ]

    @property
    def tokens(self) -> int:
        return self.config.tokens

    def layer(self, spec: str, task: str, tokens: int | None = None) -> float:
        """Seconds of one layer: the forecast, in proportion to what was measured with the model's own tokens. Fewer
        than any of the forecast's take the time of the calls, which is out of proportion to that of many."""
        load = self.loads[task] if tokens is None else self.loads[task].at(tokens)
        comparable = load.site.tokens == self.tokens or self.tokens >= self.known.lengths[0]
        return self.known.seconds(spec, load) * (self._correction(spec, task) if comparable else 1.0)

    def _correction(self, spec: str, task: str) -> float:
        """Measured over forecast, of the spec or of the one that is nearest to it in work, of those of its kind."""
        own = self.loads[task]
        alike = [one for one, load in self.measured if load == own and kind_of(one) == kind_of(spec)]
        if not alike:
            return 1.0
        near = min(alike, key=lambda one: abs(terms(one, own)[-1] - terms(spec, own)[-1]))
        return self.measured[near, own] / self.known.seconds(near, own)

    def ratio(self, spec: str, task: str, tokens: int | None = None) -> float:
        """How many times faster than softmax a layer is."""
        return self.layer(BASELINE, task, tokens) / self.layer(spec, task, tokens)

    def lengths(self, spec: str) -> list[int]:
        """At which it is compared with softmax, in order: those of the forecast, and the model's own among them."""
        found = self.known.squares(spec, self.config.prefix_tokens)
        return sorted({*found, *([self.tokens] if found[0] <= self.tokens <= found[-1] else [])})

    def break_even(self, spec: str, task: str) -> float | None:
        """About the tokens from which on its layers stay faster than softmax's: the fewest of `lengths` if they always
        are, None if they are not with the most."""
        return self._crossing(spec, lambda n: self.ratio(spec, task, n))

    def _crossing(self, spec: str, ratio: Callable[[int], float]) -> float | None:
        """Of two digits, which are all that a forecast has: rounded so that it stays on its side of the model's own
        tokens, where it is known."""
        lengths = self.lengths(spec)
        exact = break_even({n: ratio(n) for n in lengths})
        if exact is None or exact == lengths[0]:
            return exact
        unit = 10.0 ** max(0, math.floor(math.log10(exact)) - 1)
        return max(float(lengths[0]), (math.ceil if exact > self.tokens else math.floor)(exact / unit) * unit)

    def seconds(self, spec: str, task: str, tokens: int | None = None) -> float:
        """Of the whole model; with another number of tokens all but the attention is in proportion to it."""
        rest = self.without[task] - self.config.depth * self.layer(LIMIT, task)
        share = 1.0 if tokens is None else tokens / self.tokens
        return max(rest, 0.0) * share + self.config.depth * self.layer(spec, task, tokens)

    def speed(self, spec: str, task: str, tokens: int | None = None) -> float:
        """How many times faster than with softmax the whole model is."""
        return self.seconds(BASELINE, task, tokens) / self.seconds(spec, task, tokens)

    def share(self, task: str) -> float:
        """Of the time with softmax, what attention takes: all that can be gained."""
        return max(0.0, 1 - self.seconds(LIMIT, task) / self.seconds(BASELINE, task))

    def pays_from(self, spec: str, task: str, gain: float) -> float | None:
        """About the tokens from which on the whole model is `gain` times as fast as with softmax, as `break_even`."""
        return self._crossing(spec, lambda n: self.speed(spec, task, n) / gain)
