"""A budget becomes a plan: what is chosen, what it says, and that it adds up."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from studying import DATA, QUICK, SMALL, Trained

from linvit import cli, data
from linvit.data import Survey
from linvit.durations import seconds
from linvit.models import estimate, model_config
from linvit.pipeline import batches, plan
from linvit.pipeline.batches import largest_batch
from linvit.pipeline.plan import Planner
from linvit.pipeline.steps import RUN_OVERHEAD, WORKER_START, fitting_steps, measuring_seconds
from linvit.progress import ignore
from linvit.report.comparison import Comparison
from linvit.schemas.study import Offer
from linvit.study import Study, compare
from linvit.study.placement import JobPlacement
from linvit.training.loop import Rate

CPU = torch.device("cpu")
PHOTOS = Survey("photos", 37, 3, 400, train=5300, validation=590, test=1470)
BUDGET = QUICK | {"attentions": ["softmax"], "budget": "60s", "measured": False}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three kinds of large pictures, few of each."""
    rng = np.random.default_rng(0)
    for kind in range(3):
        (tmp_path / "photos" / f"kind {kind}").mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(0, 85, (300 + 10 * i, 420, 3), dtype=np.uint8) + 85 * np.uint8(kind)
            Image.fromarray(pixels).save(tmp_path / "photos" / f"kind {kind}" / f"{i}.jpg")
    return tmp_path / "photos"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose speed is known, and little training."""

    def rungs(self: Planner, budget: float, progress: object) -> Planner:
        return replace(self, rungs=[replace(rung, seconds=1e-4) for rung in self.rungs])

    def rates(self: JobPlacement, seconds: float, progress: object) -> dict[str, Rate]:
        return {variant: Rate(100.0, 1000.0) for variant in self.study.seeds}

    monkeypatch.setattr(Planner, "timed", rungs)
    monkeypatch.setattr(JobPlacement, "rates", rates)
    monkeypatch.setattr(plan, "USEFUL", 0.05)


def planner(images: Survey = PHOTOS, given: dict | None = None, size: int | None = None, **options) -> Planner:
    """On a core that trains on a thousand of the smallest images a second, and on others by their operations."""
    found = Planner(images, 6, 2, CPU, **options).with_rungs(given or {}, size, True)
    macs = [estimate(rung.model).macs for rung in found.rungs]
    return replace(
        found, rungs=[replace(r, seconds=1e-3 * m / macs[-1]) for r, m in zip(found.rungs, macs, strict=True)]
    )


def test_a_small_budget_is_spent_on_few_of_the_default_attentions() -> None:
    """But on as many as cost nothing else."""
    found = {}
    for minutes in (3, 15, 60, 600):
        count = found[minutes] = planner().affordable(60.0 * minutes)
        rung, seeds = replace(planner(), variants=count).choose(60.0 * minutes)
        fewest, of_fewest = replace(planner(), variants=3).choose(60.0 * minutes)
        assert (rung, seeds >= 3) == (fewest, of_fewest >= 3)
    assert found[3] == 3
    assert found[600] == 6


def test_a_start_has_its_own_image_sizes() -> None:
    """Not those of the recipe that was tuned for these images."""
    like = model_config(image_size=64, stem="conv", trunk=(8, 16), pools=2, dim=32, heads=2)

    def sides(images: Survey, size: int | None = None, resizable: bool = True) -> list[int]:
        return [rung.size for rung in Planner(images, 2, 1, CPU, like=like).with_rungs({}, size, resizable).rungs]

    tuned = replace(PHOTOS, name="cifar10", side=32)
    assert sides(tuned) == [64]
    assert sides(PHOTOS) == [128, 64]
    assert sides(PHOTOS, size=48) == [48]
    like = like.model_copy(update={"image_size": 224})
    assert sides(PHOTOS) == [224]  # never smaller than what it was trained for
    assert sides(tuned, resizable=False) == [32]


def test_a_size_that_an_attention_cannot_have_is_not_chosen() -> None:
    like = model_config(image_size=96, patch_size=8, dim=32, depth=1, heads=2)
    ladder = Planner(PHOTOS, 2, 1, CPU, like=like)

    def sides(*attentions: str) -> list[int]:
        return [rung.size for rung in ladder.with_rungs({}, None, True, attentions).rungs]

    assert sides("softmax", "linformer:k=32") == [192, 96]
    assert sides("softmax", "linformer:k=200") == [192]
    assert sides("linformer:k=640") == [192, 96]  # none: designing the variants says why


def test_a_survey_knows_the_images_before_any_is_decoded(photos: Path) -> None:
    found = data.survey(photos)
    whole = data.load_data(photos, image_size=16)
    assert (found.train, found.validation, found.test) == (len(whole.train), len(whole.validation), len(whole.test))
    assert (found.name, found.classes, found.channels) == ("photos", 3, 3)
    assert 350 <= found.side <= 420
    assert data.survey(DATA).side == 8


def test_photos_are_resized_and_small_images_are_not() -> None:
    assert [(rung.size, rung.narrower) for rung in planner().rungs] == list(plan.LADDER)
    assert all(rung.model.image_size == rung.size for rung in planner().rungs)
    small = replace(PHOTOS, side=28)
    assert [(rung.size, rung.narrower) for rung in planner(small).rungs] == [(28, 1), (28, 2), (28, 4)]
    known = replace(PHOTOS, name="cifar10", side=32)
    assert {rung.size for rung in planner(known).rungs} == {32}


def test_what_is_given_is_not_chosen() -> None:
    assert {rung.size for rung in planner(size=96).rungs} == {96}
    assert {rung.size for rung in planner(size="64x96").rungs} == {"64x96"}
    assert {rung.model.grid for rung in planner(size="64x96").rungs} == {(8, 12)}
    for given in ({"dim": 64}, {"size": "nano"}, {"depth": 1}):
        assert {rung.narrower for rung in planner(given=given).rungs} == {1}
    assert all("batch_size" not in rung.options for rung in planner(given={"batch_size": 17}).rungs)
    assert planner(seeds=7).offer(1e5).seeds == 7


def test_more_time_never_allows_less() -> None:
    ladder = planner()
    found = [ladder.offer(60 * minutes) for minutes in (3, 5, 10, 15, 30, 60, 120, 240, 480, 960)]
    for less, more in itertools.pairwise(found):
        assert (more.seeds >= 3) >= (less.seeds >= 3)
        assert more.image_size >= less.image_size or more.seeds > less.seeds
    assert "too little training" in found[0].resolves
    assert "without proof" in {offer.resolves.partition(", ")[2] for offer in found}
    assert (found[-1].image_size, found[-1].seeds >= 3) == (128, True)


def test_time_that_does_not_help_is_not_used() -> None:
    ladder = planner()
    found = ladder.offer(1e7)
    assert found.epochs <= plan.USEFUL * ladder.enough
    assert found.seeds == max(plan.MORE_SEEDS)


def test_few_images_are_seen_often_and_many_at_least_a_few_times() -> None:
    for train, epochs in ((500, plan.MAX_EPOCHS), (10**6, plan.MIN_EPOCHS)):
        assert Planner(replace(PHOTOS, train=train), 6, 2, CPU).enough == epochs


@pytest.mark.parametrize("jobs", [1, 2, 8])
@pytest.mark.parametrize("budget", [120.0, 600.0, 3600.0])
def test_the_steps_fit_the_budget(jobs: int, budget: float) -> None:
    """Jobs in the study's order, each given to the worker that is free first, end in time and do not waste it."""
    rates = {name: Rate(10 / (1 + i / 5), 4000.0) for i, name in enumerate("abcdef")}
    per_epoch, seeds = 50, 3
    steps, expected = fitting_steps(budget, 20.0, rates, PHOTOS, per_epoch, seeds, jobs, most=10**9)
    workers = [20.0 + WORKER_START] * jobs
    for share in [1.0] * seeds + [0.5]:
        for rate in rates.values():
            images = PHOTOS.validation * max(1, steps * share / per_epoch) + 2 * PHOTOS.test
            worker = workers.index(min(workers))
            workers[worker] += steps * share / rate.steps + images / rate.images + RUN_OVERHEAD
    end = max(workers) + measuring_seconds(budget)
    assert 0.85 * budget <= end <= 1.02 * budget
    assert sum(expected.values()) == pytest.approx(end, rel=0.08)


