"""`compare`: one protocol, nothing run twice, other studies refused; the speed measurements are kept short here."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from linvit import cli, data
from linvit.measure import race
from linvit.measure.race import BASELINES
from linvit.records import Records
from linvit.study import StudyEvent, compare, measuring
from linvit.study.compare import seconds

compare_module = sys.modules["linvit.study.compare"]

SMALL = {
    "stem": "patch",
    "patch_size": 4,
    "dim": 16,
    "depth": 1,
    "heads": 2,
    "mlp_dim": 32,
    "batch_size": 16,
    "pad_crop": 0,
}


@pytest.fixture(scope="module", autouse=True)
def short_curves():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "LENGTHS", (16, 32))
        yield


@pytest.fixture(scope="module")
def dataset() -> data.Dataset:
    return data.load_data("synthetic:classes=3,images=96,size=8,channels=1")


@pytest.fixture(scope="module")
def study(dataset: data.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / "run"
    return compare(dataset, attentions=["softmax", "performer-relu:m=8"], seeds=2, epochs=2, out=out, **SMALL)


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "results.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def trained(events: list[StudyEvent]) -> set[tuple[str, int]]:
    return {(event.attention, event.seed) for event in events if event.stage == "train"}


def test_every_requested_variant_has_one_row_with_all_measurements(study: Path) -> None:
    table = rows(study)
    assert [row["attention"] for row in table] == ["softmax", "performer-relu:m=8"]
    for row in table:
        assert (
            0 <= float(row["test_accuracy_low"]) <= float(row["test_accuracy"]) <= float(row["test_accuracy_high"]) <= 1
        )
        assert row["seeds"] == "2"
        ratios = [f"{task}_vs_{base}" for task in ("train_step", "inference", "latency") for base in BASELINES]
        for column in ("train_step_s", *ratios, "peak_memory_bytes", "macs"):
            assert float(row[column]) > 0, column
    assert (study / "report.html").stat().st_size < 5_000_000
    assert (study / "report.md").exists()


@pytest.mark.parametrize("match", [True, False])
def test_runs_take_turns_share_their_recipe_and_match_in_parameters(
    match: bool, dataset: data.Dataset, tmp_path: Path
) -> None:
    """A learnable kernel has parameters of its own, which only a narrower MLP makes up for."""
    events: list[StudyEvent] = []
    options = SMALL | {"dim": 32, "mlp_dim": 256}
    folder = compare(dataset, attentions=["softmax", "performer-theta:m=8", "uniform"], seeds=2, epochs=1, match=match,
                     out=tmp_path / "x", watch=events.append, **options)  # fmt: skip
    turns = list(dict.fromkeys((e.attention, e.seed) for e in events if e.stage == "train"))
    assert turns == [("softmax", 0), ("performer-theta:m=8", 0), ("uniform", 0),
                     ("performer-theta:m=8", 1), ("uniform", 1), ("softmax", 1)]  # fmt: skip
    experiments = [json.loads(file.read_text()) for file in folder.glob("*/experiment.json")]
    assert len({json.dumps([e["recipe"], e["data"]], sort_keys=True) for e in experiments}) == 1
    counts = {r.tags["attention"]: r.value for r in Records(folder / "records.jsonl") if r.metric == "parameters"}
    assert (max(counts.values()) <= 1.02 * min(counts.values())) == match
    warned = "Parameters are not matched" in (folder / "report.md").read_text()
    assert warned != match


def test_what_cannot_be_measured_is_said_and_the_rest_goes_on(
    dataset: data.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> object:
        raise RuntimeError("no such counter")

    words = {"attentions": ["softmax"], "seeds": 1, "epochs": 1, "out": tmp_path / "x", **SMALL}
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "peak_memory", broken)
        patch.setattr(measuring, "trained_error", broken)
        folder = compare(dataset, **words)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Memory of softmax could not be measured: no such counter." in page
    assert "Distance of softmax from softmax could not be measured" in page
    assert rows(folder)[0]["peak_memory_bytes"] == ""
    compare(dataset, **words)  # tried again
    assert float(rows(folder)[0]["peak_memory_bytes"]) > 0
    assert "could not be measured" not in (folder / "report.html").read_text(encoding="utf-8")


KILLED = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)  # as the tests do
from linvit.study import compare, measuring
measuring.LENGTHS = (16, 32)
out, stage, turn, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
seen = 0
def watch(event):
    global seen
    seen += stage in (event.stage, event.what)
    if seen == turn:
        os.kill(os.getpid(), signal.SIGKILL)
compare("synthetic:classes=3,images=96,size=8,channels=1", attentions=["softmax", "performer-relu:m=8"], seeds=2,
        epochs=2, out=out, watch=watch, **options)
"""


