"""`compare`: one protocol, nothing run twice, other studies refused; the measurements are kept short here."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from linvit import cli, data, metrics
from linvit.measure.race import BASELINES
from linvit.progress import seconds
from linvit.records import Record, Records
from linvit.report import page
from linvit.study import Study, Variant, compare, measuring
from linvit.study.design import named

DATA = "synthetic:classes=3,images=96,size=8,channels=1"
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
QUICK = {"controls": False, "threads": 1, **SMALL}


@pytest.fixture(scope="module", autouse=True)
def short():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "LENGTHS", (16, 36))
        patch.setattr(measuring, "ROUNDS", 2)
        patch.setattr(page, "draw_files", lambda specs, folder: None)  # tested with the report
        yield


@pytest.fixture
def no_memory(monkeypatch):
    """Peak memory takes a fresh process for each variant, which only some tests are about."""
    monkeypatch.setattr(measuring, "peak_memory", lambda *_: Record("peak_memory", 7, "bytes", tags={"batch": 16}))


@pytest.fixture(scope="module")
def dataset() -> data.Dataset:
    return data.load_data(DATA)


@pytest.fixture(scope="module")
def whole(dataset: data.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study, to look at only."""
    out = tmp_path_factory.mktemp("study") / "run"
    return compare(dataset, attentions=["softmax", "performer-relu:m=8"], seeds=2, epochs=2, out=out, **QUICK)


@pytest.fixture
def study(whole: Path, tmp_path: Path) -> Path:
    """A finished study, to go on with."""
    return shutil.copytree(whole, tmp_path / "study")


class Heard(list):
    """Which whole trainings told of themselves."""

    def __call__(self, job, event) -> None:
        if not job.half and (job.variant, job.experiment.seed) not in self:
            self.append((job.variant, job.experiment.seed))


