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
from linvit.metrics import problems
from linvit.models import create_model
from linvit.progress import duration
from linvit.records import Records
from linvit.train.checkpoint import save_config, save_model
from linvit.train.events import Stepped

TINY = {
    "error": ["--tokens", "17", "--heads", "2", "--head-dim", "8", "--draws", "2", "--sigma", "1"],
    "speed": ["--tokens", "11", "--tokens", "23", "--heads", "2", "--head-dim", "8", "--rounds", "2"],
}
SPECS = ["-a", "performer-exp:m=5", "-a", "linformer:k=3"]
OVER = {  # its options, the metric, the control
    "features": (["--tokens", "17", "--head-dim", "8", "--draws", "2", "--features", "8", "--features", "32"],
                 "output_mse"),
    "depth": (["--tokens", "16", "--heads", "2", "--head-dim", "8", "--draws", "2", "--layers", "3"], "depth_error"),
    "angle": ([], "mse_ratio"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model that nobody trained, and the data set of its images."""
    folder = tmp_path_factory.mktemp("model")
    data = load_data("synthetic:classes=3,images=60,size=8,channels=1")
    net = create_model(image_size=8, channels=1, classes=3, patch_size=2, dim=16, depth=2, heads=2, pool="cls")
    save_config(folder, net.config, data)
    save_model(folder, net)
    return folder, "synthetic:classes=3,images=60,size=8,channels=1"


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


@pytest.mark.parametrize("over", OVER)
def test_the_papers_figures(capsys, tmp_path, monkeypatch, over):
    monkeypatch.setattr("linvit.measure.angle._estimate", lambda angle, length, rows, seed: (1.0, 0.1))
    given, metric = OVER[over]
    specs = ["-a", "performer-exp", "-a", "performer-trig:projection=iid"] if over != "angle" else []
    assert cli.main(["bench", "error", "--over", over, *given, *specs, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "\nuniform " in printed or over == "angle"
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"records.jsonl", f"{over}.html", f"{over}.png"}
    records = list(Records(tmp_path / "records.jsonl"))
    assert any(r.metric == metric for r in records)
    assert not [problem for r in records for problem in problems(r)]


def test_trained_queries_and_keys(capsys, tmp_path, model):
    folder, data = model
    call = ["bench", "error", "--model", str(folder), "--data", data, "--images", "3", "--draws", "2"]
    assert cli.main([*call, *SPECS, "--out", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert "\nperformer-exp:m=5 " in printed
    assert f"q and k of {folder.name} on" in printed
    assert (tmp_path / "a" / "layers.png").read_bytes().startswith(b"\x89PNG")
    records = list(Records(tmp_path / "a" / "records.jsonl"))
    assert {r.tags.get("layer") for r in records} == {None, 1, 2}
    assert {r.tags["images"] for r in records} == {3}
    assert not [problem for r in records for problem in problems(r)]
    assert cli.main([*call, "--over", "features", "-a", "performer-exp", "--features", "4", "--out",
                     str(tmp_path / "b")]) == 0  # fmt: skip
    assert "Total variation to softmax, by the number of features" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "b" / "features.png").exists()
    assert cli.main([*call, "--over", "depth", "-a", "performer-exp:m=4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["layer"] for row in rows} == {1, 2}
    assert rows[0]["model"].startswith(folder.name)


def test_a_trained_models_own_attention_has_a_row(capsys, tmp_path, model):
    data = load_data(model[1])
    net = create_model(image_size=8, channels=1, classes=3, patch_size=2, dim=16, depth=2, heads=2, pool="cls",
                       attention="linformer:k=3")  # fmt: skip
    save_config(tmp_path, net.config, data)
    save_model(tmp_path, net)
    call = ["bench", "error", "--model", str(tmp_path), "--data", model[1], "--images", "3", "--draws", "1"]
    assert cli.main([*call, "-a", "performer-exp:m=5"]) == 0
    printed = capsys.readouterr().out
    assert "\nlinformer:k=3 " in printed
    assert "linformer:k=3 is the model's own, as trained." in printed
    assert "Rows of linformer:k=3 do not sum to one or are signed" in printed
    assert "untrained" not in printed
    assert ", one draw, " in printed


def test_rows_that_are_no_distributions_have_a_footnote(capsys):
    assert cli.main(["bench", "error", *TINY["error"], *SPECS]) == 0
    printed = capsys.readouterr().out
    assert "Rows of linformer:k=3 do not sum to one or are signed: TV is half the absolute difference" in printed
    assert "The weights of linformer:k=3 are untrained." in printed
    assert cli.main(["bench", "error", *TINY["error"], *SPECS[:2]]) == 0
    printed = capsys.readouterr().out
    assert "do not sum" not in printed
    assert "untrained" not in printed


def test_the_shortest_length_is_no_crossing(capsys, monkeypatch):
    assert [_bench.even(*given) for given in ((None, 64), (64.0, 64), (1234.0, 64), (71.2, 64))] == [
        "–", "≤ 64", "≈ 1,200", "≈ 71",
    ]  # fmt: skip
    assert cli.main(["bench", "speed", *TINY["speed"][4:], "--tokens", "11", "-a", "uniform", "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["metric"] == "break_even_tokens"]
    assert {row["from"] for row in rows} == {11}  # a value that is this one is "at most"
    assert {row["value"] for row in rows} <= {11, None}


def test_maps(capsys, tmp_path, model):
    folder, data = model
    call = ["bench", "maps", str(folder), data, "-a", "uniform", "--image", "2"]
    assert cli.main([*call, "--out", str(tmp_path)]) == 0
    assert "Entropy of rows" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("[!.]*")} == {
        "records.jsonl", "maps.html", "maps.png", "maps-softmax.npz", "maps-uniform.npz",
    }  # fmt: skip
    records = list(Records(tmp_path / "records.jsonl"))
    assert not [problem for r in records for problem in problems(r)]
    stored = {r.tags["attention"]: r.artefact for r in records if r.metric == "attention_maps"}
    maps = np.load(tmp_path / stored["softmax"])["maps"]
    assert maps.shape == (2, 2, 17, 17)
    np.testing.assert_allclose(maps.sum(-1), 1, rtol=1e-5)
    assert cli.main([*call, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2 * 2 * 2 * 2
    assert cli.main(["bench", "maps", str(folder), data, "--image", "99"]) == 2
    assert "image=99" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--until-limit"]])
def test_memory(capsys, tmp_path, monkeypatch, more):
    def weigh(spec, tokens, setting, limit, seconds):
        taken = 100 * tokens if spec != "uniform" else 0
        return {"forward": taken, "both": 2 * taken, "seconds": 0.1}, ""

    monkeypatch.setattr("linvit.measure.memory._in_a_fresh_process", weigh)
    call = ["bench", "memory", "-a", "performer-exp:m=5", "-a", "uniform", "--tokens", "64", "--tokens", "256"]
    assert cli.main([*call, *more, "--most-memory", "4MB", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "\nuniform " in printed
    assert ("refused" in printed) is bool(more)
    assert "most tokens" in printed
    name = "memory-to-the-limit" if more else "memory"
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"records.jsonl", f"{name}.html", f"{name}.png"}
    assert not [problem for r in Records(tmp_path / "records.jsonl") for problem in problems(r)]


def test_one_length_tells_no_most_tokens(capsys, monkeypatch):
    found = {"forward": 100.0, "both": 200.0, "seconds": 0.1}
    monkeypatch.setattr("linvit.measure.memory._in_a_fresh_process", lambda *given: (dict(found), ""))
    assert cli.main(["bench", "memory", "-a", "uniform", "--tokens", "64"]) == 0
    printed = capsys.readouterr().out
    assert all(line.endswith("–") for line in printed.splitlines() if line.startswith(("uniform ", "softmax ")))
    assert "one length does not tell how memory grows" in printed


def test_speed_to_the_limit(capsys, tmp_path):
    call = ["bench", "speed", "--tokens", "16", "--until-limit", "--most-memory", "1MB", "--rounds", "1"]
    assert cli.main([*call, "--heads", "2", "--head-dim", "8", *SPECS, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "refused: performer-exp:m=5" in printed
    assert "more than 977 KiB" in printed
    assert (tmp_path / "speed-to-the-limit.png").exists()
    assert not [problem for r in Records(tmp_path / "records.jsonl") for problem in problems(r)]


@pytest.mark.parametrize("which", ["error", "speed"])
def test_peers(capsys, which):
    pytest.importorskip("linformer")
    assert cli.main(["bench", which, *TINY[which], *SPECS, "--against", "linformer"]) == 0
    assert "\nlinformer==" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["error", "--model", "somewhere"], "--model and --data go together"),
        (["error", "--over", "angle", "--tokens", "64"], "--tokens=64 has no effect with --over angle"),
        (["error", "--over", "depth", "--sigma", "1"], "--sigma=[1.0] has no effect with --over depth"),
        (["error", "--over", "depth", "--dtype", "float16"], "--dtype=float16 has no effect with --over depth"),
        (["error", "--images", "8"], "--images=8 has no effect with --over sigma"),
        (["error", "--tokens", "4000000"], "tokens=4000000: matrices of all pairs would take"),
        (["error", "--features", "8"], "--features=[8] has no effect with --over sigma"),
        (["error", "--over", "features", "-a", "uniform"], "'uniform' has no number of features"),
        (["error", "--over", "depth", "--tokens", "17"], "tokens=17 must be a square"),
        (["error", "--against", "performer"], "unknown peer 'performer'"),
        (["speed", "--most-memory", "lots"], "memory 'lots' is not a size"),
        (["speed", "--most-memory", "10", "-a", "uniform"], "nothing to compare with at N = 64"),
        (["memory", "-a", "performer-nothing"], "unknown attention 'performer-nothing'"),
        (["maps", "nowhere", "digits"], "nowhere does not exist"),
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
            display.hear(whole, Stepped(step, 200, 1.0, 0.5, 640.0, 0.0, 0.0, 1.0))  # type: ignore[arg-type]
            now += 1.0
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(", ")[2] for line in lines] == ["28s left)", "18s left)"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (61, "1m01s"), (3600, "1h00m"), (7384, "2h03m")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text
