"""Searches that are killed, or run on a cluster, end with the same trials and weights as an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from traces import weights

pytest.importorskip("optuna")

from searching import DATA, TINY, optuna_trials, rows, write_space

from linvit import report
from linvit.tuning import search as module
from linvit.tuning import tune

pytestmark = pytest.mark.kills
CODE = """
import functools, json, sys
from linvit import report
from linvit.tuning import search
report.build = lambda folder: None
search.Job = functools.partial(search.Job, checkpoint_seconds=0.0)  # every step is saved
search.tune(sys.argv[1], out=sys.argv[2], **json.loads(sys.argv[3]))
"""


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    monkeypatch.setattr(report, "build", lambda folder: None)


def start(out: Path, words: dict[str, Any]) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", CODE, DATA, str(out), json.dumps(words)], env=environment)


def validations(out: Path) -> int:
    return sum(len(log.read_bytes().splitlines()) for log in out.glob("*/log.jsonl"))


def run_with_kills(out: Path, words: dict[str, Any], kills: int, total: int) -> None:
    """Kill the search after some validations and restart it, a given number of times."""
    dice, deadline = random.Random(kills), time.monotonic() + 300
    for _ in range(kills):
        process, aim = start(out, words), validations(out) + dice.randint(2, total // (kills + 1))
        while validations(out) < aim:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.kill()
        process.wait()
    assert start(out, words).wait(120) == 0


@pytest.mark.parametrize("folds", [None, 3])
def test_a_search_killed_again_and_again_finds_the_same(folds, tmp_path):
    """Points, accuracies, steps and weights of tpe with one training at a time, to the bit."""
    words = TINY | {"trials": 3, "epochs": 8, "folds": folds, "space": write_space(tmp_path), "jobs": 1}
    whole = tune(DATA, out=tmp_path / "whole" / "x", **words)
    run_with_kills(tmp_path / "x", words, kills=3, total=validations(whole))
    assert rows(tmp_path / "x") == rows(whole)
    assert len(weights(whole, "*/best")) >= 6
    assert weights(tmp_path / "x", "*/best") == weights(whole, "*/best")


def test_processes_on_postgresql_killed_with_their_search(tmp_path, postgres):
    words = {"trials": 3, "epochs": 8, "space": write_space(tmp_path), "sampler": "random", "pruner": "none"}
    whole = tune(DATA, out=tmp_path / "whole" / "x", jobs=1, **words, **TINY)
    run_with_kills(tmp_path / "x", words | TINY | {"jobs": 2, "storage": postgres}, 2, validations(whole))
    assert rows(tmp_path / "x") == rows(whole)
    assert weights(tmp_path / "x", "*/best") == weights(whole, "*/best")
    for trials in optuna_trials(tmp_path / "x", postgres).values():
        assert sorted({trial.state.name for trial in trials}) in (["COMPLETE"], ["COMPLETE", "FAIL"])
        assert sum(trial.state.name == "COMPLETE" for trial in trials) == 3


def test_ctrl_c_saves_and_the_same_command_resumes(tmp_path):
    out, space = tmp_path / "x", write_space(tmp_path)
    words = [word for spec in TINY["attentions"] for word in ("-a", spec)]
    for key in ("stem", "patch_size", "dim", "heads", "mlp_dim", "batch_size", "pad_crop"):
        words += ["--set", f"{key}={TINY[key]}"]
    words += ["--trials", "1", "--epochs", "60", "--jobs", "2", "--threads", "1", "--device", "cpu", "--space", space]
    call = [sys.executable, "-m", "linvit", "tune", DATA, *words, "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(call, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while len(list(out.glob("*/best/model.safetensors"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "nothing that was trained is lost" in errors.splitlines()[-1]
    assert len(list(out.glob("*/last/step-*"))) == 2
    assert subprocess.run(call, env=environment, capture_output=True, timeout=200).returncode == 0
    assert [row[2] for row in rows(out)] == ["complete"] * 2


def test_a_killed_worker_is_one_failed_trial(tmp_path, monkeypatch):
    killed: list[int] = []

    def log(text: str) -> None:
        said.append(text)

    def progress(done: int, total: int, what: str) -> None:
        if "trial 0" in what and not killed:
            worker = tunings[0].executor.workers[0]
            killed.append(worker.process.pid)
            worker.process.kill()

    said: list[str] = []
    tunings: list[Any] = []
    real = module.Tuning.prepare
    monkeypatch.setattr(module.Tuning, "prepare", lambda self: (tunings.append(self), real(self))[1])
    monkeypatch.setattr(module, "PROGRESS_SECONDS", 0.0)
    words = TINY | {"trials": 2, "epochs": 40, "space": write_space(tmp_path), "jobs": 2, "pruner": "none"}
    out = tune(DATA, out=tmp_path / "x", log=log, progress=progress, **words)
    assert sorted(row[2] for row in rows(out)) == ["complete"] * 3 + ["failed"]
    assert sum("its process ended by SIGKILL" in text for text in said) == 1


def test_trials_on_a_cluster_of_which_a_node_is_killed(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="the extra 'cluster' is not installed")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": 1, "include_dashboard": False}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cluster = Cluster(initialize_head=True, head_node_args=node | {"ray_client_server_port": port})
    cluster.add_node(**node)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    second: set[str] = set()
    said: list[str] = []

    def progress(done: int, total: int, what: str) -> None:
        if "fold 2 of 2" in what:
            second.add(what.partition(":")[0])
        if len(second) == 2 and cluster.worker_nodes:
            (last,) = cluster.worker_nodes
            cluster.remove_node(last, allow_graceful=False)

    monkeypatch.setattr(module, "PROGRESS_SECONDS", 0.0)
    words = TINY | {"trials": 1, "epochs": 60, "folds": 2, "space": write_space(tmp_path)}
    try:
        there = tune(DATA, runner="ray", out=tmp_path / "there", log=said.append, progress=progress, **words)
        assert not cluster.worker_nodes
        assert not ray.is_initialized()
    finally:
        cluster.shutdown()
    assert sum("its process or node was lost: it resumes elsewhere" in text for text in said) == 1
    here = tune(DATA, jobs=1, out=tmp_path / "here", **words)
    assert rows(there) == rows(here)
    assert len(weights(here, "*/best")) == 4
    assert weights(there, "*/best") == weights(here, "*/best")
