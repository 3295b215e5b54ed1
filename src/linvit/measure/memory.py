"""Memory that one call needs."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path


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
