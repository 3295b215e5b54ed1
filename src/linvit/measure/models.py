"""Whole models side by side: training step, inference throughput and latency, and memory in a fresh process.

Ratios are taken inside a round in which every model runs once, in random order; on a CPU by CPU time, so that other
programs do not count.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from linvit.measure.provenance import Progress, ignore, provenance, wait
from linvit.models import ModelConfig, VisionTransformer
from linvit.records import Record

BASELINES = ("softmax", "identity")
TASKS = ("train_step", "inference", "latency")
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.0)


def side_by_side(
    configs: Mapping[str, ModelConfig],
    *,
    device: torch.device,
    batch: int = 64,
    rounds: int = 12,
    optimizer: MakeOptimizer = adamw,
    progress: Progress = ignore,
) -> Iterator[Record]:
    """configs by spec, the baselines among them → times and ratios of each. The optimizer's rate should
    be tiny: the steps are on random labels."""
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for spec, config in configs.items():
        calls |= {(spec, task): call for task, call in _calls(config, device, batch, optimizer).items()}
    for call in calls.values():  # warm up
        call()
    times: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in calls}
    order = random.Random(0)
    for turn in range(rounds):
        keys = list(calls)
        order.shuffle(keys)
        for i, key in enumerate(keys):
            progress(turn * len(keys) + i, rounds * len(keys), f"speed of {key[0]}")
            times[key].append(_time(calls[key], device))
    clock = 1 if device.type == "cpu" else 0
    common = provenance(device, torch.float32)

    def record(metric: str, values: list[float], unit: str, spec: str) -> Record:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        return Record(metric, middle, unit, rounds, **common, tags={"attention": spec, "low": low, "high": high})

    for spec in configs:
        wall = {task: [t[0] for t in times[spec, task]] for task in TASKS}
        yield record("train_step", wall["train_step"], "s", spec)
        yield record("inference_throughput", [batch / t for t in wall["inference"]], "images/s", spec)
        yield record("inference_latency", wall["latency"], "s", spec)
        for task, base in (("train_step", "softmax"), ("inference", "softmax"), ("inference", "identity")):
            pairs = zip(times[spec, task], times[base, task], strict=True)
            yield record(f"{task}_vs_{base}", [b[clock] / a[clock] for a, b in pairs], "×", spec)


def _calls(
    config: ModelConfig, device: torch.device, batch: int, make_optimizer: MakeOptimizer = adamw
) -> dict[str, Callable[[], object]]:
    model = VisionTransformer(config).to(device)
    x = torch.randn(batch, config.channels, config.image_size, config.image_size, device=device)
    y = torch.arange(batch, device=device) % config.classes
    optimizer = make_optimizer(model)

    def step() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def infer(images: torch.Tensor) -> Callable[[], object]:
        def call() -> object:
            model.eval()
            with torch.inference_mode():
                return model(images)

        return call

    return {"train_step": step, "inference": infer(x), "latency": infer(x[:1])}


def _time(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    wait(device)
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    wait(device)
    return time.perf_counter() - wall, time.process_time() - cpu


def peak_memory(config: ModelConfig, device: torch.device, batch: int = 64) -> Record:
    """Bytes one training step needs beyond the idle process: on CUDA as allocated, else a fresh CPU process's peak."""
    place = device if device.type == "cuda" else torch.device("cpu")
    tags = {"attention": config.attention, "batch": batch}
    return Record("peak_memory", _peak(config, place, batch), "bytes", **provenance(place, torch.float32), tags=tags)


def _peak(config: ModelConfig, device: torch.device, batch: int) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _calls(config, device, batch)["train_step"]()
        return torch.cuda.max_memory_allocated(device) - before
    command = [sys.executable, "-m", "linvit.measure.models", config.model_dump_json(), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"memory of {config.attention} could not be measured: {done.stderr.strip().splitlines()[-1:]}")
    return int(done.stdout)


def extra_memory(call: Callable[[], object]) -> int:
    """Bytes by which this process's peak memory during the call exceeds what it held before."""
    import resource

    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if reset.exists():  # getrusage's peak would include what the parent held when it forked
        reset.write_text("5")
        before = int(re.findall(r"VmRSS:\s*(\d+)", status.read_text())[0])
        call()
        return 1024 * (int(re.findall(r"VmHWM:\s*(\d+)", status.read_text())[0]) - before)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)


def _print_peak(config: str, batch: int) -> None:
    device, parsed = torch.device("cpu"), ModelConfig(**json.loads(config))
    _calls(parsed, device, 1)["train_step"]()  # libraries take their own memory here
    print(extra_memory(lambda: _calls(parsed, device, batch)["train_step"]()))


if __name__ == "__main__":
    _print_peak(sys.argv[1], int(sys.argv[2]))
