"""Which systems are raced at the reports' own sizes, and what a race leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from linvit.metrics import problems
from linvit.models import estimate
from linvit.records import Record
from linvit.requests import ReproduceRequest
from linvit.studies import STUDIES, true_sizes
from linvit.studies.declaration import all_published
from linvit.studies.quiet import busy, waiting
from linvit.studies.run import Reproduction
from linvit.studies.true_sizes import RACES, Race, largest_batch, measured, shrunk

pytestmark = pytest.mark.filterwarnings("ignore:stem=length-one")


@pytest.fixture(scope="module")
def races():
    return {report: {race.name: race for race in make()} for report, make in RACES.items()}


def test_every_printed_system_is_raced_at_its_own_size(races):
    for study, rows in all_published().items():
        report = study.partition("-")[0]
        if report not in races or study in ("002-cifar100", "002-gelu-1", "002-gelu-2", "002-gelu-3"):
            continue  # the same models as others
        raced = {row for name, race in races[report].items() if name.startswith(study) for row in race.systems}
        assert {row for row in rows if "checkpoint" not in row} <= raced, study
    assert races["000"]["000-cifar10"].baseline.model.tokens == 144
    assert races["000"]["000-mnist"].baseline.model.tokens == 16
    assert {race.baseline.model.tokens for race in races["001"].values()} == {65, 257}
    assert races["000"]["000-cifar10, Keras"].baseline.model.tokens == 25
    assert (races["000"]["000-cifar10"].batch, races["001"]["001-V"].batch) == (32, 256)


def test_all_systems_of_a_race_have_softmaxs_shape(races):
    """But for the number of parameters of their attention: it is what is raced."""
    for race in (race for report in races.values() for race in report.values()):
        for name, one in race.systems.items():
            if name in ("ViT, patch 8",):
                continue
            own, exact = (x.model.model_copy(update={"attention": "softmax"}) for x in (one, race.baseline))
            assert estimate(own) == estimate(exact), (race.name, name)
            assert "half=" not in one.model.attention


def test_a_batch_is_as_large_as_memory_allows(races, monkeypatch):
    taken: list[int] = []

    def peak(model, recipe, device, batch):
        taken.append(batch)
        return Record("peak_memory", 1000 * batch, "bytes", device="cpu", threads=1, dtype="float32")

    monkeypatch.setattr(true_sizes, "peak_memory", peak)
    race, cpu = races["001"]["001-V"], torch.device("cpu")
    for free, batch in ((10**9, 256), (3 * 100_000, 64), (10, 1)):
        monkeypatch.setattr(true_sizes, "free_memory", lambda device, free=free: free)
        assert largest_batch(race, cpu, 256) == batch
    assert set(taken) == {4}


def test_a_race_leaves_times_and_memory_for_each_batch(races, monkeypatch, tmp_path):
    monkeypatch.setattr(
        true_sizes,
        "peak_memory",
        lambda model, recipe, device, batch: replace(
            Record("peak_memory", 1000.0, "bytes", device="cpu", threads=1, dtype="float32"), tags={"batch": batch}
        ),
    )
    race = races["001"]["001-I"]
    small = Race(race.name, {"relu": shrunk(race.systems["relu"])}, shrunk(race.baseline))
    run = Reproduction(ReproduceRequest.of(names=("001-sizes",), scale="smoke", out=tmp_path, device="cpu"))
    found = list(measured(small, {"rounds": 2, "batch": 3, "timed": 2}, run))
    assert {r.tags["variant"] for r in found} == {
        *("001-I: relu", "001-I: softmax", "001-I: relu, batch 1", "001-I: softmax, batch 1")
    }
    for name, timed, weighed in (("001-I: relu", 2, 3), ("001-I: relu, batch 1", 1, 1)):
        mine = {r.metric: r for r in found if r.tags["variant"] == name}
        assert {"train_step_vs_softmax", "inference_vs_softmax", "latency_vs_softmax", "peak_memory"} <= set(mine)
        assert mine.pop("peak_memory").tags["batch"] == weighed
        assert {r.tags["batch"] for r in mine.values()} == {timed}
    marked = [replace(record, tags={**record.tags, "busy": True}) for record in found]
    assert [problem for record in marked for problem in problems(record)] == []
    chart = STUDIES["001-sizes"].draw(found, tmp_path).to_dict()
    assert len(chart["hconcat"]) == 4


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux says how long a thread has waited")
def test_a_race_is_marked_where_others_had_its_core():
    assert busy(0.5, 10.0) == {"busy": True}
    assert busy(0.1, 10.0) == {}
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    cores = os.sched_getaffinity(0)
    try:
        one = min(cores)
        for process in (0, other.pid):
            os.sched_setaffinity(process, {one})
        waited, begun = waiting(), time.thread_time()
        while time.thread_time() - begun < 0.1:
            pass
        assert waiting() - waited > 0.02
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()
