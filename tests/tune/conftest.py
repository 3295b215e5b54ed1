from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # searching.py


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def begin():
    """begin(out, options, steps, …) → a process that works on a search."""
    import searching

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["searching"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))

        def start(out: Path, options: dict[str, Any], steps: Path, **more: Any) -> Any:
            process = context.Process(target=searching.search, args=(str(out), options, str(steps)), kwargs=more)
            process.start()
            return process

        yield start


def postgres_programs() -> Path | None:
    """Where Debian has them, which puts none on the PATH."""
    found = shutil.which("initdb")
    every = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return every[-1].parent if every else Path(found).resolve().parent if found else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server of our own, run by an ordinary user."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL's initdb is not installed")
    who: dict[str, Any] = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}
    home = Path(tempfile.mkdtemp(prefix="linvit-postgres-"))
    if who:
        shutil.chown(home, "nobody", "nogroup")
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def call(*words: str) -> None:
        done = subprocess.run(words, cwd=home, capture_output=True, text=True, timeout=120, **who)
        assert done.returncode == 0, done.stderr or done.stdout

    data = str(home / "data")
    try:
        call(str(programs / "initdb"), "-D", data, "-U", "linvit", "-A", "trust", "--no-sync")
        settings = f"-p {port} -k {home} -c listen_addresses=127.0.0.1 -c fsync=off"
        call(str(programs / "pg_ctl"), "-D", data, "-w", "-l", str(home / "log"), "-o", settings, "start")
        try:
            yield f"postgresql://linvit@127.0.0.1:{port}/postgres"
        finally:
            call(str(programs / "pg_ctl"), "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)
