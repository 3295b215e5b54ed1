"""The recipe that studies are run with, where they say nothing else: `train` may get better defaults, and a published
study must stay what it was. These are the defaults of the version in which the studies were first run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RECIPE = {"optimizer": "muon", "weight_decay": 0.05, "betas": (0.9, 0.99), "schedule": "onecycle",
          "warmup": 0.1, "clip_norm": 1.0, "label_smoothing": 0.1}  # fmt: skip
CIFAR = {"batch_size": 128, "lr": 6e-3, "pad_crop": 4, "flip": "alternating", "epochs": 12}
# data → its training and the shape of its model
OF_DATA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mnist": (
        {"batch_size": 64, "lr": 5e-3, "pad_crop": 2, "flip": "none", "epochs": 4},
        {"stem": "conv", "trunk": (32, 64, 128), "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128},
    ),
    "cifar10": (CIFAR, {"stem": "conv", "dim": 128, "depth": 2, "heads": 4, "mlp_dim": 256}),
    "tiny-imagenet": (
        CIFAR,
        {"stem": "conv", "trunk": (32, 64, 128, 256), "pools": 3, "dim": 128, "depth": 2, "heads": 4, "mlp_dim": 256},
    ),
}
OF_DATA["cifar100"] = OF_DATA["cifar10"]
PIXELS = (
    {"batch_size": 16, "lr": 5e-3, "epochs": 1, "label_smoothing": 0.0},
    {"dim": 64, "depth": 3, "heads": 4, "mlp_dim": 128, "positions": "sincos"},
)
STARTED = {"lr": 3e-3}  # of rows that start from a trained model


def pinned(data: str, task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a column: those that are given, and the pinned ones that they leave open."""
    known = PIXELS if task != "classification" else OF_DATA.get(data.partition(":")[0])
    if known is None:
        return dict(given)
    training, shape = dict(known[0]), dict(known[1])
    if "optimizer" in given:  # which has options that suit it
        del training["lr"]
    else:
        training = RECIPE | training
    if "size" in given:
        shape = {}
    elif given.get("stem", shape.get("stem")) != shape.get("stem"):
        shape = {key: value for key, value in shape.items() if key not in ("stem", "trunk", "pools")}
    return shape | training | dict(given)
