"""Where a study's jobs run: as requested, or by a benchmark that is run once; on machines that are only imagined."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from studying import DATA, QUICK, SMALL

from linvit import data
from linvit.execute import EXECUTORS, WorkerDied
from linvit.progress import ignore
from linvit.requests import CompareRequest
from linvit.study import Comparison, Study, compare, placement
from linvit.training.loop import Rate

WORDS = {"attentions": ["softmax", "performer-relu:m=8"], "seeds": 1, "steps": 1, "controls": False, **SMALL}
Here = EXECUTORS["here"]


class Elsewhere(Here):  # type: ignore[valid-type,misc]
    """Seven slots on another machine."""

    located = 0
    measures = True

    @classmethod
    def locate(cls, address: str, device: str, threads: int | None) -> tuple[torch.device, int]:
        cls.located += 1
        return torch.device("cpu"), 7

    def measure(self, work, progress):
        if not self.measures:
            raise WorkerDied("no node with a CPU is left")
        return super().measure(work, progress)[0], {"cpu": "Another CPU", "node": "far (1a2b3c)"}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> type[Elsewhere]:
    monkeypatch.setattr(EXECUTORS, "_entries", dict(EXECUTORS._entries) | {"elsewhere": Elsewhere})
    monkeypatch.setattr(Elsewhere, "located", 0)
    return Elsewhere


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Steps per second of one training, by executor; workers are this process. Benchmarks are noted in `timed`."""
    found = {"here": 5.0, "processes": 3.5}

    class Workers(Here):  # type: ignore[valid-type,misc]
        name = "processes"

        def rate(self, experiment, seconds, device):
            timed.append((self.name, self.slots))
            return Rate(found[self.name], 1.0)

    class OneHere(Workers):
        name = "here"

    timed.clear()
    monkeypatch.setattr(EXECUTORS, "_entries", dict(EXECUTORS._entries) | {"here": OneHere, "processes": Workers})
    monkeypatch.setattr(placement, "cpu_count", lambda: 2)
    return found


timed: list[tuple[str, int]] = []


@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize(("faster", "steps"), [("processes", 3.5), ("here", 1.5)])
def test_the_faster_executor_is_found_once_and_stored(
    faster: str, steps: float, rates: dict[str, float], tmp_path: Path
) -> None:
    rates["processes"] = steps
    for _ in range(2):
        folder = compare(DATA, measured=False, out=tmp_path / "x", **WORDS)
    assert timed == [("here", 1), ("processes", 2)]
    stored = Study.read(folder / "study.json").placement
    assert stored is not None
    assert (stored.executor, stored.measured) == (faster, {"here": 5.0, "processes": 2 * steps})
    assert stored.jobs == (2 if faster == "processes" else 1)


@pytest.mark.usefixtures("rates")
def test_no_more_workers_than_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four cores are of no use to four runs: what is timed is what could run."""
    monkeypatch.setattr(placement, "cpu_count", lambda: 64)
    comparison = planned(tmp_path, **WORDS | {"steps": 2})
    assert comparison.placement.decide(ignore).jobs == 4
    assert timed == [("here", 1), ("processes", 4)]


def test_what_workers_cannot_run_runs_here(
    rates: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention that only this process has registered."""

    def refuse(self, experiment, device) -> None:
        raise ValueError("unknown attention")

    rates["processes"] = 100.0
    monkeypatch.setattr(EXECUTORS["processes"], "check", refuse)
    found = planned(tmp_path, **WORDS).placement.decide(ignore)
    assert (found.executor, found.measured) == ("here", {"here": 5.0, "processes": 0.0})


@pytest.mark.parametrize(
    ("words", "executor", "jobs", "threads"),
    [
        ({"jobs": 1}, "here", 1, torch.get_num_threads()),
        ({"threads": 3}, "here", 1, 3),
        ({"jobs": 5}, "processes", 5, 1),
        ({"jobs": 5, "threads": 2}, "processes", 5, 2),
        ({"runner": "elsewhere"}, "elsewhere", 7, 1),
        ({"runner": "elsewhere", "jobs": 3, "threads": 4}, "elsewhere", 3, 4),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_as_requested(tmp_path: Path, words: dict, executor: str, jobs: int, threads: int) -> None:
    found = planned(tmp_path, **WORDS | words).placement.placement
    assert found is not None
    assert (found.executor, found.jobs, found.threads) == (executor, jobs, threads)


def test_other_processes_cannot_use_a_dataset_in_memory(dataset: data.Dataset, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="the executor 'processes' needs images that workers can open: give a name or a path"
    ):
        compare(dataset, jobs=2, out=tmp_path / "x", **WORDS)
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("no_page")
def test_a_study_elsewhere_names_the_machine_that_measured_it(elsewhere: type[Elsewhere], tmp_path: Path) -> None:
    folder = compare(DATA, runner="elsewhere", out=tmp_path / "x", **WORDS)
    assert elsewhere.located == 1  # which takes seconds on a cluster
    study = Study.read(folder / "study.json")
    assert study.machine == {"cpu": "Another CPU", "node": "far (1a2b3c)"}
    assert study.placement is not None
    assert (study.placement.executor, study.placement.jobs) == ("elsewhere", 7)


@pytest.mark.usefixtures("no_page")
def test_what_was_trained_has_a_report_if_no_machine_is_left_to_measure(
    elsewhere: type[Elsewhere], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "measures", False)
    folder = compare(DATA, runner="elsewhere", out=tmp_path / "x", **WORDS)
    study = Study.read(folder / "study.json")
    assert study.finished is not None
    assert "Speed and memory could not be measured: no node with a CPU is left." in study.warnings


def test_rates_are_of_real_steps(tmp_path: Path) -> None:
    found = planned(tmp_path, **WORDS | QUICK).placement.rates(0.02, ignore)
    assert set(found) == {"softmax", "performer-relu:m=8"}
    assert all(rate.steps > 0 and rate.images > 0 for rate in found.values())


def planned(tmp_path: Path, **words: object) -> Comparison:
    """A comparison that has been prepared and is not started."""
    comparison = Comparison(CompareRequest.of(data=DATA, out=tmp_path / "x", dry_run=True, **words))
    comparison.run()
    return comparison
