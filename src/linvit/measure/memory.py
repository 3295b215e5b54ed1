"""Memory that one call needs: of anything (`extra_memory`), and of attentions at each length, in fresh processes.

Nothing here may exhaust the machine. What a call will take is extrapolated from shorter lengths before it is made, and
what that has missed fails at a limit of the process's own instead of the system's.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from linvit.attention import BASELINE
from linvit.machine import MEMORY
from linvit.measure.gate import both, wrong
from linvit.measure.provenance import provenance
from linvit.measure.timing import CPU, MODES, Timing
from linvit.metrics import size
from linvit.progress import Progress, ignore, repeated
from linvit.records import Record, Tag
from linvit.site import Site

if sys.platform == "win32":
    import psutil
else:
    import resource

NOISE = 2**16  # bytes: less is the measurement's own
SLACK = 2**30  # of addresses that a process takes besides what it fills: stacks of threads, pools of libraries
MAX_TOKENS = 2**22  # to which lengths are doubled


def extra_memory(call: Callable[[], object], device: torch.device = CPU) -> int:
    """Bytes by which the peak during the call exceeds what was held before: on CUDA as allocated there, else by this
    process."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if reset.exists():  # getrusage's peak would include what the parent held when it forked
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if release is not None:  # what was freed but kept would be used again, and not be seen
            release(0)
        reset.write_text("5")
        before = int(re.findall(r"VmRSS:\s*(\d+)", status.read_text())[0])
        call()
        return 1024 * (int(re.findall(r"VmHWM:\s*(\d+)", status.read_text())[0]) - before)
    before = _peak()
    call()
    return _peak() - before


def _peak() -> int:
    """The most that this process has held so far, where it cannot be reset."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_memory(device: torch.device = CPU) -> int:
    """Bytes that nobody uses now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if sys.platform == "win32":
        return psutil.virtual_memory().available
    with suppress(OSError):
        if found := re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text()):
            return 1024 * int(found[1])
    return MEMORY


@contextmanager
def bounded(limit: int, device: torch.device) -> Iterator[None]:
    """A call inside that asks for more than this many bytes fails by itself (`is_out_of_memory`), where a process can
    be limited so; other devices do that anyway."""
    status = Path("/proc/self/status")
    if sys.platform == "win32" or device.type != "cpu" or not status.exists():
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


