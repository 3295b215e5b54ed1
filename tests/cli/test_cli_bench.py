"""`linvit bench`: each measurement's records, tables and chart, in-process and small."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from linvit import cli
from linvit.cli import _bench, _display
from linvit.data import load_data
from linvit.durations import duration
from linvit.metrics import problems
from linvit.models import create_model
from linvit.records import Records
from linvit.training.checkpoint import save_config, save_model
from linvit.training.events import Stepped

DATA = "synthetic:classes=3,images=60,size=8,channels=1"
SITE = ["--heads", "2", "--head-dim", "8"]
TINY = {  # the options of each that runs without a model
    "error": ["--tokens", "17", *SITE, "--draws", "2", "--sigma", "1"],
    "features": ["--tokens", "17", *SITE, "--draws", "2", "--features", "8", "--features", "32"],
    "depth": ["--tokens", "16", *SITE, "--draws", "2", "--layers", "3"],
    "angle": [],
    "speed": ["--tokens", "11", "--tokens", "23", *SITE, "--rounds", "2"],
    "memory": ["--tokens", "64", "--tokens", "256", *SITE],
}
SPECS = ["-a", "performer-exp:m=5", "-a", "linformer:k=3"]
FAMILIES = ["-a", "performer-exp", "-a", "performer-trig:projection=iid"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model that nobody trained."""
    return stored(tmp_path_factory.mktemp("model"))


