"""Ray: a real cluster of two nodes gives the same weights as this process, also when one of them is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import DATASET, cache, make_job
from pydantic import TypeAdapter
from traces import weights

from linvit.execute import EXECUTORS, Executor, Job, StopWork, Work, WorkerDied, executor_type
from linvit.execute import ray as module
from linvit.training.events import Began, Event, Noted, Progressed, Stepped, Validated

ray = pytest.importorskip("ray", reason="the extra 'cluster' is not installed")
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = pytest.mark.kills
NODE = {"num_cpus": 1, "include_dashboard": False}
HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def port() -> int:
    """Of the cluster, for connections from outside."""
    return free_port()


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S", "120")  # a busy machine is no failure
        yield


@pytest.fixture(scope="module")
def head(port: int, environment: None) -> Iterator[Cluster]:
    """One node with one CPU; tests add the second, which they may kill."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"ray_client_server_port": port})
    with pytest.MonkeyPatch.context() as patch:
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


@pytest.fixture
def executor(cluster: Cluster) -> Iterator[Executor]:
    device, slots = executor_type("ray").locate("ray", "auto", 1) or (None, 0)
    assert (device, slots) == (torch.device("cpu"), 2)
    with EXECUTORS["ray"](slots, 1, cache(), "ray") as found:
        yield found
    assert not ray.is_initialized()


def run_here(folder: Path, **options: Any) -> None:
    jobs = [make_job(folder / str(seed), seed=seed, **options) for seed in (0, 1)]
    list(EXECUTORS["here"](1, 1, cache()).run_jobs(jobs, lambda *_: None))


class Measures(Work):
    """Says on which machine it runs, and with how many threads."""

    result_type = TypeAdapter(int)
    threads: int | None = None

    def run(self, datasets: Any, on_event: Any) -> int:
        on_event(Progressed(1, 2, "half"))
        return self.threads or 0


