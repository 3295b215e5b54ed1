"""Images with several labels: training, what the model's folder says, evaluation, prediction and the page."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

import linvit
from linvit import cli, report

SMALL = {"dim": 12, "depth": 1, "heads": 2, "start": "scratch"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Half of the image bright is class a, the other half b, both, or none."""
    folder = tmp_path_factory.mktemp("several")
    rng, rows = np.random.default_rng(0), ["path,label"]
    for i in range(120):
        has = rng.random(2) < 0.5
        pixels = rng.integers(0, 60, (8, 8))
        pixels[:4] += 180 * has[0]
        pixels[4:] += 180 * has[1]
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
        rows.append(f"{i}.png,{'|'.join(name for name, there in zip('ab', has, strict=True) if there) or '|'}")
    (folder / "labels.csv").write_text("\n".join(rows))
    return folder / "labels.csv"


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "one"
    options = {"attention": "performer-relu:m=8", "epochs": 8, "batch_size": 16}
    linvit.train(photos, task="multi-label", out=out, **options, **SMALL)
    return out


def test_what_is_recorded(run):
    rows = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    found = {(row["metric"], row.get("selection"), row.get("class")): row["value"] for row in rows}
    assert found["mean_average_precision", "best", None] > 0.9
    parts = [found["average_precision", "best", name] for name in "ab"]
    assert found["mean_average_precision", "best", None] == pytest.approx(np.mean(parts))
    about = json.loads((run / "best/config.json").read_text())["data"]
    assert about["thresholds"] == [found["threshold", "best", name] for name in "ab"]
    assert ("test_accuracy", "best", None) not in found
    values = np.load(run / "precision.npz")["values"]
    assert values.mean() == pytest.approx(found["mean_average_precision", "best", None], abs=0.05)


def test_evaluation_gives_the_same_number(run, capsys):
    rows = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    score = next(r["value"] for r in rows if r["metric"] == "mean_average_precision" and r["selection"] == "best")
    assert cli.main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mean_average_precision"] == pytest.approx(score, abs=1e-6)
    assert [row["class"] for row in found["classes"]] == ["a", "b"]
    assert cli.main(["evaluate", str(run)]) == 0
    assert "mean average precision" in capsys.readouterr().out
    assert cli.main(["evaluate", str(run), "digits"]) == 2
    assert "have one label each, but the model was trained on several" in capsys.readouterr().err


def test_predictions_are_the_classes_above_their_thresholds(run, photos, capsys, tmp_path):
    names = [str(photos.parent / f"{i}.png") for i in range(20)]
    assert cli.main(["predict", *names, "--model", str(run), "--json"]) == 0
    said = [{name for name, _ in one.top} for one in _predicted(run, names)]
    true = [set(line.partition(",")[2].split("|")) - {""} for line in photos.read_text().splitlines()[1:21]]
    assert np.mean([a == b for a, b in zip(said, true, strict=True)]) > 0.7
    assert json.loads(capsys.readouterr().out)


def _predicted(run, names):
    from linvit.training.predict import predict

    return list(predict(linvit.load(run), names))


def test_the_wrong_task_is_one_line(photos, capsys, tmp_path):
    assert cli.main(["train", str(photos), "--out", str(tmp_path / "a")]) == 2
    assert "these images have several labels each: add --task multi-label" in capsys.readouterr().err
    assert cli.main(["train", "digits", "--task", "multi-label", "--out", str(tmp_path / "b")]) == 2
    assert "task multi-label needs images with several labels each" in capsys.readouterr().err
    assert cli.main(["compare", str(photos), "--task", "multi-label", "--budget", "1m", "--out", str(tmp_path)]) == 2
    assert "budget=1m cannot be combined with task multi-label" in capsys.readouterr().err


def test_a_study_compares_mean_average_precision(photos, tmp_path):
    variants = {"attentions": ("softmax", "performer-relu:m=8"), "controls": False, "measured": False}
    linvit.compare(photos, task="multi-label", epochs=2, seeds=2, out=tmp_path / "study", jobs=1, **variants, **SMALL)
    result = report.build(tmp_path / "study")
    page = (tmp_path / "study/report.html").read_text()
    assert "Mean average precision" in page
    assert "Average precision" in page  # of every class, with its threshold
    assert "Threshold" in page
    assert result.summary.merit.metric == "mean_average_precision"
    assert len(result.summary.evidence.right) == 2
