"""`Measuring`: every kind of variant, its models, the deadline, and redrawn features, without a comparison."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import specs as every_spec
from studying import SMALL

from linvit import data, metrics
from linvit.execute import DatasetCache
from linvit.models import VisionTransformer, model_config
from linvit.pipeline.design import Designer
from linvit.progress import ignore, repeated
from linvit.records import Record, Records
from linvit.schemas.study import Study, Variant, name_variants
from linvit.study import StudyJob, measuring
from linvit.study.measuring import MeasureStudy, Measuring
from linvit.training.checkpoint import load, load_into, save_config, save_model
from linvit.training.start import start_from

OPTIONS = SMALL | {"patch_size": 2, "depth": 2, "pad_crop": 0, "epochs": 1}
VARIANTS = name_variants(
    [
        Variant(attention="softmax@1+performer-relu:m=4,dwc=3"),
        Variant(attention="linformer:k=8"),
        Variant(attention="performer-exp:m=4", options={"heads": 4, "pool": "cls"}),
        Variant(attention="performer-theta:m=4", options={"patch_size": 4}),
        Variant(attention="uniform"),
    ]
)
RANDOM = {VARIANTS[0].id, VARIANTS[2].id}


def make_study(folder: Path, dataset: data.Dataset, designer: Designer, variants: list[Variant]) -> None:
    study = Study(
        started=0.0,
        dataset=designer.facts(dataset),
        variants=variants,
        seeds={v.id: [0] for v in variants},
        model=designer.base.model,
        recipe=designer.base.recipe,
    )
    study.save(folder)


def trained_job(place: Path, dataset: data.Dataset, number: int, variant: Variant, designer: Designer) -> StudyJob:
    cache = DatasetCache()
    cache.add(dataset)
    experiment = designer.experiment(variant)
    job = StudyJob(number=number, jobs=1, variant=variant.id, folder=str(place), experiment=experiment)
    job.run(cache, lambda event: None)
    return job


@pytest.fixture(scope="module")
def designer(dataset: data.Dataset) -> Designer:
    return Designer(dataset, None, 0, OPTIONS, match=False)


@pytest.fixture(scope="module")
def jobs(dataset: data.Dataset, designer: Designer, tmp_path_factory: pytest.TempPathFactory) -> list[StudyJob]:
    """A trained model of each variant."""
    place = tmp_path_factory.mktemp("jobs")
    return [trained_job(place / str(i), dataset, i, v, designer) for i, v in enumerate(VARIANTS)]


@pytest.fixture
def measure(
    dataset: data.Dataset, designer: Designer, jobs: list[StudyJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[list[str], list[Record]]]:
    """measure(deadline) → the problems, and all records."""
    monkeypatch.setattr(measuring, "LENGTHS", (9, 25))
    make_study(tmp_path, dataset, designer, VARIANTS)

    def run(deadline: float | None = None) -> tuple[list[str], list[Record]]:
        work = MeasureStudy(folder=str(tmp_path), jobs=tuple(jobs), experiment=designer.base)
        problems = Measuring(work, dataset, ignore, deadline).run()
        return problems, list(Records(tmp_path / "records.jsonl"))

    return run


def test_every_variant_has_every_measurement_and_a_curve_of_its_own_shape(measure) -> None:
    problems, records = measure()
    assert problems == []
    assert [problem for r in records for problem in metrics.problems(r)] == []
    times = [r for r in records if r.metric == "attention_time"]
    lost = {(r.tags["variant"], r.tags["tokens"]): r.tags["refused"] for r in times if r.value is None}
    assert set(lost) == {("linformer:k=8", 4)}  # the tokens of a model with larger patches
    assert "k=8 is more than tokens=4" in str(lost["linformer:k=8", 4])
    shapes = {(r.tags.get("variant"), *(r.tags[tag] for tag in ("heads", "head_dim", "layers"))) for r in times}
    assert shapes == {(None, 2, 8, 2), *((v.id, *((4, 4) if v is VARIANTS[2] else (2, 8)), 2) for v in VARIANTS)}
    lengths = {v.id: {r.tags["tokens"] for r in times if r.tags.get("variant") == v.id} for v in VARIANTS}
    assert lengths[VARIANTS[0].id] == {4, 9, 16, 25}
    assert lengths[VARIANTS[2].id] == {5, 10, 17, 26}  # with its class token
    assert {r.tags["variant"] for r in records if r.metric == "break_even_tokens"} == {v.id for v in VARIANTS}
    assert measure() == ([], records)


def test_redrawn_features_are_evaluated_where_there_are_any(measure, jobs: list[StudyJob], dataset) -> None:
    files = [file for job in jobs for file in Path(job.folder).rglob("*") if file.is_file()]
    before = [file.read_bytes() for file in files]
    _, records = measure()
    assert [file.read_bytes() for file in files] == before
    for metric in ("draw_spread", "redrawn_accuracy"):
        found = {r.tags["variant"]: r for r in records if r.metric == metric}
        assert set(found) == RANDOM
        assert {(r.n, r.tags["seed"], r.tags["draws"]) for r in found.values()} == {(len(dataset.test), 0, 5)}
        assert all(r.value is not None and 0 <= r.value <= 1 for r in found.values())


def test_models_that_started_see_images_as_their_start_did(dataset, jobs, tmp_path, monkeypatch) -> None:
    """The data's statistics are others."""
    other = replace(dataset, mean=(0.9,), std=(0.7,))
    start = start_from(jobs[2].folder)
    variant = Variant(id="started", attention="performer-exp:m=4", start=start)
    designer = Designer(other, None, 0, {"epochs": 1}, match=False, start=start)
    job = trained_job(tmp_path / "job", other, 0, variant, designer)
    make_study(tmp_path, other, designer, [variant])
    seen: list[Any] = []
    real = measuring.trained_error
    monkeypatch.setattr(measuring, "trained_error", lambda model, x: seen.append(x) or real(model, x))
    monkeypatch.setattr(measuring, "redrawn", lambda *args: seen.append(args[3:5]) or [0.5, 0.5])
    monkeypatch.setattr(measuring, "attention_maps", lambda model, x: seen.append(x))
    work = MeasureStudy(folder=str(tmp_path), jobs=(job,), experiment=designer.base)
    made = Measuring(work, other, ignore)
    made.errors()
    made.redraws()
    made.examples()
    assert made.problems == []
    sample, statistics, shown = seen
    assert statistics == (list(dataset.mean), list(dataset.std))
    images = other.test.batch(other.test.order(0, 0)[: len(sample)])[0]
    torch.testing.assert_close(sample, data.normalise(images, dataset.mean, dataset.std))
    pixels = torch.from_numpy(np.load(tmp_path / "examples.npz")["images"].transpose(0, 3, 1, 2).copy())
    torch.testing.assert_close(shown, data.normalise(pixels, dataset.mean, dataset.std))


