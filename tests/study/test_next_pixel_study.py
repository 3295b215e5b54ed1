"""`compare --task next-pixel`: bits decide, fewer are better, and the page says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from studying import rows, shortened

from linvit import cli, metrics, report
from linvit.ledger import open_ledger
from linvit.records import Records
from linvit.report.merit import ACCURACY, BITS
from linvit.study import Variant, compare

DATA = "synthetic:images=64,size=5,channels=1"
SHAPE = {"dim": 8, "depth": 1, "heads": 2, "mlp_dim": 16, "levels": 4, "batch_size": 16, "steps": 4, "threads": 1}
WORDS = SHAPE | {"task": "next-pixel"}
ATTENTIONS = ["softmax", "performer-relu:m=8"]


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with shortened() as patch:
        patch.setenv("LINVIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        return compare(DATA, attentions=ATTENTIONS, seeds=3, out=tmp_path_factory.mktemp("pixels") / "run", **WORDS)


def test_every_record_is_as_the_table_of_metrics_says(pixels: Path) -> None:
    found = list(Records(pixels / "records.jsonl"))
    assert [problem for record in found for problem in metrics.problems(record)] == []
    names = {record.metric for record in found}
    assert {"bits_per_dim", "half_bits_per_dim", "image_bits", "samples", "attention_error", "train_step"} <= names
    assert not {"test_accuracy", "confusion", "examples", "draw_spread"} & names
    assert not [text for text in json.loads((pixels / "study.json").read_text())["warnings"] if "could not" in text]


def test_the_fewest_bits_are_the_best(pixels: Path) -> None:
    table = {row["attention"]: row for row in rows(pixels)}
    assert set(table) == {*ATTENTIONS, "uniform"}
    bits = {name: float(row["bits_per_dim"]) for name, row in table.items()}
    for name, value in bits.items():
        records = open_ledger(pixels).find("bits_per_dim", selection="best", attention=name)
        assert value == pytest.approx(np.mean([r.value for r in records]))
        assert float(table[name]["bits_per_dim_low"]) <= value <= float(table[name]["bits_per_dim_high"])
    best, other = sorted(ATTENTIONS, key=lambda name: bits[name])
    assert table[best]["verdict"] == "fewest bits"
    assert float(table[other]["behind_best"]) == pytest.approx(bits[best] - bits[other])
    result = report.study_result(pixels)
    assert result.summary.merit is BITS
    assert result.summary.sampled  # images are a sample, too
    assert "point" not in " ".join([*result.sentences, *(text for _, text in result.answer)])
    page = (pixels / "report.html").read_text()
    assert "Bits per dimension" in page
    assert "Test accuracy" not in page


@pytest.mark.usefixtures("no_page")
def test_both_orders_are_variants_and_resume(tmp_path: Path) -> None:
    orders = [
        Variant(attention="performer-relu:m=8", task="next-pixel", options={"order": order})
        for order in ("raster", "reversed")
    ]
    words = SHAPE | {"variants": orders, "seeds": 1, "controls": False, "measured": False, "out": tmp_path / "orders"}
    out = compare(DATA, **words)
    found = {r.tags["variant"]: r.value for r in Records(out / "records.jsonl") if r.metric == "bits_per_dim"}
    assert set(found) == {f"performer-relu:m=8, order {order}, next-pixel" for order in ("raster", "reversed")}
    assert len(set(found.values())) == 2
    before = (out / "records.jsonl").read_bytes()
    compare(DATA, **words)
    assert (out / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attentions": ["linformer:k=5"]}, "linformer cannot be causal"),
        ({"folds": 2}, "folds=2 cannot be combined with task next-pixel"),
        ({"budget": "2m", "steps": None}, "budget=2m cannot be combined with task next-pixel"),
        ({"variants": [Variant(attention="softmax")]}, "tasks next-pixel and classification cannot be compared"),
    ],
)
def test_what_cannot_be_compared(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(DATA, out=tmp_path / "run", **WORDS | {"attentions": ["softmax"]} | options)
    assert not (tmp_path / "run").exists()


def test_the_command_line_names_the_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", DATA, "--task", "next-pixel", "--dry-run", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "performer-theta:m=32" in out
    assert "linformer" not in out


def test_differences_are_in_their_unit() -> None:
    assert ACCURACY.within(0.01) == "within 1 point"
    assert ACCURACY.amount(0.005) == "0.5 points"
    assert BITS.within(0.01) == "within 0.01 bits"
    assert BITS.signed(-0.0123) == "−0.012"
    assert ACCURACY.signed(0.0123) == "+1.2"
