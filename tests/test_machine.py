"""What linvit does to its own process."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from linvit.machine import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    for size in (3, 40, 11):
        np.ones(size * 2**17)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no mallopt")
def test_freed_memory_is_used_again_without_new_pages():
    usual, kept = (
        int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("usual", "keep")
    )
    assert kept < usual / 10
