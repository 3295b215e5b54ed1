"""Where jobs run makes no difference to what comes of them; a worker that dies costs one job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from traces import order, weights

from linvit import data
from linvit.records import Records
from linvit.study import Study, compare
from linvit.study import crew as crew_module
from linvit.study.jobs import Job
from linvit.study.runners import RUNNERS, Runner
from linvit.train import Source, design
from linvit.train.events import Stepped
from linvit.train.loop import Rate

pytestmark = pytest.mark.usefixtures("short")
DATA = "synthetic:classes=3,images=96,size=8,channels=1"
SMALL = {"stem": "patch", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 32, "batch_size": 16}
WORDS = {"attentions": ["softmax", "performer-relu:m=8"], "seeds": 2, "epochs": 2, "controls": False, **SMALL}


def test_processes_give_the_same_bits_and_records_in_the_same_order(tmp_path: Path) -> None:
    one = compare(DATA, jobs=1, threads=1, out=tmp_path / "one", **WORDS)
    two = compare(DATA, jobs=2, out=tmp_path / "two", **WORDS)
    assert len(weights(one)) == 12  # best and last of two variants with two seeds, and each once for half
    assert weights(one) == weights(two)
    assert order(one) == order(two)
    placing = Study.read(two / "study.json").placing
    assert placing is not None
    assert (placing.runner, placing.jobs, placing.threads) == ("processes", 2, 1)


class Doomed:
    """Kills the worker that trains one variant, the first time it says how far it is."""

    def __init__(self, variant: str):
        self.variant, self.killed = variant, False

    def __call__(self, job: Job, event: object) -> None:
        if job.variant == self.variant and isinstance(event, Stepped) and not self.killed:
            self.killed = True
            (worker,) = [w for w in CREW[-1].workers if w.job is not None and w.job.number == job.number]
            os.kill(worker.process.pid, signal.SIGKILL)


CREW: list = []


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runners that are made, to reach their workers."""
    real = RUNNERS["processes"]
    start = real.__init__
    monkeypatch.setattr(real, "__init__", lambda self, *args: (CREW.append(self), start(self, *args))[1])


@pytest.mark.kills
def test_a_worker_that_dies_is_one_failed_job_and_is_tried_again(tmp_path: Path, crew: None) -> None:
    words = WORDS | {"epochs": 40}
    doom = Doomed("performer-relu:m=8")
    folder = compare(DATA, jobs=2, out=tmp_path / "x", hear=doom, **words | {"seeds": 1})
    failed = [r for r in Records(folder / "records.jsonl") if r.metric == "failed"]
    assert [(r.tags["variant"], r.tags["seed"]) for r in failed] == [("performer-relu:m=8", 0)]
    assert str(failed[0].tags["why"]).startswith("its process ended by SIGKILL")
    page = (folder / "report.md").read_text()
    assert "failed: seed 0: its process ended by SIGKILL" in page
    done = {r.tags["variant"] for r in Records(folder / "records.jsonl") if r.metric == "test_accuracy"}
    assert done == {"softmax"}
    compare(DATA, jobs=1, threads=1, out=tmp_path / "x", **words | {"seeds": 1})
    assert "failed" not in (folder / "report.md").read_text()
    alone = compare(DATA, jobs=1, threads=1, out=tmp_path / "y", **words | {"seeds": 1})
    assert weights(alone) == weights(folder)


