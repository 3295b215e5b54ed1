"""Time over tokens: what is drawn, and what is said of what is not."""

from __future__ import annotations

import altair as alt
import pytest
from synthetic import record, study
from test_report import build, text_of

from linvit import report
from linvit.records import Records
from linvit.report import benchmarks, charts, curves

PERFORMER = "performer-exp:m=64"
SHAPE = {"heads": 4, "head_dim": 16, "prefix": 0}


def made(folder, attentions=(PERFORMER,), **shape):
    """A study whose softmax is timed beside the variants, three layers of a millisecond each."""
    study(folder, attentions, artefacts=False)
    Records(folder / "records.jsonl").append(
        record("attention_time", 3e-3 * tokens, baseline="softmax", layers=3, tokens=tokens, mode=mode, **SHAPE | shape)
        for mode in ("forward", "both") for tokens in (64, 4096)
    )  # fmt: skip
    return folder


def drawn(folder):
    return charts.scaling(report.summarise(report.read(folder)), "forward")


def test_softmax_is_drawn_where_it_is_no_variant(tmp_path):
    chart = drawn(made(tmp_path))
    assert chart is not None
    assert chart.beside == "softmax (for comparison)"
    grey = curves.beside(report.summarise(report.read(tmp_path)), "forward")
    assert [(row["tokens"], row["seconds"]) for row in grey] == [(64, 0.064), (4096, 4.096)]  # of one layer
    alt.LayerChart.from_dict(chart.page(), validate=True)
    assert "softmax (for comparison)" in text_of(build(tmp_path))


@pytest.mark.parametrize(("heads", "beside"), [(4, ""), (8, curves.BESIDE)])
def test_softmax_is_drawn_once(tmp_path, heads, beside):
    """As a variant; another line only if that has other heads than what all are compared with."""
    made(tmp_path, ("softmax", PERFORMER))
    Records(tmp_path / "records.jsonl").append(
        [record("attention_time", 1e-3, attention="softmax", tokens=64, mode="forward", **SHAPE | {"heads": heads})]
    )
    chart = drawn(tmp_path)
    assert chart is not None
    assert chart.beside == beside


def test_what_is_not_timed_is_named_with_the_reason(tmp_path):
    study(tmp_path, ("softmax", PERFORMER), artefacts=False)
    why = "spec 'x': k=16 is more than the 4 tokens there are to project"
    Records(tmp_path / "records.jsonl").append([
        record("attention_time", None, attention=PERFORMER, tokens=4, mode="forward", refused=why),
        record("attention_time", None, attention="linformer:k=16", tokens=4, mode="forward", refused=why),
        record("test_accuracy", 0.9, attention="other", seed=0, selection="best"),
    ])  # fmt: skip
    words = text_of(build(tmp_path))
    reason = "k=16 is more than the 4 tokens there are to project"
    assert f"{PERFORMER} could not be timed at 4 tokens: {reason}." in words
    assert f"Not timed: linformer:k=16 ({reason})." in words
    assert "Not timed: other (not measured)." in words


def test_what_attentions_learned_is_drawn_by_layer(tmp_path):
    study(tmp_path, ("softmax", "performer-theta:m=32"))
    summary = report.summarise(report.read(tmp_path))
    rows = curves.learned(summary)["tau"]
    assert {(row["variant"], row["layer"]) for row in rows} == {("performer-theta:m=32", f"layer {i}") for i in (0, 2)}
    assert [row["epoch"] for row in rows if row["marked"]] == [30, 30]
    logs = [log for log in summary.study.logs.values() if "learned.2.tau" in log[0]]
    last = [row["value"] for row in rows if row["marked"] and row["layer"] == "layer 2"]
    assert last == pytest.approx([sum(log[-1]["learned.2.tau"] for log in logs) / 3])
    assert curves.unlearned(summary) == ["softmax"]
    alt.LayerChart.from_dict(charts.learned(summary, "tau", rows).page(), validate=True)
    assert "τ of each layer" in text_of(build(tmp_path))


def test_layers_are_shown_and_a_broken_file_of_them_is_not(tmp_path):
    study(tmp_path, ("softmax", PERFORMER))
    assert "50,240 parameters" in text_of(build(tmp_path))
    (tmp_path / "models.json").write_text("[")
    assert "50,240 parameters" not in text_of(build(tmp_path))


def test_a_cross_says_what_the_attention_met_beyond_its_last_length():
    """Not what it could not do at a lesser one."""
    sizes = {"mode": "forward", "batch": 1, "heads": 2, "head_dim": 8}
    refused = {
        ("softmax", 32): "it would take about 27 s, more than 20 s", ("linformer:k=64", 16): "k=64 is more than 16",
        ("performer-relu", 64): "it takes more than 4 GiB", ("efficient", 64): "it takes more than 4 GiB",
    }  # fmt: skip
    timed = {("softmax", 16), *((name, n) for name in ("performer-relu", "efficient") for n in (16, 32)),
             *(("linformer:k=64", n) for n in (64, 128))}  # fmt: skip
    records = [record("attention_time", 1e-3 * n, attention=name, tokens=n, **sizes) for name, n in sorted(timed)]
    records += [record("attention_time", None, attention=name, tokens=n, refused=why, **sizes)
                for (name, n), why in refused.items()]  # fmt: skip
    said = " ".join(benchmarks.speed_to_the_limit(records).to_dict()["title"]["subtitle"])
    assert "A cross: the next length takes more than 20 s (softmax) or takes more than 4 GiB (the others)." in said
    assert "more than 16" not in said
