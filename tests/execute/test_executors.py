"""Where work runs makes no difference to its result; a worker that dies costs one job."""

from __future__ import annotations

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
import torch
from jobs import DATASET, cache, make_job
from pydantic import TypeAdapter
from traces import weights

from linvit.execute import EXECUTORS, Executor, Job, Probe, StopWork, Work, WorkerDied, executor_type
from linvit.execute.processes import Processes, gpu_environment
from linvit.signals import Evicted
from linvit.training.events import Event, Progressed, Stepped, Validated, from_json, to_json


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """Two workers, which all tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_VERBOSE", "1")  # what a library prints on standard output is no answer
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with EXECUTORS["processes"](2, 1, cache()) as executor:
            assert isinstance(executor, Processes)
            yield executor


@pytest.fixture
def here() -> Executor:
    return EXECUTORS["here"](1, 1, cache())


class Fails(Work):
    """Raises a named exception; for a worker to rebuild."""

    result_type = TypeAdapter(int)
    how: str

    def run(self, datasets: Any, on_event: Any) -> int:
        if self.how == "exit":
            os._exit(3)
        if self.how == "evicted":
            raise Evicted
        if self.how == "progress":
            on_event(Progressed(1, 2, "half"))
            return os.getpid()
        raise {"value": ValueError, "os": OSError, "memory": MemoryError, "runtime": RuntimeError}[self.how]("because")


def fails(how: str) -> Fails:
    return Fails(experiment=make_job(Path("x")).experiment, how=how)


def test_processes_give_the_same_weights_records_and_events_in_the_order_of_the_jobs(
    processes: Processes, here: Executor, tmp_path: Path
) -> None:
    rows: dict[str, dict[int, list[dict[str, float]]]] = {}
    metrics: dict[str, list[list[str]]] = {}
    for name, executor in (("here", here), ("processes", processes)):
        jobs = [make_job(tmp_path / name / f"{seed}", seed=seed) for seed in (0, 1, 2)]
        found: dict[int, list[dict[str, float]]] = {0: [], 1: [], 2: []}

        def on_event(job: Job, event: Event, found: dict[int, list[dict[str, float]]] = found) -> None:
            if isinstance(event, Validated):
                found[job.experiment.seed].append({k: v for k, v in event.row.items() if k != "seconds"})

        done = list(executor.run_jobs(jobs, on_event))
        assert [job for job, _ in done] == jobs
        rows[name], metrics[name] = found, [[record.metric for record in records] for _, records in done]
    assert rows["here"] == rows["processes"]
    assert [len(found) for found in rows["here"].values()] == [2, 2, 2]
    assert metrics["here"] == metrics["processes"]
    assert len(weights(tmp_path / "here")) == 6
    assert weights(tmp_path / "here") == weights(tmp_path / "processes")


@pytest.mark.parametrize("name", ["here", "processes"])
def test_on_event_stops_a_training_right_after_a_validation_and_the_worker_survives(
    name: str, processes: Processes, here: Executor, tmp_path: Path
) -> None:
    executor, validated = {"here": here, "processes": processes}[name], []

    def on_event(event: Event) -> None:
        if isinstance(event, Validated):
            validated.append(event.step)
            if len(validated) == 2:
                raise StopWork

    before = {worker.process.pid for worker in processes.workers if worker.alive}
    job = make_job(tmp_path / "run", epochs=50)
    with pytest.raises(StopWork):
        executor.submit(job, on_event).result()
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert steps == validated
    assert len(steps) == 2
    assert job.finished() == []
    if name == "processes":
        (next_one,) = list(executor.run_jobs([make_job(tmp_path / "next", epochs=1)], lambda *_: None))
        assert any(record.metric == "test_accuracy" for record in next_one[1])
        assert before <= {worker.process.pid for worker in processes.workers if worker.alive}


@pytest.mark.parametrize("name", ["here", "processes"])
def test_an_error_of_on_event_is_the_futures(name: str, processes: Processes, here: Executor, tmp_path: Path) -> None:
    def on_event(event: Event) -> None:
        raise ValueError("cannot be tracked")

    with pytest.raises(ValueError, match="cannot be tracked"):
        {"here": here, "processes": processes}[name].submit(make_job(tmp_path / "run"), on_event).result()


@pytest.mark.kills
@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("value", ValueError, "because"),
        ("os", ValueError, "because"),
        ("memory", RuntimeError, "because"),
        ("runtime", RuntimeError, "because"),
        ("exit", WorkerDied, "its process ended with 3"),
        ("evicted", Evicted, "a worker was asked to end"),
    ],
)
def test_how_work_fails_in_a_worker(processes: Processes, how: str, kind: type[BaseException], says: str) -> None:
    with pytest.raises(kind, match=says):
        processes.submit(fails(how)).result()
    assert processes.submit(fails("progress")).result() != os.getpid()


def test_a_job_that_fails_is_a_failed_record_and_a_users_error_ends_all(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "log.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"holds log\.jsonl, but no experiment\.json"):
        list(processes.run_jobs([make_job(tmp_path / "taken")], lambda *_: None))
    job = make_job(tmp_path / "died", epochs=200)

    def kill(job: Job, event: Event) -> None:
        if isinstance(event, Stepped):
            for worker in processes.workers:
                worker.process.kill()

    ((_, (record,)), (_, records)) = processes.run_jobs([job, make_job(tmp_path / "b", epochs=1)], kill)
    assert (record.metric, record.experiment) == ("failed", job.experiment.id)
    assert str(record.tags["why"]).startswith("its process ended by SIGKILL")
    assert records


@pytest.mark.kills
def test_a_worker_that_died_idle_costs_no_job(processes: Processes, tmp_path: Path) -> None:
    processes.submit(fails("progress")).result()
    for worker in processes.workers:
        worker.process.kill()
        worker.process.wait()
    ((_, records),) = processes.run_jobs([make_job(tmp_path / "a", steps=1, epochs=None)], lambda *_: None)
    assert any(record.metric == "test_accuracy" for record in records)


def test_what_only_the_caller_registered_is_an_error_that_says_so(
    processes: Processes, here: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from linvit.attention import ATTENTIONS
    from linvit.attention.exact import Identity

    ATTENTIONS.discover()
    monkeypatch.setattr(ATTENTIONS, "_entries", ATTENTIONS._entries | {"half-of-it": Identity})
    probe = Probe(experiment=make_job(Path("x"), attention="half-of-it").experiment, seconds=0.0)
    assert here.submit(probe).result() == (0.0, 0.0)
    says = "unknown attention 'half-of-it': a worker knows only what linvit and LINVIT_PLUGINS register"
    with pytest.raises(ValueError, match=says):
        processes.submit(probe).result()


def test_speed_is_measured_with_all_slots_busy(processes: Processes) -> None:
    rate = processes.rate(make_job(Path("x")).experiment, 0.05, torch.device("cpu"))
    assert min(rate) > 0
    assert len([worker for worker in processes.workers if worker.alive]) == 2


def test_measuring_ends_the_workers_and_runs_here(tmp_path: Path) -> None:
    told = []
    executor = EXECUTORS["processes"](1, 1, cache())
    assert executor.measure(fails("progress"), lambda *far: told.append(far)) == (os.getpid(), {})
    assert told == [(1, 2, "half")]


@pytest.mark.parametrize("name", ["here", "processes"])
def test_jobs_that_are_not_admitted_have_no_records_and_all_can_be_stopped(
    name: str, processes: Processes, here: Executor, tmp_path: Path
) -> None:
    executor = {"here": here, "processes": processes}[name]
    jobs = [make_job(tmp_path / f"{seed}", seed=seed, epochs=1) for seed in (0, 1, 2)]
    ended: list[Job] = []
    found = list(executor.run_jobs(jobs, lambda *_: None, lambda job: job.experiment.seed != 1, ended.append))
    assert [job for job, _ in found] == jobs
    assert [bool(records) for _, records in found] == [True, False, True]
    assert sorted(job.experiment.seed for job in ended) == [0, 2]
    assert not (tmp_path / "1").exists()

    def stop(job: Job, event: Event) -> None:
        if isinstance(event, Stepped):
            raise StopWork

    long = [make_job(tmp_path / f"long {seed}", seed=seed, epochs=500) for seed in (0, 1, 2)]
    with pytest.raises(StopWork):
        list(executor.run_jobs(long, stop))
    assert not any(job.finished() for job in long)
    ((_, records),) = executor.run_jobs([make_job(tmp_path / "next", epochs=1)], lambda *_: None)
    assert records, "the workers are still there"


def test_work_and_events_are_rebuilt_from_json(tmp_path: Path) -> None:
    job = make_job(tmp_path / "x", begin_by=3.5, test=False)
    assert Job.model_validate(json.loads(job.to_json())["fields"]) == job
    event = Progressed(1, 2, "half")
    assert from_json(json.loads(json.dumps(to_json(event)))) == event


def test_images_that_exist_in_one_process_only_are_refused_elsewhere(processes: Processes, tmp_path: Path) -> None:
    assert processes.opens_data
    job = make_job(tmp_path / "x")
    data = job.experiment.data.model_copy(update={"identity": "another"})
    job = job.model_copy(update={"experiment": job.experiment.model_copy(update={"source": None, "data": data})})
    with pytest.raises(ValueError, match=f"the images of {DATASET.name} exist only in the process that made them"):
        processes.submit(job).result()


def test_an_unknown_executor_is_one_line() -> None:
    with pytest.raises(ValueError, match="unknown executor 'ther'; did you mean 'here'"):
        executor_type("ther")
    assert executor_type("processes") is Processes
    assert executor_type("ray://head:10001") is EXECUTORS["ray"]


CODE = """
import sys
from jobs import cache, make_job
from linvit.execute import EXECUTORS
from pathlib import Path
out = Path(sys.argv[1])
with EXECUTORS["processes"](2, 1, cache()) as executor:
    list(executor.run_jobs([make_job(out / str(seed), seed=seed, epochs=120) for seed in (0, 1)], lambda *_: None))
