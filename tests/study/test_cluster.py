"""Ray: a study on a real cluster of two nodes gives the same bits as one here, also when a node is killed in the middle
of it; nodes that do not see the study's folder send it what they make."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from traces import order, weights

from linvit import cli, data
from linvit.records import Records
from linvit.study import Study, compare
from linvit.study.jobs import Job, tracked
from linvit.study.runners import RUNNERS, runner_of
from linvit.study.runners import cluster as cluster_module
from linvit.train import Source, design, start_from, train
from linvit.train.events import Began, Noted, Stepped
from linvit.train.start import load_start
from linvit.train.trackers import TRACKERS, Tracker

ray = pytest.importorskip("ray", reason="the extra 'cluster' is not installed")
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = pytest.mark.usefixtures("short")
DATA = "synthetic:classes=3,images=96,size=8,channels=1"
SMALL = {"stem": "patch", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 32, "batch_size": 16}
WORDS = {"attentions": ["softmax", "performer-relu:m=8"], "seeds": 1, "epochs": 2, "controls": False, **SMALL}
NODE = {"num_cpus": 1, "include_dashboard": False}
SHORT = """
from linvit.records import Record
from linvit.study import measuring
measuring.LENGTHS, measuring.ROUNDS = (16,), 1
measuring.peak_memory = lambda *_: Record("peak_memory", 7, "bytes", tags={"batch": 16})
"""
CODE = f"""
import json, sys
from linvit.study import compare
compare({DATA!r}, runner="ray", threads=1, out=sys.argv[1], **json.loads(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def port() -> int:
    """Of the cluster, for those outside it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], AbstractContextManager[None]]:
    """While it lasts, nodes that are started measure little."""
    plugin = tmp_path_factory.mktemp("plugin") / "short.py"
    plugin.write_text(SHORT)

    @contextmanager
    def starting() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LINVIT_PLUGINS", str(plugin))
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
            yield

    return starting


@pytest.fixture(scope="module")
def head(port: int, nodes: Callable[[], AbstractContextManager[None]]) -> Iterator[Cluster]:
    """One node with one processor; tests add the second, which they may kill."""
    with nodes():
        cluster = Cluster(initialize_head=True, head_node_args=NODE | {"ray_client_server_port": port})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def cluster(head: Cluster, nodes: Callable[[], AbstractContextManager[None]]) -> Iterator[Cluster]:
    with nodes():
        node = head.add_node(**NODE)
    yield head
    if node in head.worker_nodes:
        head.remove_node(node)


@pytest.mark.kills
def test_a_cluster_gives_the_same_bits_and_records_and_names_the_node_of_speeds(
    cluster: Cluster, tmp_path: Path
) -> None:
    here = compare(DATA, jobs=1, threads=1, out=tmp_path / "here", **WORDS)
    heard: list[str] = []
    there = compare(DATA, runner="ray", threads=1, out=tmp_path / "there",
                    hear=lambda job, event: heard.append(type(event).__name__), **WORDS)  # fmt: skip
    assert len(weights(here)) == 8
    assert weights(here) == weights(there)
    assert order(here) == order(there)
    assert {"Began", "Validated"} <= set(heard)
    study = Study.read(there / "study.json")
    assert study.placing is not None
    assert (study.placing.runner, study.placing.jobs, study.placing.threads) == ("ray", 2, 1)
    assert socket.gethostname() in study.machine["node"]
    assert study.machine["node"] in (there / "report.md").read_text()
    assert not list(there.glob(".ray-*"))
    assert not ray.is_initialized()
    again = compare(DATA, jobs=1, threads=1, out=there, **WORDS)  # without a cluster, nothing is left to do
    assert weights(again) == weights(here)


class Killer:
    """Kills a node when both of two jobs have said how far they are, and one of them that it saved something."""

    def __init__(self, cluster: Cluster):
        self.cluster, self.steps, self.notes = cluster, dict[int, int](), list[str]()
        self.begun: list[tuple[int, int]] = []

    def __call__(self, job: Job, event: Any) -> None:
        if isinstance(event, Noted):
            self.notes.append(event.text)
        if isinstance(event, Began):
            self.begun.append((job.number, event.step))
        if isinstance(event, Stepped):
            self.steps[job.number] = event.step
        if len(self.steps) == 2 and min(self.steps.values()) > 20 and self.cluster.worker_nodes:
            (node,) = self.cluster.worker_nodes
            self.cluster.remove_node(node, allow_graceful=False)


class Wanted(Tracker):
    """Writes down the steps of validations, where its training is told of."""

    package = "json"

    def begin(self, step: int) -> None:
        (self.folder / "wanted").mkdir(parents=True, exist_ok=True)
        self.file = open(self.folder / "wanted" / "steps", "a")  # noqa: SIM115 (as long as the training)

    def log(self, step: int, row: dict[str, float]) -> None:
        if "validation_loss" in row:  # not what the test images say of the best
            print(step, file=self.file, flush=True)

    def end(self, diverged: bool) -> None:
        self.file.close()


def jobs(folder: Path, count: int, **options: Any) -> list[Job]:
    source, found = Source.of(DATA), []
    for number in range(count):
        experiment = design(source.open(), "performer-relu:m=8", number, source=source, **SMALL | options)
        place = str(folder / f"{number}")
        found.append(
            Job(number=number, jobs=count, variant="x", experiment=experiment, folder=place, checkpoint_seconds=0.0)
        )
    return found


@pytest.mark.kills
@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_node_killed_in_the_middle_costs_no_bit(
    shared: bool, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job goes on from its last checkpoint, which lies in the study's folder or came back from the node."""
    kind, killer = runner_of("ray"), Killer(cluster)
    told = kind._told  # type: ignore[attr-defined]
    if not shared:  # then the nodes look for a folder that they do not see
        monkeypatch.setattr(kind, "_told", lambda self, *args: told(self, *args)._replace(mark="nowhere"))
    dataset = data.load_data(DATA)
    runner = kind(None, {dataset.identity: dataset}, "ray")
    wanted = jobs(tmp_path / "there", 2, epochs=60)
    TRACKERS.discover()
    monkeypatch.setattr(TRACKERS, "_entries", TRACKERS._entries | {"wanted": Wanted})
    try:
        done = list(runner.run(wanted, tracked(killer, [Wanted], tmp_path)))
    finally:
        runner.close()
    assert [job.number for job, _ in done] == [0, 1]
    assert all(any(r.metric == "test_accuracy" for r in records) for _, records in done)
    assert not cluster.worker_nodes
    assert killer.notes == ["its process or node was lost: it goes on elsewhere, from its last checkpoint"]
    assert [step for _, step in killer.begun[:2]] == [0, 0]
    assert [step > 0 for _, step in killer.begun[2:]] == [True]
    list(RUNNERS["here"](1, {dataset.identity: dataset}).run(jobs(tmp_path / "here", 2, epochs=60), lambda *_: None))
    assert len(weights(tmp_path / "here")) == 4
    assert weights(tmp_path / "there") == weights(tmp_path / "here")
    for run in (tmp_path / "here").iterdir():
        names = {str(f.relative_to(run)) for f in run.rglob("*") if f.is_file() and not f.name.startswith(".")}
        names.add("wanted/steps")
        other = tmp_path / "there" / run.name
        told = [int(line) for line in (other / "wanted" / "steps").read_text().split()]
        steps = [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()]
        assert (told[0], told[-1]) == (steps[0], steps[-1])  # a node's last words may be lost with it
        assert {str(f.relative_to(other)) for f in other.rglob("*") if f.is_file() and f.name[0] != "."} == names


@pytest.mark.parametrize("where", ["ray", "ray://127.0.0.1:1", "ray://nowhere.invalid:10001", "ray://127.0.0.1:x"])
def test_a_cluster_that_is_not_there_is_one_line_within_seconds(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    begun = time.monotonic()
    assert cli.main(["compare", DATA, "--on", where, "--out", str(tmp_path / "x")]) == 2
    assert time.monotonic() - begun < 15
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("linvit: error: no Ray cluster can be used at ")
    assert not (tmp_path / "x").exists()


def test_what_no_node_has_is_refused(head: Cluster, tmp_path: Path) -> None:
    try:
        with pytest.raises(ValueError, match="no node of the cluster has 64 CPUs"):
            compare(DATA, runner="ray", threads=64, out=tmp_path / "x", **WORDS)
        with pytest.raises(ValueError, match="no node of the cluster has a GPU"):
            compare(DATA, runner="ray", device="cuda", out=tmp_path / "x", **WORDS)
    finally:
        ray.shutdown()
    assert not (tmp_path / "x").exists()


def test_an_error_of_the_user_on_a_node_is_one(head: Cluster, tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, 1, epochs=1)
    Path(job.folder).mkdir()
    (Path(job.folder) / "log.jsonl").write_text("")
    dataset = data.load_data(DATA)
    runner = runner_of("ray")(None, {dataset.identity: dataset}, "ray")
    try:
        with pytest.raises(ValueError, match=r"holds log\.jsonl, but no experiment\.json"):
            list(runner.run([job], lambda *_: None))
    finally:
        runner.close()


def test_a_start_is_sent_to_a_node_that_does_not_have_it(head: Cluster, tmp_path: Path) -> None:
    began = train(DATA, attention="softmax", epochs=1, out=tmp_path / "start", **SMALL)
    start = start_from(began.folder)
    (job,) = jobs(tmp_path, 1, epochs=1)
    there = job.experiment.model_copy(update={"start": start})
    runner = runner_of("ray")(None, {}, "ray")
    try:
        files = runner._start(job.model_copy(update={"experiment": there}))  # type: ignore[attr-defined]
        told = cluster_module.Told(None, 0, 1, "", "", [], files, "")
        gone = there.model_copy(update={"start": start.model_copy(update={"folder": "/nowhere/best"})})
        text = job.model_copy(update={"experiment": gone}).model_dump_json()
        (tmp_path / "node").mkdir()
        found = cluster_module._rebuilt(told, text, tmp_path / "root", str(tmp_path / "node"))
    finally:
        runner.close()
    assert Path(found.folder) == tmp_path / "root" / "0"
    assert found.experiment.start == start.model_copy(update={"folder": str(tmp_path / "node")})
    assert found.experiment.id == there.id
    load_start(found.experiment.start)  # the same weights, or an error


@pytest.mark.slow
def test_a_budget_is_planned_with_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """Rates are of two trainings at a time, one on each node."""
    words, said = WORDS | {"epochs": None, "seeds": None}, list[str]()
    compare(DATA, runner="ray", folds=2, budget="4m", dry_run=True, out=tmp_path / "x", say=said.append, **words)
    assert "2 trainings at a time" in said[0]
    assert any("2 variants × 2 folds × " in line for line in said)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_process_that_always_dies_is_a_failed_job(head: Cluster, tmp_path: Path) -> None:
    """An attention that ends its process, from a plugin that the nodes are told of."""
    plugin = tmp_path / "deadly.py"
    plugin.write_text(
        "import os\n"
        "from linvit.attention import register\n"
        "from linvit.attention.exact import Identity\n"
        "@register('deadly')\n"
        "class Deadly(Identity):\n"
        "    def attend(self, q, k, v, mask):\n"
        "        os._exit(3)\n"
    )
    words = WORDS | {"attentions": ["softmax", "deadly"]}
    environment = os.environ | {"LINVIT_PLUGINS": str(plugin), "PYTHONPATH": os.pathsep.join(sys.path)}
    call = [sys.executable, "-c", CODE, str(tmp_path / "x"), json.dumps(words)]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    failed = [r for r in Records(tmp_path / "x" / "records.jsonl") if r.metric == "failed"]
    assert {r.tags["variant"] for r in failed} == {"deadly"}
    assert str(failed[0].tags["why"]).startswith("lost 3 times")
    assert any(r.metric == "test_accuracy" for r in Records(tmp_path / "x" / "records.jsonl"))


@pytest.mark.slow
def test_from_outside_the_cluster(cluster: Cluster, port: int, tmp_path: Path) -> None:
    words = [word for spec in WORDS["attentions"] for word in ("-a", spec)]
    words += [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    call = [sys.executable, "-m", "linvit", "compare", DATA, "--on", f"ray://127.0.0.1:{port}", "--threads", "1",
            "--epochs", "2", "--seeds", "1", "--no-controls", "--out", str(tmp_path / "there"), *words]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    here = compare(DATA, jobs=1, threads=1, out=tmp_path / "here", **WORDS)
    assert weights(here) == weights(tmp_path / "there")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_interrupted_study_saves_what_its_nodes_are_at(cluster: Cluster, tmp_path: Path) -> None:
    words, out = WORDS | {"epochs": 2000}, tmp_path / "x"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", CODE, str(out), json.dumps(words)], env=environment)
    deadline = time.monotonic() + 100
    while len(list(out.glob("*/best/model.safetensors"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    assert not list(out.glob("*/last/step-*"))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert len(list(out.glob("*/last/step-*"))) == 2
