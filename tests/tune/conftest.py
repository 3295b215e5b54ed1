from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # searching.py


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def invented(monkeypatch):
    """`runner="invented"`: trainings that take no time, and no report."""
    from searching import Invented

    from linvit import report
    from linvit.execute import EXECUTORS

    class Fresh(Invented):
        jobs: ClassVar = []

    EXECUTORS.discover()
    monkeypatch.setattr(EXECUTORS, "_entries", EXECUTORS._entries | {"invented": Fresh})
    monkeypatch.setattr(report, "build", lambda folder: None)
    return Fresh


@pytest.fixture(scope="session")
def tuned(tmp_path_factory):
    """A finished search of real trainings, to look at only."""
    from searching import DATA, TINY, write_space

    from linvit.tuning import tune

    home = tmp_path_factory.mktemp("tuned")
    return tune(DATA, trials=5, epochs=2, space=write_space(home), pruner="none", out=home / "x", jobs=1, **TINY)


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
