"""Builds and loads hooks.cpp, without which a CPU build of PyTorch refuses autograd on "cuda". As the pytest plugin
`-p hooks` it is loaded before torch, as it must be: PyTorch looks for the hooks once, while it is imported."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("hooks.cpp")


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def compiler() -> str | None:
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def build() -> Path:
    """The compiled hooks, made once for each version of torch, in a few seconds."""
    torch = torch_folder()
    key = hashlib.sha256(SOURCE.read_bytes() + (torch / "version.py").read_bytes() + str(torch).encode()).hexdigest()
    library = Path(tempfile.gettempdir()) / f"linvit-hooks-{os.getuid()}-{key[:16]}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}.part")
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch / 'include'}", f"-L{torch / 'lib'}"]
        libraries = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        subprocess.run([compiler() or "c++", *flags, str(SOURCE), *libraries, "-o", str(part)], check=True)
        part.replace(library)
    return library


def load() -> None:
    assert "torch" not in sys.modules, "the hooks must be loaded before torch"
    library = build()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


if os.environ.get("LINVIT_FAKE_GPU"):
    load()
