"""The public `train`: from keywords to a trained model, or to one for each fold."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from linvit import metrics
from linvit.measure.accuracy import Evaluation
from linvit.pipeline.train import Trained, train
from linvit.records import Records
from linvit.schemas.search import Best
from linvit.training.checkpoint import load
from linvit.training.defaults import ATTENTION
from linvit.training.evaluate import evaluate_folder
from linvit.training.events import Began, Noted, Validated
from linvit.training.predict import predict

DATA = "synthetic:images=60,size=8,classes=3"
SHAPE = {"stem": "patch", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 24, "batch_size": 16}
TINY = SHAPE | {"epochs": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def folds(tmp_path_factory) -> tuple[Trained, list]:
    events: list = []
    folder = tmp_path_factory.mktemp("folds") / "run"
    return train(DATA, folds=3, out=folder, on_event=events.append, **TINY), events


@pytest.mark.parametrize("option", ["dry_run", "print_config"])
def test_what_would_be_trained_is_returned_and_nothing_written(option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = train(DATA, **TINY | {option: True})
    assert (found.records, found.model, found.experiment.model.attention) == ([], None, ATTENTION)
    assert found.folder.name == f"synthetic-images-60-size-8-classes-3-{found.experiment.id}"
    several = train(DATA, folds=3, **TINY | {option: True})
    assert len(several.folds) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_start_keeps_its_attention_unless_another_is_asked_for(teacher):
    found = train(DATA, start=teacher, dry_run=True).experiment
    assert (found.model.attention, found.model.dim, found.start.name) == ("uniform", 16, "teacher")
    assert train(DATA, start=teacher, attention="softmax", dry_run=True).experiment.model.attention == "softmax"


def test_the_best_of_a_search_is_trained(tmp_path):
    winner = {"variant": "a", "attention": "uniform", "validation_accuracy": 0.5, "trial": 1, "options": {"lr": 0.25}}
    best = Best.model_validate({"data": DATA, "epochs": 5, "trials": 1, "seed": 0, "winner": [winner]})
    best.write(tmp_path / "best.toml", "found by a test")
    found = train(DATA, config=tmp_path / "best.toml", dry_run=True).experiment
    assert (found.model.attention, found.recipe.lr, found.recipe.epochs) == ("uniform", 0.25, 5)


def test_bad_requests_are_one_line_and_leave_nothing(tmp_path, photos):
    for options, message in (
        ({"attention": "sofmax"}, "unknown attention 'sofmax'"),
        ({"learning_rate": 1}, "unknown option 'learning_rate'"),
        ({"classes": 3}, "classes comes from the data"),
        ({"epochs": 1, "steps": 1}, "give epochs or steps, not both"),
        ({"threads": 0}, "threads=0"),
        ({"device": "gpu"}, "device 'gpu'"),
        ({"start": "nowhere"}, "nowhere does not exist"),
        ({"image_size": 9}, "patch_size=4 does not divide image_size=9"),
        ({"folds": 1}, "folds=1 must be at least 2"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            train(DATA, out=tmp_path / "run", **SHAPE | options)
        assert "\n" not in str(caught.value), options
    with pytest.raises(ValueError, match="is in the folder of the data"):
        train(photos, out=photos / "run", start="scratch", image_size=8, **SHAPE)
    assert not (tmp_path / "run").exists()
    assert not (photos / "run").exists()


def test_folds_are_scored_together(folds):
    trained, _ = folds
    assert trained.model is None
    assert [fold.folder.name for fold in trained.folds] == ["fold-0", "fold-1", "fold-2"]
    right = []
    for fold in trained.folds:
        with np.load(fold.folder / "predictions.npz") as file:
            right.append(file["predicted"] == file["labels"])
    assert trained.test_accuracy == pytest.approx(np.mean(np.concatenate(right)))
    assert trained.find("test_accuracy", "best").n == 60
    stored = list(Records(trained.folder / "records.jsonl"))
    assert stored == trained.records
    assert [problem for record in stored for problem in metrics.problems(record)] == []
    assert {r.tags.get("fold") for r in stored} == {None, 0, 1, 2}
    assert all((trained.folder / r.artefact).exists() for r in stored if r.artefact)


def test_events_name_the_fold(folds):
    trained, events = folds
    texts = [event.text for event in events if isinstance(event, Noted)]
    assert texts == ["fold 0, 1 of 3", "fold 1, 2 of 3", "fold 2, 3 of 3"]
    assert len([event for event in events if isinstance(event, Began)]) == 3
    assert len([event for event in events if isinstance(event, Validated)]) == 3
    later: list = []
    again = train(DATA, folds=3, out=trained.folder, on_event=later.append, **TINY)
    assert later == []  # all are finished
    assert [(r.metric, r.value, r.tags) for r in again.records] == [
        (r.metric, r.value, r.tags) for r in trained.records
    ]


def test_a_folder_that_holds_something_else_is_refused(folds, tmp_path):
    trained, _ = folds
    with pytest.raises(ValueError, match=r"holds records\.jsonl, but no experiment\.json"):
        train(DATA, out=trained.folder, **TINY)
    with pytest.raises(ValueError, match=r"holds experiment\.json: choose another --out"):
        train(DATA, folds=2, out=trained.folds[0].folder, **TINY)


def test_a_fold_that_diverges_leaves_no_score_of_all_images(tmp_path):
    trained = train(DATA, folds=2, out=tmp_path, **TINY | {"lr": 1e30, "optimizer": "sgd", "clip_norm": 0, "epochs": 9})
    assert trained.diverged.endswith("of fold-0")
    assert trained.test_accuracy is None
    assert trained.value("test_accuracy") is None


@pytest.mark.parametrize("resize", [None, "crop", "squeeze"])
def test_a_model_remembers_how_its_photos_became_square(resize, photos, tmp_path):
    """evaluate and predict read the same pixels as training, and what starts from it does by default."""
    done = train(photos, resize=resize, out=tmp_path / "run", start="scratch", image_size=16, steps=1, device="cpu")
    assert load(tmp_path / "run").about["resize"] == done.data.resize == (resize or "crop")
    for data in (None, photos):
        found = evaluate_folder(tmp_path / "run", data, device="cpu").result
        assert isinstance(found, Evaluation)
        assert found.accuracy == done.test_accuracy
    wide, seen = tmp_path / "wide.png", []
    Image.fromarray(np.repeat(np.array([[255, 0, 0, 0]], np.uint8), 20, 1).repeat(16, 0)).convert("RGB").save(wide)
    model = load(tmp_path / "run")
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    list(predict(model, [wide]))
    assert (len(seen[0].unique()) > 3) == (resize == "squeeze")  # its left quarter is white
    again = train(photos, out=tmp_path / "next", start=tmp_path / "run", steps=1, device="cpu")
    assert again.data.resize == done.data.resize


def test_a_model_stored_before_there_was_a_choice_squeezes(photos, tmp_path):
    train(photos, resize="squeeze", out=tmp_path / "run", start="scratch", image_size=16, steps=1, device="cpu")
    for file, part in (("best/config.json", "data"), ("experiment.json", "source")):
        document = json.loads((tmp_path / "run" / file).read_text())
        del document[part]["resize"]
        (tmp_path / "run" / file).write_text(json.dumps(document))
    assert load(tmp_path / "run").about["resize"] == "squeeze"
    assert evaluate_folder(tmp_path / "run", device="cpu").changed is False
