"""Whole models side by side: training step, inference throughput and latency.

Every round runs each model once, in random order, so that whatever else the machine does hits all alike; ratios are
taken inside a round.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from linvit.measure.provenance import provenance
from linvit.measure.timing import ROUNDS, Call, clock, quartiles, repeats, timed
from linvit.models import ModelConfig, VisionTransformer
from linvit.progress import Progress, ignore
from linvit.records import Record

BASELINES = ("softmax", "identity")
TASKS = ("train_step", "inference", "latency")
METRICS = (
    "train_step", "inference_throughput", "inference_latency",
    *(f"{task}_vs_{base}" for task, base in itertools.product(TASKS, BASELINES)),
)  # fmt: skip
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.0)


def side_by_side(
    configs: Mapping[str, ModelConfig],
    *,
    device: torch.device,
    batch: int = 64,
    rounds: int = ROUNDS,
    optimizer: MakeOptimizer = adamw,
    by: str | None = None,
    progress: Progress = ignore,
) -> Iterator[Record]:
    """configs by spec, the baselines among them → times and ratios of each, `by` one clock. The optimizer's rate should
    be tiny: the steps are on random labels."""
    by = by or clock(device)
    calls: dict[tuple[str, str], Call] = {}
    for spec, config in configs.items():
        calls |= {(spec, task): call for task, call in model_calls(config, device, batch, optimizer).items()}
    repeat = {key: repeats(call, device) for key, call in calls.items()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    order = random.Random(0)
    for turn in range(rounds):
        keys = list(calls)
        order.shuffle(keys)
        for i, key in enumerate(keys):
            progress(turn * len(keys) + i, rounds * len(keys), f"speed of {key[0]}")
            times[key].append(timed(calls[key], repeat[key], device)[by])
    common = provenance(device, torch.float32)

    def record(metric: str, values: list[float], unit: str, spec: str) -> Record:
        low, middle, high = quartiles(values)
        tags = {"attention": spec, "batch": batch, "clock": by, "low": low, "high": high}
        return Record(metric, middle, unit, rounds, **common, tags=tags)

    for spec in configs:
        yield record("train_step", times[spec, "train_step"], "s", spec)
        yield record("inference_throughput", [batch / t for t in times[spec, "inference"]], "images/s", spec)
        yield record("inference_latency", times[spec, "latency"], "s", spec)
        for task, base in itertools.product(TASKS, BASELINES):
            pairs = zip(times[spec, task], times[base, task], strict=True)
            yield record(f"{task}_vs_{base}", [other / own for own, other in pairs], "×", spec)


def model_calls(
    config: ModelConfig, device: torch.device, batch: int, make_optimizer: MakeOptimizer = adamw
) -> dict[str, Call]:
    """One training step, a batch of inference, and one image of it, on random images."""
    model = VisionTransformer(config).to(device)
    x = torch.randn(batch, config.channels, config.image_size, config.image_size, device=device)
    y = torch.arange(batch, device=device) % config.classes
    optimizer = make_optimizer(model)

    def step() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def infer(images: torch.Tensor) -> Call:
        def call() -> object:
            model.eval()
            with torch.inference_mode():
                return model(images)

        return call

    return {"train_step": step, "inference": infer(x), "latency": infer(x[:1])}