def test_a_killed_study_goes_on_and_ends_the_same(study: Path, tmp_path: Path) -> None:
    """Killed in the second training, then while it is measured; then left alone."""
    for stage, turn in (("train", 12), ("memory of performer-relu:m=8", 1), ("examples", 1), ("never", 1)):
        call = [sys.executable, "-c", KILLED, str(tmp_path / "x"), stage, str(turn), json.dumps(SMALL)]
        done = subprocess.run(call, capture_output=True, text=True)
        assert done.returncode == (0 if stage == "never" else -signal.SIGKILL), done.stderr

    def results(folder: Path) -> dict:
        return {(r.experiment, r.metric, r.tags.get("selection")): r.value for r in Records(folder / "records.jsonl")
                if r.metric in ("test_accuracy", "test_loss")}  # fmt: skip

    assert len(results(tmp_path / "x")) == 16
    assert results(tmp_path / "x") == {
        key: value for key, value in results(study).items() if key in results(tmp_path / "x")
    }
    keys = [(r.metric, r.experiment, *map(str, r.tags.items())) for r in Records(tmp_path / "x" / "records.jsonl")]
    assert len(keys) == len(set(keys))  # nothing was stored twice
    assert not list((tmp_path / "x").glob(".*.part"))


def test_the_same_call_again_trains_and_measures_nothing(study: Path, dataset: data.Dataset) -> None:
    before = (study / "records.jsonl").read_bytes()
    events: list[StudyEvent] = []
    compare(
        dataset,
        attentions=["softmax", "performer-relu:m=8"],
        seeds=2,
        epochs=2,
        out=study,
        watch=events.append,
        **SMALL,
    )
    assert not trained(events)
    assert (study / "records.jsonl").read_bytes() == before


def test_a_new_variant_trains_only_itself(study: Path, dataset: data.Dataset) -> None:
    events: list[StudyEvent] = []
    compare(dataset, attentions=["uniform"], seeds=2, epochs=2, out=study, watch=events.append, **SMALL)
    assert trained(events) == {("uniform", 0), ("uniform", 1)}
    assert [row["attention"] for row in rows(study)] == ["softmax", "performer-relu:m=8", "uniform"]


def test_an_extended_study_is_whole(dataset: data.Dataset, tmp_path: Path) -> None:
    """Examples and ratios cover old variants too, and new seeds are for all."""
    events: list[StudyEvent] = []
    words = {"epochs": 1, "out": tmp_path / "x", **SMALL}
    compare(dataset, attentions=["softmax"], seeds=1, command="linvit once", **words)
    compare(dataset, attentions=["uniform"], seeds=2, command="linvit again", watch=events.append, **words)
    assert trained(events) == {("uniform", 0), ("softmax", 1), ("uniform", 1)}
    with np.load(tmp_path / "x" / "examples.npz") as arrays:
        assert {"predictions/softmax", "predictions/uniform"} <= set(arrays)
    assert json.loads((tmp_path / "x" / "study.json").read_text())["command"] == "linvit once\nlinvit again"


