"""A study's jobs run by a scheduler: one process each, evicted, killed, requeued; assembled afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from studying import DATA, QUICK, SETS, SMALL
from traces import weights

from linvit import cli
from linvit.records import Record, Records
from linvit.study import compare
from linvit.study.jobs import read_job

WORDS = {"attentions": ["softmax"], "seeds": 2, "controls": False, **SMALL}
SBATCH = Path(__file__).parents[2] / "docs" / "slurm"


class Slurm:
    """As much of it as the scripts in docs/slurm need: a job is a script with variables, `srun` starts its tasks,
    `scontrol requeue` has it started again once it has ended."""

    def __init__(self, home: Path):
        self.home, self.log = home, home / "requeued"
        self.bin = home / "bin"
        self.bin.mkdir(parents=True)
        self.log.touch()
        tasks = 'for i in $(seq 0 $((SLURM_NTASKS - 1))); do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & done\n'
        highest = "code=0; for p in $(jobs -p); do wait $p; c=$?; [ $c -gt $code ] && code=$c; done; exit $code\n"
        self._script("srun", tasks + highest)
        self._script("scontrol", f'[ "$1" = show ] && echo localhost && exit; echo "$2" >> {self.log}\n')
        self._script("linvit", f'exec {sys.executable} -m linvit "$@"\n')

    def _script(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{body}")
        (self.bin / name).chmod(stat.S_IRWXU)

    def start(self, script: str, number: int, *words: object, tasks: int = 1, **variables: str) -> subprocess.Popen:
        given = {
            "SLURM_JOB_ID": str(number),
            "SLURM_NTASKS": str(tasks),
            "SLURM_JOB_NODELIST": "localhost",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.bin}:{os.environ['PATH']}",
        } | variables
        call = ["bash", str(SBATCH / script), *map(str, words)]
        return subprocess.Popen(call, env=os.environ | given, start_new_session=True, stderr=subprocess.DEVNULL)

    def requeued(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()]

    def tasks(self, process: subprocess.Popen) -> list[int]:
        """The processes of its linvit, which alone a scheduler's warning goes to."""
        found = []
        for number in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path(f"/proc/{number}/cmdline").read_text().split("\0")
                if os.getsid(int(number)) == process.pid and words[1:3] == ["-m", "linvit"]:
                    found.append(int(number))
            except OSError:
                continue
        return found


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    return Slurm(tmp_path / "slurm")