def in_fresh_process(module: str, told: Mapping[str, Any], timeout: float | None = None) -> Any:
    """What `python -m module JSON` prints last, as JSON. A process that fails is a ValueError with its last line."""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}  # what can be imported here can be there
    call = [sys.executable, "-P", "-m", module, json.dumps(told)]
    try:
        done = subprocess.run(
            call, env=os.environ | paths, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"it took more than {timeout:.0f} s") from None
    except OSError as error:
        raise ValueError(str(error)) from None
    if done.returncode:
        raise ValueError((done.stderr.strip() or f"its process ended with {done.returncode}").splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


@dataclass
class Growth:
    """How a cost grows with the number of tokens, from the lengths that were measured."""

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


@dataclass(frozen=True)
class Limits:
    """Beyond which an attention is not tried."""

    memory: int | None = None  # bytes; without it half of what is free
    seconds: float = 60.0
    double: bool = False  # the greatest length again and again, until nothing is within the limits

    def bytes(self, device: torch.device) -> int:
        return free_memory(device) // 2 if self.memory is None else self.memory

    def lengths(self, tokens: Sequence[int]) -> list[int]:
        """In order, with the doubled ones."""
        found = sorted(set(tokens))
        if min(found, default=0) < 1:
            raise ValueError(f"tokens={list(tokens)} must be at least 1")
        while self.double and 2 * found[-1] <= MAX_TOKENS:
            found.append(2 * found[-1])
        return found

    def refusal(self, memory: float, seconds: float) -> str:
        """Why a call that takes this much is not made; empty if it may be."""
        if self.memory is not None and memory > self.memory:
            return f"it would take about {size(memory)}, more than {size(self.memory)}"
        if seconds > self.seconds:
            return f"it would take about {seconds:.2g} s, more than {self.seconds:g} s"
        return ""


def attention_memory(
    specs: Iterable[str],
    site: Site,
    *,
    tokens: Sequence[int] = (256, 1024, 4096),
    timing: Timing = Timing(),  # noqa: B008 (frozen)
    limits: Limits = Limits(),
    progress: Progress = ignore,
) -> Iterator[Record]:
    """Peak memory of one call of each attention besides its inputs, forward and with its backward pass, each length in
    a fresh process; as a ratio to fused softmax's; and, from two lengths on, the most tokens that fit the limit.

    What would not fit, or take longer than the limit, is not tried: its record has no value, and the tag `refused` says
    why. Of the site, only the tokens are replaced.
    """
    limits = replace(limits, memory=limits.bytes(timing.device))
    specs, lengths = list(dict.fromkeys([BASELINE, *specs])), limits.lengths(tokens)
    for spec in specs:
        timing.attention(spec, site.at(max(tokens)))  # a bad spec is an error before anything is measured
    common = provenance(timing.device, timing.dtype)
    weighed, softmax = {spec: _Weighed(spec, timing, limits) for spec in specs}, {}
    with repeated(progress) as tell:
        for i, n in enumerate(lengths):
            for j, (spec, one) in enumerate(weighed.items()):
                tell(i * len(specs) + j, len(lengths) * len(specs), f"{spec} at N = {n:,}")
                found, why = one.at(site.at(n))
                if spec == BASELINE:
                    softmax = found
                    if why and i == 0:
                        raise ValueError(f"nothing to compare with at N = {n}: {spec} is refused ({why})")
                for mode in MODES:
                    tags: dict[str, Tag] = {"attention": spec, "mode": mode, "tokens": n, **timing.tags(site)}
                    if why:
                        yield Record("attention_memory", None, "bytes", 0, **common, tags=tags | {"refused": why})
                        continue
                    yield Record("attention_memory", found[mode], "bytes", **common, tags=tags)
                    if base := softmax.get(mode):
                        yield Record("memory_vs_softmax", found[mode] / base, "×", **common, tags=tags)
            if limits.double and all(one.ended for one in weighed.values()):
                break
    for spec, one in weighed.items():
        for mode in MODES:
            if len(one.growth[mode].found) > 1:  # one length does not tell how it grows
                told = {"limit": limits.memory, "to": one.growth[mode].found[-1][0]}
                tags = {"attention": spec, "mode": mode, **timing.tags(site), **told}
                yield Record("largest_tokens", one.most_tokens(mode, site), "tokens", **common, tags=tags)
    progress(1, 1, "done")


class _Weighed:
    """One attention at one length after the other."""

    def __init__(self, spec: str, timing: Timing, limits: Limits):
        self.spec, self.timing, self.limits = spec, timing, limits
        self.growth = {what: Growth() for what in (*MODES, "seconds")}
        self.ended = ""  # why it is not tried at a greater length

    def at(self, site: Site) -> tuple[dict[str, float], str]:
        """Bytes by mode and the seconds that both took; or why there are none."""
        expected = self.timing.input_bytes(site) + self.growth["both"].at(site.tokens)
        self.ended = self.ended or self.limits.refusal(expected, self.growth["seconds"].at(site.tokens))
        if self.ended:
            return {}, self.ended
        found = weigh(self.spec, site, self.timing, self.limits)
        why, ends = found.pop("refused", ""), found.pop("ended", False)
        self.ended = why if ends else ""
        for what, cost in found.items():
            self.growth[what].add(site.tokens, max(cost, NOISE) if what in MODES else cost)
        return found, why

    def most_tokens(self, mode: str, site: Site) -> int:
        """The greatest length whose inputs and cost are within the limit, if costs grow as they last did."""
        low, high, limit = 1, 2**40, self.limits.bytes(self.timing.device)
        while high - low > 1:
            middle = (low + high) // 2
            taken = self.timing.input_bytes(replace(site, tokens=middle, grid=None)) + self.growth[mode].at(middle)
            low, high = (middle, high) if taken <= limit else (low, middle)
        return low


def weigh(spec: str, site: Site, timing: Timing, limits: Limits) -> dict[str, Any]:
    """Bytes by mode and seconds, of a fresh process; or why there are none (`refused`), and whether a greater length
    has none either (`ended`)."""
    told = {"spec": spec, "site": asdict(site), "limit": limits.memory, "threads": torch.get_num_threads()}
    told |= {"batch": timing.batch, "device": str(timing.device), "dtype": str(timing.dtype).removeprefix("torch.")}
    try:
        return in_fresh_process("linvit.measure.memory", told, 60 + 10 * limits.seconds)
    except ValueError as error:
        return {"refused": str(error), "ended": True}


def _weigh_here(
    spec: str, site: Mapping[str, Any], limit: int, threads: int, batch: int, device: str, dtype: str
) -> dict[str, Any]:
    torch.set_num_threads(threads)
    timing, here = Timing(batch=batch, device=torch.device(device), dtype=getattr(torch, dtype)), Site(**site)
    found: dict[str, Any] = {}
    try:
        with bounded(limit, timing.device):
            small = _small(spec, here, timing)
            if why := wrong(timing.attention(spec, small), *timing.inputs(small)):  # libraries take their own memory
                return {"refused": why, "ended": True}
            attention, inputs = timing.attention(spec, here), timing.inputs(here)
            forward = torch.no_grad()(partial(attention, *inputs[:3]))
            found["forward"] = max(0, extra_memory(forward, timing.device))
            begun = time.monotonic()
            found["both"] = max(0, extra_memory(partial(both, attention, *inputs), timing.device))
            found["seconds"] = time.monotonic() - begun
    except ValueError as error:
        return {"refused": str(error)}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"refused": f"it takes more than {size(limit)}", "ended": True}
    return found


def _small(spec: str, site: Site, timing: Timing) -> Site:
    """The least length, of a few, for which the attention can be built."""
    for n in (64, 256, 1024):
        if n < site.tokens:
            with suppress(ValueError):
                timing.attention(spec, site.at(n))
                return site.at(n)
    return site


if __name__ == "__main__":
    print(json.dumps(_weigh_here(**json.loads(sys.argv[1]))))
