"""Heads fitted to frozen features, against scikit-learn; and a training that starts with one."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf_shrinkage
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression

from linvit.data import folded, load_data
from linvit.models import VisionTransformer, create_model
from linvit.pipeline.train import train
from linvit.schemas.experiment import Fold
from linvit.training import features as training_features
from linvit.training import heads
from linvit.training.checkpoint import load, save_config, save_model
from linvit.training.features import Remembering

CLASSES, WIDTH = 5, 11
FROZEN = {"steps": 0, "start_head": "fitted"}
CPU = torch.device("cpu")


def blobs(count: int = 211, spread: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of unequal scale around class means that are as far from 0 as from each other."""
    source = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.randint(CLASSES, (count,), generator=source)
    mixed = torch.randn(count, WIDTH, generator=source, dtype=torch.float64) @ torch.randn(
        WIDTH, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    return 7 + (means[y] + spread * mixed) * torch.logspace(-1, 1, WIDTH, dtype=torch.float64), y


@pytest.mark.parametrize("penalty", [30.0, 1.0])
def test_logistic_regression_is_scikit_learns(penalty):
    f, y = blobs()
    x = ((f - f.mean(0)) / f.std(0, correction=0)).numpy()
    theirs = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=5000).fit(x, y.numpy())
    found = heads.logistic(f, y, CLASSES, penalty)
    ours = torch.softmax(f @ found.weight.T + found.bias, 1).numpy()
    np.testing.assert_allclose(ours, theirs.predict_proba(x), atol=2e-3)  # both solvers stop near the one minimum


@pytest.mark.parametrize("shrinkage", [0.1, 0.7])
def test_discriminant_analysis_is_scikit_learns(shrinkage):
    f, y = blobs()
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(f.numpy(), y.numpy())
    found = heads.discriminant(f, y, CLASSES, shrinkage)
    np.testing.assert_allclose(found.weight.numpy(), theirs.coef_, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.bias.numpy(), theirs.intercept_, rtol=1e-6)


@pytest.mark.parametrize("count", [7, 60, 2000])
def test_shrinkage_is_ledoit_and_wolfs(count):
    f, _ = blobs(count)
    f = f - f.mean(0)
    found = heads.ledoit_wolf(f, f.T @ f / count)
    assert found == pytest.approx(ledoit_wolf_shrinkage(f.numpy(), assume_centered=True), rel=1e-9)


@pytest.mark.parametrize("kind", [heads.class_means, heads.discriminant, lambda *a: heads.logistic(*a, penalty=1.0)])
@pytest.mark.parametrize("missing", [0, 1])
def test_any_head_is_finite_whatever_the_features(kind, missing):
    """Constant features, a class without images, and fewer images than features."""
    f, y = blobs(9)
    f[:, 3] = 2.5
    y[y == missing] = 2
    head = kind(f, y, CLASSES)
    assert head.weight.shape == (CLASSES, WIDTH)
    assert all(part.isfinite().all() for part in (head.weight, head.bias))


def test_the_kind_is_chosen_by_cross_validation_and_the_choice_is_repeatable():
    f, y = blobs(400, spread=1.5)
    found, again = heads.fit(f, y, CLASSES), heads.fit(f, y, CLASSES)
    assert torch.equal(found.weight, again.weight)
    assert found.kind != "class means"  # features of unequal scale and correlated
    new, labels = blobs(1000, spread=1.5, seed=3)
    means = heads.class_means(f, y, CLASSES)
    assert found.right(new, labels) > means.right(new, labels)
    assert found.accuracy == pytest.approx(found.right(new, labels) / 1000, abs=0.06)  # 400 images: 2 standard errors
    assert heads.fit(f[:13], y[:13], CLASSES).kind == "class means"


def test_the_solver_has_bounded_work(monkeypatch):
    seen = []
    monkeypatch.setattr(
        heads, "logistic", lambda f, y, classes, penalty: seen.append(len(y)) or heads.class_means(f, y, classes)
    )
    f, y = blobs(400)
    monkeypatch.setattr(
        heads, "WORK", 4.0 * WIDTH * CLASSES * heads.FOLDS * len(heads.PENALTIES) * heads.ITERATIONS * 100
    )
    heads.fit(f, y, CLASSES)
    assert seen
    assert max(seen) <= 100
    seen.clear()
    monkeypatch.setattr(heads, "WORK", 1.0)
    assert heads.fit(f, y, CLASSES).kind != "logistic regression"
    assert seen == []


@pytest.fixture(scope="module")
def digits():
    return load_data("digits", limit=200)


@pytest.fixture
def start(digits, tmp_path, monkeypatch):
    """An untrained model's folder, whose classes are not those of the images."""
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))
    shape = {"stem": "conv", "trunk": (16,), "pools": 1, "dim": 32, "depth": 1, "heads": 2, "mlp_dim": 32}
    model = create_model(image_size=8, channels=1, classes=3, **shape, seed=5)
    other = load_data("synthetic:images=30,size=8,classes=3,channels=1")
    save_config(tmp_path / "start", model.config, other)
    save_model(tmp_path / "start", model)
    return tmp_path / "start"


def folds_of(digits):
    """The same images, held out in three parts."""
    return [folded(digits, Fold(index=i, of=3)) for i in range(3)]


def images_of(dataset) -> int:
    return len(dataset.train) + len(dataset.validation) + len(dataset.test)


def run(digits, start, tmp_path, name="run", **options):
    return train(digits, start=start, attention="softmax", out=tmp_path / name, device="cpu", threads=1, **options)