"""


@pytest.mark.kills
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_of_a_command_that_ends_save_and_end(how: signal.Signals, tmp_path: Path) -> None:
    """And whoever runs the same jobs then gets the weights of an undisturbed run."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    out = tmp_path / "x"
    process = subprocess.Popen([sys.executable, "-c", CODE, str(out)], env=os.environ | {"PYTHONPATH": path})
    deadline = time.monotonic() + 100
    while len(list(out.glob("*/best/model.safetensors"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    workers = [int(p) for p in os.listdir("/proc") if p.isdigit() and _status(p)[1:2] == [str(process.pid)]]
    assert len(workers) == 2
    process.send_signal(how)
    assert process.wait(60) != 0
    deadline = time.monotonic() + 30
    while any(_status(str(worker))[:1] not in ([], ["Z"], ["X"]) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlives its caller"
        time.sleep(0.05)
    assert len(list(out.glob("*/last/step-*"))) >= 2
    executor = EXECUTORS["here"](1, 1, cache())
    for place in ("x", "y"):
        jobs = [make_job(tmp_path / place / str(seed), seed=seed, epochs=120) for seed in (0, 1)]
        list(executor.run_jobs(jobs, lambda *_: None))
    assert weights(out) == weights(tmp_path / "y")


def _status(pid: str) -> list[str]:
    """State and parent of a process; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    except OSError:
        return []


def test_each_worker_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = [gpu_environment(number, "cuda").get("CUDA_VISIBLE_DEVICES") for number in range(3)]
    assert seen == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert gpu_environment(1, "cuda") == {"CUDA_VISIBLE_DEVICES": "7"}
    assert gpu_environment(1, "cuda:1") == gpu_environment(1, "cpu") == {}, "what is named is used as it is"
