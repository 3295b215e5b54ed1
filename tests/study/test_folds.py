"""`--folds`: the same folds for all variants, scores of all images together, and the page says which interval it is."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

from linvit import cli, data, metrics, report, train
from linvit.records import Record, Records
from linvit.report import page
from linvit.report.statistics import interval
from linvit.study import Study, compare, measuring
from linvit.study.plan import Offer
from linvit.train.use import evaluate_folder

SMALL = ["stem=patch", "patch_size=4", "dim=16", "depth=1", "heads=2", "mlp_dim=32", "batch_size=64"]
TINY = [word for pair in SMALL for word in ("--set", pair)]
OPTIONS = {"stem": "patch", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 32, "batch_size": 16}
DATA = "synthetic:classes=3,images=96,size=8,channels=1"


@pytest.fixture(scope="module", autouse=True)
def short():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "LENGTHS", (16,))
        patch.setattr(measuring, "ROUNDS", 1)
        patch.setattr(page, "draw_files", lambda specs, folder: None)
        patch.setattr(measuring, "peak_memory", lambda *_: Record("peak_memory", 7, "bytes", tags={"batch": 64}))
        yield


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study, to look at only."""
    out = tmp_path_factory.mktemp("folds") / "run"
    words = ["compare", "digits", "--folds", "3", "-a", "softmax", "-a", "performer-relu:m=8", "--no-controls", "-q"]
    assert cli.main([*words, *TINY, "--set", "steps=40", "--threads", "1", "--out", str(out)]) == 0
    return out


def runs(folder: Path) -> dict[tuple[str, int], dict]:
    """(attention, fold) → experiment.json of the whole runs."""
    found = {}
    for file in folder.glob("*/experiment.json"):
        if "-half-" not in file.parent.name:
            there = json.loads(file.read_text())
            found[there["model"]["attention"], there["source"]["fold"]["index"]] = there | {"folder": file.parent}
    return found


def test_all_variants_have_the_same_folds(study: Path) -> None:
    found = runs(study)
    assert len(found) == 6
    digits = data.load_data("digits")
    for fold in range(3):
        mine = {found[attention, fold]["data"]["identity"] for attention in ("softmax", "performer-relu:m=8")}
        assert mine == {data.folded(digits, data.Fold(fold, 3, 0)).identity}


def test_scores_are_of_all_images_each_when_it_was_held_out(study: Path) -> None:
    records = list(Records(study / "records.jsonl"))
    assert [problem for record in records for problem in metrics.problems(record)] == []
    assert len({metrics.key(record) for record in records}) == len(records)
    for attention in ("softmax", "performer-relu:m=8"):
        parts = [np.load(runs(study)[attention, fold]["folder"] / "predictions.npz") for fold in range(3)]
        labels, said = (np.concatenate([part[name] for part in parts]) for name in ("labels", "predicted"))
        assert len(labels) == 1797
        mine = [r for r in records if r.tags.get("variant") == attention and "fold" not in r.tags and r.n == 1797]
        value = {(r.metric, r.tags.get("class")): r.value for r in mine}
        assert value["test_accuracy", None] == pytest.approx(np.mean(labels == said))
        of_class = precision_recall_fscore_support(labels, said, zero_division=0.0)
        for i, name in enumerate(("precision", "recall", "f1")):
            assert value[f"macro_{name}", None] == pytest.approx(np.mean(of_class[i]))
            assert [value[name, str(c)] for c in range(10)] == pytest.approx(of_class[i])


def test_the_page_says_which_interval_it_is(study: Path) -> None:
    words = (study / "report.md").read_text()
    assert "corrected resampled 95 % t-interval (Nadeau and Bengio) over 3 folds" in words
    assert "Not every run says which test images" not in words
    assert "corrected resampled" in (study / "report.html").read_text()
    with open(study / "results.csv", newline="", encoding="utf-8") as file:
        rows = {row["attention"]: row for row in csv.DictReader(file)}
    for attention, row in rows.items():
        values = [r.value for r in Records(study / "records.jsonl")
                  if r.metric == "test_accuracy" and r.tags["variant"] == attention and "fold" in r.tags
                  and r.tags["selection"] == "best"]  # fmt: skip
        found = interval(values, 1 / 2)
        assert found is not None
        assert len(values) == 3
        assert (row["seeds"], row["folds"]) == ("1", "3")
        assert float(row["test_accuracy"]) == pytest.approx(found.mean, abs=1e-3)
        assert float(row["test_accuracy_high"]) - float(row["test_accuracy"]) == pytest.approx(found.high - found.mean)
    summary = report.summarise(report.read(study))
    assert (summary.seeds, summary.folds, summary.images) == (1, 3, 1797)
    assert summary.variants[0].get("macro_f1") is not None


