"""Budgets on machines that turn out slower than planned: real trainings, and a clock that only they advance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from studying import DATA, QUICK
from test_frozen import ATTENTIONS, photos, speeds, start  # noqa: F401 (fixtures)

from linvit import report
from linvit.pipeline.steps import measuring_seconds
from linvit.records import Records
from linvit.requests import CompareRequest
from linvit.study import Comparison, Study
from linvit.study.measuring import MeasureStudy
from linvit.study.placement import JobPlacement
from linvit.study.schedule import GRACE
from linvit.training.events import Progressed, Stepped

BUDGET = 180.0


class Machine:
    """A clock, advanced by each step and each batch of features as a machine of this slowness would take."""

    def __init__(self, step: float, image: float, slowness: Callable[[float], float]):
        self.now, self.step, self.image, self.slowness = 0.0, step, image, slowness
        self.at: dict[str, int] = {}  # run → steps or images so far

    def clock(self) -> float:
        return self.now

    def on_event(self, job: Any, event: Any) -> None:
        if isinstance(event, Stepped):
            self._advance(job.folder, event.step, self.step)
        elif isinstance(event, Progressed):
            self._advance(f"{job.folder} features", event.done, self.image)

    def _advance(self, run: str, to: int, seconds: float) -> None:
        self.now += (to - self.at.get(run, 0)) * seconds * self.slowness(self.now)
        self.at[run] = to

    def compare(self, data: Any, **words: Any) -> tuple[Study, Records, list[str]]:
        lines: list[str] = []
        request = CompareRequest.of(data=str(data), **{"measured": False} | words | {"budget": "3m", "threads": 1})
        Comparison(request, on_event=self.on_event, log=lines.append, clock=self.clock).run()
        return Study.read(words["out"] / "study.json"), Records(words["out"] / "records.jsonl"), lines


def latest() -> float:
    return BUDGET - measuring_seconds(BUDGET) + GRACE * BUDGET


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, no_page: None) -> None:
    """A machine that was timed at a step a second, and on which nothing but steps and features takes time."""
    speeds(monkeypatch, per_image=0.05, steps=1.0, seen=1e4)


@pytest.mark.parametrize("factor", [1.0, 2.0, 5.0])
def test_a_slower_machine_trains_for_fewer_steps_and_ends_in_time(tmp_path: Path, factor: float) -> None:
    machine = Machine(1.0, 0.0, lambda now: factor)
    words = QUICK | {"attentions": ATTENTIONS, "seeds": 1, "out": tmp_path / "x"}
    study, records, lines = machine.compare(DATA, **words)
    assert study.plan is not None
    assert 0.6 * latest() < machine.now < latest() + 2 * factor
    scores = [r.tags["variant"] for r in records if r.metric == "test_accuracy" and r.tags["selection"] == "best"]
    assert len(scores) == len(ATTENTIONS)
    runs = {r.tags["variant"]: r.experiment for r in records if r.metric == "test_accuracy"}
    kept = {file.parent.name.partition("-seed")[0] for file in (tmp_path / "x").glob("*/experiment.json")}
    assert len(list((tmp_path / "x").glob("*/experiment.json"))) == len(kept), "runs that were given up are removed"
    assert len(runs) == len(ATTENTIONS)
    assert any("that are left" in line for line in lines) == (factor > 1)
    if factor > 1:
        assert study.steps is not None
        assert study.steps < int(next(line for line in lines if " steps (" in line).split("steps")[0].split(",")[-1])


def test_slow_features_are_computed_of_fewer_images(
    photos: Path,  # noqa: F811
    start: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planned for all images in 100 seconds; at four times that, fewer are used from the start again."""
    from linvit.pipeline import plan
    from linvit.training import heads

    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))  # without heads that other tests fitted
    monkeypatch.setattr(plan, "MIN_LIMIT", 10)
    monkeypatch.setattr(heads, "BATCH", 4)
    speeds(monkeypatch, per_image=0.5, steps=0.01, seen=2.4)
    machine = Machine(1.0, 1.0 / 2.4 * 120 / 87, lambda now: 4.0)  # validation and test give no events
    words = {"attentions": ATTENTIONS, "start": start, "controls": False, "jobs": 1, "out": tmp_path / "x"}
    study, records, lines = machine.compare(photos, **words)
    assert study.plan is not None
    assert study.plan.limit is not None
    assert 10 <= study.dataset.train < 60
    assert machine.now < latest()
    assert {r.n for r in records if r.metric == "test_accuracy"} == {study.dataset.test}
    assert any(f"{study.plan.limit:,} images of each split" in text for text in study.warnings)
    assert any(line.startswith("without training: ") for line in lines)
    assert any(
        line == f"features take longer than planned: at most {study.plan.limit} images of each split" for line in lines
    )


def test_runs_that_a_machine_has_no_time_for_are_left_to_the_next_call(tmp_path: Path) -> None:
    """It becomes slow when most is done: what is left are seeds and runs of half the steps."""
    machine = Machine(1.0, 0.0, lambda now: 1.0 if now < 60 else 3.0)
    words = QUICK | {"attentions": ATTENTIONS[:1], "seeds": 4, "out": tmp_path / "x"}
    study, records, _ = machine.compare(DATA, **words)
    late = [text for text in study.warnings if text.startswith("There was no time for ")]
    assert late
    assert all(text.endswith("the same command adds them.") for text in late)
    first = {r.tags["seed"] for r in records if r.metric == "test_accuracy"}
    assert 1 <= len(first) < 4
    study, records, _ = machine.compare(DATA, **words)
    assert {r.tags["seed"] for r in records if r.metric == "test_accuracy"} == {0, 1, 2, 3}
    assert any(r.metric == "half_accuracy" for r in records)
    assert not any(text.startswith("There was no time for ") for text in study.warnings)


@pytest.mark.parametrize("page", [2.0, 15.0])
def test_measurements_get_what_is_left_when_the_pages_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: float
) -> None:
    """The first page, without figures, is there as soon as accuracies are known; its time is kept for the last one."""
    machine, pages = Machine(1.0, 0.0, lambda now: 1.0), []

    def build(folder: Path, figures: bool) -> None:
        pages.append(figures)
        machine.now += page * (1 + 2 * figures)

    def measured(self: JobPlacement, work: MeasureStudy, progress: object) -> tuple[list[str], dict]:
        assert work.seconds is not None
        assert work.seconds >= measuring_seconds(BUDGET) / 4
        machine.now += work.seconds
        return [], {}

    monkeypatch.setattr(report, "build", build)
    monkeypatch.setattr(JobPlacement, "measure", measured)
    words = QUICK | {"attentions": ATTENTIONS, "seeds": 1, "out": tmp_path / "x", "measured": True}
    study, _, _ = machine.compare(DATA, **words)
    assert pages == [False, page < 10]
    assert machine.now <= 1.05 * BUDGET
    assert not any("still to be measured" in text for text in study.warnings)
