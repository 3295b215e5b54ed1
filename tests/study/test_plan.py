"""A budget becomes a plan: what is chosen, what it says, and that it adds up."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from linvit import cli, data
from linvit.data import Survey
from linvit.models import model_config
from linvit.progress import seconds
from linvit.records import Records
from linvit.report import statistics
from linvit.study import Study, compare, jobs, plan
from linvit.study.plan import Planner, Rung, fitting, largest_batch
from linvit.train.loop import Rate

pytestmark = pytest.mark.usefixtures("short")
DATA = "synthetic:classes=3,images=96,size=8,channels=1"
CPU = torch.device("cpu")
PHOTOS = Survey("photos", 37, 3, 400, train=5300, validation=590, test=1470)


def test_a_start_has_its_own_image_sizes() -> None:
    """Not those of the recipe that was tuned for these images."""
    like = model_config(image_size=64, stem="conv", trunk=(8, 16), pools=2, dim=32, heads=2)

    def sides(images: Survey, size: int | None = None, sizes: bool = True) -> list[int]:
        return [rung.side for rung in Planner(images, 2, 1, CPU, like=like).with_rungs({}, size, sizes).rungs]

    tuned = replace(PHOTOS, name="cifar10", side=32)
    assert sides(tuned) == [64]
    assert sides(PHOTOS) == [128, 64]
    assert sides(PHOTOS, size=48) == [48]
    assert sides(tuned, sizes=False) == [32]  # images that are given as they are


def test_a_size_that_an_attention_cannot_have_is_not_chosen() -> None:
    like = model_config(image_size=224, patch_size=16, dim=32, depth=1, heads=2)
    ladder = Planner(PHOTOS, 2, 1, CPU, like=like)

    def sides(*attentions: str) -> list[int]:
        return [rung.side for rung in ladder.with_rungs({}, None, True, attentions).rungs]

    assert sides("softmax", "linformer:k=32") == [224, 112]
    assert sides("softmax", "linformer:k=64") == [224]
    assert sides("linformer:k=640") == [224, 112]  # nowhere: whoever builds the models says so


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three kinds of large pictures, few of each."""
    rng = np.random.default_rng(0)
    for kind in range(3):
        for i in range(12):
            folder = tmp_path / "photos" / f"kind {kind}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 85, (300 + 10 * i, 420, 3), dtype=np.uint8) + 85 * np.uint8(kind)
            Image.fromarray(pixels).save(folder / f"{i}.jpg")
    return tmp_path / "photos"


def planner(images: Survey = PHOTOS, given: dict | None = None, size: int | None = None, **options) -> Planner:
    """On a core that learns from a thousand of the smallest images a second, and from others by their operations."""
    found = Planner(images, 6, 2, CPU, **options).with_rungs(given or {}, size, True)
    macs = [plan.estimate(rung.model).macs for rung in found.rungs]
    return replace(
        found, rungs=[replace(r, seconds=1e-3 * m / macs[-1]) for r, m in zip(found.rungs, macs, strict=True)]
    )


