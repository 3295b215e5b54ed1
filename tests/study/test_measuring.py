"""`Measuring`: every kind of variant, the deadline, and chance in drawing features; without a comparison around it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from linvit import data, metrics
from linvit.progress import ignore, repeated
from linvit.records import Record, Records
from linvit.study import Variant, measuring
from linvit.study.design import named
from linvit.study.jobs import Job
from linvit.study.measuring import Measuring
from linvit.train import architecture, design, start_from

CPU = torch.device("cpu")
SMALL = {"stem": "patch", "patch_size": 2, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32, "batch_size": 16,
         "pad_crop": 0, "epochs": 1}  # fmt: skip
VARIANTS = named([
    Variant(attention="softmax@1+performer-relu:m=4,dwc=3"),
    Variant(attention="linformer:k=8"),
    Variant(attention="performer-exp:m=4", options={"heads": 4, "pool": "cls"}),
    Variant(attention="performer-theta:m=4", options={"patch_size": 4}),
    Variant(attention="uniform"),
])  # fmt: skip
RANDOM = {VARIANTS[0].id, VARIANTS[2].id}


@pytest.fixture(scope="module", autouse=True)
def short():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "LENGTHS", (9, 25))
        patch.setattr(measuring, "ROUNDS", 2)
        patch.setattr(measuring, "peak_memory", lambda *_: Record("peak_memory", 7, "bytes", tags={"batch": 16}))
        yield


@pytest.fixture(scope="module")
def dataset() -> data.Dataset:
    return data.load_data("synthetic:classes=3,images=96,size=8,channels=1")


@pytest.fixture(scope="module")
def jobs(dataset: data.Dataset, tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    """A trained model of each variant."""
    place = tmp_path_factory.mktemp("jobs")
    found = [
        Job(number=i, jobs=len(VARIANTS), variant=v.id, folder=str(place / str(i)),
            experiment=design(dataset, v.attention, 0, **SMALL | v.options))
        for i, v in enumerate(VARIANTS)
    ]  # fmt: skip
    for job in found:
        job.do(dataset, [])
    return found


@pytest.fixture
def measure(dataset: data.Dataset, jobs: list[Job], tmp_path: Path):
    """measure(deadline) → what was said, and all records."""

    def work(deadline: float | None = None, progress: Any = ignore) -> tuple[list[str], list[Record]]:
        base, records = design(dataset, "softmax", 0, **SMALL), Records(tmp_path / "records.jsonl")
        study: Any = SimpleNamespace(variants=VARIANTS)
        said = Measuring(tmp_path, records, dataset, study, jobs, base, CPU, progress, deadline=deadline).all()
        return said, list(records)

    return work


def test_every_variant_has_every_measurement_and_a_curve_of_its_own_shape(measure) -> None:
    said, records = measure()
    assert said == []
    assert [problem for r in records for problem in metrics.problems(r)] == []
    times = [r for r in records if r.metric == "attention_time"]
    lost = {(r.tags["variant"], r.tags["tokens"]): r.tags["refused"] for r in times if r.value is None}
    assert set(lost) == {("linformer:k=8", 4)}  # the tokens of a model with larger patches
    assert "k=8 is more than the 4 tokens" in str(lost["linformer:k=8", 4])
    shapes = {(r.tags.get("variant"), *(r.tags[tag] for tag in ("heads", "head_dim", "layers"))) for r in times}
    assert shapes == {(None, 2, 8, 2), *((v.id, *((4, 4) if v is VARIANTS[2] else (2, 8)), 2) for v in VARIANTS)}
    lengths = {v.id: {r.tags["tokens"] for r in times if r.tags.get("variant") == v.id} for v in VARIANTS}
    assert lengths[VARIANTS[0].id] == {4, 9, 16, 25}
    assert lengths[VARIANTS[2].id] == {5, 10, 17, 26}  # with its class token
    assert {r.tags["variant"] for r in records if r.metric == "break_even_tokens"} == {v.id for v in VARIANTS}
    count = len(records)
    assert measure() == ([], records)
    assert len(records) == count


def test_chance_in_drawing_features_is_measured_where_there_is_any(
    measure, jobs: list[Job], dataset: data.Dataset
) -> None:
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
    """The data's statistics are others; records tell which were used."""
    other = replace(dataset, mean=(0.9,), std=(0.7,))
    start = start_from(jobs[2].folder)
    experiment = design(other, "performer-exp:m=4", 0, start=start, like=architecture(start), epochs=1)
    job = Job(number=0, jobs=1, variant="started", folder=str(tmp_path / "job"), experiment=experiment)
    job.do(other, [])
    seen: list[Any] = []
    real = measuring.trained_error
    monkeypatch.setattr(measuring, "trained_error", lambda model, x: seen.append(x) or real(model, x))
    monkeypatch.setattr(measuring, "redrawn", lambda *args: seen.append(args[3:5]) or [0.5, 0.5])
    monkeypatch.setattr(measuring, "attention_maps", lambda model, x: seen.append(x))
    study: Any = SimpleNamespace(variants=named([Variant(id="started", attention="performer-exp:m=4")]))
    made = Measuring(tmp_path, Records(tmp_path / "records.jsonl"), other, study, [job], experiment, CPU, ignore)
    made.errors()
    made.draws()
    made.examples()
    assert made.failed == []
    sample, statistics, shown = seen
    assert statistics == (list(dataset.mean), list(dataset.std))
    images = other.test.batch(other.test.order(0, 0)[: len(sample)])[0]
    torch.testing.assert_close(sample, data.normalise(images, dataset.mean, dataset.std))
    pixels = torch.from_numpy(np.load(tmp_path / "examples.npz")["images"].transpose(0, 3, 1, 2).copy())
    torch.testing.assert_close(shown, data.normalise(pixels, dataset.mean, dataset.std))