def test_results_of_something_else_are_left_alone(dataset: data.Dataset, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"holds records.jsonl, but no study"):
        compare(dataset, attentions=["softmax"], seeds=1, epochs=1, out=tmp_path, **SMALL)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "seeds=3"], "use --seeds"),
        (["--set", "epochs=3", "--epochs", "2"], "epochs is given twice"),
        (["--set", "watch=3"], "unknown option 'watch'"),
        (["--set", "patch_size=abc"], "patch_size='abc'"),
        (["--budget", "10min"], "not a duration"),
        (["--budget", "10m", "--set", "steps=3"], "steps or a budget"),
    ],
)
def test_bad_settings_are_one_line(words: list[str], says: str, tmp_path: Path, capsys) -> None:
    command = ["compare", "synthetic:images=96,size=8", "--out", str(tmp_path / "x"), *words]
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_another_study_is_refused_and_nothing_is_overwritten(study: Path, dataset: data.Dataset) -> None:
    before = (study / "study.json").read_bytes()
    with pytest.raises(ValueError, match="another study"):
        compare(dataset, attentions=["softmax"], seeds=1, epochs=5, out=study, **SMALL)
    assert (study / "study.json").read_bytes() == before


def test_an_unknown_attention_is_an_error_before_anything_is_written(dataset: data.Dataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'performer-relu'"):
        compare(dataset, attentions=["softmax", "performer-rel"], out=tmp_path / "x", **SMALL)
    assert not (tmp_path / "x").exists()


def test_a_budget_too_small_says_how_much_is_needed(
    dataset: data.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "timed", lambda call, repeat, device: {"wall": 1.0, "cpu": 0.2})
    monkeypatch.setattr(compare_module, "MEASURING", 10.0)
    monkeypatch.setattr(compare_module, "PAGE", 20.0)
    images = (len(dataset.validation) + 2 * len(dataset.test)) / 16 * 2  # seconds, at one for a batch of each variant
    rounds = 30 * 3 * 3  # three tasks of two variants and identity
    need = 2 * 10 + 20 + images + rounds + 2.2
    with pytest.raises(ValueError, match="too small") as error:
        compare(dataset, attentions=["softmax", "uniform"], seeds=1, budget="1s", out=tmp_path / "x", **SMALL)
    said = float(re.findall(r"at least (\d+)s", str(error.value))[0])
    assert need <= said <= need + 8


def test_a_budget_gives_every_run_the_same_stored_steps(
    dataset: data.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_module, "MEASURING", 0.0)
    monkeypatch.setattr(compare_module, "PAGE", 0.0)
    options = {"attentions": ["softmax", "identity"], "seeds": 1, "budget": "12s", "out": tmp_path / "x"}
    folder = compare(dataset, **options, **SMALL)
    study = json.loads((folder / "study.json").read_text())
    steps = {json.loads(file.read_text())["recipe"]["steps"] for file in folder.glob("*/experiment.json")}
    assert steps == {study["steps"]}
    events: list[StudyEvent] = []
    compare(dataset, **options, watch=events.append, **SMALL)
    assert not trained(events)


@pytest.mark.parametrize(("text", "value"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "ten", "-5m", "0s", "5d"])
def test_bad_durations_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        seconds(text)


def test_a_diverged_run_is_listed_and_never_recommended(dataset: data.Dataset, tmp_path: Path) -> None:
    options = SMALL | {"lr": 1e30, "clip_norm": 0.0, "optimizer": "sgd", "warmup": 0.0}
    folder = compare(dataset, attentions=["softmax"], seeds=1, epochs=2, out=tmp_path / "x", **options)
    assert [row["verdict"] for row in rows(folder)] == ["diverged"]
    assert float(rows(folder)[0]["parameters"]) > 0
    assert "No attention can be recommended" in (folder / "report.md").read_text()
    before = (folder / "records.jsonl").read_bytes()
    assert {"diverged", "learning_curve", "macs"} <= {record.metric for record in Records(folder / "records.jsonl")}
    compare(dataset, attentions=["softmax"], seeds=1, epochs=2, out=folder, **options)
    assert (folder / "records.jsonl").read_bytes() == before


def test_examples_show_where_variants_differ() -> None:
    wrong = np.array([0] * 50 + [5] * 20 + [2, 3] + [1] * 3)
    found = wrong[measuring.pick_examples(wrong, 5)]
    assert sorted(found, reverse=True) == list(found)
    assert {0, 2, 3, 5} <= set(found)
    assert len(found) == 12
    assert len(measuring.pick_examples(np.zeros(3, int), 5)) == 3
