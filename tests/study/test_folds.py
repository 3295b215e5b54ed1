"""`--folds`: the same folds for all variants, scores over all images, and which interval that is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support
from studying import DATA, SETS, SMALL, experiments, rows, shortened

from linvit import cli, data, metrics, report
from linvit.execute import DatasetCache
from linvit.ledger import open_ledger
from linvit.pipeline.train import train
from linvit.records import Records
from linvit.report.statistics import interval
from linvit.requests import CompareRequest
from linvit.study import Comparison, Study, compare
from linvit.study.compare import warnings
from linvit.study.jobs import StudyJob, read_job
from linvit.training.evaluate import evaluate_folder

ATTENTIONS = ("softmax", "performer-relu:m=8")
WORDS = ["compare", "digits", "-a", "softmax", "-a", "performer-relu:m=8", "--no-controls", "-q", *SETS]
WORDS += ["--set", "steps=40", "--threads", "1"]


@pytest.fixture(scope="module")
def folds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study, to look at only."""
    out = tmp_path_factory.mktemp("folds") / "run"
    with shortened():
        assert cli.main([*WORDS, "--folds", "3", "--out", str(out)]) == 0
    return out


def runs(folder: Path) -> dict[tuple[str, int], dict]:
    """(attention, fold) → experiment.json of the full runs."""
    return {(e["model"]["attention"], e["source"]["fold"]["index"]): e for e in experiments(folder)}


def test_all_variants_have_the_same_folds(folds: Path) -> None:
    found = runs(folds)
    assert len(found) == 6
    digits = data.load_data("digits")
    for fold in range(3):
        mine = {found[attention, fold]["data"]["identity"] for attention in ATTENTIONS}
        assert mine == {data.folded(digits, data.Fold(fold, 3, 0)).identity}


def test_scores_are_over_all_images_each_when_it_was_held_out(folds: Path) -> None:
    records = list(Records(folds / "records.jsonl"))
    assert [problem for record in records for problem in metrics.problems(record)] == []
    assert len({metrics.key(record) for record in records}) == len(records)
    for attention in ATTENTIONS:
        parts = [np.load(runs(folds)[attention, fold]["folder"] / "predictions.npz") for fold in range(3)]
        labels, predicted = (np.concatenate([part[name] for part in parts]) for name in ("labels", "predicted"))
        assert len(labels) == 1797
        mine = [r for r in records if r.tags.get("variant") == attention and "fold" not in r.tags and r.n == 1797]
        value = {(r.metric, r.tags.get("class")): r.value for r in mine}
        assert value["test_accuracy", None] == pytest.approx(np.mean(labels == predicted))
        of_class = precision_recall_fscore_support(labels, predicted, zero_division=0.0)
        for i, name in enumerate(("precision", "recall", "f1")):
            assert value[f"macro_{name}", None] == pytest.approx(np.mean(of_class[i]))
            assert [value[name, str(c)] for c in range(10)] == pytest.approx(of_class[i])


def test_models_are_measured_on_images_that_they_did_not_see(folds: Path) -> None:
    """Those of the first fold, on which its models were not trained."""
    ledger = open_ledger(folds)
    assert [(r.tags["variant"], r.tags["seed"]) for r in ledger.find("attention_error")] == [(a, 0) for a in ATTENTIONS]
    with np.load(folds / "examples.npz") as arrays:
        held_out = data.folded(data.load_data("digits"), data.Fold(0, 3, 0)).test.batch(slice(None))[0].numpy()
        shown = {image.tobytes() for image in arrays["images"].transpose(0, 3, 1, 2)}
        assert shown <= {image.tobytes() for image in held_out}


def test_the_report_says_which_interval_it_is(folds: Path) -> None:
    assert "corrected resampled 95 % t-interval over 3 folds" in (folds / "report.md").read_text()
    for row in rows(folds):
        values = [
            r.value
            for r in open_ledger(folds).find("test_accuracy", variant=row["variant"], selection="best")
            if "fold" in r.tags
        ]
        found = interval(values, 1 / 2)
        assert found is not None
        assert len(values) == 3
        assert (row["seeds"], row["folds"]) == ("1", "3")
        assert float(row["test_accuracy"]) == pytest.approx(found.mean, abs=1e-3)
        assert float(row["test_accuracy_high"]) - float(row["test_accuracy"]) == pytest.approx(found.high - found.mean)
    summary = report.study_result(folds).summary
    assert (summary.seeds, summary.folds, summary.images) == (1, 3, 1797)
    assert summary.sampled
    for attention in ATTENTIONS:  # each image, when it was held out
        right = summary.evidence.right[attention][0]
        assert (len(right), right.mean()) == (1797, pytest.approx(summary[attention].best.mean))
    assert summary.variants[0].get("macro_f1") is not None


