"""scikit-learn's digits: 1,797 grey 8×8 images in 10 classes. No download, a few seconds of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from linvit.data.sources import DATASETS, Arrays


@DATASETS.register("digits")
def digits(root: Path) -> Arrays:
    from sklearn.datasets import load_digits  # here, because importing scikit-learn takes a second

    bundle: Any = load_digits()
    images = np.rint(bundle.images * (255 / 16)).astype(np.uint8)  # stored as 0 … 16
    return Arrays(images[:, None], bundle.target.astype(np.int64), [str(i) for i in range(10)], {"train": len(images)})