@torch.no_grad()
def test_a_built_model_takes_other_weights_as_if_it_were_new(dataset: data.Dataset, tmp_path: Path) -> None:
    """Of whatever attention: features, random or learned, are those of the weights, and redraws those of their seed."""
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for spec in every_spec():
        shape = OPTIONS | {"image_size": 8, "channels": 1, "classes": 3, "depth": 1, "attention": spec}
        shape = {key: value for key, value in shape.items() if key not in ("batch_size", "pad_crop", "epochs")}
        old, new = (model_config(**shape, seed=seed) for seed in (0, 1))
        save_config(tmp_path, new, dataset)
        save_model(tmp_path, VisionTransformer(new))
        model, fresh = VisionTransformer(old), load(tmp_path)
        model(x)
        assert load_into(model, tmp_path) is model
        assert (model.config, model.about, model.training) == (fresh.config, fresh.about, False)
        assert torch.equal(model(x), fresh(x)), spec
        model.redraw(-1)
        fresh.redraw(-1)
        assert torch.equal(model(x), fresh(x)), spec
    other = VisionTransformer(model_config(**shape | {"dim": 32}))
    with pytest.raises(ValueError, match=r"model.safetensors does not fit its config.json"):
        load_into(other, tmp_path)


def test_what_a_deadline_leaves_out_is_a_limitation_and_is_measured_by_the_next_call(measure) -> None:
    problems, records = measure(time.monotonic() - 1)
    assert problems == [
        "Speed was left out to keep the budget.",
        f"Memory of {', '.join(v.id for v in VARIANTS)} was left out to keep the budget.",
        "Speed at 4, 9, 16 and 25 tokens was left out to keep the budget.",
        "Distance from softmax of 5 models was left out to keep the budget.",
        "Spread over redrawn features of 2 models was left out to keep the budget.",
        "Selecting examples was left out to keep the budget.",
    ]
    late = {"train_step", "attention_time", "attention_error", "draw_spread", "examples"}
    assert not [r for r in records if r.metric in late]
    problems, records = measure(time.monotonic() + 3600)
    assert problems == []
    assert late <= {r.metric for r in records}


def test_memory_that_is_not_started_in_time_is_left_out(measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline passes while the first is measured."""
    now = [0.0]

    def slow(*_: object) -> Record:
        now[0] = 1.0
        time.sleep(0.3)
        return Record("peak_memory", 7, "bytes", tags={"batch": 16})

    monkeypatch.setattr(measuring, "peak_memory", slow)
    monkeypatch.setattr(measuring.Measuring, "pace", 1e-6)
    monkeypatch.setattr(measuring.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(measuring.time, "monotonic", lambda: now[0])
    problems, records = measure(0.1)
    assert problems[0] == f"Memory of {', '.join(v.id for v in VARIANTS[1:])} was left out to keep the budget."
    assert [r.tags["variant"] for r in records if r.metric == "peak_memory"] == [VARIANTS[0].id]


def test_progress_of_long_work_is_repeated() -> None:
    seen: list[tuple[int, int, str]] = []
    with repeated(lambda *progress: seen.append(progress), every=0.02) as tell:
        time.sleep(0.1)
        assert seen == []  # nothing to repeat
        tell(1, 2, "a")
        while len(seen) < 4:
            time.sleep(0.01)
        tell(2, 2, "b")
    count = len(seen)
    time.sleep(0.1)
    assert len(seen) == count
    assert list(dict.fromkeys(seen)) == [(1, 2, "a"), (2, 2, "b")]


def test_an_error_of_a_progress_callback_is_the_callers() -> None:
    def broken(done: int, total: int, what: str) -> None:
        raise OSError("closed")

    with repeated(broken, every=0.02) as tell:
        for _ in range(2):
            with pytest.raises(OSError, match="closed"):
                tell(1, 2, "a")
            time.sleep(0.1)