def test_a_survey_tells_what_is_there_before_anything_is_decoded(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = data.survey(photos)
    whole = data.load_data(photos, image_size=16)
    assert (found.train, found.validation, found.test) == (len(whole.train), len(whole.validation), len(whole.test))
    assert (found.name, found.classes, found.channels) == ("photos", 3, 3)
    assert 350 <= found.side <= 420
    assert data.survey(DATA).side == 8


def test_photos_are_made_small_and_small_images_stay_as_they_are() -> None:
    assert [(rung.side, rung.narrower) for rung in planner().rungs] == list(plan.LADDER)
    small = replace(PHOTOS, side=28)
    assert [(rung.side, rung.narrower) for rung in planner(small).rungs] == [(28, 1), (28, 2), (28, 4)]
    known = replace(PHOTOS, name="cifar10", side=32)
    assert {rung.side for rung in planner(known).rungs} == {32}


def test_what_is_asked_for_is_not_chosen() -> None:
    assert {rung.side for rung in planner(size=96).rungs} == {96}
    for given in ({"dim": 64}, {"size": "nano"}, {"depth": "1"}):
        assert {rung.narrower for rung in planner(given=given).rungs} == {1}
    assert all("batch_size" not in rung.options for rung in planner(given={"batch_size": 17}).rungs)
    assert planner(seeds=7).offer(1e5).seeds == 7


def test_more_time_never_buys_less() -> None:
    found = [planner().offer(60 * minutes) for minutes in (3, 5, 10, 15, 30, 60, 120, 240, 480, 960)]
    for less, more in itertools.pairwise(found):
        assert (more.seeds >= 3) >= (less.seeds >= 3)
        assert more.image_size >= less.image_size or more.seeds > less.seeds
    assert "too early" in found[0].tells
    assert "without proof" in {offer.tells.partition(", ")[2] for offer in found}
    assert (found[-1].image_size, found[-1].seeds >= 3) == (128, True)


def test_time_that_nothing_can_use_is_not_used() -> None:
    found = planner().offer(1e7)
    assert found.epochs <= plan.WHOLE * planner().enough
    assert found.seeds == max(plan.MANY)


def test_few_images_are_seen_often_and_many_at_least_a_few_times() -> None:
    assert planner(replace(PHOTOS, train=500)).enough == plan.MOST
    assert planner(replace(PHOTOS, train=10**6)).enough == plan.FEWEST


@pytest.mark.parametrize("jobs", [1, 2, 8])
@pytest.mark.parametrize("budget", [120.0, 600.0, 3600.0])
def test_the_steps_fit_the_budget(jobs: int, budget: float) -> None:
    """Jobs in the study's order, each given to the worker that is free first, end in time and do not waste it."""
    rates = {name: Rate(10 / (1 + i / 5), 4000.0) for i, name in enumerate("abcdef")}
    per_epoch, seeds = 50, 3
    steps, expected = fitting(budget, 20.0, rates, PHOTOS, per_epoch, seeds, jobs, most=10**9)
    workers = [20.0 + plan.STARTING] * jobs
    for share in [1.0] * seeds + [0.5]:
        for rate in rates.values():
            looks = PHOTOS.validation * max(1, steps * share / per_epoch) + 2 * PHOTOS.test
            worker = workers.index(min(workers))
            workers[worker] += steps * share / rate.steps + looks / rate.images + plan.PER_RUN
    end = max(workers) + plan.measuring(budget)
    assert 0.85 * budget <= end <= 1.02 * budget
    assert sum(expected.values()) == pytest.approx(end, rel=0.08)


def test_a_budget_too_small_names_one_that_is_enough() -> None:
    rates = {"a": Rate(0.01, 10.0)}
    with pytest.raises(ValueError, match=r"too small for two steps of each run: .* would do") as error:
        fitting(30.0, 5.0, rates, PHOTOS, 50, 3, 1, 10**9)
    named = str(error.value).rpartition(": ")[2].removesuffix(" would do")
    minutes = sum(seconds(part + unit) for part, unit in _parts(named))
    assert fitting(minutes + 1, 5.0, rates, PHOTOS, 50, 3, 1, 10**9)[0] >= 2


def _parts(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(\d+)([hms])", text)


def test_a_batch_fits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planner(size=224).rungs[0].model
    monkeypatch.setattr(plan, "MEMORY", 10**12)
    assert largest_batch(model, 128, 2) == 128
    monkeypatch.setattr(plan, "MEMORY", 4 * 2 * plan.step_memory(model, 1) * 9)
    assert largest_batch(model, 128, 2) == 8


SMALL = {"stem": "patch", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 32, "batch_size": 16}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MEASURING", (0.1, 0.5, 1.0))
    monkeypatch.setattr(plan, "STARTING", 0.0)
    monkeypatch.setattr(plan, "PER_RUN", 0.1)


def test_a_plan_is_made_once_and_kept(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[compare.__module__], "_with_deadline", lambda jobs, *_: jobs)  # however busy it is
    said: list[str] = []
    words = {"attentions": ["softmax"], "controls": False, "budget": "9s", "threads": 1, "out": tmp_path / "x", **SMALL}
    folder = compare(DATA, **words, seeds=2, say=said.append)
    study = Study.read(folder / "study.json")
    assert study.plan is not None
    assert study.steps == study.plan.steps
    assert said[0].startswith("plan for 9s")
    stored = [json.loads(file.read_text())["recipe"]["steps"] for file in folder.glob("*/experiment.json")]
    assert sorted(stored) == [study.steps // 2, study.steps, study.steps]

    monkeypatch.setattr(Planner, "timed", None)  # no second plan
    heard: list[str] = []
    compare(DATA, **words, seeds=2, hear=lambda job, event: heard.append(job.variant))
    assert heard == []
    compare(DATA, **words | {"attentions": ["uniform"]}, seeds=2, hear=lambda job, event: heard.append(job.variant))
    assert set(heard) == {"uniform"}


def test_what_cannot_be_begun_in_time_is_left_for_the_next_call(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that has become slower: runs of half the steps would end after the budget."""
    words = {"attentions": ["softmax"], "controls": False, "budget": "9s", "threads": 1, "out": tmp_path / "x", **SMALL}
    with monkeypatch.context() as slower:
        slower.setattr(jobs, "time", SimpleNamespace(time=lambda: math.inf))
        folder = compare(DATA, **words, seeds=1)
    study = Study.read(folder / "study.json")
    assert any(text.startswith("The time was up before 1 of the runs with half") for text in study.warnings)
    half = [r for r in Records(folder / "records.jsonl") if r.metric == "half_accuracy"]
    assert half == []
    compare(DATA, **words, seeds=1)
    assert any(r.metric == "half_accuracy" for r in Records(folder / "records.jsonl"))
    assert not any(text.startswith("The time was up") for text in Study.read(folder / "study.json").warnings)


def test_a_dry_run_says_the_plan_and_writes_nothing(
    photos: Path, tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(photos), "-a", "softmax", "--threads", "1", "--budget", "60s", "--dry-run"]
    assert cli.main([*words, "--out", str(tmp_path / "x")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan for 1m00s")
    assert "made" in out
    assert "tells" in out
    assert not (tmp_path / "x").exists()


def test_images_without_a_recipe_get_a_budget(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "BUDGET", "1s")
    with pytest.raises(ValueError, match="budget 1s is too small"):
        compare(photos, attentions=["softmax"], threads=1, out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_more_seeds_for_some(tmp_path: Path) -> None:
    heard: set[tuple[str, int]] = set()
    words = {"controls": False, "epochs": 1, "threads": 1, "out": tmp_path / "x", **SMALL}
    compare(DATA, attentions=["softmax", "uniform"], seeds=1, **words)
    folder = compare(DATA, attentions=["softmax"], seeds=2, **words,
                     hear=lambda job, event: heard.add((job.variant, job.experiment.seed)))  # fmt: skip
    assert heard == {("softmax", 1)}
    assert Study.read(folder / "study.json").seeds == {"softmax": [0, 1], "uniform": [0]}


@pytest.mark.parametrize("margin", ["0", "-1", "21", "nan"])
def test_a_margin_that_makes_no_sense_is_refused(
    margin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", DATA, "--margin", margin, "--out", str(tmp_path / "x"), "-q"]) == 2
    error = capsys.readouterr().err
    assert "margin" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_rungs_are_models_that_can_be_built() -> None:
    for rung in planner().rungs:
        assert isinstance(rung, Rung)
        assert rung.model.image_size == rung.side


def test_what_a_plan_says_can_be_told_is_what_verdicts_can_tell() -> None:
    """The bound of three variants whose seeds and images differ just as usual."""
    seeds, test, square = 5, 4000, np.ones((3, 3))
    usual = statistics.Comparison(0 * square, seeds * square, 2 * plan.BETWEEN_SEEDS**2 * square,
                                  2.0 * (seeds - 1) * square, plan.DISCORDANT / test * square)  # fmt: skip
    assert plan.resolution(3, seeds, test) == pytest.approx(usual.half()[0, 1])
    assert plan.resolution(3, 10, test) < plan.resolution(3, 3, test) < plan.resolution(3, 3, test // 10)