def until(there: Path, pattern: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 100
    while not list(there.glob(pattern)):
        assert time.monotonic() < deadline
        assert process.poll() is None, f"ended with {process.returncode}"
        time.sleep(0.02)


@pytest.mark.kills
def test_an_array_that_is_killed_and_requeued_is_the_same_study(tmp_path: Path, slurm: Slurm, capsys) -> None:
    words = WORDS | {"epochs": 120}
    out = compare(DATA, out=tmp_path / "study", jobs_file=True, **words)
    rows = [json.loads(line) for line in (out / "jobs.jsonl").read_text().splitlines()]
    assert len(rows) == 3  # two seeds, and once for half of the steps
    assert not list(out.glob("*/log.jsonl"))  # nothing was trained
    start = lambda job: slurm.start("study.sbatch", job, out, SLURM_ARRAY_TASK_ID=str(job))  # noqa: E731
    first, second = start(1), start(2)
    until(out, f"{rows[0]['folder']}/best/model.safetensors", first)
    for task in slurm.tasks(first):
        os.kill(task, signal.SIGUSR1)  # its time is nearly up
    until(out, f"{rows[1]['folder']}/best/model.safetensors", second)
    os.killpg(second.pid, signal.SIGKILL)  # its machine is gone
    second.wait()
    assert first.wait(60) == 75
    assert slurm.requeued() == [1]
    assert list((out / rows[0]["folder"] / "last").glob("step-*"))
    again = [start(1), start(2)]
    assert [process.wait(100) for process in again] == [0, 0]
    capsys.readouterr()
    assert cli.main(["report", str(out), "--json"]) == 0  # what is there: not the half run
    there = [r.metric for r in Records(out / "records.jsonl")]
    assert there.count("learning_curve") == 2
    assert "half_accuracy" not in there
    assert (out / "report.html").exists()
    assert start(3).wait(100) == 0
    assert slurm.requeued() == [1]
    compare(DATA, out=out, jobs=1, threads=1, **words)  # trains nothing, measures the rest
    there = [r.metric for r in Records(out / "records.jsonl")]
    assert there.count("test_accuracy") == 4  # nothing is copied twice
    assert there.count("half_accuracy") == 1
    assert "train_step" in there
    compare(DATA, out=tmp_path / "alone", jobs=1, threads=1, **words)
    assert weights(out) == weights(tmp_path / "alone")


@pytest.mark.slow
def test_a_shared_training_is_requeued(tmp_path: Path, slurm: Slurm) -> None:
    words = [DATA, *SETS, "--epochs", "60", "--out", str(tmp_path / "run"), "-q"]
    process = slurm.start("train.sbatch", 7, *words, tasks=2)
    until(tmp_path / "run", "best/model.safetensors", process)
    os.kill(slurm.tasks(process)[1], signal.SIGTERM)  # one is told, all leave
    assert process.wait(60) == 75
    assert slurm.requeued() == [7]
    assert not (tmp_path / "run" / "records.jsonl").exists()
    assert slurm.start("train.sbatch", 7, *words, tasks=2).wait(100) == 0
    assert any(r.metric == "test_accuracy" for r in Records(tmp_path / "run" / "records.jsonl"))


@pytest.fixture(scope="module")
def jobs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of three jobs, none of them started."""
    out = tmp_path_factory.mktemp("jobs") / "study"
    return compare(DATA, out=out, jobs_file=True, threads=2, **WORDS | {"epochs": 1})


def test_a_job_by_its_number(jobs_file: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    moved = shutil.copytree(jobs_file, tmp_path / "moved")  # mounted elsewhere
    job = read_job(moved, 2)
    assert (job.number, job.experiment.seed, job.threads) == (1, 1, 2)
    assert Path(job.folder).parent == moved
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert cli.main(["job", str(moved), "--dry-run"]) == 0
    assert f"in {job.folder}: not started" in capsys.readouterr().out
    assert not Path(job.folder).exists()
    assert cli.main(["job", str(moved), "--threads", "1"]) == 0
    assert capsys.readouterr().out.startswith("job 2 of 3, softmax, seed 1: test accuracy 0.")
    assert cli.main(["job", str(moved), "2", "--dry-run"]) == 0
    assert f"in {job.folder}: finished" in capsys.readouterr().out
    assert {r.experiment for r in job.finished()} == {job.experiment.id}


@pytest.mark.parametrize(
    ("number", "says"),
    [("0", "has no job 0: it has 1 to 3"), ("4", "has no job 4: it has 1 to 3"), ("x", "number=x must be an integer")],
)
def test_a_job_that_does_not_exist(jobs_file: Path, tmp_path: Path, capsys, number: str, says: str) -> None:
    assert cli.main(["job", str(jobs_file), number]) == 2
    assert says in capsys.readouterr().err
    assert cli.main(["job", str(tmp_path), "1"]) == 2
    assert "holds no jobs.jsonl: write it with `linvit compare … --jobs-file`" in capsys.readouterr().err


def test_jobs_need_images_that_others_can_open(dataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="jobs_file needs images that other processes can open"):
        compare(dataset, out=tmp_path / "x", jobs_file=True, **WORDS | {"epochs": 1})
    assert not (tmp_path / "x").exists()


def test_a_dry_run_shows_the_state_of_each_job(study: Path, dataset, tmp_path: Path) -> None:
    lines: list[str] = []
    compare(DATA, out=tmp_path / "x", dry_run=True, log=lines.append, **WORDS | {"epochs": 1})
    assert lines == [
        "job 1 of 3: softmax, seed 0: not started",
        "job 2 of 3: softmax, seed 1: not started",
        "job 3 of 3: softmax, seed 0, half of the steps: not started",
    ]
    assert not (tmp_path / "x").exists()
    lines.clear()
    words = QUICK | {"attentions": ["softmax"], "epochs": 2, "seeds": 3}
    compare(dataset, out=study, dry_run=True, log=lines.append, **words)
    assert [line.rpartition(": ")[2] for line in lines] == ["finished"] * 4 + ["not started"] + ["finished"] * 2


@pytest.mark.usefixtures("no_page")
def test_the_jobs_of_folds(tmp_path: Path, capsys) -> None:
    """Each holds out its own images, and the report is over the images of all folds once there is a result of each."""
    words = {"attentions": ["softmax"], "folds": 2, "controls": False, "epochs": 1, "measured": False, **SMALL}
    lines: list[str] = []
    compare(DATA, out=tmp_path / "x", dry_run=True, log=lines.append, **words)
    assert [line.partition(": ")[2] for line in lines] == [
        "softmax, seed 0, fold 0: not started",
        "softmax, seed 0, fold 1: not started",
        "softmax, seed 0, fold 0, half of the steps: not started",
    ]
    out = compare(DATA, out=tmp_path / "x", jobs_file=True, **words)
    jobs = [read_job(out, number) for number in (1, 2, 3)]
    assert [(job.fold, job.half) for job in jobs] == [(0, False), (1, False), (0, True)]
    assert len({job.experiment.data.identity for job in jobs}) == 2

    def whole() -> list[Record]:
        assert cli.main(["report", str(out), "-q"]) == 0
        found = Records(out / "records.jsonl")
        return [r for r in found if r.metric == "test_accuracy" and "fold" not in r.tags]

    assert cli.main(["job", str(out), "1"]) == 0
    assert capsys.readouterr().out.startswith("job 1 of 3, softmax, seed 0, fold 0: test accuracy 0.")
    assert whole() == []
    assert cli.main(["job", str(out), "2", "-q"]) == 0
    (record,) = whole()
    assert (record.n, record.experiment, record.artefact, record.tags["variant"]) == (96, "", "", "softmax")
    folds = [r for r in Records(out / "records.jsonl") if r.metric == "test_accuracy" and "fold" in r.tags]
    assert sorted((r.tags["fold"], r.tags["selection"]) for r in folds) == [
        (fold, selection) for fold in (0, 1) for selection in ("best", "final")
    ]
    right = sum(round(r.value * r.n) for r in folds if r.tags["selection"] == "best")
    assert record.value == pytest.approx(right / 96)
    compare(DATA, out=out, jobs=1, threads=1, **words)
    assert whole() == [record]  # nothing is copied twice
    alone = compare(DATA, out=tmp_path / "alone", jobs=1, threads=1, **words)
    assert weights(out) == weights(alone)
    pooled = [
        [(r.metric, r.value) for r in Records(folder / "records.jsonl") if not r.experiment] for folder in (out, alone)
    ]
    assert pooled[0] == pooled[1] != []
