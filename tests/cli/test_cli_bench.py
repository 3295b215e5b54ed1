from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch

from linvit import cli
from linvit.cli import _display
from linvit.progress import duration
from linvit.records import Records
from linvit.train.events import Stepped

TINY = {
    "error": ["--tokens", "17", "--heads", "2", "--head-dim", "8", "--draws", "2", "--sigma", "1"],
    "speed": ["--tokens", "11", "--tokens", "23", "--heads", "2", "--head-dim", "8", "--rounds", "2"],
}
SPECS = ["-a", "performer-exp:m=5", "-a", "linformer:k=3"]


@pytest.mark.parametrize("which", TINY)
def test_records_table_and_chart(capsys, tmp_path, which):
    out = tmp_path / "new" / "folder"
    assert cli.main(["bench", which, *TINY[which], *SPECS, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for name in ("performer-exp:m=5", "linformer:k=3", "uniform" if which == "error" else "identity"):
        assert f"\n{name} " in printed
    assert {path.name for path in out.glob("[!.]*")} == {"records.jsonl", f"{which}.html", f"{which}.png"}
    assert (out / f"{which}.png").read_bytes().startswith(b"\x89PNG")
    page = (out / f"{which}.html").read_text()
    assert "performer-exp:m=5" in page
    assert "<script src=" not in page
    records = list(Records(out / "records.jsonl"))
    assert records
    assert all(r.device == "cpu" and r.threads and r.dtype and "torch" in r.versions for r in records)
    assert all("attention" in r.tags for r in records)


@pytest.mark.parametrize("which", TINY)
def test_json_is_the_records(capsys, which):
    assert cli.main(["bench", which, *TINY[which], *SPECS, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"metric", "value", "unit", "device", "threads", "dtype", "versions", "commit", "attention"} <= set(rows[0])
    metric = {"error": "attention_error", "speed": "attention_vs_softmax"}[which]
    assert any(row["metric"] == metric for row in rows)


@pytest.mark.parametrize("which", TINY)
def test_quiet_prints_nothing(capsys, tmp_path, which):
    assert cli.main(["bench", which, *TINY[which], *SPECS, "--quiet", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("threads", "ratio", "time"), [(1, "CPU", "CPU"), (2, "CPU", "wall")])
def test_each_column_names_its_own_clock(capsys, monkeypatch, threads, ratio, time):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    before = torch.get_num_threads()
    try:
        assert cli.main(["bench", "speed", *TINY["speed"], *SPECS, "--threads", str(threads)]) == 0
    finally:
        torch.set_num_threads(before)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"by {ratio} time" in printed
    assert f"ms: {time} time" in printed


def test_a_prefix_lets_what_needs_a_class_token_and_a_grid_be_timed(capsys):
    spec = "performer-relu:m=5,dwc=3,exact_cls=true"
    sizes = [*TINY["speed"][4:], "--tokens", "10", "--tokens", "17"]
    assert cli.main(["bench", "speed", *sizes, "-a", spec, "--prefix", "1", "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["attention"] == spec]
    assert {row["tokens"] for row in rows if row["metric"] == "attention_time" and row["value"]} == {10, 17}
    assert cli.main(["bench", "speed", *sizes, "-a", spec]) == 2


def test_out_that_is_a_file(capsys, tmp_path):
    file = tmp_path / "taken"
    file.write_text("mine")
    assert cli.main(["bench", "error", *TINY["error"], *SPECS, "--out", str(file)]) == 2
    err = capsys.readouterr().err
    assert err == f"linvit: error: {file}: File exists\n"
    assert file.read_text() == "mine"


def test_progress_in_a_pipe_is_lines_with_the_time_left(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with _display.Display() as display:
        for done in range(31):
            display.progress(done, 30, f"part {done}")
            now += 1.0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"part {t} ({t}/30, {30 - t}s left)" for t in (2, 12, 22)]


def test_the_time_left_of_a_study_counts_short_runs_as_short(capsys, monkeypatch):
    """Ten steps a second; run 0 was done by an earlier call, run 2 has half the steps."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    whole = SimpleNamespace(
        number=1, jobs=3, part=(0.4, 0.8), fold=None, experiment=SimpleNamespace(label="softmax", seed=1)
    )
    with _display.Display() as display:
        for step in range(0, 201, 10):
            display.hear(whole, Stepped(step, 200, 1.0, 0.5, 640.0, 0.0, 0.0, 1.0))  # type: ignore[arg-type]
            now += 1.0
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(", ")[2] for line in lines] == ["28s left)", "18s left)"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (61, "1m01s"), (3600, "1h00m"), (7384, "2h03m")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text