def whole_runs(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*/experiment.json") if "-half-" not in file.parent.name]


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "results.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_requested_variant_has_one_row_with_all_measurements(whole: Path) -> None:
    table = rows(whole)
    assert [row["attention"] for row in table] == ["softmax", "performer-relu:m=8"]
    for row in table:
        assert (
            0 <= float(row["test_accuracy_low"]) <= float(row["test_accuracy"]) <= float(row["test_accuracy_high"]) <= 1
        )
        assert row["seeds"] == "2"
        ratios = [f"{task}_vs_{base}" for task in ("train_step", "inference", "latency") for base in BASELINES]
        for column in ("train_step_s", *ratios, "peak_memory_bytes", "macs"):
            assert float(row[column]) > 0, column
    assert (whole / "report.html").stat().st_size < 5_000_000
    assert (whole / "report.md").exists()


def test_every_record_is_as_the_table_of_metrics_says(whole: Path) -> None:
    found = list(Records(whole / "records.jsonl"))
    assert [problem for record in found for problem in metrics.problems(record)] == []
    assert len({metrics.key(record) for record in found}) == len(found)
    told = {"variant", "baseline"}
    assert all(told & set(r.tags) for r in found if metrics.METRICS[r.metric].per)
    kinds = {"test_accuracy", "peak_memory", "attention_time", "attention_error", "examples"}
    assert kinds <= {r.metric for r in found}


def test_a_study_is_read_back(whole: Path) -> None:
    study = Study.read(whole / "study.json")
    assert [variant.id for variant in study.variants] == ["softmax", "performer-relu:m=8"]
    assert (study.model.dim, study.recipe.batch_size) == (16, 16)
    assert study.seeds == {"softmax": [0, 1], "performer-relu:m=8": [0, 1]}
    assert study.placing is not None
    assert (study.placing.runner, study.placing.threads) == ("here", 1)
    study.save(whole.parent)
    assert (whole.parent / "study.json").read_bytes() == (whole / "study.json").read_bytes()


@pytest.mark.parametrize("match", [True, False])
def test_runs_take_turns_share_their_recipe_and_match_in_parameters(
    match: bool, dataset: data.Dataset, tmp_path: Path, no_memory: None
) -> None:
    """A learnable kernel has parameters of its own, which only a narrower MLP makes up for."""
    heard = Heard()
    folder = compare(dataset, attentions=["softmax", "performer-theta:m=8", "uniform"], seeds=2, epochs=1, match=match,
                     out=tmp_path / "x", hear=heard, **QUICK | {"dim": 32, "mlp_dim": 256})  # fmt: skip
    assert heard == [("softmax", 0), ("performer-theta:m=8", 0), ("uniform", 0),
                     ("performer-theta:m=8", 1), ("uniform", 1), ("softmax", 1)]  # fmt: skip
    experiments = [json.loads(file.read_text()) for file in whole_runs(folder)]
    assert len({json.dumps([e["recipe"], e["data"]], sort_keys=True) for e in experiments}) == 1
    counts = {r.tags["variant"]: r.value for r in Records(folder / "records.jsonl") if r.metric == "parameters"}
    assert (max(counts.values()) <= 1.02 * min(counts.values())) == match
    warned = "Parameters are not matched" in (folder / "report.md").read_text()
    assert warned != match


def test_a_control_is_trained_beside_the_others(dataset: data.Dataset, tmp_path: Path, no_memory: None) -> None:
    heard = Heard()
    words = {"seeds": 1, "epochs": 1, "hear": heard, **QUICK | {"controls": True}}
    compare(dataset, attentions=["softmax"], out=tmp_path / "a", **words)
    assert heard == [("softmax", 0), ("uniform", 0)]
    heard.clear()
    compare(dataset, attentions=["identity"], out=tmp_path / "b", **words)
    assert heard == [("identity", 0)]


def test_variants_differ_in_any_part(dataset: data.Dataset, tmp_path: Path, no_memory: None) -> None:
    """Recipe, model, data, start and column: each is trained as it says, named by what differs, and has its row."""
    teacher = compare(DATA, attentions=["softmax"], seeds=1, epochs=1, out=tmp_path / "teacher", **QUICK)
    (best,) = teacher.glob("softmax-seed*/best")
    from linvit.train import start_from

    variants = [
        Variant(attention="softmax"),
        Variant(attention="softmax", options={"lr": 1e-4, "dropout": 0.1}),
        Variant(attention="softmax", data={"image_size": 16}),
        Variant(attention="performer-relu:m=8", start=start_from(best), id="student"),
        Variant(attention="uniform", column="literal"),
        Variant(attention="softmax", column="published", published={"test_accuracy": 0.983}, id="paper", place="p. 4"),
    ]
    folder = compare(DATA, variants=variants, seeds=1, epochs=1, out=tmp_path / "x", **QUICK)
    table = {row["variant"]: row for row in rows(folder)}
    bare = "from scratch"
    assert [row["label"] for row in table.values()] == [
        f"softmax, {bare}", f"softmax, {bare}, lr 0.0001, dropout 0.1", f"softmax, {bare}, image_size 16",
        f"performer-relu:m=8, from {best.parent.name}", f"uniform, {bare}, literal", "softmax, published, p. 4",
    ]  # fmt: skip
    assert [row["column"] for row in table.values()] == ["fair"] * 4 + ["literal", "published"]
    assert float(table["paper"]["test_accuracy"]) == 0.983
    assert all(row["test_accuracy"] for row in table.values())
    stored = [json.loads(file.read_text()) for file in whole_runs(folder)]
    assert sorted((e["recipe"]["lr"], e["model"]["dropout"], e["model"]["image_size"]) for e in stored)[0] == (
        1e-4,
        0.1,
        8,
    )
    assert {e["model"]["image_size"] for e in stored} == {8, 16}
    assert [e["start"]["folder"] for e in stored if e["start"]] == [str(best.resolve())]
    assert len(stored) == 5


def test_each_seed_may_begin_with_a_model_of_its_own(
    dataset: data.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds without one are not run; when they have one they are, and nothing else is, wherever the models lie."""
    from linvit.train import start_from

    monkeypatch.setattr(measuring.Measuring, "all", lambda self: [])
    words = {"seeds": 3, "steps": 1, **QUICK}
    teachers = compare(dataset, attentions=["softmax"], out=tmp_path / "teachers", **words)

    def student(*seeds: int, home: Path = teachers) -> Variant:
        starts = {seed: start_from(next(home.glob(f"softmax-seed{seed}-*/best"))) for seed in seeds}
        return Variant(id="student", attention="performer-relu:m=8", start=starts[seeds[0]], starts=starts)

    out, heard = tmp_path / "x", Heard()
    compare(dataset, variants=[student(1, 2)], out=out, hear=heard, **words)
    moved = shutil.copytree(teachers, tmp_path / "moved")
    compare(dataset, variants=[student(0, 1, 2, home=moved)], out=out, hear=heard, **words)
    assert heard == [("student", 1), ("student", 2), ("student", 0)]
    stored = {e["seed"]: e["start"]["sha256"] for e in (json.loads(file.read_text()) for file in whole_runs(out))}
    assert stored == {seed: start.sha256 for seed, start in student(0, 1, 2).starts.items()}
    assert len(set(stored.values())) == 3
    (kept,) = Study.read(out / "study.json").variants
    assert kept.starts == student(0, 1, 2, home=moved).starts
    swapped = student(0, 1).model_copy(update={"starts": {0: student(0).start, 1: student(2).start}})
    for other in (swapped, student(0).model_copy(update={"starts": {}})):
        with pytest.raises(ValueError, match="another variant called 'student': choose another id, or another --out"):
            compare(dataset, variants=[other], out=out, **words)
    with pytest.raises(ValueError, match="variant 'student' has no start for any of the seeds 0, 1"):
        compare(dataset, variants=[student(2)], out=tmp_path / "none", **words | {"seeds": 2})
    with pytest.raises(ValueError, match="has the first of them as its start"):
        Variant(starts=student(1).starts)


def test_random_features_once_more_with_new_draws(dataset: data.Dataset, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(measuring.Measuring, "all", lambda self: [])
    layers = "softmax@1+performer-exp:m=4@1"
    folder = compare(dataset, attentions=["softmax", layers, "performer-theta:m=4"], with_redrawn=2, seeds=1, steps=1,
                     out=tmp_path / "drawn", **QUICK | {"depth": 2})  # fmt: skip
    study = Study.read(folder / "study.json")
    assert [(v.id, v.options) for v in study.variants] == [
        ("softmax", {}), (layers, {}), ("performer-theta:m=4", {}), (f"{layers}, redraw 2", {"redraw": 2}),
    ]  # fmt: skip
    stored = [json.loads(path.read_text()) for path in folder.glob("*/experiment.json")]
    assert sorted(e["recipe"]["redraw"] for e in stored) == [2, 1000, 1000, 1000]
    with pytest.raises(ValueError, match="with_redrawn=2 has no effect: none of these attentions has random features"):
        compare(dataset, attentions=["softmax", "linformer:k=2"], with_redrawn=2, out=tmp_path / "none", **QUICK)
    assert not (tmp_path / "none").exists()


def test_names_show_what_differs_and_nothing_else() -> None:
    def labels(*variants: Variant) -> list[str]:
        return [variant.label for variant in named(variants)]

    assert labels(Variant(), Variant(attention="uniform")) == ["softmax", "uniform"]
    slow = {"lr": 0.1, "dim": 8}
    assert labels(Variant(options=slow), Variant(options=slow | {"lr": 0.2})) == ["lr 0.1", "lr 0.2"]
    assert labels(Variant(options=slow)) == ["softmax"]
    assert labels(Variant(), Variant(column="literal")) == ["softmax", "softmax, literal"]
    with pytest.raises(ValueError, match="two variants are called 'a'"):
        named([Variant(id="a"), Variant(id="a", attention="uniform")])
    assert len(named([Variant(), Variant()])) == 1


def test_no_variant_is_lost(tmp_path: Path, dataset: data.Dataset) -> None:
    """Whatever differs is a variant of its own; one name for two is an error, now and when a study is extended."""
    from linvit.train import Start

    printed = {"column": "published", "published": {"test_accuracy": 0.9}}
    same = [Variant(), Variant(task="other"), Variant(place="a", **printed), Variant(place="b", **printed),
            *(Variant(start=Start(folder="/models/best", sha256=sha * 32)) for sha in ("ab", "cd"))]  # fmt: skip
    assert len({variant.id for variant in named(same)}) == len({variant.label for variant in named(same)}) == 6
    words = {"seeds": 1, "epochs": 1, "out": tmp_path / "x", **QUICK}
    with pytest.raises(ValueError, match="unknown task 'other'"):
        compare(dataset, variants=[Variant(task="other")], **words)
    with pytest.raises(ValueError, match="unknown option 'img_size'"):
        compare(DATA, variants=[Variant(data={"img_size": 16})], **words)
    for bad in ({"column": "published"}, {"published": {"test_accuracy": 0.9}}):
        with pytest.raises(ValueError, match="if, and only if, its column is published"):
            Variant(**bad)
    with pytest.raises(ValueError, match="did you mean 'test_accuracy'"):
        Variant(column="published", published={"test_acuracy": 0.9})
    assert not (tmp_path / "x").exists()


def test_another_variant_of_the_same_name_is_refused(study: Path, dataset: data.Dataset) -> None:
    before = (study / "study.json").read_bytes()
    with pytest.raises(ValueError, match="another variant called 'softmax'"):
        compare(dataset, variants=[Variant(id="softmax", options={"dim": 32})], epochs=2, out=study, **QUICK)
    assert (study / "study.json").read_bytes() == before


def test_what_cannot_be_measured_is_said_and_the_rest_goes_on(
    dataset: data.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> object:
        raise RuntimeError("no such counter")

    words = {"attentions": ["softmax"], "seeds": 1, "epochs": 1, "out": tmp_path / "x", **QUICK}
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
from linvit.records import Record
from linvit.study import compare, measuring
measuring.LENGTHS, measuring.ROUNDS = (16, 36), 2
out, stage, turn, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
seen = 0
def count(what):
    global seen
    seen += stage == what
    if seen == turn and stage == what:
        os.kill(os.getpid(), signal.SIGKILL)
compare("synthetic:classes=3,images=96,size=8,channels=1", attentions=["softmax", "performer-relu:m=8"], seeds=2,
        epochs=2, out=out, hear=lambda job, event: count("train"), progress=lambda done, total, what: count(what),
        **options)
"""


def results(folder: Path) -> dict:
    return {(r.tags["variant"], r.tags["seed"], r.metric, r.tags["selection"]): r.value
            for r in Records(folder / "records.jsonl") if r.metric in ("test_accuracy", "test_loss")}  # fmt: skip


@pytest.mark.kills
def test_a_killed_study_goes_on_and_ends_the_same(whole: Path, tmp_path: Path) -> None:
    """Killed in the second training, then while it is measured; then left alone."""
    for stage, turn in (("train", 12), ("memory of performer-relu:m=8", 1), ("examples", 1), ("never", 1)):
        call = [sys.executable, "-c", KILLED, str(tmp_path / "x"), stage, str(turn), json.dumps(QUICK)]
        done = subprocess.run(call, capture_output=True, text=True)
        assert done.returncode == (0 if stage == "never" else -signal.SIGKILL), done.stderr
    assert len(results(tmp_path / "x")) == 16
    assert results(tmp_path / "x") == results(whole)
    keys = [metrics.key(r) for r in Records(tmp_path / "x" / "records.jsonl")]
    assert len(keys) == len(set(keys))  # nothing was stored twice
    assert not list((tmp_path / "x").glob(".*.part"))


def test_the_same_call_again_trains_and_measures_nothing(study: Path, dataset: data.Dataset) -> None:
    before, heard = (study / "records.jsonl").read_bytes(), Heard()
    compare(dataset, attentions=["softmax", "performer-relu:m=8"], seeds=2, epochs=2, out=study, hear=heard, **QUICK)
    assert heard == []
    assert (study / "records.jsonl").read_bytes() == before


def test_a_new_variant_trains_only_itself(study: Path, dataset: data.Dataset, no_memory: None) -> None:
    heard = Heard()
    compare(dataset, attentions=["uniform"], seeds=2, epochs=2, out=study, hear=heard, **QUICK)
    assert sorted(heard) == [("uniform", 0), ("uniform", 1)]
    assert [row["variant"] for row in rows(study)] == ["softmax", "performer-relu:m=8", "uniform"]


def test_an_extended_study_is_whole(dataset: data.Dataset, tmp_path: Path, no_memory: None) -> None:
    """Examples and ratios cover old variants too, and new seeds are for those that are named."""
    heard = Heard()
    words = {"epochs": 1, "out": tmp_path / "x", **QUICK}
    compare(dataset, attentions=["softmax"], seeds=1, command="linvit once", **words)
    compare(dataset, attentions=["uniform"], seeds=2, command="linvit again", hear=heard, **words)
    assert sorted(heard) == [("uniform", 0), ("uniform", 1)]
    with np.load(tmp_path / "x" / "examples.npz") as arrays:
        assert {"predictions/softmax", "predictions/uniform"} <= set(arrays)
    assert Study.read(tmp_path / "x" / "study.json").commands == ["linvit once", "linvit again"]


def test_results_of_something_else_are_left_alone(dataset: data.Dataset, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"holds records.jsonl, but no study"):
        compare(dataset, attentions=["softmax"], seeds=1, epochs=1, out=tmp_path, **QUICK)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "seeds=3"], "use --seeds"),
        (["--set", "epochs=3", "--epochs", "2"], "epochs is given twice"),
        (["--set", "hear=3"], "unknown option 'hear'"),
        (["--set", "patch_size=abc"], "patch_size"),
        (["--budget", "10min"], "not a duration"),
        (["--budget", "10m", "--set", "steps=3"], "steps or a budget"),
        (["--jobs", "0"], "--jobs"),
        (["-a", "performer-rel"], "did you mean 'performer-relu'"),
        (["--budget", "1s"], "too small"),
    ],
)
def test_bad_settings_are_one_line_and_leave_nothing(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "synthetic:images=96,size=8", "--threads", "1", "--out", str(tmp_path / "x"), "-q", *words]
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_another_study_is_refused_and_nothing_is_overwritten(study: Path, dataset: data.Dataset) -> None:
    before = (study / "study.json").read_bytes()
    with pytest.raises(ValueError, match=r"another study \(its recipe.epochs is 2.0, not 5.0\)"):
        compare(dataset, attentions=["softmax"], seeds=1, epochs=5, out=study, **QUICK)
    assert (study / "study.json").read_bytes() == before


