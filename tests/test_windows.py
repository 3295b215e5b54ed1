"""What Windows lacks is used only where it is there. The tests run on any system, made to look like it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from linvit.files import sync_folder

CODE = """
import importlib, os, pkgutil, signal, sys, types
import altair, filelock, numpy, PIL.Image, pydantic, rich.progress, safetensors.torch
import scipy.optimize, scipy.stats, torch

held = types.SimpleNamespace(peak_wset=1000)
psutil = types.ModuleType("psutil")
psutil.Process = lambda: types.SimpleNamespace(memory_info=lambda: held)
psutil.virtual_memory = lambda: types.SimpleNamespace(total=2**34, available=2**33)
sys.modules |= {"psutil": psutil, "resource": None, "fcntl": None}
sys.platform = "win32"
del signal.SIGUSR1, signal.SIGKILL, os.sched_getaffinity, os.sysconf

import linvit
for module in pkgutil.walk_packages(linvit.__path__, "linvit."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            extras = {"optuna", "ray", "triton", "transformers", "tensorboard", "mlflow"}
            assert error.name.partition(".")[0] in extras, error
        except ValueError as error:  # of an extra
            assert "pip install" in str(error)

from linvit import cli, measure, signals
from linvit.machine import cpu_count
from linvit.measure import memory
from linvit.measure.memory import bounded, extra_memory, free_memory

memory.Path = lambda text: types.SimpleNamespace(exists=lambda: False)  # there is no /proc
taken = extra_memory(lambda: setattr(held, "peak_wset", 5000))
with bounded(2**20, torch.device("cpu")), signals.interrupted() as stop:
    print(stop(), free_memory() == 2**33, cpu_count() == os.cpu_count(), cli.main(["list", "sizes"]), taken)
"""


def test_all_modules_can_be_imported_without_what_windows_lacks():
    """Memory is psutil's there: before and after, as a peak cannot be reset."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "0 True True 0 4000"


def test_a_folder_is_not_opened_where_that_fails(monkeypatch):
    missing = Path("no/such/folder")
    monkeypatch.setattr(os, "name", "nt")
    sync_folder(missing)