def test_a_study_stays_with_its_folds(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in study.rglob("*.safetensors")}
    words = ["compare", "digits", "-a", "softmax", "-a", "performer-relu:m=8", "--no-controls", "-q", *TINY,
             "--set", "steps=40", "--threads", "1", "--out", str(study)]  # fmt: skip
    assert cli.main(words) == 2
    assert "its folds is 3, not None" in capsys.readouterr().err
    assert cli.main([*words, "--folds", "3"]) == 0
    assert {path: path.stat().st_mtime_ns for path in study.rglob("*.safetensors")} == before


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_too_many_folds_are_refused_in_one_line(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "digits", "--folds", "1000", "--out", str(tmp_path / "x")]) == 2
    said = capsys.readouterr().err.strip()
    assert said == ("linvit: error: folds=1000 needs as many images of every class, but '8' has 174: give at most 174, "
                    "or add images or remove the class")  # fmt: skip
    assert not (tmp_path / "x").exists()


def test_workers_open_the_same_folds_and_seeds_deal_anew(tmp_path: Path) -> None:
    words = {"attentions": ["softmax", "performer-relu:m=8"], "folds": 2, "seeds": 2, "epochs": 1, "controls": False}
    here = compare(DATA, jobs=1, threads=1, out=tmp_path / "here", **words, **OPTIONS)
    there = compare(DATA, jobs=2, out=tmp_path / "there", **words, **OPTIONS)
    weights = [{str(f.relative_to(folder)): f.read_bytes() for f in folder.glob("*/best/model.safetensors")}
               for folder in (here, there)]  # fmt: skip
    assert len(weights[0]) == 10  # two variants, two seeds, two folds, and each once for half
    assert weights[0] == weights[1]
    study = Study.read(here / "study.json")
    assert [(run.seed, run.fold) for run in study.runs()[::2]] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]
    identities = {json.loads(file.read_text())["data"]["identity"] for file in here.glob("*/experiment.json")}
    assert len(identities) == 4
    found = [r for r in Records(here / "records.jsonl") if r.metric == "test_accuracy" and "fold" not in r.tags]
    assert {(r.tags["variant"], r.tags["seed"], r.n) for r in found} == {
        (name, seed, 96) for name in words["attentions"] for seed in (0, 1)
    }


def test_images_given_as_they_are_are_dealt_out_too(tmp_path: Path) -> None:
    dataset = data.load_data(DATA)
    folder = compare(dataset, attentions=["softmax"], folds=3, epochs=1, controls=False, threads=1,
                     out=tmp_path / "x", **OPTIONS)  # fmt: skip
    found = [r for r in Records(folder / "records.jsonl") if r.metric == "test_accuracy" and "fold" not in r.tags]
    assert [r.n for r in found] == [96]
    assert "over 3 folds" in (folder / "report.md").read_text()


def test_a_budget_counts_every_fold(tmp_path: Path) -> None:
    """The steps of five runs for each variant must fit, not of one."""
    said: list[str] = []
    compare(DATA, attentions=["softmax"], folds=5, budget="90s", controls=False, threads=1, dry_run=True,
            out=tmp_path / "x", say=said.append, **OPTIONS)  # fmt: skip
    assert "1 variants × 5 folds ×" in next(line for line in said if line.startswith("  runs"))
    offer = Offer(seconds=60, image_size=8, narrower=1, seeds=1, folds=5, epochs=3, tells="something")
    assert "5 folds × 1 seed" in offer.text
    assert not (tmp_path / "x").exists()


def test_train_holds_every_fold_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", DATA, "--folds", "3", "-a", "softmax", "--epochs", "2", "--out", str(tmp_path / "x"), *TINY[:-2]]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert "out of fold" in out
    assert "n = 96 in 3 folds, one seed: corrected resampled t" in out
    assert [line for line in err.splitlines() if "fold" in line] == [
        f"linvit: fold {i}, {i + 1} of 3" for i in range(3)
    ]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert "nothing was left to do" in out
    assert err == ""
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    values = [evaluate_folder(tmp_path / "x" / f"fold-{i}").result for i in range(3)]
    assert not any(evaluate_folder(tmp_path / "x" / f"fold-{i}").changed for i in range(3))
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


def test_a_fold_that_diverges_leaves_no_score_of_all_images(tmp_path: Path) -> None:
    found = train(DATA, attention="softmax", folds=2, epochs=1, lr=1e30, optimizer="sgd", clip_norm=0.0,
                  out=tmp_path / "x", **OPTIONS)  # fmt: skip
    assert "fold-0" in found.diverged
    assert found.test_accuracy is None
