"""`linvit advise` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from linvit import cli
from linvit.cli.advise import chart
from linvit.measure import advice, features
from linvit.measure.advice import Workload
from linvit.metrics import problems
from linvit.records import Records
from linvit.site import Site
from linvit.study.advising import advise

TINY = ["17", "--size", "nano", "--patch", "4", "--batch", "2", "-a", "performer-exp:m=8", "-a", "linformer:k=4"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Few small points, a cache for this file, and no studies."""
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "advice"))
    monkeypatch.chdir(tmp_path)
    few = [
        (Workload(Site(h, 8, n, prefix=1).at(n), b), m) for n, h, b, m in ((10, 1, 1, 8), (26, 2, 2, 16), (50, 1, 3, 8))
    ]
    monkeypatch.setattr(advice, "points", lambda: few)
    monkeypatch.setattr(features, "COUNTS", (8, 16))


def test_text_records_and_a_chart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    assert cli.main(["advise", *TINY, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("a model of size nano with 4 × 4 patches and CLS: 17 tokens, 4 layers, 4 heads of 16\n")
    for words in (
        "attention's share of the time",
        "\nperformer-exp:m=8 ",
        "\nlinformer:k=4 ",
        "performer-hyp needs ",
        "uniform attention has",
        "σ = 1",
        "\n  linvit compare path/to/images ",
    ):
        assert words in printed
    assert "\nStay with softmax: " in printed or "\nTry " in printed
    assert {path.name for path in out.glob("[!.]*")} == {"records.jsonl", "advice.json", "advice.html", "advice.png"}
    assert (out / "advice.png").read_bytes().startswith(b"\x89PNG")
    assert "<script src=" not in (out / "advice.html").read_text()
    records = list(Records(out / "records.jsonl"))
    assert {"attention_time", "break_even_tokens", "attention_error", "train_step"} <= {r.metric for r in records}
    assert [problem for record in records for problem in problems(record)] == []


def test_json_and_quiet_and_the_second_time_nothing_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["advise", *TINY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"recommendation", "reason", "command", "share", "attentions", "features", "studies"} <= set(found)
    monkeypatch.setattr(advice, "race", lambda *given, **options: pytest.fail("measured again"))
    assert cli.main(["advise", *TINY, "--quiet"]) == 0
    assert capsys.readouterr() == (found["recommendation"] + "\n", "")


def test_the_chart_shows_what_it_is_about() -> None:
    """Fewer tokens than those of any point: the dashed line and the dots are within the axis."""
    given = {"attentions": ["performer-exp:m=8"], "size": "nano", "patch": 4, "batch": 2}
    drawn = chart(advise(4, **given)).to_dict()
    assert {
        layer["encoding"]["x"]["scale"]["domain"][0]
        for panel in drawn["hconcat"]
        for layer in panel["layer"]
        if "scale" in layer["encoding"].get("x", {})
    } == {4}


def test_one_token_is_not_plural(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", "1", *TINY[1:-2]]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("a model of size nano with 1 × 1 patches: 1 token, ")
    assert "1 tokens" not in printed
    assert "uniform attention has 0.00" in printed


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["0"], "N=0 must be at least 1"),
        (["nowhere/near/here"], "no such file or folder"),
        (["empty"], "images"),
        (["64", "-a", "performer-nothing"], "unknown attention 'performer-nothing'"),
        (["digits", "--patch", "3"], "patch_size=3 does not divide image_size=8"),
        (["64", "--error", "1.5"], "--error 1.5 must be less than 1"),
        (["64", "--for", "fun"], "--for fun"),
        (["64", "--device", "nonsense"], "device 'nonsense' cannot be used here"),
        (["64", "--batch", "1000000000"], "batch=1000000000: a training step needs about"),
        (["64", "--runs", "nowhere"], "runs=nowhere is not a folder"),
        (["64", "--out", "taken"], "--out taken is a file"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(capsys, tmp_path: Path, monkeypatch, words, why) -> None:
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").write_text("mine")
    assert cli.main(["advise", *([] if "--out" in words else ["--out", "results"]), *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert why in printed.err
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "cache" / "advice").exists()
    assert (tmp_path / "taken").read_text() == "mine"
