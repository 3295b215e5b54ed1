"""Whole models side by side: training step, inference throughput and latency, and their ratios to baselines'."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from linvit.devices import amp_dtype, autocast
from linvit.measure.provenance import provenance
from linvit.measure.race import BASELINES, Call, over_rounds, race
from linvit.measure.timing import Timing
from linvit.models import ModelConfig, VisionTransformer
from linvit.progress import Progress, ignore
from linvit.randomness import generator
from linvit.records import Record, Tag

RACES = ("train_step", "inference", "latency")
SPEEDS = (
    "train_step",
    "inference_throughput",
    "inference_latency",
    *(f"{task}_vs_{base}" for task, base in itertools.product(RACES, BASELINES)),
)
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Build = Callable[[ModelConfig], VisionTransformer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.0)


def side_by_side(
    configs: Mapping[str, ModelConfig],
    *,
    baselines: Mapping[str, ModelConfig],
    timing: Timing,
    optimizer: MakeOptimizer = adamw,
    others: Mapping[str, MakeOptimizer] | None = None,
    build: Build = VisionTransformer,
    progress: Progress = ignore,
    deadline: float | None = None,
) -> Iterator[Record]:
    """Times of each variant, and ratios `<task>_vs_<baseline>`: how many times faster than the baseline it is.

    `configs` by the variant's id, which every record carries as its tag `variant`; `baselines` by name, timed in the
    same rounds and given no records of their own. `others`: variants with an optimizer of their own. Equal ones are
    timed once. `build` may return a model that is built already. An optimizer's rate should be tiny: the steps are on
    random labels. To end near a `deadline` (of time.monotonic) there are fewer rounds. `timing.dtype` is
    that of autocast.
    """
    device, batch, rounds, dtype = timing.device, timing.batch, timing.rounds, timing.dtype
    own = dict(others or {})
    makers = {(config, None): optimizer for config in [*configs.values(), *baselines.values()]}
    makers |= {(configs[variant], variant): make for variant, make in own.items()}

    def show(done: int, total: int, what: str) -> None:
        progress(done, total, f"speed: {what}")

    calls: dict[tuple[ModelConfig, str | None, str], Call] = {}
    for i, ((config, name), make) in enumerate(makers.items()):
        show(0, rounds * len(makers) * len(RACES), f"building {i + 1} of {len(makers)}")
        made = model_calls(config, device, batch, make, build, dtype)
        calls |= {(config, name, task): call for task, call in made.items()}
    times = race(calls, device=device, rounds=rounds, progress=show, deadline=deadline)
    by, where = times.clock, provenance(device, dtype)
    for variant, config in configs.items():
        tags: dict[str, Tag] = {"variant": variant, "batch": batch, "clock": by}
        mine = config, variant if variant in own else None
        step, inference, latency = (times.of((*mine, task), by=by) for task in RACES)
        bound = {task: times.launch_bound((*mine, task)) for task in RACES}
        yield over_rounds("train_step", step, "s", where, tags | bound["train_step"])
        rates = [batch / seconds for seconds in inference]
        yield over_rounds("inference_throughput", rates, "images/s", where, tags | bound["inference"])
        yield over_rounds("inference_latency", latency, "s", where, tags | bound["latency"])
        for task, (name, baseline) in itertools.product(RACES, baselines.items()):
            found = times.ratios((baseline, None, task), (*mine, task), by)
            yield over_rounds(f"{task}_vs_{name}", found, "×", where, tags)


def model_calls(
    config: ModelConfig,
    device: torch.device,
    batch: int,
    make_optimizer: MakeOptimizer = adamw,
    build: Build = VisionTransformer,
    dtype: torch.dtype | None = None,
) -> dict[str, Call]:
    """One training step, a batch of inference, and one image of it, on random images. dtype: of autocast, without it
    what is usual for the device."""
    dtype = amp_dtype("auto", device) if dtype is None else dtype
    model = build(config).to(device)
    shape = batch, *config.image_shape
    x = torch.randn(shape, generator=generator("speed", *shape)).to(device)
    optimizer = make_optimizer(model)

    def step() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        with autocast(device, dtype):
            logits = model(x).float().flatten(0, -2)  # of a next-pixel model there are some for each token
        F.cross_entropy(logits, torch.arange(len(logits), device=device) % logits.shape[1]).backward()
        optimizer.step()

    @torch.inference_mode()
    def infer(images: torch.Tensor) -> torch.Tensor:
        with autocast(device, dtype):
            return model.eval()(images)

    return dict(zip(RACES, (step, partial(infer, x), partial(infer, x[:1])), strict=True))
