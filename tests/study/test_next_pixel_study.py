"""`compare --task next-pixel`: bits decide, fewer are better, and the page says so."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from linvit import cli, metrics, report
from linvit.records import Record, Records
from linvit.report import page
from linvit.report.merit import ACCURACY, BITS
from linvit.study import Variant, compare, measuring

DATA = "synthetic:images=64,size=5,channels=1"
SMALL = {"task": "next-pixel", "dim": 8, "depth": 1, "heads": 2, "mlp_dim": 16, "levels": 4, "batch_size": 16,
         "steps": 4, "threads": 1}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def short(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINVIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(measuring, "LENGTHS", (16, 36))
        patch.setattr(measuring, "ROUNDS", 2)
        patch.setattr(measuring, "peak_memory", lambda *_: Record("peak_memory", 7, "bytes", tags={"batch": 16}))
        patch.setattr(page, "draw_files", lambda specs, folder: None)
        yield


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "run"
    return compare(DATA, attentions=["softmax", "performer-relu:m=8"], seeds=3, out=out, **SMALL)


def test_every_record_is_as_the_table_of_metrics_says(study):
    found = list(Records(study / "records.jsonl"))
    assert [problem for record in found for problem in metrics.problems(record)] == []
    names = {record.metric for record in found}
    assert {"bits_per_dim", "half_bits_per_dim", "image_bits", "samples", "attention_error", "train_step"} <= names
    assert not {"test_accuracy", "confusion", "examples", "draw_spread"} & names
    assert not [text for text in json.loads((study / "study.json").read_text())["warnings"] if "could not" in text]


def test_the_fewest_bits_are_the_best(study):
    with open(study / "results.csv", newline="", encoding="utf-8") as file:
        rows = {row["attention"]: row for row in csv.DictReader(file)}
    bits = {name: float(row["bits_per_dim"]) for name, row in rows.items()}
    assert set(rows) == {"softmax", "performer-relu:m=8", "uniform"}
    records = [
        r for r in Records(study / "records.jsonl") if r.metric == "bits_per_dim" and r.tags["selection"] == "best"
    ]
    for name, value in bits.items():
        assert value == pytest.approx(np.mean([r.value for r in records if r.tags["attention"] == name]))
        assert float(rows[name]["bits_per_dim_low"]) <= value <= float(rows[name]["bits_per_dim_high"])
    real = {name: bits[name] for name in ("softmax", "performer-relu:m=8")}
    best, other = sorted(real, key=lambda name: real[name])
    assert rows[best]["verdict"] == "fewest bits"
    assert float(rows[other]["behind_best"]) == pytest.approx(bits[best] - bits[other])
    summary = report.summarise(report.read(study))
    assert summary.merit is BITS
    assert summary.sampled  # images are a sample, too
    text = (study / "report.html").read_text()
    for words in ("Bits per dimension", "What they draw", "fewest bits"):
        assert words in text
    assert "Test accuracy" not in text
    assert "point" not in " ".join(report.recommend(summary).sentences)


def test_both_orders_are_variants_and_go_on(study, tmp_path):
    orders = [Variant(attention="performer-relu:m=8", task="next-pixel", options={"order": order})
              for order in ("raster", "reversed")]  # fmt: skip
    options = {key: value for key, value in SMALL.items() if key != "task"}
    out = compare(DATA, variants=orders, seeds=1, controls=False, out=tmp_path / "orders", **options)
    found = {r.tags["variant"]: r.value for r in Records(out / "records.jsonl") if r.metric == "bits_per_dim"}
    assert set(found) == {f"performer-relu:m=8, order {order}, next-pixel" for order in ("raster", "reversed")}
    assert len(set(found.values())) == 2
    before = (out / "records.jsonl").read_bytes()
    compare(DATA, variants=orders, seeds=1, controls=False, out=out, **options)
    assert (out / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize(("options", "message"), [
    ({"attentions": ["linformer:k=5"]}, "linformer cannot be causal"),
    ({"folds": 2}, "folds=2 does not go with task next-pixel"),
    ({"budget": "2m", "steps": None}, "budget=2m does not go with task next-pixel"),
    ({"variants": [Variant(attention="softmax")]}, "tasks next-pixel and classification cannot be compared"),
])  # fmt: skip
def test_what_cannot_be_compared(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        compare(DATA, out=tmp_path / "run", **SMALL | {"attentions": ["softmax"]} | options)
    assert not (tmp_path / "run").exists()


def test_the_command_line_names_the_task(tmp_path, capsys):
    words = ["compare", DATA, "--task", "next-pixel", "--dry-run", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "performer-theta:m=32" in said
    assert "linformer" not in said


def test_differences_are_said_in_their_unit():
    assert ACCURACY.within(0.01) == "within 1 point"
    assert ACCURACY.amount(0.005) == "0.5 points"
    assert BITS.within(0.01) == "within 0.01 bits"
    assert BITS.signed(-0.0123) == "−0.012"
    assert ACCURACY.signed(0.0123) == "+1.2"
