"""What a study's page shows of its records: rows, curves, images and limitations."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from synthetic import ATTENTIONS, document, record, study, variant

from linvit import report
from linvit.records import Records
from linvit.report import benchmarks, images, scaling, study_charts

PERFORMER = "performer-exp:m=64"
SHAPE = {"heads": 4, "head_dim": 16, "prefix": 0}


def summary_of(folder):
    return report.study_result(folder).summary


def names_of(layer):
    """What a layer writes next to its marks."""
    return [row["variant"] for row in layer.data.values] if "text" in layer.encoding.to_dict() else []


def add(folder, *records):
    Records(folder / "records.jsonl").append(records)
    return folder


def test_limitations(tmp_path):
    folder = study(tmp_path, artefacts=False)
    add(
        folder,
        record("parameters", 400_000, attention="linformer:k=16"),
        record("test_accuracy", 0.97, attention="softmax", seed=9, selection="best", n=360),
    )
    found = " ".join(summary_of(folder).limitations)
    assert "Parameters are not matched: linformer:k=16 has 99%" in found
    assert "same seeds" in found
    assert "versions of linvit" not in found
    assert "verdicts hold for these test images only" in found


def test_like_must_be_compared_with_like(tmp_path):
    """Speeds of another version than the accuracies are fair; speeds of two versions are not."""
    folder = study(tmp_path, artefacts=False)
    speeds = [r for r in Records(folder / "records.jsonl") if r.metric == "train_step"]
    add(folder, *(replace(r, commit="other", time=r.time + 1) for r in speeds))
    assert "versions of linvit" not in " ".join(summary_of(folder).limitations)
    add(folder, replace(speeds[0], time=speeds[0].time + 2))
    both = ", ".join(sorted([speeds[0].commit, "other"]))
    assert f"different versions of linvit: {both}" in " ".join(summary_of(folder).limitations)


def test_a_mean_is_over_the_seeds(tmp_path):
    folder = study(tmp_path, artefacts=False, speeds=False)
    add(folder, *(record("attention_error", (s + 1) / 4, attention="linformer:k=16", seed=s) for s in range(3)))
    assert summary_of(folder)["linformer:k=16"].get("attention_error") == 0.5


def test_variants_are_distinguished_by_their_ids(tmp_path):
    """Two variants of one attention, a printed number and a failed run: each has a row, a label and its own verdict."""
    printed = variant("softmax", id="paper", label="published", column="published", published={"test_accuracy": 0.999})
    variants = [variant("softmax", label="lr 0.1"), variant("softmax", id="slow", label="lr 0.2"), printed]
    folder = study(tmp_path, ("softmax",), seeds=range(5), artefacts=False, variants=variants)
    tags = {"attention": "softmax", "selection": "best"}
    slow = [record("test_accuracy", 0.5, n=360, seed=s, **tags).tagged(variant="slow") for s in range(4)]
    failed = record("failed", None, variant="slow", seed=4, why="ended by SIGKILL")
    add(folder, *slow, failed, record("test_accuracy", 0.999, n=360, **tags).tagged(variant="paper"))
    result = report.study_result(folder)
    found = {row["variant"]: row for row in result.rows()}
    verdicts = {"softmax": "most accurate", "slow": "worse", "paper": "published"}
    assert {name: row["verdict"] for name, row in found.items()} == verdicts
    assert found["paper"]["test_accuracy"] == 0.999
    assert result.recommendation.use.startswith("lr 0.1: ")
    assert "lr 0.2 failed: seed 4: ended by SIGKILL. The same command retries it." in result.limitations


def test_many_classes_and_large_photos(tmp_path):
    """Noise is the worst case for the size of the page."""
    names = [f"class {i}" for i in range(60)]
    many = tuple(f"performer-exp:m={8 * i}" for i in range(1, 10))
    result = report.build(study(tmp_path, many, classes=names, side=224, channels=3), figures=False)
    assert result.page.stat().st_size < 5_000_000
    assert "data:image/jpeg" in result.page.read_text(encoding="utf-8")
    sections = result.sections()
    assert not sections["confusion"].drawn
    assert [(table.title, len(table.rows)) for table in sections["confusion"].tables] == [(name, 8) for name in many]
    assert "The 20 hardest of 60 classes." in sections["classes"].drawn[0].note


def test_a_grid_too_fine_to_draw_is_left_out(copy):
    with np.load(copy / "illustration.npz") as file:
        arrays = dict(file) | {"grid": np.array([112, 112])}
    np.savez(copy / "illustration.npz", **arrays)
    found = images.illustration(summary_of(copy))
    assert found["original"]
    assert not found["patches"]


def test_recovery_from_a_start_and_redrawn_features(tmp_path):
    folder = study(tmp_path, ATTENTIONS[:2])
    usual = report.study_result(folder).sections()["learning"].drawn[0]
    assert (usual.title, usual.note) == ("Validation accuracy", "")
    for place in folder.glob("run-*/log.jsonl"):
        place.write_text('{"epoch": 0.0, "step": 0, "validation_accuracy": 0.31}\n' + place.read_text())
    add(
        folder,
        *(record("start_accuracy", 0.31, attention=name, seed=0) for name in ATTENTIONS[:2]),
        record("draw_spread", 0.012, attention=PERFORMER, seed=0, draws=5),
        record("redrawn_accuracy", 0.876, attention=PERFORMER, seed=0, draws=5),
    )
    result = report.study_result(folder)
    chart = result.sections()["learning"].drawn[0]
    assert (chart.name, chart.title) == ("learning-validation-accuracy", "Recovery from the start")
    points = next(iter(chart.page()["datasets"].values()))
    assert {row["mean"] for row in points if row["step"] == 0} == {0.31}
    assert max(row["step"] for row in points) == 630
    details = result.details[0].texts[1]
    assert details["Std. dev. over feature draws"] == "1.2\xa0%"
    assert details["With redrawn features"] == "87.6\xa0%"
    assert result.table.texts[0]["Before training"] == "31.0\xa0%"


def test_bubbles_have_the_area_of_the_memory(built):
    chart = built.sections()["front"].drawn[0]
    spec = chart.page()
    (circle,) = [layer for layer in spec["layer"] if layer["mark"]["type"] == "circle"]
    memory = [row["memory"] for rows in spec["datasets"].values() for row in rows if "memory" in row]
    size = circle["encoding"]["size"]
    assert (size["field"], size["scale"]["range"][0]) == ("memory", 0)
    assert size["scale"]["domain"] == [0, max(memory)]  # from zero, so that areas are in proportion
    assert "memory" in chart.note


def test_maps_share_one_scale():
    """A map that is nearly flat looks nearly flat; one with a single peak is opaque there."""

    def alpha(grid):
        file = io.BytesIO(base64.b64decode(images.heat(grid).partition(",")[2]))
        return np.asarray(Image.open(file))[..., 3]

    flat, peak = np.full((4, 4), 1 / 16), np.zeros((4, 4))
    flat[0, 0], peak[0, 0] = 1.01 / 16, 1.0
    assert alpha(flat).max() < 5
    assert alpha(peak)[0, 0] > 200
    assert alpha(peak)[1:].max() == 0


@pytest.mark.parametrize(
    ("attentions", "heads", "name"),
    [
        ((PERFORMER,), 4, "softmax (for comparison)"),
        (("softmax", PERFORMER), 4, ""),
        (("softmax", PERFORMER), 8, "softmax (for comparison)"),
    ],
)
def test_the_baseline_is_drawn_once(tmp_path, attentions, heads, name):
    """As a variant; as a line of its own only if no variant has its shape."""
    study(tmp_path, attentions, artefacts=False)
    timed = {"baseline": "softmax", "layers": 3, "mode": "forward"} | SHAPE
    add(tmp_path, *(record("attention_time", 3e-3 * n, tokens=n, **timed) for n in (64, 4096)))
    own = record("attention_time", 1e-3, attention="softmax", tokens=64, mode="forward", **SHAPE | {"heads": heads})
    add(tmp_path, *([own] if "softmax" in attentions else []))
    summary = summary_of(tmp_path)
    rows = scaling.reference(summary, "forward")
    assert {row["variant"] for row in rows} == ({name} if name else set())
    assert [(row["tokens"], row["seconds"]) for row in rows] == ([(64, 0.064), (4096, 4.096)] if name else [])
    names = [text for layer in scaling.chart(summary, "forward").layers for text in names_of(layer)]
    assert names == ([name] if name else [])


def test_what_is_not_timed_is_named_with_the_reason(tmp_path):
    variants = [variant(name) for name in ("softmax", PERFORMER, "linformer:k=16", "other")]
    study(tmp_path, ("softmax", PERFORMER), artefacts=False, variants=variants)
    why = "spec 'x': k=16 is more than tokens=4"
    add(
        tmp_path,
        *(
            record("attention_time", None, attention=name, tokens=4, mode="forward", refused=why)
            for name in (PERFORMER, "linformer:k=16")
        ),
    )
    summary, reason = summary_of(tmp_path), "k=16 is more than tokens=4"
    assert scaling.partly_timed(summary) == [f"{PERFORMER} could not be timed at 4 tokens: {reason}."]
    assert scaling.not_timed(summary) == {"linformer:k=16": reason, "other": "not measured"}


def test_learned_parameters_and_layers(built):
    chart = next(chart for chart in study_charts.learned(built.summary) if chart.name == "learned-tau")
    rows = chart.layers[0].data.values
    layers = {("performer-theta:m=32", f"layer {i}") for i in (0, 2)}
    assert {(row["variant"], row["layer"]) for row in rows} == layers
    assert [row["epoch"] for row in rows if row["marked"]] == [30, 30]
    logs = [log for log in built.summary.evidence.logs.values() if "learned.2.tau" in log[0]]
    last = [row["value"] for row in rows if row["marked"] and row["layer"] == "layer 2"]
    assert last == pytest.approx([sum(log[-1]["learned.2.tau"] for log in logs) / 4])
    assert list(chart.legend) == ["performer-theta:m=32"]  # no other variant has learned parameters
    tables = built.sections()["models"].tables
    assert [table.title.partition(": ")[2] for table in tables] == ["50,240 parameters"] * 6


def test_a_cross_says_why_the_next_length_was_not_measured():
    """Not what could not be done at a smaller one."""
    sizes = {"mode": "forward", "batch": 1, "heads": 2, "head_dim": 8}
    refused = {
        ("softmax", 32): "it would take about 27 s, more than 20 s",
        ("linformer:k=64", 16): "k=64 is more than 16",
        ("performer-relu", 64): "it takes more than 4 GiB",
        ("efficient", 64): "it takes more than 4 GiB",
    }
    timed = {
        ("softmax", 16),
        *((name, n) for name in ("performer-relu", "efficient") for n in (16, 32)),
        *(("linformer:k=64", n) for n in (64, 128)),
    }
    records = [record("attention_time", 1e-3 * n, attention=name, tokens=n, **sizes) for name, n in sorted(timed)]
    records += [
        record("attention_time", None, attention=name, tokens=n, refused=why, **sizes)
        for (name, n), why in refused.items()
    ]
    said = " ".join(benchmarks.speed_to_the_limit(records).to_dict()["title"]["subtitle"])
    assert "A cross: the next length takes more than 20 s (softmax) or takes more than 4 GiB (the others)." in said
    assert "more than 16" not in said


def test_advice_is_drawn(tmp_path):
    rows = [{"attention": PERFORMER, "tokens": n, "ratio": n / 512} for n in (64, 1024)]
    spec = benchmarks.advice({"inference": rows}, {"inference": rows[:1]}, [PERFORMER], 196, "One line.").to_dict()
    (panel,) = spec["hconcat"]
    assert (panel["title"]["text"], spec["title"]["subtitle"]) == ("inference", ["One line."])
    assert len(panel["layer"]) == 4


def test_what_each_part_of_a_budget_brought(tmp_path):
    """Only with a budget; the frozen features stand alone where nothing was trained."""
    folder = study(tmp_path, ATTENTIONS[:2])
    assert "What the time brought" not in [table.title for table in report.study_result(folder).details]
    add(folder, *(record("frozen_accuracy", 0.5 + 0.1 * i, attention=n, seed=0) for i, n in enumerate(ATTENTIONS[:2])))
    spent = {"planning": 20.0, "frozen features": 40.0, "training": 90.0, "measuring": 25.0, "all": 180.0}
    path = folder / "study.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": spent, "steps": 100}))
    table = report.study_result(folder).details[0]
    assert table.title == "What the time brought"
    rows = {row["Step"]: row for row in table.texts}
    assert [row["Time"] for row in rows.values()] == ["20s", "40s", "1m30s", "25s"]
    assert rows["Frozen features, fitted heads"][ATTENTIONS[0]] == "50.0\xa0%"
    reached = {row["Variant"]: row["Test accuracy"] for row in report.study_result(folder).table.texts}
    assert {name: rows["Training"][name] for name in reached} == reached
    spent.pop("training")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": spent, "steps": 0}))
    rows = {row["Step"]: row for row in report.study_result(folder).details[0].texts}
    assert "Training" not in rows
    assert rows["Frozen features, fitted heads"][ATTENTIONS[0]] != "50.0\xa0%", (
        "its tested accuracy is that of the table"
    )


def test_an_incomplete_seed_does_not_hide_the_others(tmp_path):
    """Neither if it is the first to be read."""
    document(("softmax", "uniform"), seeds=(0, 1), folds=2).save(tmp_path)
    records, truth = [], np.random.default_rng(0).random((2, 2, 10)) < 0.7
    for i, attention in enumerate(("softmax", "uniform")):
        for seed, fold in ((0, 0), (0, 1), (1, 0), (1, 1)):
            if (i, seed, fold) == (0, 0, 1):
                continue
            rows, name = np.arange(fold, 10, 2), f"{attention}-{seed}-{fold}.npz"
            labels = rows % 3
            predicted = np.where(truth[i, seed, rows], labels, 3)
            np.savez(tmp_path / name, rows=rows, labels=labels, predicted=predicted)
            records.append(record("predictions", None, artefact=name, attention=attention, seed=seed, fold=fold))
    found = report.read_study(add(tmp_path, *records)).right
    assert {name: sorted(of) for name, of in found.items()} == {"softmax": [1], "uniform": [0, 1]}
    for i, attention in enumerate(("softmax", "uniform")):
        np.testing.assert_array_equal(found[attention][1], truth[i, 1])
