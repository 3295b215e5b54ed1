"""`compare`: one protocol, nothing runs twice, other studies are refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from studying import DATA, QUICK, SETS, Trained, experiments, planned, rows

from linvit import cli, data, metrics
from linvit.ledger import open_ledger
from linvit.measure.race import BASELINES
from linvit.records import Records
from linvit.requests import CompareRequest, ReproduceRequest, read_request
from linvit.schemas.study import name_variants
from linvit.study import Study, Variant, compare, measuring
from linvit.training.start import start_from

ATTENTIONS = ["softmax", "performer-relu:m=8"]
ONE = {"seeds": 1, "steps": 1, "measured": False, **QUICK}


def test_every_variant_has_one_row_with_all_measurements(finished: Path) -> None:
    table = rows(finished)
    assert [row["attention"] for row in table] == ATTENTIONS
    ratios = [f"{task}_vs_{base}" for task in ("train_step", "inference", "latency") for base in BASELINES]
    for row in table:
        low, mean, high = (float(row[f"test_accuracy{end}"]) for end in ("_low", "", "_high"))
        assert 0 <= low <= mean <= high <= 1
        assert row["seeds"] == "2"
        assert all(float(row[column]) > 0 for column in ("train_step_s", *ratios, "peak_memory_bytes", "macs"))
    assert (finished / "report.html").stat().st_size < 5_000_000
    assert (finished / "report.md").exists()


def test_every_record_is_as_the_table_of_metrics_says(finished: Path) -> None:
    found = list(Records(finished / "records.jsonl"))
    assert [problem for record in found for problem in metrics.problems(record)] == []
    assert len({metrics.key(record) for record in found}) == len(found)
    assert all({"variant", "baseline"} & set(r.tags) for r in found if metrics.METRICS[r.metric].per)
    kinds = {"test_accuracy", "peak_memory", "attention_time", "attention_error", "examples"}
    assert kinds <= {r.metric for r in found}


def test_a_study_is_read_back(finished: Path, tmp_path: Path) -> None:
    study = Study.read(finished / "study.json")
    assert [variant.id for variant in study.variants] == ATTENTIONS
    assert (study.model.dim, study.recipe.batch_size) == (16, 16)
    assert study.seeds == {name: [0, 1] for name in ATTENTIONS}
    assert study.placement is not None
    assert (study.placement.executor, study.placement.threads) == ("here", 1)
    study.save(tmp_path)
    assert (tmp_path / "study.json").read_bytes() == (finished / "study.json").read_bytes()


def test_every_variant_is_also_trained_for_half_of_the_steps(finished: Path) -> None:
    halves = [json.loads(file.read_text()) for file in finished.glob("*-half-*/experiment.json")]
    assert {e["recipe"]["steps"] for e in halves} == {(Study.read(finished / "study.json").steps or 0) // 2}
    records = list(Records(finished / "records.jsonl"))
    found = [r for r in records if r.metric == "half_accuracy"]
    assert [(r.tags["variant"], r.tags["seed"]) for r in found] == [(name, 0) for name in ATTENTIONS]
    assert {r.experiment for r in found}.isdisjoint(r.experiment for r in records if r.metric == "test_accuracy")


@pytest.mark.parametrize("match", [True, False])
def test_runs_take_turns_share_their_recipe_and_match_in_parameters(match: bool, tmp_path: Path) -> None:
    """A learnable kernel has parameters of its own, for which only a narrower MLP compensates."""
    attentions = ["softmax", "performer-theta:m=8", "uniform"]
    words = QUICK | {"dim": 32, "mlp_dim": 256, "match": match, "seeds": 2, "epochs": 1}
    jobs = planned(compare(DATA, attentions=attentions, jobs_file=True, out=tmp_path / "x", **words))
    whole = [job for job in jobs if not job["half"]]
    order = [*attentions, *attentions[1:], attentions[0]]
    assert [(job["variant"], job["experiment"]["seed"]) for job in whole] == [
        *zip(order, [0] * 3 + [1] * 3, strict=True)
    ]
    assert len({json.dumps([job["experiment"][part] for part in ("recipe", "data")]) for job in whole}) == 1
    widths = {job["variant"]: job["experiment"]["model"]["mlp_dim"] for job in whole}
    assert (widths["performer-theta:m=8"] < 256) == match
    assert widths["softmax"] == widths["uniform"] == 256


def test_a_control_is_trained_with_the_others_unless_there_is_one(tmp_path: Path) -> None:
    words = {"jobs_file": True, "seeds": 1, "epochs": 1, **QUICK | {"controls": True}}
    for attention, variants in (("softmax", ["softmax", "uniform"]), ("identity", ["identity"])):
        jobs = planned(compare(DATA, attentions=[attention], out=tmp_path / attention, **words))
        assert [job["variant"] for job in jobs if not job["half"]] == variants


def test_variants_differ_in_any_part(finished: Path, tmp_path: Path) -> None:
    """Recipe, model, data, start and column: each is trained as it says, and named by what differs."""
    start = start_from(next(finished.glob("softmax-seed0-*")))
    variants = [
        Variant(attention="softmax"),
        Variant(attention="softmax", options={"lr": 1e-4, "dropout": 0.1}),
        Variant(attention="softmax", data={"image_size": 16}),
        Variant(attention="performer-relu:m=8", start=start, id="student"),
        Variant(attention="uniform", column="literal"),
        Variant(attention="softmax", column="published", published={"test_accuracy": 0.983}, id="paper", place="p. 4"),
    ]
    folder = compare(DATA, variants=variants, jobs_file=True, out=tmp_path / "x", **QUICK | {"seeds": 1, "epochs": 1})
    scratch = "from scratch"
    assert [variant.label for variant in Study.read(folder / "study.json").variants] == [
        f"softmax, {scratch}",
        f"softmax, {scratch}, lr 0.0001, dropout 0.1",
        f"softmax, {scratch}, image_size 16",
        f"performer-relu:m=8, from {start.name}",
        f"uniform, {scratch}, literal",
        "softmax, published, p. 4",
    ]
    stored = [job["experiment"] for job in planned(folder) if not job["half"]]
    assert len(stored) == 5
    assert [e["recipe"]["lr"] for e in stored].count(1e-4) == 1
    assert sorted((e["model"]["dropout"], e["model"]["image_size"]) for e in stored)[-2:] == [(0.0, 16), (0.1, 8)]
    assert [e["start"]["folder"] for e in stored if e["start"]] == [start.folder]


def test_published_numbers_have_a_row(dataset: data.Dataset, tmp_path: Path) -> None:
    paper = Variant(column="published", published={"test_accuracy": 0.983}, id="paper")
    folder = compare(dataset, variants=[Variant(), paper], out=tmp_path / "x", **ONE)
    table = {row["variant"]: row for row in rows(folder)}
    assert [row["column"] for row in table.values()] == ["fair", "published"]
    assert float(table["paper"]["test_accuracy"]) == 0.983
    assert table["softmax"]["test_accuracy"]


@pytest.mark.usefixtures("no_page")
def test_each_seed_may_start_from_a_model_of_its_own(dataset: data.Dataset, finished: Path, tmp_path: Path) -> None:
    """Seeds without a start are not run; once they have one they are, and nothing else is, wherever the models are."""

    def student(*seeds: int, home: Path = finished) -> Variant:
        starts = {seed: start_from(next(home.glob(f"softmax-seed{seed}-*/best"))) for seed in seeds}
        return Variant(id="student", attention="performer-relu:m=8", start=starts[seeds[0]], starts=starts)

    out, trained, words = tmp_path / "x", Trained(), ONE | {"seeds": 2}
    compare(dataset, variants=[student(1)], out=out, on_event=trained, **words)
    moved = tmp_path / "moved"
    moved.symlink_to(finished)
    compare(dataset, variants=[student(0, 1, home=moved)], out=out, on_event=trained, **words)
    assert trained == [("student", 1), ("student", 0)]
    stored = {e["seed"]: e["start"]["sha256"] for e in experiments(out)}
    assert stored == {seed: start.sha256 for seed, start in student(0, 1).starts.items()}
    assert len(set(stored.values())) == 2
    swapped = student(0, 1).model_copy(update={"starts": {0: student(0).start, 1: student(0).start}})
    for other in (swapped, student(0).model_copy(update={"starts": {}})):
        with pytest.raises(ValueError, match="another variant called 'student': choose another id, or another --out"):
            compare(dataset, variants=[other], out=out, **words)
    with pytest.raises(ValueError, match="variant 'student' has no start for any of the seeds 0"):
        compare(dataset, variants=[student(1)], out=tmp_path / "none", **ONE)
    with pytest.raises(ValueError, match="has the first of them as its start"):
        Variant(starts=student(1).starts)


def test_random_features_once_more_with_redraws(tmp_path: Path) -> None:
    layers = "softmax@1+performer-exp:m=4@1"
    words = {"jobs_file": True, "with_redrawn": 2, "seeds": 1, "steps": 1, **QUICK | {"depth": 2}}
    folder = compare(DATA, attentions=["softmax", layers, "performer-theta:m=4"], out=tmp_path / "drawn", **words)
    found = {job["variant"]: job["experiment"]["recipe"]["redraw"] for job in planned(folder)}
    assert found == {"softmax": 1000, layers: 1000, "performer-theta:m=4": 1000, f"{layers}, redraw 2": 2}
    with pytest.raises(ValueError, match="with_redrawn=2 has no effect: none of these attentions has random features"):
        compare(DATA, attentions=["softmax", "linformer:k=2"], out=tmp_path / "none", **words)
    assert not (tmp_path / "none").exists()


def test_names_show_what_differs_and_nothing_else() -> None:
    def labels(*variants: Variant) -> list[str]:
        return [variant.label for variant in name_variants(variants)]

    assert labels(Variant(), Variant(attention="uniform")) == ["softmax", "uniform"]
    slow = {"lr": 0.1, "dim": 8}
    assert labels(Variant(options=slow), Variant(options=slow | {"lr": 0.2})) == ["lr 0.1", "lr 0.2"]
    assert labels(Variant(options=slow)) == ["softmax"]
    assert labels(Variant(), Variant(column="literal")) == ["softmax", "softmax, literal"]
    assert len(name_variants([Variant(), Variant()])) == 1
    with pytest.raises(ValueError, match="two variants are called 'a'"):
        name_variants([Variant(id="a"), Variant(id="a", attention="uniform")])


def test_no_variant_is_lost(finished: Path, tmp_path: Path) -> None:
    """Whatever differs is a variant of its own."""
    starts = [start_from(next(finished.glob(f"softmax-seed{seed}-*"))) for seed in (0, 1)]
    printed = {"column": "published", "published": {"test_accuracy": 0.9}}
    same = [
        Variant(),
        Variant(task="other"),
        Variant(place="a", **printed),
        Variant(place="b", **printed),
        *(Variant(start=start) for start in starts),
    ]
    named = name_variants(same)
    assert len({variant.id for variant in named}) == len({variant.label for variant in named}) == 6
    for variant, why in ((Variant(task="other"), "unknown task 'other'"), (Variant(data={"img": 16}), "'img'")):
        with pytest.raises(ValueError, match=why):
            compare(DATA, variants=[variant], out=tmp_path / "x", **ONE)
    for bad in ({"column": "published"}, {"published": {"test_accuracy": 0.9}}):
        with pytest.raises(ValueError, match="if, and only if, its column is published"):
            Variant(**bad)
    with pytest.raises(ValueError, match="did you mean 'test_accuracy'"):
        Variant(column="published", published={"test_acuracy": 0.9})
    assert not (tmp_path / "x").exists()


def test_what_cannot_be_measured_is_a_limitation_and_is_measured_by_the_next_call(
    dataset: data.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> object:
        raise RuntimeError("no such counter")

    words = ONE | {"attentions": ["softmax"], "measured": True, "out": tmp_path / "x"}
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "peak_memory", broken)
        patch.setattr(measuring, "trained_error", broken)
        folder = compare(dataset, **words)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Memory of softmax could not be measured: no such counter." in page
    assert "Distance of softmax from softmax could not be measured" in page
    assert rows(folder)[0]["peak_memory_bytes"] == ""
    compare(dataset, **words)
    assert float(rows(folder)[0]["peak_memory_bytes"]) == 7
    assert "could not be measured" not in (folder / "report.html").read_text(encoding="utf-8")


def test_the_same_call_again_trains_and_measures_nothing(study: Path, dataset: data.Dataset) -> None:
    before, trained = (study / "records.jsonl").read_bytes(), Trained()
    compare(dataset, attentions=ATTENTIONS, seeds=2, epochs=2, out=study, on_event=trained, **QUICK)
    assert trained == []
    assert (study / "records.jsonl").read_bytes() == before


def test_a_new_variant_trains_only_itself_and_is_measured_with_the_others(study: Path) -> None:
    """Ratios and examples are of all variants; new seeds are for those that are named."""
    trained, before = Trained(), Study.read(study / "study.json").requests
    compare(DATA, attentions=["uniform"], seeds=3, epochs=2, out=study, on_event=trained, **QUICK)
    assert trained == [("uniform", 0), ("uniform", 1), ("uniform", 2)]
    assert [row["variant"] for row in rows(study)] == [*ATTENTIONS, "uniform"]
    with np.load(study / "examples.npz") as arrays:
        assert {f"predictions/{name}" for name in (*ATTENTIONS, "uniform")} <= set(arrays)
    times = open_ledger(study).find("train_step_vs_softmax")
    assert [r.tags["variant"] for r in times] == [*ATTENTIONS, *ATTENTIONS, "uniform"]
    stored = Study.read(study / "study.json")
    assert stored.seeds == {"softmax": [0, 1], "performer-relu:m=8": [0, 1], "uniform": [0, 1, 2]}
    assert stored.requests[:-1] == before
    asked = read_request(stored.requests[-1])
    assert isinstance(asked, CompareRequest)
    assert (asked.data, asked.attentions) == (DATA, ("uniform",))


@pytest.mark.usefixtures("no_page")
def test_a_study_that_is_part_of_another_request_stores_that(dataset: data.Dataset, tmp_path: Path) -> None:
    origin = ReproduceRequest(names=("000-mnist",))
    folder = compare(dataset, variants=[Variant()], origin=origin, out=tmp_path / "x", **ONE)
    assert Study.read(folder / "study.json").requests == [origin.stored()]
    for words in ({"data": DATA, "variants": [Variant()]}, {"data": dataset, "attentions": ["softmax"]}):
        folder = compare(**words, out=tmp_path / "y", **ONE)
        assert Study.read(folder / "study.json").requests == []  # no command makes these variants or images


def test_results_of_something_else_are_left_alone(dataset: data.Dataset, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"holds records.jsonl, but no study"):
        compare(dataset, attentions=["softmax"], out=tmp_path, **ONE)


def test_another_study_or_variant_is_refused_and_nothing_is_overwritten(study: Path, dataset: data.Dataset) -> None:
    before = (study / "study.json").read_bytes()
    with pytest.raises(ValueError, match=r"another study \(its recipe.epochs is 2.0, not 5.0\)"):
        compare(dataset, attentions=["softmax"], epochs=5, out=study, **QUICK)
    with pytest.raises(ValueError, match="another variant called 'softmax'"):
        compare(dataset, variants=[Variant(id="softmax", options={"dim": 32})], epochs=2, out=study, **QUICK)
    assert (study / "study.json").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "seeds=3"], "use --seeds"),
        (["--set", "epochs=3", "--epochs", "2"], "epochs is given twice"),
        (["--set", "on_event=3"], "unknown option 'on_event'"),
        (["--set", "patch_size=abc"], "patch_size"),
        (["--budget", "10min"], "not a duration"),
        (["--budget", "10m", "--set", "steps=3"], "give steps or budget, not both"),
        (["--jobs", "0"], "--jobs"),
        (["--margin", "0"], "--margin"),
        (["--margin", "21%"], "--margin"),
        (["--margin", "nan"], "--margin"),
        (["-a", "performer-rel"], "did you mean 'performer-relu'"),
        (["--on", "here", "--jobs", "2", "--epochs", "1"], "runs one training at a time"),
        (["--budget", "1s"], "too small"),
    ],
)
def test_bad_settings_are_one_line_and_leave_nothing(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = [] if "-a" in words else ["-a", "softmax"]
    command = ["compare", DATA, *SETS, *attention, "--threads", "1", "--out", str(tmp_path / "x"), "-q", *words]
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_a_diverged_run_is_listed_and_never_recommended(dataset: data.Dataset, tmp_path: Path) -> None:
    options = QUICK | {"lr": 1e30, "clip_norm": 0.0, "optimizer": "sgd", "warmup": 0.0, "seeds": 1, "epochs": 2}
    folder = compare(dataset, attentions=["softmax"], out=tmp_path / "x", **options)
    assert [row["verdict"] for row in rows(folder)] == ["diverged"]
    assert float(rows(folder)[0]["parameters"]) > 0
    assert "Nothing to recommend" in (folder / "report.md").read_text()
    before = (folder / "records.jsonl").read_bytes()
    assert {"diverged", "learning_curve", "macs"} <= {record.metric for record in Records(folder / "records.jsonl")}
    compare(dataset, attentions=["softmax"], out=folder, **options)
    assert (folder / "records.jsonl").read_bytes() == before


def test_examples_show_where_variants_differ() -> None:
    wrong = np.array([0] * 50 + [5] * 20 + [2, 3] + [1] * 3)
    found = wrong[measuring.pick_examples(wrong, 5)]
    assert sorted(found, reverse=True) == list(found)
    assert {0, 2, 3, 5} <= set(found)
    assert len(found) == 12
    assert len(measuring.pick_examples(np.zeros(3, int), 5)) == 3


def test_compare_and_report_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", DATA, *SETS, "-a", "softmax", "--epochs", "1", "--seeds", "1", "--threads", "1", "--no-match"]
    words += ["--set", "lr=1e-9"]  # nothing is learned: half of the steps are as good
    assert cli.main([*words, "--out", str(tmp_path / "x")]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split()[:3] == ["Variant", "Test", "accuracy"]
    assert f"Report: {tmp_path / 'x' / 'report.html'}" in out
    assert "uniform" in out
    (request,) = Study.read(tmp_path / "x" / "study.json").requests
    assert (request["verb"], request["attentions"], request["match"]) == ("compare", ["softmax"], False)
    (tmp_path / "x" / "report.html").unlink()
    assert cli.main(["report", str(tmp_path / "x"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommendation"] == "softmax"
    assert (tmp_path / "x" / "report.html").exists()


KILLED = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)  # as the tests do
from linvit.records import Record
from linvit.report import page
from linvit.study import compare, measuring
measuring.LENGTHS, measuring.ROUNDS, page.draw_files = (16,), 1, lambda specs, folder: None
measuring.peak_memory = lambda *_: Record("peak_memory", 7, "bytes", tags={"batch": 16})
out, stage, turn, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
seen = 0
def count(what):
    global seen
    seen += stage == what
    if seen == turn and stage == what:
        os.kill(os.getpid(), signal.SIGKILL)
compare("synthetic:classes=3,images=96,size=8,channels=1", attentions=["softmax", "performer-relu:m=8"], seeds=2,
        epochs=2, out=out, on_event=lambda job, event: count("train"),
        progress=lambda done, total, what: count(what), **options)
"""