def test_without_steps_the_model_is_the_start_with_a_fitted_head(digits, start, tmp_path):
    done = run(digits, start, tmp_path, steps=0, start_head="fitted")
    assert done.test_accuracy > 0.7  # features of random filters; a head of class means is right less often
    assert done.test_accuracy > run(digits, start, tmp_path, "means", steps=0).test_accuracy
    assert done.value("validation_accuracy") == done.value("start_accuracy")
    assert done.value("test_accuracy", "final") == done.test_accuracy
    first, now = load(start).state_dict(), load(tmp_path / "run").state_dict()
    assert all(torch.equal(value, now[name]) for name, value in first.items() if not name.startswith("head."))
    assert run(digits, start, tmp_path, steps=0, start_head="fitted").records == done.records  # nothing runs again
    rows = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0]


def test_features_are_computed_once_for_a_model_and_its_images(digits, start, tmp_path, monkeypatch):
    first = run(digits, start, tmp_path, steps=0, start_head="fitted")
    monkeypatch.setattr(heads, "features", lambda *args, **options: pytest.fail("computed again"))
    again = run(digits, start, tmp_path, "again", steps=0, start_head="fitted", seed=1)
    assert again.test_accuracy == first.test_accuracy
    (file,) = (tmp_path / "cache/heads").iterdir()
    file.write_bytes(b"damaged")
    with pytest.raises(pytest.fail.Exception, match="computed again"):
        run(digits, start, tmp_path, "damaged", steps=0, start_head="fitted")


def counted(monkeypatch) -> list[int]:
    """How many images each pass of the model took."""
    passes: list[int] = []
    pooled = VisionTransformer.pooled
    monkeypatch.setattr(VisionTransformer, "pooled", lambda self, x: passes.append(len(x)) or pooled(self, x))
    return passes


def test_other_folds_limits_and_seeds_compute_features_of_new_images_only(digits, start, tmp_path, monkeypatch):
    monkeypatch.setattr(training_features, "MAX_IMAGES", 0)  # nothing is kept
    expected = [run(fold, start, tmp_path, f"bare {i}", **FROZEN) for i, fold in enumerate(folds_of(digits))]
    monkeypatch.undo()
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "anew"))
    passes = counted(monkeypatch)
    found = [run(fold, start, tmp_path, f"fold {i}", **FROZEN) for i, fold in enumerate(folds_of(digits))]
    assert sum(passes) == images_of(digits)  # every image once, of training, validation and test
    assert [one.test_accuracy for one in found] == [one.test_accuracy for one in expected]
    for one, other in zip(found, expected, strict=True):
        ours, theirs = (load(done.folder).head.weight for done in (one, other))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # batches, and so roundings, differ


def test_damaged_features_are_computed_again(digits, start, tmp_path, monkeypatch):
    first = run(digits, start, tmp_path, **FROZEN)
    (file,) = (tmp_path / "cache/features").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-7])
    shutil.rmtree(tmp_path / "cache/heads")
    passes = counted(monkeypatch)
    again = run(digits, start, tmp_path, "again", **FROZEN)
    assert sum(passes) == images_of(digits)
    assert torch.equal(load(again.folder).head.weight, load(first.folder).head.weight)


def test_a_pass_that_was_cut_off_resumes_to_the_bit(digits, start, tmp_path, monkeypatch):
    whole = run(digits, start, tmp_path, "whole", **FROZEN)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(training_features, "SAVE_SECONDS", 0.0)
    kept = Remembering.save

    def cut(self):
        kept(self)
        if len(self.known) > 100:
            raise KeyboardInterrupt

    monkeypatch.setattr(Remembering, "save", cut)
    with pytest.raises(KeyboardInterrupt):
        run(digits, start, tmp_path, **FROZEN)
    monkeypatch.setattr(Remembering, "save", kept)
    passes = counted(monkeypatch)
    done = run(digits, start, tmp_path, **FROZEN)
    assert 0 < sum(passes) < images_of(digits)
    assert torch.equal(load(done.folder).head.weight, load(whole.folder).head.weight)


def test_training_never_keeps_a_model_that_is_worse_than_its_start(digits, start, tmp_path):
    """A learning rate that destroys everything."""
    done = run(digits, start, tmp_path, steps=6, lr=30.0, warmup=0.0, optimizer="sgd", start_head="fitted")
    frozen = run(digits, start, tmp_path, "frozen", steps=0, start_head="fitted")
    assert done.test_accuracy == frozen.test_accuracy
    assert done.value("test_accuracy", "final") < frozen.test_accuracy


def test_a_head_that_knows_the_classes_is_kept_where_it_is_as_good(digits, start, tmp_path):
    trained = run(digits, start, tmp_path, "trained", epochs=10, start_head="fitted")
    again = run(digits, tmp_path / "trained", tmp_path, "again", steps=0, start_head="fitted")
    assert again.value("start_accuracy") >= trained.value("validation_accuracy")


@pytest.mark.parametrize("option", [{"steps": 0}, {"start_head": "fitted"}])
def test_without_a_start_there_is_nothing_to_fit_or_keep(option, digits, tmp_path):
    with pytest.raises(ValueError, match=r"needs a trained start: name one with --from"):
        train(digits, start="scratch", out=tmp_path / "run", device="cpu", **option)


def test_only_a_linear_head_is_fitted(digits, start, tmp_path):
    with pytest.raises(ValueError, match="start_head=fitted needs head=linear"):
        run(digits, start, tmp_path, steps=0, start_head="fitted", head="wide")