def test_a_short_training_is_a_limitation_unless_runs_of_half_the_steps_judge_it(folds: Path) -> None:
    words = {"attentions": ATTENTIONS, "folds": 3, "steps": 40, "controls": False, "threads": 1, "out": folds, **SMALL}
    comparison = Comparison(CompareRequest.of(data="digits", dry_run=True, **words))
    comparison.run()
    comparison.study.epochs, jobs = 2.0, comparison.jobs()  # of the recipe's 20
    assert [job.half for job in jobs].count(True) == 2

    def texts(jobs: list[StudyJob]) -> list[str]:
        return [text for text in warnings(comparison.study, comparison.prepared, jobs, None) if "recipe" in text]

    assert texts(jobs) == []
    assert texts(jobs[:-1]) == ["2 of the recipe's 20 epochs: more training may change the order."]
    lost = jobs[-1].model_copy(update={"folder": str(folds / "nowhere")})
    assert texts([*jobs[:-1], lost]) == texts(jobs[:-1])


def test_a_study_keeps_its_folds(folds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folds.rglob("*.safetensors")}
    assert cli.main([*WORDS, "--out", str(folds)]) == 2
    assert "its folds is 3, not None" in capsys.readouterr().err
    assert cli.main([*WORDS, "--folds", "3", "--out", str(folds)]) == 0
    assert {path: path.stat().st_mtime_ns for path in folds.rglob("*.safetensors")} == before


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_too_many_folds_are_refused_in_one_line(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "digits", "--folds", "1000", "--out", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.strip() == (
        "linvit: error: folds=1000 needs as many images of every class, but '8' has 174: give at most 174, "
        "or add images or remove the class"
    )
    assert not (tmp_path / "x").exists()


def test_seeds_have_folds_of_their_own_which_workers_open(tmp_path: Path) -> None:
    words = {"attentions": list(ATTENTIONS), "folds": 2, "seeds": 2, "epochs": 1, "controls": False, **SMALL}
    folder = compare(DATA, jobs_file=True, out=tmp_path / "x", **words)
    study = Study.read(folder / "study.json")
    assert [(run.seed, run.fold) for run in study.runs()[::2]] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]
    jobs, opened = [read_job(folder, number) for number in range(1, len(study.runs()) + 1)], DatasetCache()
    assert len({opened.find(job.experiment).identity for job in jobs}) == 4


@pytest.mark.usefixtures("no_page")
def test_a_dataset_in_memory_is_divided_too(dataset: data.Dataset, tmp_path: Path) -> None:
    words = {"folds": 3, "epochs": 1, "controls": False, "threads": 1, "measured": False, **SMALL}
    folder = compare(dataset, attentions=["softmax"], out=tmp_path / "x", **words)
    found = [r for r in Records(folder / "records.jsonl") if r.metric == "test_accuracy" and "fold" not in r.tags]
    assert [r.n for r in found] == [96]
    assert len(report.study_result(folder).summary.evidence.right["softmax"][0]) == 96


def test_train_holds_out_every_fold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", DATA, "--folds", "3", "-a", "softmax", "--epochs", "2", "--out", str(tmp_path / "x"), *SETS]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert "out of fold" in out
    assert "n = 96 in 3 folds, one seed: corrected resampled t" in out
    assert [line for line in err.splitlines() if "fold" in line] == [
        f"linvit: fold {i}, {i + 1} of 3" for i in range(3)
    ]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert "already finished" in out
    assert err == ""
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    values = [evaluate_folder(tmp_path / "x" / f"fold-{i}").result for i in range(3)]
    right = sum(int((one.labels == one.predictions).sum()) for one in values)
    assert found["test_accuracy"] == pytest.approx(right / 96)
    assert found["folds"] == pytest.approx([one.accuracy for one in values])
    spread = interval(found["folds"], 1 / 2)
    assert spread is not None
    assert found["test_accuracy_interval"][1] == pytest.approx(min(1.0, right / 96 + spread.high - spread.mean))
    records = list(Records(tmp_path / "x" / "records.jsonl"))
    assert {r.tags.get("fold") for r in records} == {None, 0, 1, 2}
    assert all((tmp_path / "x" / r.artefact).is_file() for r in records if r.artefact)
    plain = [word for word in words if word not in ("--folds", "3")]
    assert cli.main([*plain, "-q"]) == 2  # the folder holds folds


def test_a_fold_that_diverges_leaves_no_score_over_all_images(tmp_path: Path) -> None:
    bad = {"lr": 1e30, "optimizer": "sgd", "clip_norm": 0.0}
    found = train(DATA, attention="softmax", folds=2, epochs=1, out=tmp_path / "x", **SMALL, **bad)
    assert "fold-0" in found.diverged
    assert found.test_accuracy is None