def stored(folder, attention="softmax"):
    shape = {"image_size": 8, "channels": 1, "classes": 3, "patch_size": 2, "dim": 16, "depth": 2, "heads": 2}
    net = create_model(**shape, pool="cls", attention=attention)
    save_config(folder, net.config, load_data(DATA))
    save_model(folder, net)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No draws of a hundred thousand rows, and no processes."""
    monkeypatch.setattr("linvit.measure.angle._estimate", lambda angle, length, rows, seed: (1.0, 0.1))

    def weigh(spec, site, timing, limits):
        taken = 100 * site.tokens if spec != "uniform" else 0
        return {"forward": taken, "both": 2 * taken, "seconds": 0.1}

    monkeypatch.setattr("linvit.measure.memory.weigh", weigh)


@pytest.mark.parametrize("which", TINY)
def test_records_tables_and_chart(capsys, tmp_path, which):
    out = tmp_path / "new" / "folder"
    specs = {"angle": [], "features": FAMILIES}.get(which, SPECS)
    assert cli.main(["bench", which, *TINY[which], *specs, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for name in specs[1::2]:
        assert f"\n{name} " in printed
    control = {"speed": "identity", "memory": "softmax", "angle": "0.5"}.get(which, "uniform")
    assert f"\n{control} " in printed
    assert {path.name for path in out.glob("[!.]*")} == {"records.jsonl", f"{which}.html", f"{which}.png"}
    assert (out / f"{which}.png").read_bytes().startswith(b"\x89PNG")
    records = list(Records(out / "records.jsonl"))
    assert all(r.device == "cpu" and r.threads and r.dtype and "torch" in r.versions for r in records)
    assert not [problem for r in records for problem in problems(r)]


def test_json_is_the_records_and_quiet_prints_nothing(capsys):
    call = ["bench", "error", *TINY["error"], *SPECS]
    assert cli.main([*call, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"metric", "value", "unit", "device", "threads", "dtype", "versions", "commit", "attention"} <= set(rows[0])
    assert any(row["metric"] == "attention_error" for row in rows)
    assert cli.main([*call, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("threads", "ratio", "time"), [(1, "cpu", "cpu"), (2, "cpu", "wall")])
def test_each_record_names_its_own_clock(capsys, monkeypatch, threads, ratio, time):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    before = torch.get_num_threads()
    try:
        call = ["bench", "speed", *TINY["speed"], *SPECS, "--threads", str(threads), "--json"]
        assert cli.main(call) == 0
    finally:
        torch.set_num_threads(before)
    clocks = {row["metric"]: row["clock"] for row in json.loads(capsys.readouterr().out) if "clock" in row}
    assert (clocks["attention_vs_softmax"], clocks["attention_time"]) == (ratio, time)


def test_a_prefix_lets_what_needs_a_class_token_and_a_grid_be_timed(capsys):
    spec = "performer-relu:m=5,dwc=3,exact_cls=true"
    sizes = [*SITE, "--rounds", "1", "--tokens", "10", "--tokens", "17"]
    assert cli.main(["bench", "speed", *sizes, "-a", spec, "--prefix", "1", "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["attention"] == spec]
    assert {row["tokens"] for row in rows if row["metric"] == "attention_time" and row["value"]} == {10, 17}
    assert cli.main(["bench", "speed", *sizes, "-a", spec]) == 2


def test_trained_queries_and_keys(capsys, tmp_path, model):
    given = ["--model", str(model), "--data", DATA, "--images", "3", "--draws", "2"]
    assert cli.main(["bench", "error", *given, *SPECS, "--out", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert "\nperformer-exp:m=5 " in printed
    assert f"model {model.name} on" in printed
    assert (tmp_path / "a" / "layers.png").read_bytes().startswith(b"\x89PNG")
    records = list(Records(tmp_path / "a" / "records.jsonl"))
    assert {r.tags.get("layer") for r in records} == {None, 1, 2}
    assert {r.tags["images"] for r in records} == {3}
    assert not [problem for r in records for problem in problems(r)]
    assert cli.main(["bench", "features", *given, "-a", "performer-exp", "--features", "4"]) == 0
    assert "Total variation to softmax, by features" in capsys.readouterr().out
    assert cli.main(["bench", "depth", *given, "-a", "performer-exp:m=4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["layer"] for row in rows} == {1, 2}
    assert rows[0]["model"].startswith(model.name)


def test_a_trained_models_own_attention_has_a_row(capsys, tmp_path):
    folder = stored(tmp_path, "linformer:k=3")
    call = ["bench", "error", "--model", str(folder), "--data", DATA, "--images", "3", "--draws", "1"]
    assert cli.main([*call, "-a", "performer-exp:m=5"]) == 0
    printed = capsys.readouterr().out
    assert "\nlinformer:k=3 " in printed
    assert "Rows of linformer:k=3 do not sum to one or are signed" in printed
    assert "untrained" not in printed


def test_rows_that_are_no_distributions_have_a_footnote(capsys):
    assert cli.main(["bench", "error", *TINY["error"], *SPECS]) == 0
    printed = capsys.readouterr().out
    assert "Rows of linformer:k=3 do not sum to one or are signed" in printed
    assert "The weights of linformer:k=3 are untrained." in printed
    assert cli.main(["bench", "error", *TINY["error"], *SPECS[:2]]) == 0
    printed = capsys.readouterr().out
    assert "do not sum" not in printed
    assert "untrained" not in printed


def test_the_shortest_length_is_no_crossing(capsys):
    given = (None, 64), (64.0, 64), (1234.0, 64), (71.2, 64)
    assert [_bench.break_even_text(*one) for one in given] == ["–", "≤ 64", "≈ 1,200", "≈ 71"]
    assert cli.main(["bench", "speed", *SITE, "--rounds", "1", "--tokens", "11", "-a", "uniform", "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["metric"] == "break_even_tokens"]
    assert {row["from"] for row in rows} == {11}  # a value that is this one is "at most"
    assert {row["value"] for row in rows} <= {11, None}


def test_maps(capsys, tmp_path, model):
    call = ["bench", "maps", str(model), DATA, "-a", "uniform", "--image", "2"]
    assert cli.main([*call, "--out", str(tmp_path)]) == 0
    assert "Entropy of rows" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("[!.]*")} == {
        "records.jsonl",
        "maps.html",
        "maps.png",
        "maps-softmax.npz",
        "maps-uniform.npz",
    }
    records = list(Records(tmp_path / "records.jsonl"))
    assert not [problem for r in records for problem in problems(r)]
    named = {r.tags["attention"]: r.artefact for r in records if r.metric == "attention_maps"}
    maps = np.load(tmp_path / named["softmax"])["maps"]
    assert maps.shape == (2, 2, 17, 17)
    np.testing.assert_allclose(maps.sum(-1), 1, rtol=1e-5)
    assert cli.main(["bench", "maps", str(model), DATA, "--image", "99"]) == 2
    assert "image=99" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["memory", "speed"])
def test_to_the_limit(capsys, tmp_path, which):
    call = ["bench", which, "--tokens", "16", "--until-limit", "--most-memory", "1MB", *SITE, *SPECS]
    assert cli.main([*call, *(["--rounds", "1"] if which == "speed" else []), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "refused: performer-exp:m=5" in printed
    assert "more than 977 KiB" in printed
    assert (tmp_path / f"{which}-to-the-limit.png").exists()
    assert not [problem for r in Records(tmp_path / "records.jsonl") for problem in problems(r)]


def test_peers(capsys):
    pytest.importorskip("linformer")
    assert cli.main(["bench", "error", *TINY["error"], *SPECS, "--against", "linformer"]) == 0
    assert "\nlinformer==" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["error", "--model", "somewhere"], "--model and --data are used together"),
        (["angle", "--tokens", "64"], "no such option --tokens"),
        (["depth", "--sigma", "1"], "no such option --sigma"),
        (["error", "--images", "8"], "--images 8 has no effect without --model"),
        (["error", "--model", "x", "--data", "digits", "--tokens", "8"], "--tokens 8 has no effect with --model"),
        (["error", "--tokens", "4000000"], "tokens=4000000: matrices of all pairs would take"),
        (["features", "-a", "uniform"], "'uniform' has no number of features"),
        (["depth", "--tokens", "17"], "tokens=17 must be a square"),
        (["error", "--against", "performer"], "unknown peer 'performer'"),
        (["speed", "--most-memory", "lots"], "memory 'lots' is not a size"),
        (["speed", "--most-memory", "10", "-a", "uniform"], "nothing to compare with at N = 64"),
        (["memory", "-a", "performer-nothing"], "unknown attention 'performer-nothing'"),
        (["maps", "nowhere", "digits"], "nowhere does not exist"),
        (["nothing"], "unknown verb 'bench nothing'"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(capsys, tmp_path, words, told):
    out = tmp_path / "out"
    assert cli.main(["bench", *words, "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert not out.exists()


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
            display.on_job_event(whole, Stepped(step, 200, 1.0, 0.5, 640.0, 0.0, 0.0, 1.0))  # type: ignore[arg-type]
            now += 1.0
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(", ")[2] for line in lines] == ["28s left)", "18s left)"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (61, "1m01s"), (3600, "1h00m"), (7384, "2h03m")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text
