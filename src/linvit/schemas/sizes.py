"""Sizes by name, in one table. The reports' are as printed; where a report leaves a value open, ours is noted."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    # ours: small enough for a laptop, tuned on real data
    "nano": {"dim": 64, "depth": 4, "heads": 4, "mlp_dim": 128},
    "tiny": {"dim": 128, "depth": 6, "heads": 4, "mlp_dim": 256},
    "small": {"dim": 192, "depth": 8, "heads": 6, "mlp_dim": 384},
    "base": {"dim": 256, "depth": 8, "heads": 8, "mlp_dim": 512},
    # report 000: torch models (patch 7 on MNIST, 6 on CIFAR resized to 72²) and the Keras performer
    "000-torch-mnist": {"patch_size": 7, "dim": 256, "depth": 6, "heads": 8, "mlp_dim": 768, "dropout": 0.2},
    "000-torch-cifar": {"patch_size": 6, "dim": 256, "depth": 8, "heads": 8, "mlp_dim": 768, "dropout": 0.2},
    "000-keras-mnist": {"patch_size": 7, "dim": 64, "depth": 6, "heads": 8, "head_dim": 128, "mlp_dim": 128,
                        "pool": "all", "head": "wide"},
    "000-keras-cifar": {"patch_size": 6, "dim": 64, "depth": 8, "heads": 4, "head_dim": 128, "mlp_dim": 128,
                        "pool": "all", "head": "wide"},
    # report 001: nine experiments, four sizes
    **{
        name: {"patch_size": patch, "dim": dim, "depth": 6, "heads": 8, "head_dim": head, "mlp_dim": mlp,
               "dropout": dropout, "pool": "cls"}
        for names, patch, dim, mlp, head, dropout in (
            (("001-I", "001-II", "001-III"), 4, 128, 200, 32, 0.15),
            (("001-IV",), 4, 200, 256, 64, 0.15),
            (("001-V", "001-VI", "001-VII"), 4, 256, 256, 32, 0.18),
            (("001-VIII",), 8, 256, 256, 32, 0.18),
            (("001-IX",), 8, 256, 256, 32, 0.15),
        )
        for name in names
    },
    # report 002: a vision transformer, and performers behind a convolutional trunk (mlp_dim unstated: 2 × dim)
    "002-vit": {"patch_size": 4, "dim": 256, "depth": 8, "heads": 8, "mlp_dim": 512, "dropout": 0.1},
    "002-relu": {"stem": "conv", "dim": 960, "depth": 4, "heads": 16, "mlp_dim": 1920, "dropout": 0.1},
    "002-elu": {"stem": "conv", "dim": 768, "depth": 1, "heads": 8, "mlp_dim": 1536},
    "002-gelu": {"stem": "conv", "dim": 768, "depth": 1, "heads": 16, "mlp_dim": 1536},
    "002-exp": {"stem": "conv", "dim": 576, "depth": 3, "heads": 16, "mlp_dim": 1152, "dropout": 0.1},
    "002-literal": {"stem": "length-one", "dim": 768, "depth": 1, "heads": 16, "mlp_dim": 1536},
}  # fmt: skip