def test_every_variant_is_also_trained_for_half_of_the_steps(whole: Path) -> None:
    halves = [json.loads(file.read_text()) for file in whole.glob("*-half-*/experiment.json")]
    (steps,) = {e["recipe"]["steps"] for e in halves}
    assert steps == Study.read(whole / "study.json").steps // 2
    found = [r for r in Records(whole / "records.jsonl") if r.metric == "half_accuracy"]
    assert [(r.tags["variant"], r.tags["seed"]) for r in found] == [("softmax", 0), ("performer-relu:m=8", 0)]
    assert {r.experiment for r in found}.isdisjoint(
        r.experiment for r in Records(whole / "records.jsonl") if r.metric == "test_accuracy"
    )


@pytest.mark.parametrize(("text", "value"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "ten", "-5m", "0s", "5d"])
def test_bad_durations_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        seconds(text)


def test_a_diverged_run_is_listed_and_never_recommended(dataset: data.Dataset, tmp_path: Path, no_memory: None) -> None:
    options = QUICK | {"lr": 1e30, "clip_norm": 0.0, "optimizer": "sgd", "warmup": 0.0}
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


def test_compare_and_report_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that is stored is the one that was given, whatever started the process."""
    still = SMALL | {"lr": 1e-9}  # nothing is learned, so it is not too early to tell
    sets = [word for key, value in still.items() for word in ("--set", f"{key}={value}")]
    words = ["compare", DATA, "-a", "softmax", "--epochs", "1", "--seeds", "1", "--threads", "1", "--no-match", *sets]
    assert cli.main([*words, "--out", str(tmp_path / "x")]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split()[:3] == ["variant", "test", "accuracy"]
    assert f"Report: {tmp_path / 'x' / 'report.html'}" in out
    assert "uniform" in out
    (command,) = Study.read(tmp_path / "x" / "study.json").commands
    assert command.startswith("linvit compare --attention softmax --epochs 1")
    assert " --no-match " in command
    (tmp_path / "x" / "report.html").unlink()
    assert cli.main(["report", str(tmp_path / "x"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommendation"] == "softmax"
    assert (tmp_path / "x" / "report.html").exists()


@pytest.mark.kills
def test_ctrl_c_saves_every_training_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "x"
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    words = ["compare", DATA, "-a", "softmax", "--epochs", "3000", "--jobs", "2", "--out", str(out), *sets]
    process = subprocess.Popen(
        [sys.executable, "-m", "linvit", *words], stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job has none
    )  # fmt: skip
    deadline = time.monotonic() + 100
    while len(list(out.glob("*/best/model.safetensors"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    last = err.splitlines()[-1]
    assert last.startswith("linvit: interrupted: nothing that was trained is lost; go on with: linvit compare")
    assert len(list(out.glob("*/last/step-*"))) >= 2
    assert not [p for p in os.listdir("/proc") if p.isdigit() and str(out) in _words(p)]  # nobody is left behind


def _words(number: str) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_text()
    except OSError:
        return ""
