"""A budget with a trained start: frozen features with a fitted head first, then training where there is time for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from linvit.data import Survey, load_data
from linvit.models import create_model, model_config
from linvit.pipeline import plan
from linvit.pipeline.plan import Planner, Rung
from linvit.pipeline.steps import RUN_OVERHEAD, WORKER_START, fitting_images, fitting_steps, measuring_seconds
from linvit.records import Records
from linvit.report.study import study_result
from linvit.requests import CompareRequest
from linvit.schemas.study import Plan
from linvit.study import Study, compare
from linvit.study.compare import wanted_variants
from linvit.study.placement import JobPlacement
from linvit.training.checkpoint import read_model, save_config, save_model
from linvit.training.defaults import START_ATTENTIONS
from linvit.training.loop import Rate

CPU = torch.device("cpu")
PETS = Survey("pets", 37, 3, 375, train=5290, validation=588, test=1470)
DEIT = model_config(image_size=224, patch_size=16, dim=192, depth=12, heads=3)
ATTENTIONS = ("softmax", "performer-relu:m=8")


def planner(images: Survey = PETS, variants: int = 6, cores: int = 2, seconds: float = 0.12) -> Planner:
    """A start that a core trains on for this long per image."""
    rungs = [Rung(224, 1, {}, DEIT, seconds)]
    return Planner(images, variants, cores, CPU, like=DEIT, fitted=True, rungs=rungs)


@pytest.mark.parametrize("minutes", [3, 5, 10, 15, 20, 30, 60, 120, 240, 480])
def test_frozen_features_and_training_fit_any_budget_from_three_minutes(minutes: int) -> None:
    """With every budget all of the features are computed in time, of as many images as there is time for."""
    budget, ladder = 60.0 * minutes, planner()
    rung, seeds = ladder.choose(budget)
    limit = ladder.limit(rung, budget)
    used = ladder.frozen_seconds(rung, limit)
    assert used <= ladder._room(budget)
    if limit is not None:
        assert ladder.frozen_seconds(rung, limit + 1) > ladder._room(budget)
        assert ladder.offer(budget).epochs == 0
    if ladder.epochs(rung, seeds, budget) >= ladder.enough:
        assert limit is None


def test_more_time_gives_more_images_then_training_then_seeds() -> None:
    ladder = planner()
    offers = [ladder.offer(60.0 * minutes) for minutes in (3, 15, 90, 480)]
    limits = [ladder.limit(ladder.rungs[0], offer.seconds) for offer in offers]
    assert limits[0] is not None
    assert limits[1] is not None
    assert limits[0] < limits[1]
    assert limits[2:] == [None, None]
    assert [offer.epochs > 0 for offer in offers] == [False, False, True, True]
    assert offers[-1].seeds >= 3
    assert "untrained" in offers[0].resolves
    assert "frozen features" in offers[0].text
    assert {offer.image_size for offer in offers} == {224}


def test_a_budget_for_too_few_images_is_refused_with_one_that_is_enough() -> None:
    ladder = planner(seconds=10.0)
    with pytest.raises(
        ValueError, match=r"budget 3m00s is too small for the features of 111 images of each split with 6"
    ):
        ladder.limit(ladder.rungs[0], 180.0)


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("budget", [7200.0, 14400.0, 36000.0])
def test_the_time_of_every_run_adds_up_to_the_budget(jobs: int, budget: float) -> None:
    """A clock that counts what each run does, in the study's order, given to the worker that is free first. Random
    features are computed anew for every seed; the frozen run, the first seed and half the steps share them."""
    rates = {name: Rate(0.5 / (1 + i / 5), 60.0) for i, name in enumerate("abcdef")}
    head, per_epoch = 5.0, 82
    steps, expected = fitting_steps(budget, 20.0, rates, PETS, per_epoch, 3, jobs, 10**9, head)
    assert steps > 0
    workers = [20.0 + WORKER_START] * jobs
    for share, anew in ((0.0, True), (1.0, False), (1.0, True), (1.0, True), (0.5, False)):
        for rate in rates.values():
            seen = PETS.validation * max(1, steps * share / per_epoch) + PETS.test * (2 if share else 1)
            seen += PETS.train * anew
            worker = workers.index(min(workers))
            workers[worker] += steps * share / rate.steps + seen / rate.images + anew * head + RUN_OVERHEAD
    end = max(workers) + measuring_seconds(budget)
    assert 0.8 * budget <= end <= 1.05 * budget
    assert sum(expected.values()) == pytest.approx(end, rel=0.08)


@pytest.mark.parametrize("spent", [20.0, 60.0])
@pytest.mark.parametrize("budget", [180.0, 900.0])
def test_the_images_fit_what_is_left_of_the_budget(budget: float, spent: float) -> None:
    rates = {name: Rate(0.5, 20.0 / (1 + i / 2)) for i, name in enumerate("abcdef")}
    count = fitting_images(budget, spent, rates, PETS, 2, 5.0)
    assert 0 < count < PETS.train
    ends = [
        spent
        + WORKER_START
        + measuring_seconds(budget)
        + sum(5.0 + RUN_OVERHEAD + seen / r.images for r in rates.values()) / 2
        for seen in (PETS.limited(count).total, PETS.limited(count + 1).total)
    ]
    assert ends[0] <= 0.95 * budget < ends[1]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three kinds of pictures that differ in colour; they are not square."""
    rng = np.random.default_rng(0)
    for kind in range(3):
        (tmp_path / "photos" / f"kind {kind}").mkdir(parents=True)
        for i in range(40):
            pixels = rng.integers(0, 150, (24, 30, 3), dtype=np.uint8)
            pixels[..., kind] += np.uint8(rng.integers(0, 60))
            Image.fromarray(pixels).save(tmp_path / "photos" / f"kind {kind}" / f"{i}.png")
    return tmp_path / "photos"


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A model of other classes."""
    shape = {"stem": "patch", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 24}
    model = create_model(image_size=16, channels=3, classes=4, **shape, seed=3)
    save_config(tmp_path / "start", model.config, load_data("synthetic:images=40,size=16,classes=4"))
    save_model(tmp_path / "start", model)
    return tmp_path / "start"


def speeds(monkeypatch: pytest.MonkeyPatch, per_image: float, steps: float, seen: float = 3000.0) -> None:
    """A machine whose speed is known."""

    def rungs(self: Planner, budget: float, progress: object) -> Planner:
        return replace(self, rungs=[replace(rung, seconds=per_image) for rung in self.rungs])

    monkeypatch.setattr(Planner, "timed", rungs)
    monkeypatch.setattr(plan, "decoding_seconds", lambda images, side: 0.0)
    monkeypatch.setattr(
        JobPlacement, "rates", lambda self, seconds, progress: {v: Rate(steps, seen) for v in self.study.seeds}
    )


def run(photos: Path, start: Path, folder: Path, **options: object) -> tuple[Study, Records, list[str]]:
    lines: list[str] = []
    words = {"attentions": ATTENTIONS, "start": start, "budget": "3m", "threads": 1, "measured": False, "out": folder}
    compare(photos, log=lines.append, **words | options)
    return Study.read(folder / "study.json"), Records(folder / "records.jsonl"), lines


@pytest.mark.usefixtures("no_page")
def test_without_time_to_train_the_start_is_compared_as_it_is(photos, start, tmp_path, monkeypatch) -> None:
    speeds(monkeypatch, per_image=0.15, steps=0.01)
    study, records, lines = run(photos, start, tmp_path / "x")
    assert (study.steps, study.plan and study.plan.steps, study.epochs) == (0, 0, 0)
    assert study.plan is not None
    assert study.plan.limit is None
    assert (study.dataset.image_size, study.recipe.start_head) == (16, "fitted")
    assert any("× frozen features and a fitted head" in line for line in lines)
    scores = {
        r.tags["variant"]: r.value for r in records if r.metric == "test_accuracy" and r.tags["selection"] == "best"
    }
    assert [name.partition(",")[0] for name in sorted(scores)] == sorted([*ATTENTIONS, "uniform"])
    assert min(scores.values()) > 0.6  # of three classes
    weights = read_model(next((tmp_path / "x").glob("softmax*seed0-*"))).tensors
    first = read_model(start).tensors
    assert all(torch.equal(value, weights[name]) for name, value in first.items() if not name.startswith("head."))
    assert not any("barely trained" in text for text in study.warnings)
    again, _, _ = run(photos, start, tmp_path / "x")  # nothing is planned or run again
    assert (again.steps, again.plan) == (0, study.plan)


def test_a_comparison_without_training_has_intervals_over_test_images(photos, start, tmp_path, monkeypatch) -> None:
    speeds(monkeypatch, per_image=0.15, steps=0.01)
    run(photos, start, tmp_path / "x", margin=0.2)
    result = study_result(tmp_path / "x")
    able = [v for v in result.summary.variants if not v.control]
    other = next(v.standing for v in able if v.standing.word != "most accurate")
    assert other.word != "too few seeds"
    assert other.over_seeds is None
    assert other.over_images is not None
    best = able[0].best
    assert best is not None
    assert best.low is not None
    text = " ".join([*result.sentences, *result.limitations, result.table.note])
    assert "Nothing was trained" in text
    assert "per variant cannot show a difference" not in text
    assert (tmp_path / "x/report.html").exists()


@pytest.mark.usefixtures("no_page")
def test_with_time_to_train_what_frozen_features_reach_is_known_first(photos, start, tmp_path, monkeypatch) -> None:
    speeds(monkeypatch, per_image=1e-4, steps=50.0)
    monkeypatch.setattr(plan, "USEFUL", 0.6)
    study, records, lines = run(photos, start, tmp_path / "x", controls=False)
    assert study.steps
    order = [run.frozen for run in study.runs()]
    assert order == sorted(order, reverse=True)
    frozen = {r.tags["variant"]: r.value for r in records if r.metric == "frozen_accuracy"}
    assert len(frozen) == len(ATTENTIONS)
    (line,) = (line for line in lines if line.startswith("without training: "))
    assert all(name in line for name in ATTENTIONS)
    starts = {(r.tags["variant"], r.tags["seed"]): r.value for r in records if r.metric == "start_accuracy"}
    ends = {(r.tags["variant"], r.tags["seed"]): r.value for r in records if r.metric == "validation_accuracy"}
    assert starts.keys() == ends.keys()
    assert all(ends[key] >= starts[key] for key in starts)
    table = study_result(tmp_path / "x").table
    assert "Frozen" in table.columns


@pytest.mark.usefixtures("no_page")
def test_fewer_images_are_used_where_there_is_no_time_for_all(photos, start, tmp_path, monkeypatch) -> None:
    speeds(monkeypatch, per_image=5.0, steps=0.01)
    monkeypatch.setattr(plan, "MIN_LIMIT", 10)
    study, _, lines = run(photos, start, tmp_path / "x", controls=False, jobs=1)
    assert study.plan is not None
    limit = study.plan.limit
    assert limit is not None
    assert max(study.dataset.train, study.dataset.test) <= limit
    assert study.dataset.train == limit
    assert any(f"at most {limit} of each split" in line for line in lines)
    assert any(f"At most {limit:,} images of each split were used" in text for text in study.warnings)


@pytest.mark.usefixtures("no_page")
def test_variants_that_are_slower_than_planned_get_fewer_images(photos, start, tmp_path, monkeypatch) -> None:
    """Their features were planned for all images, but their measured speed allows less than half of them."""
    speeds(monkeypatch, per_image=0.15, steps=0.01, seen=1.0)
    monkeypatch.setattr(plan, "MIN_LIMIT", 10)
    study, records, lines = run(photos, start, tmp_path / "x", controls=False, jobs=1)
    assert study.plan is not None
    limit = study.plan.limit
    assert limit is not None
    assert 10 <= study.dataset.train == limit < 87
    assert any(f"at most {limit} of each split" in line for line in lines)
    assert sum(study.plan.expected.values()) <= 1.05 * 180
    assert study.source is not None
    assert study.source.limit == limit
    assert {r.n for r in records if r.metric == "test_accuracy"} == {min(limit, 24)}
    again, _, _ = run(photos, start, tmp_path / "x", controls=False, jobs=1)
    assert again.dataset == study.dataset


def test_a_refusal_comes_before_any_image_is_decoded(photos, start, tmp_path, monkeypatch) -> None:
    speeds(monkeypatch, per_image=100.0, steps=0.01)
    with pytest.raises(ValueError, match=r"budget 3m00s is too small for the features of .* use "):
        run(photos, start, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("no_page")
def test_a_variant_from_scratch_or_another_head_has_no_frozen_features(photos, start, tmp_path, monkeypatch) -> None:
    speeds(monkeypatch, per_image=1e-4, steps=50.0)
    monkeypatch.setattr(plan, "USEFUL", 0.1)
    for number, changes in enumerate(({"with_scratch": True}, {"start_head": "means"})):
        study, records, _ = run(
            photos, start, tmp_path / f"{number}", attentions=("softmax",), controls=False, **changes
        )
        assert study.recipe.start_head == "means"
        assert not any(r.metric == "frozen_accuracy" for r in records)


def test_jobs_say_that_they_are_frozen(photos, start, tmp_path, monkeypatch) -> None:
    speeds(monkeypatch, per_image=1e-4, steps=50.0)
    run(photos, start, tmp_path / "x", jobs_file=True, controls=False)
    rows = [json.loads(line) for line in (tmp_path / "x/jobs.jsonl").read_text().splitlines()]
    assert [row["experiment"]["recipe"]["steps"] for row in rows if row["frozen"]] == [0, 0]


def test_a_trained_model_is_compared_with_attentions_that_suit_its_weights() -> None:
    def names(**words: object) -> list[str]:
        return [v.attention.partition(":")[0] for v in wanted_variants(CompareRequest.of(data="digits", **words), [])]

    assert names(start="runs/mine")[:2] == ["softmax", "twoscale"]
    for start in (None, "scratch", "backbones"):
        assert "twoscale" not in names(start=start)
    assert names(start="runs/mine", attentions=["efficient"], controls=False) == ["efficient"]
    assert "twoscale" not in names(start="runs/mine", task="next-pixel")


def test_default_attentions_are_left_out_where_there_is_no_time(photos, start, tmp_path, monkeypatch) -> None:
    """The last ones; what is asked for never is."""
    speeds(monkeypatch, per_image=3.0, steps=0.01, seen=100.0)
    monkeypatch.setattr(plan, "MIN_LIMIT", 10)
    study, _, lines = run(photos, start, tmp_path / "x", attentions=(), jobs=1)
    assert study.plan is not None
    left_out = study.plan.left_out
    assert left_out == START_ATTENTIONS[2:]
    assert [v.attention for v in study.variants] == [*START_ATTENTIONS[:2], "uniform"]
    assert any(line == f"  left out {', '.join(left_out)}, for lack of time; -a adds them" for line in lines)
    again, _, _ = run(photos, start, tmp_path / "x", attentions=(), jobs=1)
    assert again.variants == study.variants
    asked, _, _ = run(photos, start, tmp_path / "y", attentions=START_ATTENTIONS, jobs=1)
    assert asked.plan is not None
    assert asked.plan.left_out == ()


def test_seeds_are_given_up_before_training_is() -> None:
    """Of variants that turn out slower than timed."""
    ladder, rates = planner(), {name: Rate(0.4, 60.0) for name in "abcdef"}
    plan_ = Plan(seconds=3600.0, image_size=224, options={}, seeds=3)
    found = ladder.settle(plan_, rates, 82, 2, 60.0)
    assert (found.seeds, found.steps > 0) == (1, True)
    assert set(found.run_seconds) == set(found.frozen_seconds) == set(rates)
    assert found.run_seconds["a"] > found.steps / 0.4
    later = ladder.settle(plan_, rates, 82, 2, 60.0 + sum(found.frozen_seconds.values()) / 2, frozen=False)
    assert later.steps == pytest.approx(found.steps, rel=0.05)
    asked = replace(ladder, seeds=3).settle(plan_, rates, 82, 2, 60.0)
    assert (asked.seeds, asked.steps) == (3, 0)