def results(folder: Path) -> dict:
    return {
        (r.tags["variant"], r.tags["seed"], r.metric, r.tags["selection"]): r.value
        for r in Records(folder / "records.jsonl")
        if r.metric in ("test_accuracy", "test_loss")
    }


@pytest.mark.kills
def test_a_killed_study_resumes_and_ends_the_same(finished: Path, tmp_path: Path) -> None:
    """Killed in the second training, then while it is measured; then left alone."""
    for stage, turn in (("train", 12), ("memory of performer-relu:m=8", 1), ("examples", 1), ("never", 1)):
        call = [sys.executable, "-c", KILLED, str(tmp_path / "x"), stage, str(turn), json.dumps(QUICK)]
        done = subprocess.run(call, capture_output=True, text=True)
        assert done.returncode == (0 if stage == "never" else -signal.SIGKILL), done.stderr
    assert len(results(tmp_path / "x")) == 16
    assert results(tmp_path / "x") == results(finished)
    keys = [metrics.key(r) for r in Records(tmp_path / "x" / "records.jsonl")]
    assert len(keys) == len(set(keys))  # nothing was stored twice
    assert not list((tmp_path / "x").glob(".*.part"))


@pytest.mark.kills
def test_ctrl_c_saves_every_training_and_says_how_to_resume(tmp_path: Path) -> None:
    out = tmp_path / "x"
    words = ["compare", DATA, *SETS, "-a", "softmax", "--epochs", "3000", "--jobs", "2", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "linvit", *words],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job has none
    )
    deadline = time.monotonic() + 100
    while len(list(out.glob("*/best/model.safetensors"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    last = err.splitlines()[-1]
    assert last.startswith("linvit: interrupted: nothing that was trained is lost; resume with: linvit compare")
    assert len(list(out.glob("*/last/step-*"))) >= 2
    assert not [p for p in os.listdir("/proc") if p.isdigit() and str(out) in _command(p)]  # no process is left


def _command(number: str) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_text()
    except OSError:
        return ""