@pytest.mark.kills
def test_a_killed_study_leaves_no_worker_and_goes_on(tmp_path: Path) -> None:
    """The study is killed -9 in the middle: its workers save and end, and the same call ends with the same bits."""
    code = """
import sys, json
from linvit.study import compare
compare(sys.argv[1], jobs=2, out=sys.argv[2], **json.loads(sys.argv[3]))
"""
    words = WORDS | {"epochs": 40, "seeds": 1}
    out = tmp_path / "x"
    process = subprocess.Popen([sys.executable, "-c", code, DATA, str(out), json.dumps(words)])
    deadline = time.monotonic() + 100
    while len(list(out.glob("*/best/model.safetensors"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    workers = [int(p) for p in os.listdir("/proc") if p.isdigit() and _parent(p) == process.pid]
    process.kill()
    process.wait()
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while any(_alive(worker) for worker in workers):
        assert time.monotonic() < deadline, "an orphan is still there"
        time.sleep(0.05)
    assert len(list(out.glob("*/last/step-*"))) >= 2  # they saved what they were at
    compare(DATA, jobs=2, out=out, **words)
    compare(DATA, jobs=1, threads=1, out=tmp_path / "y", **words)
    assert weights(out) == weights(tmp_path / "y")


def _parent(number: str) -> int:
    try:
        return int(Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def _alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_the_faster_way_is_measured_once_and_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def rate(name: str, value: float):
        def measured(self: Runner, job: Job, seconds: float) -> Rate:
            asked.append(name)
            return Rate(value, 1.0)

        return measured

    monkeypatch.setattr(crew_module.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    for faster, there in (("processes", 3.5), ("here", 1.5)):
        monkeypatch.setattr(RUNNERS["here"], "rate", rate("here", 5.0))
        monkeypatch.setattr(RUNNERS["processes"], "rate", rate("processes", there))
        asked.clear()
        for _ in range(2):
            folder = compare(DATA, out=tmp_path / faster, **WORDS | {"epochs": 1})
        assert asked == ["here", "processes"]
        placing = Study.read(folder / "study.json").placing
        assert placing is not None
        assert (placing.runner, placing.measured) == (faster, {"here": 5.0, "processes": 2 * there})


def test_no_more_workers_than_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four cores are of no use to two runs: what is measured is what could run."""
    crews: list[int] = []

    def measured(self: Runner, job: Job, seconds: float) -> Rate:
        crews.append(self.jobs)
        return Rate(1.0, 1.0)

    monkeypatch.setattr(crew_module.os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for name in ("here", "processes"):
        monkeypatch.setattr(RUNNERS[name], "rate", measured)
    compare(DATA, out=tmp_path / "x", **WORDS | {"epochs": 1, "seeds": 1})
    assert crews == [1, 4]


def test_what_only_this_process_knows_is_done_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from linvit.attention import ATTENTIONS
    from linvit.attention.exact import Identity

    class Half(Identity):
        def attend(self, q, k, v, mask):
            return v / 2

    ATTENTIONS.register("half-of-it")(Half)
    monkeypatch.setattr(crew_module.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(crew_module, "PROBE", 0.01)
    words = WORDS | {"attentions": ["softmax", "half-of-it"], "epochs": 1, "seeds": 1}
    try:
        folder = compare(DATA, out=tmp_path / "x", **words)
        placing = Study.read(folder / "study.json").placing
        assert placing is not None
        assert placing.runner == "here"
        assert not [r for r in Records(folder / "records.jsonl") if r.metric == "failed"]
        with pytest.raises(ValueError, match=r"a worker cannot do this job: .*half-of-it"):
            compare(DATA, jobs=2, out=tmp_path / "y", **words)
    finally:
        del ATTENTIONS._entries["half-of-it"]


def one_job(folder: Path, **options: object) -> Job:
    source = Source.of(DATA)
    experiment = design(source.open(), "softmax", source=source, **SMALL | options)
    return Job(number=0, jobs=1, variant="softmax", experiment=experiment, folder=str(folder))


def test_what_a_library_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN writes to the process's standard output, past Python's."""
    monkeypatch.setenv("ONEDNN_VERBOSE", "1")
    job = one_job(tmp_path / "run", steps=3)
    runner = RUNNERS["processes"](1, {})
    try:
        ((_, records),) = runner.run([job], lambda job, event: None)
    finally:
        runner.close()
    assert any(r.metric == "test_accuracy" for r in records)


def test_a_worker_whose_study_is_gone_begins_nothing(tmp_path: Path) -> None:
    """The job and the end of input are both there before the worker has even started."""
    line = json.dumps({"job": one_job(tmp_path / "run", epochs=500).model_dump(mode="json")}) + "\n"
    call = [sys.executable, "-m", "linvit.study.runners.processes"]
    done = subprocess.run(call, input=line, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, -signal.SIGTERM)  # its own, if it was just about to begin
    assert done.stdout == ""
    assert not (tmp_path / "run").exists()


def test_a_worker_that_died_idle_costs_no_job(tmp_path: Path) -> None:
    runner = RUNNERS["processes"](1, {})
    try:
        first = one_job(tmp_path / "a", steps=1)
        list(runner.run([first], lambda job, event: None))
        runner.workers[0].process.kill()  # type: ignore[attr-defined]
        runner.workers[0].process.wait()  # type: ignore[attr-defined]
        ((_, records),) = runner.run([one_job(tmp_path / "b", steps=1)], lambda job, event: None)
    finally:
        runner.close()
    assert any(r.metric == "test_accuracy" for r in records)


def test_jobs_need_images_that_a_worker_can_find(tmp_path: Path) -> None:
    dataset = data.load_data(DATA)
    with pytest.raises(ValueError, match="jobs=2 needs images that workers can find"):
        compare(dataset, jobs=2, out=tmp_path / "x", **WORDS)
    with pytest.raises(ValueError, match="needs images that workers can find"):
        compare(dataset, runner="processes", out=tmp_path / "x", **WORDS)
    with pytest.raises(ValueError, match="jobs=4 cannot be done at a time by the runner 'here'"):
        compare(dataset, runner="here", jobs=4, out=tmp_path / "x", **WORDS)
    with pytest.raises(ValueError, match="unknown runner 'ther'"):
        compare(DATA, runner="ther", out=tmp_path / "x", **WORDS)
    assert not (tmp_path / "x").exists()


def test_a_job_is_rebuilt_from_json() -> None:
    source = Source.of(DATA)
    dataset = source.open()
    experiment = design(dataset, "softmax", 3, source=source, **SMALL)
    job = Job(number=2, jobs=5, variant="softmax", experiment=experiment, folder="runs/x", threads=2)
    assert Job.model_validate_json(job.model_dump_json()) == job
    assert job.experiment.source is not None
    assert job.experiment.source.open().identity == dataset.identity


def test_an_error_of_the_user_in_a_worker_is_one(tmp_path: Path) -> None:
    source = Source.of(DATA)
    experiment = design(source.open(), "softmax", source=source, epochs=1, **SMALL)
    (tmp_path / "log.jsonl").write_text("")
    job = Job(number=0, jobs=1, variant="softmax", experiment=experiment, folder=str(tmp_path))
    runner = RUNNERS["processes"](1, {})
    try:
        with pytest.raises(ValueError, match=r"holds log\.jsonl, but no experiment\.json"):
            list(runner.run([job], lambda job, event: None))
    finally:
        runner.close()


def test_a_runner_is_one_class(tmp_path: Path) -> None:
    """Anything that yields each job with its records, in order, is a runner."""
    here = RUNNERS["here"]

    class Backwards(here):  # type: ignore[valid-type,misc]
        def run(self, jobs, hear):
            found = dict(super().run(list(reversed(jobs)), hear))
            yield from ((job, found[job]) for job in jobs)

    source = Source.of(DATA)
    dataset = source.open()
    jobs = []
    for number, seed in enumerate((0, 1)):
        experiment = design(dataset, "softmax", seed, source=source, epochs=1, **SMALL)
        place = str(tmp_path / f"{seed}")
        jobs.append(Job(number=number, jobs=2, variant="softmax", experiment=experiment, folder=place))
    found = list(Backwards(1, {dataset.identity: dataset}).run(jobs, lambda job, event: None))
    assert [job.number for job, _ in found] == [0, 1]
    assert all(any(r.metric == "test_accuracy" for r in records) for _, records in found)
