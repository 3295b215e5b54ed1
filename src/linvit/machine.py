"""This machine: its memory and its cores."""

from __future__ import annotations

import ctypes
import os
import sys

try:
    if sys.platform == "win32":
        import psutil

        MEMORY = psutil.virtual_memory().total  # bytes
    else:
        MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
except (ImportError, ValueError, OSError):  # not known on this system: only what no machine has is refused
    MEMORY = 2**50


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Keep freed blocks for the next allocation instead of returning large ones to the system, with glibc.

    Every step of a training frees and allocates the same blocks; new pages take a tenth of its time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    trim_threshold, mmap_max = -1, -4
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
