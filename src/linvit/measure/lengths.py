"""Whole models from short to long sequences, up to a limit of time or memory (the paper's figure 3): every pixel of a
larger and larger image is a token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from linvit.measure.memory import Growth, Limits, bounded, extra_memory, is_out_of_memory
from linvit.measure.models import model_calls
from linvit.measure.provenance import provenance
from linvit.measure.race import Call, over_rounds, race
from linvit.measure.timing import MODES, Timing
from linvit.metrics import size
from linvit.models import ModelConfig, model_config
from linvit.progress import Progress, ignore
from linvit.records import Record, Tag

TASKS = dict(zip(MODES, ("inference", "train_step"), strict=True))


@dataclass
class _Reach:
    """What one attention has taken so far."""

    memory: Growth = field(default_factory=Growth)
    seconds: Growth = field(default_factory=Growth)
    ended: str = ""  # why it is tried at no greater length


def model_times(
    specs: Sequence[str],
    shape: Mapping[str, Any],
    *,
    sides: Sequence[int],
    timing: Timing,
    limits: Limits,
    progress: Progress = ignore,
) -> Iterator[Record]:
    """`model_time` of each attention in models of this shape, with side² tokens each: an inference, and a training
    step. What is beyond the limits has a record without a value, which says why; nothing longer is tried then."""
    limits = replace(limits, memory=limits.bytes(timing.device))
    common = provenance(timing.device, timing.dtype)
    reached = {spec: _Reach() for spec in specs}
    for side in sides:
        calls: dict[tuple[str, str], Call] = {}
        for spec, reach in reached.items():
            progress(sides.index(side), len(sides), f"{spec} at N = {side**2:,}")
            config = model_config(**shape, image_size=side, attention=spec)
            tags: dict[str, Tag] = {"attention": spec, "tokens": config.tokens, "batch": timing.batch}
            if made := _within(config, timing, limits, reach):
                calls |= {(spec, mode): made[task] for mode, task in TASKS.items()}
                continue
            for mode in MODES:
                refused = tags | {"mode": mode, "refused": reach.ended}
                yield Record("model_time", None, "s", 0, **common, tags=refused)
        if not calls:
            return
        times = race(calls, device=timing.device, rounds=timing.rounds, progress=progress)
        for spec, mode in calls:
            tags = {"attention": spec, "tokens": side**2, "batch": timing.batch, "mode": mode, "clock": times.clock}
            yield over_rounds("model_time", times.of((spec, mode)), "s", common, tags)
    progress(1, 1, "done")


def _within(config: ModelConfig, timing: Timing, limits: Limits, reach: _Reach) -> dict[str, Call]:
    """The calls of a model, if its training step is within the limits; else empty, and `reach.ended` says why."""
    if not reach.ended:
        reach.ended = limits.refusal(reach.memory.at(config.tokens), reach.seconds.at(config.tokens))
    if reach.ended:
        return {}
    most = limits.bytes(timing.device)
    try:
        with bounded(most, timing.device):
            calls = model_calls(config, timing.device, timing.batch, dtype=timing.dtype)
            step: Callable[[], object] = calls["train_step"]
            if not reach.seconds.found:
                step()  # libraries take their own time and memory
            begun = time.monotonic(), time.process_time()
            reach.memory.add(config.tokens, extra_memory(step, timing.device))
            reach.seconds.add(config.tokens, min(time.monotonic() - begun[0], time.process_time() - begun[1]))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reach.ended = f"it takes more than {size(most)}"
        return {}
    return calls
