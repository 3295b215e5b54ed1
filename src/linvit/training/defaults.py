"""What a newcomer gets without asking: sizes and recipes by data set, tuned on validation accuracy alone."""

from __future__ import annotations

from typing import Any

from linvit.schemas.pixels import ImageSize, mean_side

ATTENTION = "performer-relu:m=32"  # of `train`
# Of `compare`; a small budget takes the first of them.
ATTENTIONS = ("softmax", "performer-relu:m=32", "linformer:k=16", "performer-exp:m=32", "performer-theta:m=32")
START_ATTENTIONS = ("softmax", "twoscale:cell=2", "performer-relu:m=32", "performer-exp:m=32")  # of a trained model
CAUSAL_ATTENTIONS = tuple(spec for spec in ATTENTIONS if not spec.startswith("linformer"))  # it cannot be causal
CONTROL = "uniform"  # trained with them by `compare`

# data set → options of the model and of the recipe
TUNED: dict[str, dict[str, Any]] = {
    "digits": {"stem": "conv", "trunk": (32, 64), "pools": 1, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128,
               "epochs": 20, "batch_size": 64, "lr": 5e-3, "pad_crop": 1},
    "mnist": {"stem": "conv", "trunk": (32, 64, 128), "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128,
              "epochs": 4, "batch_size": 64, "lr": 5e-3, "pad_crop": 2},
    "cifar10": {"stem": "conv", "dim": 128, "depth": 2, "heads": 4, "mlp_dim": 256,
                "epochs": 12, "batch_size": 128, "lr": 6e-3, "pad_crop": 4, "flip": "alternating"},
}  # fmt: skip
GENTLER: dict[str, Any] = {"lr": 3e-3, "epochs": 6}  # for weights that are trained already
TUNED["fashion-mnist"] = TUNED["mnist"] | {"flip": "alternating"}
TUNED["cifar100"] = TUNED["cifar10"]
# task → the same for tasks that share nothing with classification, whatever the data
OF_TASK: dict[str, dict[str, Any]] = {
    "next-pixel": {"stem": "next-pixel", "dim": 64, "depth": 3, "heads": 4, "mlp_dim": 128, "positions": "sincos",
                   "epochs": 1, "batch_size": 16, "lr": 5e-3, "label_smoothing": 0.0},
}  # fmt: skip
OF_TASK["masked-pixel"] = OF_TASK["next-pixel"] | {"stem": "masked-pixel"}


def tuned(name: str, image_size: ImageSize, channels: int, task: str = "classification") -> dict[str, Any]:
    """The tuned options of a known set; for any other, those of the nearest in size."""
    if task in OF_TASK:
        return dict(OF_TASK[task])
    if name in TUNED:
        return dict(TUNED[name])
    size = mean_side(image_size)
    nearest = "digits" if size < 16 else "mnist" if channels == 1 and size <= 32 else "cifar10"
    options = dict(TUNED[nearest])
    if size > 48:
        options |= {"trunk": (32, 64, 128, 256), "pools": 3 if size <= 96 else 4}
    return options
