"""The real data sets, where LINVIT_DATA has them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from linvit import data

pytestmark = pytest.mark.data


def real(*names: str) -> Path:
    root = os.environ.get("LINVIT_DATA", "")
    if not root:
        pytest.skip("LINVIT_DATA is not set")
    if not any((Path(root) / name).exists() for name in names):
        pytest.skip(f"LINVIT_DATA has no {' or '.join(names)}")
    return Path(root)


def test_mnist():
    mnist = data.load_data("mnist", root=real("mnist"))
    assert (len(mnist.train) + len(mnist.validation), len(mnist.test)) == (60_000, 10_000)
    assert mnist.train.store.shape[1:] == (1, 28, 28)
    assert mnist.test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert mnist.mean[0] == pytest.approx(0.1307, abs=1e-3)
    assert mnist.std[0] == pytest.approx(0.3081, abs=1e-3)


def test_cifar10():
    cifar = data.load_data("cifar10", root=real("cifar10", "cifar-10-batches-bin"))
    assert (len(cifar.train), len(cifar.validation), len(cifar.test)) == (45_000, 5_000, 10_000)
    assert np.bincount(cifar.validation.labels).tolist() == [500] * 10
    assert cifar.classes[:3] == ["airplane", "automobile", "bird"]
    assert cifar.mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=2e-3)
    assert cifar.std == pytest.approx((0.2470, 0.2435, 0.2616), abs=2e-3)


def test_some_classes_of_tiny_imagenet(tmp_path):
    """Three classes, so that it takes no time: the layout and the decoder meet the real files."""
    root = real("tiny-imagenet-200", "tiny-imagenet-100")
    whole = next(path for name in ("200", "100") if (path := root / f"tiny-imagenet-{name}").exists())
    part = tmp_path / "tiny-imagenet-100"
    (part / "train").mkdir(parents=True)
    (part / "val").mkdir()
    ids = sorted((whole / "wnids.txt").read_text().split())[:3]
    (part / "wnids.txt").write_text("\n".join(ids))
    for name in ids:
        (part / "train" / name).symlink_to(whole / "train" / name)
    (part / "val" / "images").symlink_to(whole / "val" / "images")
    lines = (whole / "val" / "val_annotations.txt").read_text().splitlines()
    (part / "val" / "val_annotations.txt").write_text("\n".join(line for line in lines if line.split("\t")[1] in ids))
    loaded = data.load_data("tiny-imagenet", root=tmp_path)
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (1350, 150, 150)
    assert loaded.train.store.shape[1:] == (3, 64, 64)
