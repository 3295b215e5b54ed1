"""`compare`: one protocol, nothing run twice, other studies refused; the speed measurements are kept short here."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from linvit import cli, data
from linvit.measure import models as measure_models
from linvit.records import Records
from linvit.study import StudyEvent, compare
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


@pytest.fixture(scope="module")
def dataset() -> data.Dataset:
    return data.load("synthetic:classes=3,images=96,size=8,channels=1")


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
        for column in ("train_step_s", "inference_vs_softmax", "inference_vs_identity", "peak_memory_bytes", "macs"):
            assert float(row[column]) > 0, column
    assert (study / "report.html").stat().st_size < 5_000_000
    assert (study / "report.md").exists()


def test_runs_share_order_and_steps_and_match_in_parameters(study: Path) -> None:
    recipes, counts = set(), {}
    for file in study.glob("*/experiment.json"):
        experiment = json.loads(file.read_text())
        recipes.add(json.dumps(experiment["recipe"], sort_keys=True))
    for record in Records(study / "records.jsonl"):
        if record.metric == "parameters":
            counts[record.tags["attention"]] = record.value
    assert len(recipes) == 1
    assert max(counts.values()) <= 1.02 * min(counts.values())


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
    monkeypatch.setattr(measure_models, "_time", lambda call, device: (1.0, 1.0))
    monkeypatch.setattr(compare_module, "MEASURING", 10.0)
    monkeypatch.setattr(compare_module, "PAGE", 20.0)
    with pytest.raises(ValueError, match=r"too small .* at least 43s"):  # 2 × 10 + 20 + 2 × 1 s with what is beside it
        compare(dataset, attentions=["softmax", "uniform"], seeds=1, budget="1s", out=tmp_path / "x", **SMALL)


def test_a_budget_gives_every_run_the_same_stored_steps(
    dataset: data.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_module, "MEASURING", 0.0)
    monkeypatch.setattr(compare_module, "PAGE", 0.0)
    options = {"attentions": ["softmax", "identity"], "seeds": 1, "budget": "3s", "out": tmp_path / "x"}
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
