"""Memory that one call needs: of anything (`extra_memory`), and of attentions at each length, in fresh processes.

Nothing here may exhaust the machine. What a call will take is forecast from shorter lengths before it is made, and what
a forecast has missed fails at a limit of the process's own instead of the system's.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from linvit.attention import Attention
from linvit.errors import MEMORY
from linvit.measure.gate import both, wrong
from linvit.measure.provenance import provenance
from linvit.measure.setting import MODES, Setting
from linvit.metrics import size
from linvit.progress import Progress, ignore, repeated
from linvit.records import Record, Tag

LEAST = 2**16  # bytes: less is the measurement's own
SLACK = 2**30  # of addresses that a process takes beside what it fills: stacks of threads, pools of libraries
LONGEST = 2**22  # tokens to which lengths are doubled


def extra_memory(call: Callable[[], object]) -> int:
    """Bytes by which this process's peak memory during the call exceeds what it held before."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if reset.exists():  # getrusage's peak would include what the parent held when it forked
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if release is not None:  # what was freed but kept would be used again, and not be seen
            release(0)
        reset.write_text("5")
        before = int(re.findall(r"VmRSS:\s*(\d+)", status.read_text())[0])
        call()
        return 1024 * (int(re.findall(r"VmHWM:\s*(\d+)", status.read_text())[0]) - before)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)


def extra_memory_on(device: torch.device, call: Callable[[], object]) -> int:
    """The same on any device: on CUDA as allocated there, else of this process."""
    if device.type != "cuda":
        return extra_memory(call)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def free_memory(device: torch.device) -> int:
    """Bytes that nobody uses now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError):
        if found := re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text()):
            return 1024 * int(found[1])
    return MEMORY


@contextmanager
def bounded(limit: int, device: torch.device) -> Iterator[None]:
    """A call inside that asks for more than so many bytes fails by itself (`is_out_of_memory`), where a process can
    be limited so; other devices do that anyway."""
    status = Path("/proc/self/status")
    if device.type != "cpu" or not status.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = 1024 * int(re.findall(r"VmSize:\s*(\d+)", status.read_text())[0])
    top = min(held + limit + SLACK, *(bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY), 2**62)
    resource.setrlimit(resource.RLIMIT_AS, (top, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def is_out_of_memory(error: BaseException) -> bool:
    told = "can't allocate memory", "not enough memory", "out of memory", "bad_alloc"
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in told)


def read_size(text: str) -> int:
    """`4GB`, `500MiB` or plain bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not found or not float(found[1]):
        raise ValueError(f"memory '{text}' is not a size: write 500MB, 4GB or 4GiB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))


@dataclass
class Forecast:
    """What a cost will be at a greater length, from those that were measured."""

    found: list[tuple[int, float]] = field(default_factory=list)

    def add(self, tokens: int, cost: float) -> None:
        self.found.append((tokens, max(cost, 1e-9)))

    def at(self, tokens: int) -> float:
        """αN + βN² through the last two lengths, neither part below nothing. Of one length nothing is known: all of it
        is quadratic, the worst, which may refuse but is not to be told."""
        if not self.found:
            return 0.0
        last, cost = self.found[-1]
        quadratic = cost / last**2
        if len(self.found) > 1:
            before, less = self.found[-2]
            quadratic = min(quadratic, max(0.0, (cost / last - less / before) / (last - before)))
        return (cost / last - quadratic * last) * tokens + quadratic * tokens**2


def doubled(tokens: Sequence[int], until_limit: bool) -> list[int]:
    """The lengths in order; if they go on to the limit, the greatest of them doubled again and again."""
    lengths = sorted(set(tokens))
    if min(lengths, default=0) < 1:
        raise ValueError(f"tokens={list(tokens)} must be at least 1")
    while until_limit and 2 * lengths[-1] <= LONGEST:
        lengths.append(2 * lengths[-1])
    return lengths


def measure(
    specs: Iterable[str], *, tokens: Sequence[int] = (256, 1024, 4096), until_limit: bool = False,
    most_memory: int | None = None, most_seconds: float = 60.0, progress: Progress = ignore, **where: Any,
) -> Iterator[Record]:  # fmt: skip
    """Peak memory of one call of each attention beside its inputs, forward and with its backward pass, each length in a
    fresh process; as a ratio to fused softmax's; and, from two lengths on, the most tokens that fit `most_memory` bytes
    (half of what is free without it).

    `until_limit` doubles the lengths until nothing fits. What would not fit, or take more than `most_seconds`, is not
    tried: its record has no value, and the tag `refused` says why. `where` are the fields of a Setting.
    """
    setting = Setting(**where)
    device = torch.device(setting.device)
    limit = free_memory(device) // 2 if most_memory is None else most_memory
    specs = list(dict.fromkeys(["softmax", *specs]))
    lengths = doubled(tokens, until_limit)
    for spec in specs:
        setting.attention(spec, max(tokens))  # a bad spec is an error before anything is measured
    common = provenance(device, setting.dtype)
    forecasts = {(spec, what): Forecast() for spec in specs for what in (*MODES, "seconds")}
    softmax: dict[tuple[int, str], int] = {}
    ended: dict[str, str] = {}  # spec → why it is not tried at a greater length
    with repeated(progress) as tell:
        for i, n in enumerate(lengths):
            for j, spec in enumerate(specs):
                tell(i * len(specs) + j, len(lengths) * len(specs), f"{spec} at N = {n:,}")
                memory = setting.input_bytes(n) + forecasts[spec, "both"].at(n)
                found: dict[str, Any] = {}
                why = ended.get(spec) or refusal(memory, forecasts[spec, "seconds"].at(n), limit, most_seconds)
                if why:
                    ended[spec] = why
                else:
                    found, why = _in_a_fresh_process(spec, n, setting, limit, most_seconds)
                    if found.pop("ended", False):
                        ended[spec] = why
                if why and i == 0 and spec == "softmax":
                    raise ValueError(f"nothing to compare with at N = {n}: softmax is refused ({why})")
                for mode in MODES:
                    tags: dict[str, Tag] = {"attention": spec, "mode": mode, "tokens": n, **setting.shape()}
                    if why:
                        yield Record("attention_memory", None, "bytes", 0, **common, tags=tags | {"refused": why})
                        continue
                    yield Record("attention_memory", found[mode], "bytes", **common, tags=tags)
                    if spec == "softmax":
                        softmax[n, mode] = found[mode]
                    if base := softmax.get((n, mode)):
                        yield Record("memory_vs_softmax", found[mode] / base, "×", **common, tags=tags)
                for what, cost in found.items():
                    forecasts[spec, what].add(n, max(cost, LEAST) if what in MODES else cost)
            if until_limit and len(ended) == len(specs):
                break
    for (spec, mode), forecast in forecasts.items():
        if mode in MODES and len(forecast.found) > 1:  # one length does not tell how it grows
            tags = {"attention": spec, "mode": mode, **setting.shape(), "limit": limit, "to": forecast.found[-1][0]}
            yield Record("largest_tokens", _most_tokens(forecast, setting, limit), "tokens", **common, tags=tags)
    progress(1, 1, "done")


def refusal(memory: float, seconds: float, limit: int, most_seconds: float) -> str:
    """Why a call is not made; empty if it may be."""
    if memory > limit:
        return f"it would take about {size(memory)}, more than {size(limit)}"
    if seconds > most_seconds:
        return f"it would take about {seconds:.2g} s, more than {most_seconds:g} s"
    return ""


def _most_tokens(forecast: Forecast, setting: Setting, limit: int) -> int:
    """The greatest length whose inputs and cost are within the limit, if costs grow as they last did."""
    low, high = 1, 2**40
    while high - low > 1:
        middle = (low + high) // 2
        fits = setting.input_bytes(middle) + forecast.at(middle) <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low


def _in_a_fresh_process(
    spec: str, tokens: int, setting: Setting, limit: int, seconds: float
) -> tuple[dict[str, Any], str]:
    """Bytes by mode and the seconds that both took; or why there are none, `ended` if a greater length has none."""
    told = {"spec": spec, "tokens": tokens, "limit": limit, "threads": torch.get_num_threads(), **setting.as_text()}
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}  # what can be imported here can be there
    call, wait = [sys.executable, "-P", "-m", "linvit.measure.memory", json.dumps(told)], 60 + 10 * seconds
    try:
        done = subprocess.run(call, env=os.environ | paths, capture_output=True, text=True, timeout=wait, check=False)
    except subprocess.TimeoutExpired:
        return {"ended": True}, f"it took more than {wait:.0f} s"
    except OSError as error:
        raise ValueError(str(error)) from None
    if done.returncode:
        why = (done.stderr.strip() or f"its process ended with {done.returncode}").splitlines()[-1]
        return {"ended": True}, why
    found = json.loads(done.stdout.splitlines()[-1])
    return found, found.pop("refused", "")


