"""`tune --on ray`: trials on a real cluster are those of a search here, also where a node is killed."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from traces import weights

optuna = pytest.importorskip("optuna")
ray = pytest.importorskip("ray", reason="the extra 'cluster' is not installed")

import searching  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

import linvit  # noqa: E402
from linvit import cli  # noqa: E402
from linvit.report import tuning  # noqa: E402
from linvit.study.runners import runner_of  # noqa: E402
from linvit.tune import worker  # noqa: E402
from linvit.tune.storage import open_storage, sqlite  # noqa: E402

DATA = searching.DATA
TINY = {name: value for name, value in searching.TINY.items() if name != "jobs"}
NODE = {"num_cpus": 1, "include_dashboard": False}
CODE = f"""
import json, sys
import linvit
linvit.tune({DATA!r}, runner="ray", out=sys.argv[1], **json.loads(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(tuning, "draw_files", lambda specs, folder: None)


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    """One node with one processor; tests add the second, which they may kill."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args=NODE)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def cluster(head: Cluster) -> Iterator[Cluster]:
    node = head.add_node(**NODE)
    yield head
    if node in head.worker_nodes:
        head.remove_node(node)


def rows(folder: Path) -> list[tuple]:
    """What is known of whole trials, but for times."""
    return [
        (t.variant, t.number, t.how, t.accuracy, t.loss, t.steps, str(t.options))
        for row in tuning.read(folder).rows for t in row.trials if t.how == "complete"
    ]  # fmt: skip


def states(folder: Path) -> dict[str, list[str]]:
    storage = open_storage(sqlite(folder))
    names = [name for name in optuna.get_all_study_names(storage) if name != folder.name]
    return {name: [t.state.name for t in optuna.load_study(study_name=name, storage=storage).trials] for name in names}


@pytest.mark.kills
def test_trials_on_a_cluster_are_those_of_a_search_here(cluster, tmp_path, monkeypatch):
    """To the bit; one that is pruned is ended there."""
    cancelled: list[str] = []
    kind: Any = runner_of("ray")
    cancel = kind.cancel
    monkeypatch.setattr(kind, "cancel", lambda self, job: (cancelled.append(job.variant), cancel(self, job)))
    hopeless = lambda self: self.claim.number == 1 and 0 < len(self.reported) < 9  # noqa: E731
    monkeypatch.setattr(worker.Trial, "_is_hopeless", hopeless)
    words = TINY | {"trials": 2, "epochs": 9, "sampler": "random", "space": searching.space(tmp_path)}
    here = linvit.tune(DATA, jobs=1, out=tmp_path / "here", **words)
    said: list[str] = []
    there = linvit.tune(DATA, runner="ray", out=tmp_path / "there", say=said.append, **words)
    assert len(rows(here)) == 2
    assert rows(there) == rows(here)
    assert len(weights(here, "*/best")) == 2
    assert weights(there, "*/best") == weights(here, "*/best")
    assert sorted(cancelled) == ["performer-relu:m=4", "softmax"]
    assert sorted(state for found in states(there).values() for state in found) == ["COMPLETE"] * 2 + ["PRUNED"] * 2
    assert [row.count("pruned") for row in tuning.read(there).rows] == [1, 1]
    assert "softmax trial 0: complete" in "\n".join(said)
    assert (there / "best.toml").exists()
    assert not [*there.glob("*/last"), *there.glob(".ray-*"), *there.glob(".workers/*")]
    assert not ray.is_initialized()
    linvit.tune(DATA, jobs=1, out=there, **words)  # without a cluster, nothing is left to do
    assert rows(there) == rows(here)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_a_node_killed_in_the_middle_costs_no_bit(shared, cluster, tmp_path, monkeypatch):
    """Its trial goes on in the fold that it was in, from the last checkpoint."""
    monkeypatch.setattr(worker, "Job", functools.partial(worker.Job, checkpoint_seconds=0.0))
    kind: Any = runner_of("ray")
    told = kind._told
    if not shared:  # then the nodes look for a folder that they do not see
        monkeypatch.setattr(kind, "_told", lambda self, *args: told(self, *args)._replace(mark="nowhere"))
    words = TINY | {"trials": 1, "epochs": 40, "folds": 2, "space": searching.space(tmp_path)}
    second: set[str] = set()
    said: list[str] = []

    def progress(done: int, total: int, what: str) -> None:
        if "fold 2 of 2" in what:
            second.add(what.partition(":")[0])
        if len(second) == 2 and cluster.worker_nodes:
            (node,) = cluster.worker_nodes
            cluster.remove_node(node, allow_graceful=False)

    there = linvit.tune(DATA, runner="ray", out=tmp_path / "there", say=said.append, progress=progress, **words)
    assert not cluster.worker_nodes
    assert sum("its process or node was lost: it goes on elsewhere" in text for text in said) == 1
    here = linvit.tune(DATA, jobs=1, out=tmp_path / "here", **words)
    assert len(rows(here)) == 2
    assert rows(there) == rows(here)
    assert len(weights(here, "*/best")) == 4
    assert weights(there, "*/best") == weights(here, "*/best")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_search_that_was_ended_goes_on_without_a_cluster(how, cluster, tmp_path):
    """Its tasks end with it, and its trials are not left running. Ctrl-C saves first."""
    words, out = TINY | {"trials": 1, "epochs": 200, "space": searching.space(tmp_path)}, tmp_path / "x"
    call = [sys.executable, "-c", CODE, str(out), json.dumps(words)]
    process = subprocess.Popen(call, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    deadline = time.monotonic() + 300
    while len(list(out.glob("*/best/model.safetensors"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    assert not list(out.glob("*/last/step-*"))
    process.send_signal(how)
    assert process.wait(100) != 0
    if how == signal.SIGINT:
        assert len(list(out.glob("*/last/step-*"))) == 2
        assert {state for found in states(out).values() for state in found} == {"WAITING"}
    linvit.tune(DATA, jobs=1, out=out, **words)
    assert [row[1:3] for row in rows(out)] == [(0, "complete")] * 2
    assert {state for found in states(out).values() for state in found} == {"COMPLETE"}


@pytest.mark.slow
def test_a_budget_is_planned_with_the_cluster(cluster, tmp_path):
    said: list[str] = []
    linvit.tune(DATA, runner="ray", budget="5m", epochs=2, space=searching.space(tmp_path), dry_run=True,
                out=tmp_path / "x", say=said.append, **TINY)  # fmt: skip
    assert said[0] == "plan of a search, 2 trainings at a time"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("where", "says"), [
    ("ray://127.0.0.1:1", "no Ray cluster can be used at ray://127.0.0.1:1"),
    ("ray", "no Ray cluster can be used at 127.0.0.1:1"),
    ("rya", "unknown runner 'rya'; did you mean 'ray'?"),
    ("processes", "on=processes: a search runs here or on a cluster: give ray or ray://HOST:PORT, or nothing"),
])  # fmt: skip
def test_a_cluster_that_is_not_there_is_one_line_within_seconds(where, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    begun = time.monotonic()
    assert cli.main(["tune", DATA, "--on", where, "--out", str(tmp_path / "x")]) == 2
    assert time.monotonic() - begun < 15
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("linvit: error: ")
    assert says in lines[0]
    assert not (tmp_path / "x").exists()
