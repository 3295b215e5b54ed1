"""GPU code paths without a GPU: the checks of this folder, each file in a process with a fake CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hooks
import pytest

HERE = Path(__file__).parent
SLOW = ["checks_compiled.py", "checks_suite.py", "checks_train.py"]  # which have slow checks; of the first, all are
CHECKS = sorted({path.name for path in HERE.glob("checks_*.py")} - {SLOW[0]})


def run(name: str, *options: str) -> None:
    if sys.platform != "linux" or hooks.compiler() is None:
        pytest.skip("the fake GPU needs Linux and a C++ compiler")
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"LINVIT_FAKE_GPU": "1", "PYTHONPATH": os.pathsep.join(paths)}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    own = ["-p", "hooks", "-p", "no:cacheprovider", "-o", "python_files=checks_*.py", "-o", "python_functions=check_*"]
    command = [sys.executable, "-m", "pytest", "-n", "0", *own, *options, str(HERE / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", CHECKS)
def test_core(name):
    run(name, "-m", "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_what_takes_minutes(name):
    run(name, "-m", "slow")