def test_what_a_deadline_leaves_out_is_said_and_made_up_for(measure) -> None:
    said, records = measure(time.monotonic() - 1)
    assert said == [
        f"Memory of {', '.join(v.id for v in VARIANTS)} was left out to keep the budget.",
        "Speed at 4, 9, 16 and 25 tokens was left out to keep the budget.",
        "Distance from softmax of 5 models was left out to keep the budget.",
        "Spread over draws of 2 models was left out to keep the budget.",
        "A look at examples was left out to keep the budget.",
    ]
    assert {r.tags["variant"] for r in records if r.metric == "train_step"} == {v.id for v in VARIANTS}
    assert not [r for r in records if r.metric in ("attention_time", "attention_error", "draw_spread", "examples")]
    said, records = measure(time.monotonic() + 3600)
    assert said == []
    assert {"attention_time", "attention_error", "draw_spread", "examples"} <= {r.metric for r in records}


def test_memory_that_is_not_begun_in_time_is_left_out(measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline passes while the first is measured."""
    now = [0.0]

    def slow(*_: object) -> Record:
        now[0] = 1.0
        time.sleep(0.3)
        return Record("peak_memory", 7, "bytes", tags={"batch": 16})

    monkeypatch.setattr(measuring, "peak_memory", slow)
    monkeypatch.setattr(measuring.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(measuring.time, "monotonic", lambda: now[0])
    said, records = measure(0.1)
    assert said[0] == f"Memory of {', '.join(v.id for v in VARIANTS[1:])} was left out to keep the budget."
    assert [r.tags["variant"] for r in records if r.metric == "peak_memory"] == [VARIANTS[0].id]


def test_what_takes_long_is_told_again() -> None:
    heard: list[tuple[int, int, str]] = []
    with repeated(lambda *said: heard.append(said), every=0.02) as tell:
        time.sleep(0.1)
        assert heard == []  # nothing to repeat
        tell(1, 2, "a")
        while len(heard) < 4:
            time.sleep(0.01)
        tell(2, 2, "b")
    count = len(heard)
    time.sleep(0.1)
    assert len(heard) == count
    assert list(dict.fromkeys(heard)) == [(1, 2, "a"), (2, 2, "b")]


def test_a_listener_that_fails_is_heard_by_who_tells_it() -> None:
    def broken(done: int, total: int, what: str) -> None:
        raise OSError("closed")

    with repeated(broken, every=0.02) as tell:
        for _ in range(2):
            with pytest.raises(OSError, match="closed"):
                tell(1, 2, "a")
            time.sleep(0.1)