def _weighed(spec: str, tokens: int, limit: int, threads: int, **where: Any) -> dict[str, Any]:
    """What the process says."""
    torch.set_num_threads(threads)
    setting = Setting.of_text(where)
    device = torch.device(setting.device)
    found: dict[str, Any] = {}
    try:
        with bounded(limit, device):
            small, few = _small(spec, tokens, setting)
            if why := wrong(small, *few):  # libraries take their own memory here
                return {"refused": why, "ended": True}
            attention, inputs = setting.attention(spec, tokens), setting.inputs(tokens)
            found["forward"] = max(0, extra_memory_on(device, torch.no_grad()(partial(attention, *inputs[:3]))))
            begun = time.monotonic()
            found["both"] = max(0, extra_memory_on(device, partial(both, attention, *inputs)))
            found["seconds"] = time.monotonic() - begun
    except ValueError as error:
        return {"refused": str(error)}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"refused": f"it takes more than {size(limit)}", "ended": True}
    return found


def _small(spec: str, tokens: int, setting: Setting) -> tuple[Attention, torch.Tensor]:
    """The attention at the least length, of a few, for which it can be built, and its inputs there."""
    for n in (64, 256, 1024):
        if n < tokens:
            with suppress(ValueError):
                return setting.attention(spec, n), setting.inputs(n)
    return setting.attention(spec, tokens), setting.inputs(tokens)


if __name__ == "__main__":
    print(json.dumps(_weighed(**json.loads(sys.argv[1]))))