def test_a_budget_too_small_names_one_that_is_enough() -> None:
    rates = {"a": Rate(0.01, 10.0)}
    with pytest.raises(ValueError, match="budget 30s is too small for two steps of each run: use ") as error:
        fitting_steps(30.0, 5.0, rates, PHOTOS, 50, 3, 1, 10**9)
    enough = sum(seconds(part) for part in re.findall(r"\d+[hms]", str(error.value).rpartition("use ")[2]))
    assert fitting_steps(enough + 1, 5.0, rates, PHOTOS, 50, 3, 1, 10**9)[0] >= 2


def test_a_batch_fits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planner(size=96).rungs[0].model
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(batches, "memory", lambda device: 10**12)
    assert largest_batch(model, 128, 2, cpu) == 128
    monkeypatch.setattr(batches, "memory", lambda device: 4 * 2 * batches.step_memory(model, 1) * 9)
    assert largest_batch(model, 128, 2, cpu) == 8
    assert largest_batch(model, 128, 2, gpu) == 16, "each GPU has one job"


def test_what_a_plan_says_can_be_resolved_is_what_verdicts_can_resolve() -> None:
    """The bound of three variants whose seeds and images differ just as usual."""
    seeds, test, square = 5, 4000, np.ones((3, 3))
    noise, images = 2 * plan.SEED_DEVIATION**2 * square, plan.DISCORDANT / test * square
    runs, freedom = seeds * square, 2.0 * (seeds - 1) * square
    usual = Comparison(0 * square, runs, noise, freedom, images)
    assert plan.resolution(3, seeds, test) == pytest.approx(usual.half()[0, 1])
    one = Comparison(0 * square, runs, noise + images, freedom, images / 5, folds=5)  # folds differ in both
    assert plan.resolution(3, 1, test, folds=5) == pytest.approx(one.half()[0, 1])
    assert plan.resolution(3, 10, test) < plan.resolution(3, 3, test) < plan.resolution(3, 3, test // 10)


def test_rungs_are_timed_on_this_machine() -> None:
    found = Planner(data.survey(DATA), 2, 1, CPU).with_rungs(SMALL, None, True).timed(60.0, ignore)
    assert len(found.rungs) == 1
    assert 0 < found.rungs[0].seconds < 1


@pytest.mark.usefixtures("timed", "no_page")
def test_a_plan_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    words = BUDGET | {"seeds": 2, "out": tmp_path / "x"}
    folder = compare(DATA, log=lines.append, **words)
    study = Study.read(folder / "study.json")
    assert study.plan is not None
    assert study.steps == study.plan.steps
    assert lines[0] == "plan for 1m00s, one training at a time"
    stored = [json.loads(file.read_text())["recipe"]["steps"] for file in folder.glob("*/experiment.json")]
    assert sorted(stored) == [study.steps // 2, study.steps, study.steps]
    monkeypatch.setattr(Planner, "timed", None)  # no second plan
    trained = Trained()
    compare(DATA, **words, on_event=trained)
    assert trained == []
    compare(DATA, **words | {"attentions": ["uniform"]}, on_event=trained)
    assert trained == [("uniform", 0), ("uniform", 1)]


@pytest.mark.usefixtures("timed")
def test_a_dry_run_shows_the_plan_and_writes_nothing(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(photos), "-a", "softmax", "--threads", "1", "--budget", "60s", "--dry-run"]
    assert cli.main([*words, "--from", "scratch", "--out", str(tmp_path / "x")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan for 1m00s")
    for text in ("\n  images   27 train, ", ", resized to ", "\n  start    from scratch\n", "\n  shows    "):
        assert text in out
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("timed")
def test_images_without_a_recipe_get_a_budget(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "DEFAULT_BUDGET", "1s")
    with pytest.raises(ValueError, match="budget 1s is too small"):
        compare(photos, attentions=["softmax"], threads=1, start="scratch", out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("timed")
def test_a_budget_counts_every_fold(tmp_path: Path) -> None:
    lines: list[str] = []
    compare(DATA, **BUDGET | {"folds": 5, "dry_run": True, "out": tmp_path / "x"}, log=lines.append)
    assert "1 variant × 5 folds ×" in next(line for line in lines if line.startswith("  runs"))
    offer = Offer(seconds=60, image_size=8, narrower=1, seeds=1, folds=5, epochs=3, resolves="something")
    assert "5 folds × 1 seed" in offer.text
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("timed")
def test_the_jobs_of_a_budget_have_its_plan(tmp_path: Path) -> None:
    folder = compare(DATA, **BUDGET | {"seeds": 1, "jobs_file": True, "out": tmp_path / "x"})
    chosen = Study.read(folder / "study.json").plan
    assert chosen is not None
    first = json.loads((folder / "jobs.jsonl").read_text().splitlines()[0])
    assert first["experiment"]["recipe"]["steps"] == chosen.steps
