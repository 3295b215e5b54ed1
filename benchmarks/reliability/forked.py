"""Command lines of linvit in processes forked from this one, which has imported everything: each starts in a few
milliseconds instead of seconds. What `inputs.py` and `kills.py` share; Linux and macOS."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
POLL_SECONDS = 0.002
ROUNDS = 3  # of a race
GRACE_SECONDS = 10.0  # for a process that was asked to end


@dataclass(frozen=True)
class Limits:
    """Of one process."""

    seconds: float  # of the wall's clock
    cpu: float = 600.0  # seconds of CPU time
    memory: int = 4 * GIB  # that it may fill, in addition to what the imports take
    file: int = GIB


@dataclass(frozen=True)
class Outcome:
    code: int  # negative: the signal that ended it
    seconds: float
    cpu: float = 0.0  # seconds
    memory: int = 0  # peak, in bytes
    late: bool = False  # it was asked to end at the limit of time


def preload() -> None:
    """Import what any verb imports, so that children need not."""
    import altair
    import sklearn.datasets
    import sklearn.metrics
    import torch
    import torch._dynamo  # the first optimizer of a process imports it
    import vl_convert

    import linvit.cli
    import linvit.pipeline.convert
    import linvit.report
    import linvit.study
    import linvit.tuning.search  # noqa: F401
    from linvit.attention import attention_names
    from linvit.cli import _parser, verbs
    from linvit.data import DATASETS, FORMATS
    from linvit.records import commit, versions
    from linvit.report import page

    del altair, vl_convert, sklearn, _parser
    torch.set_num_threads(1)
    for verb in verbs():
        __import__(f"linvit.cli.{verb}")
    attention_names(), DATASETS.names(), FORMATS.names(), commit(), versions()
    library = in_fork(page._library)  # V8 has threads, which do not survive a fork
    page._library = lambda: library


def measure_quickly() -> None:
    """In a child: few rounds, and memory in a fork instead of a new interpreter."""
    from linvit.study import measuring
    from linvit.training import memory

    measuring.ROUNDS = ROUNDS
    memory.in_fresh_process = lambda module, told, timeout=None: in_fork(lambda: memory._peak_here(**told))


def in_fork(call: Callable[[], Any]) -> Any:
    """What a call returns, made in a process of its own, as JSON."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        with open(writer, "w") as answer:
            json.dump(call(), answer)
        os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def start(
    words: Sequence[str],
    folder: Path,
    limits: Limits,
    environment: Mapping[str, str] = {},
    prepare: Callable[[], object] = lambda: None,
) -> int:
    """The id of a process, and of its group, that runs `linvit WORDS` in the folder, with its output in the files
    stdout and stderr there. prepare: called in the process first."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    if pid := os.fork():
        _own_group(pid)
        return pid
    code = 1
    try:
        _own_group(0)
        os.chdir(folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        for number, name, mode in ((0, os.devnull, os.O_RDONLY), (1, "stdout", flags), (2, "stderr", flags)):
            os.dup2(os.open(name, mode), number)
        os.environ.update(environment)
        _limit(limits)
        prepare()
        import linvit.cli

        code = linvit.cli.main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _own_group(pid: int) -> None:
    """Called by parent and child, as either may be the first to need it."""
    try:
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):  # it has ended
        return


def _limit(limits: Limits) -> None:
    """Memory is limited by RLIMIT_DATA: V8, which draws the charts, reserves far more addresses than it ever uses."""
    status = Path("/proc/self/statm")
    if status.exists():
        held = int(status.read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (held + limits.memory, held + limits.memory))
    resource.setrlimit(resource.RLIMIT_CPU, (int(limits.cpu), int(limits.cpu)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file, limits.file))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def ended(pid: int, seconds: float) -> tuple[int, float, int] | None:
    """Exit code, CPU time and peak memory of a process, or None if it is still running after this time."""
    deadline = time.monotonic() + seconds
    while True:
        found, status, used = os.wait4(pid, os.WNOHANG)
        if found:
            memory = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, memory
        if (left := deadline - time.monotonic()) <= 0:
            return None
        time.sleep(min(POLL_SECONDS, left))


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """The process and all that it started."""
    for call in (os.killpg, os.kill):
        try:
            call(pid, number)
        except ProcessLookupError:
            continue


def run(
    words: Sequence[str],
    folder: Path,
    limits: Limits,
    environment: Mapping[str, str] = {},
    prepare: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run a command line to its end; past the limit it is asked to end, and then killed."""
    begun = time.monotonic()
    pid = start(words, folder, limits, environment, prepare)
    late = (found := ended(pid, limits.seconds)) is None
    for number in (signal.SIGTERM, signal.SIGKILL):
        if found is None:
            kill(pid, number)
            found = ended(pid, GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # what it left running
    code, cpu, memory = found or (-signal.SIGKILL, 0.0, 0)
    return Outcome(code, time.monotonic() - begun, cpu, memory, late)