def test_a_cluster_gives_the_same_weights_events_and_errors(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cluster, all that needs no kill: starting one takes long."""
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[int, str]] = []
    jobs = [make_job(Path("there") / str(seed), seed=seed) for seed in (0, 1)]  # relative to where the command runs
    done = list(executor.run_jobs(jobs, lambda job, event: seen.append((job.experiment.seed, type(event).__name__))))
    assert [job for job, _ in done] == jobs
    run_here(tmp_path / "here")
    assert len(weights(tmp_path / "here")) == 4
    assert weights(tmp_path / "here") == weights(tmp_path / "there")
    assert not list((tmp_path / "there").glob(".ray-*"))
    for seed in (0, 1):
        assert [name for number, name in seen if number == seed and name != "Stepped"] == [
            "Began", "Validated", "Validated", "Tested"
        ]  # fmt: skip

    job = make_job(tmp_path / "sent", seed=0)  # images that exist only here are sent
    alone = job.experiment.model_copy(update={"source": None})
    executor.submit(job.model_copy(update={"experiment": alone})).result()
    assert [*weights(tmp_path, "sent/*").values()] == [*weights(tmp_path, "here/0/*").values()]

    def stop(event: Event) -> None:
        if isinstance(event, Validated):
            raise StopWork

    with pytest.raises(StopWork):
        executor.submit(make_job(tmp_path / "stopped", epochs=500), stop).result()

    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "log.jsonl").write_text("")
    with pytest.raises(ValueError, match=rf"node {socket.gethostname()}: .*holds log\.jsonl, but no experiment\.json"):
        executor.submit(make_job(tmp_path / "taken")).result()

    missing = make_job(tmp_path / "missing")
    source = missing.experiment.source.model_copy(update={"data": "/no/such/images"})
    data = DATASET.identity[:-1] + "x"
    update = {"source": source, "data": missing.experiment.data.model_copy(update={"identity": data})}
    missing = missing.model_copy(update={"experiment": missing.experiment.model_copy(update=update)})
    with pytest.raises(ValueError, match=rf"node {socket.gethostname()}: .*/no/such/images"):
        executor.submit(missing).result()

    far: list[Any] = []
    result, machine = executor.measure(Measures(experiment=job.experiment), lambda *where: far.append(where))
    assert result == 1
    assert machine["node"].startswith(socket.gethostname())
    assert far[0][2] == f"waiting for node {machine['node']}, to measure on it alone"
    assert far[1:] == [(1, 2, "half")]

    monkeypatch.setattr(module, "write_atomically", lambda *_: None)  # as if nodes did not see the folder
    with pytest.raises(ValueError, match=r"node .* does not see .*--out must be on storage that all nodes"):
        executor.submit(make_job(tmp_path / "elsewhere" / "x"))

    for device, threads, says in (("cuda", None, "no node of the cluster has 1 GPU"), ("cpu", 64, "has 64 CPUs")):
        with pytest.raises(ValueError, match=says):
            executor_type("ray").locate("ray", device, threads)


class Killer:
    """Kills a node when both jobs have trained for a while."""

    def __init__(self, cluster: Cluster):
        self.cluster, self.steps, self.notes = cluster, dict[int, int](), list[str]()
        self.started: list[int] = []

    def __call__(self, job: Job, event: Event) -> None:
        if isinstance(event, Noted):
            self.notes.append(event.text)
        if isinstance(event, Began):
            self.started.append(event.step)
        if isinstance(event, Stepped):
            self.steps[job.experiment.seed] = event.step
        if len(self.steps) == 2 and min(self.steps.values()) > 20 and self.cluster.worker_nodes:
            (node,) = self.cluster.worker_nodes
            self.cluster.remove_node(node, allow_graceful=False)


def test_the_job_of_a_killed_node_resumes_elsewhere_with_the_same_weights(
    cluster: Cluster, executor: Executor, tmp_path: Path
) -> None:
    options, killer = {"epochs": 60, "checkpoint_seconds": 0.0}, Killer(cluster)
    jobs = [make_job(tmp_path / "there" / str(seed), seed=seed, **options) for seed in (0, 1)]
    done = list(executor.run_jobs(jobs, killer))
    assert all(any(record.metric == "test_accuracy" for record in records) for _, records in done)
    assert not cluster.worker_nodes
    assert killer.notes == ["its process or node was lost: it resumes elsewhere from its last checkpoint"]
    assert killer.started[:2] == [0, 0]
    assert [step > 0 for step in killer.started[2:]] == [True]
    run_here(tmp_path / "here", **options)
    assert weights(tmp_path / "there") == weights(tmp_path / "here")


class Dies(Measures):
    how: str

    def run(self, datasets: Any, on_event: Any) -> int:
        if self.how == "exit":
            os._exit(3)
        raise MemoryError("too large")


def test_a_process_that_always_dies_is_given_up_and_memory_is_not_tried_again(head: Cluster, tmp_path: Path) -> None:
    experiment, notes = make_job(tmp_path).experiment, list[Event]()
    with EXECUTORS["ray"](1, 1, cache(), "ray") as executor:
        with pytest.raises(WorkerDied, match="lost 3 times"):
            executor.submit(Dies(experiment=experiment, how="exit", threads=1), notes.append).result()
        assert len(notes) == 2
        with pytest.raises(RuntimeError, match="too large"):
            executor.submit(Dies(experiment=experiment, how="memory", threads=1), notes.append).result()
        assert len(notes) == 2


CODE = """
import sys
from jobs import cache, make_job
from linvit.execute import EXECUTORS, executor_type
from pathlib import Path
address, out, epochs = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
assert executor_type(address).locate(address, "auto", 1)[1] == 2
with EXECUTORS["ray"](2, 1, cache(), address) as executor:
    list(executor.run_jobs([make_job(out / str(seed), seed=seed, epochs=epochs) for seed in (0, 1)], lambda *_: None))
"""


def test_from_outside_the_cluster_and_ctrl_c_saves(cluster: Cluster, port: int, tmp_path: Path) -> None:
    call = [sys.executable, "-c", CODE]
    done = subprocess.run([*call, f"ray://127.0.0.1:{port}", str(tmp_path / "a"), "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run_here(tmp_path / "here")
    assert weights(tmp_path / "a") == weights(tmp_path / "here")
    process, out = subprocess.Popen([*call, "ray", str(tmp_path / "x"), "5000"]), tmp_path / "x"
    deadline = time.monotonic() + 100
    while len(list(out.glob("*/best/model.safetensors"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    assert not list(out.glob("*/last/step-*"))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert len(list(out.glob("*/last/step-*"))) == 2


@pytest.mark.parametrize("where", ["ray", "ray://127.0.0.1:1", "ray://nowhere.invalid:10001", "ray://127.0.0.1:x"])
def test_a_cluster_that_is_not_there_is_one_line_within_seconds(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"^no Ray cluster can be used at .*: start one") as error:
        executor_type(where).locate(where, "auto", None)
    assert "\n" not in str(error.value)
    assert time.monotonic() - begun < 15


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ray.exceptions")
    with pytest.raises(ValueError, match=r"pip install 'linvit\[cluster\]'"):
        module.connect("ray")
