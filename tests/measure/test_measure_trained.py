"""Chance in drawing random features. Labels are what an untrained model says with its first draw."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

from linvit import data
from linvit.attention import has_random_features
from linvit.measure.accuracy import evaluate
from linvit.measure.trained import redrawn
from linvit.models import VisionTransformer, model_config


@pytest.mark.parametrize(
    ("spec", "random"),
    [
        ("performer-relu:m=8", True),
        ("performer-exp:m=8", True),
        ("performer-relu:projection=none", False),
        ("performer-theta:m=8", False),
        ("softmax", False),
        ("linformer", False),
        ("softmax@1+performer-relu:m=8@2", True),
        ("softmax@1+uniform@2", False),
    ],
)
def test_what_has_random_features(spec, random):
    assert has_random_features(spec) is random


def accuracies(spec: str, seed: int) -> list[float]:
    images = data.load_data("synthetic:classes=3,images=150,size=8,channels=1")
    shape = {"image_size": 8, "channels": 1, "classes": 3, "patch_size": 2, "dim": 16, "depth": 1, "heads": 2}
    model = VisionTransformer(model_config(**shape, attention=spec, seed=seed))
    with torch.no_grad():
        model.blocks[0].attn.proj.weight.mul_(10)  # attention decides
    facts = images.classes, images.mean, images.std
    said = evaluate(model, images.test, *facts).predictions
    return redrawn(model, replace(images.test, labels=said), *facts)


@pytest.mark.parametrize("kernel", ["relu", "exp"])
def test_more_features_leave_less_to_chance(kernel):
    """Means over seeds differ by more than four times here; a draw that training had would be right throughout."""
    few, many = ([accuracies(f"performer-{kernel}:m={m}", seed) for seed in (0, 1, 2)] for m in (1, 128))
    spread = [statistics.fmean(map(statistics.stdev, found)) for found in (few, many)]
    assert spread[0] > 1.5 * spread[1] > 0
    assert all(len(set(found)) > 1 for found in few)
    assert max(map(max, few)) < 1
    assert accuracies(f"performer-{kernel}:m=1", 0) == few[0]


def test_without_random_features_nothing_changes():
    assert accuracies("softmax", 0) == [1.0] * 5
