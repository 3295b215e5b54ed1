"""`.npz` with Keras' keys: x_train, y_train, and x_test, y_test and x_val, y_val if there are any."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from linvit.data.sources import FORMATS, Arrays, check_labels, check_memory, numbered_classes, stack

KEYS = {"train": "train", "validation": "val", "test": "test"}


@FORMATS.register(".npz")
def npz(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:  # of a plain .npy: an array, which has no `files`
            wanted = [key for key in file.files if key[:2] in ("x_", "y_")]
            check_memory("unpacked it", sum(file.zip.getinfo(f"{key}.npy").file_size for key in wanted))
            arrays = {key: file[key] for key in wanted}
    except Exception as error:  # NumPy's reader raises anything from TypeError to TokenError on a broken file
        why = str(error).split("\n")[0].split(". ")[0]
        raise ValueError(f"{path}: is not a readable .npz of plain arrays ({why}): save it with numpy.savez") from None
    parts = {
        split: (_images(path, f"x_{key}", arrays[f"x_{key}"]), _labels(path, f"y_{key}", arrays[f"y_{key}"]))
        for split, key in KEYS.items()
        if {f"x_{key}", f"y_{key}"} <= set(arrays)
    }
    if "train" not in parts:
        found = ", ".join(sorted(arrays)) or "none of them"
        raise ValueError(f"{path}: needs the arrays x_train and y_train (and x_test, y_test); it has {found}")
    shape, classes = parts["train"][0].shape[1:], numbered_classes(f"{path}, y_train", parts["train"][1])
    for split, (images, labels) in parts.items():
        if len(images) != len(labels):
            raise ValueError(f"{path}: {split} has {len(images)} images but {len(labels)} labels")
        if images.shape[1:] != shape:
            raise ValueError(f"{path}: {split} images have shape {images.shape[1:]}, train has {shape}")
        check_labels(f"{path}, y_{KEYS[split]}", labels, len(classes))
    return stack(parts, classes)


def _images(path: Path, key: str, x: np.ndarray) -> np.ndarray:
    """(n, H, W), (n, H, W, C) or (n, C, H, W), bytes or floats of [0, 1] → uint8 (n, C, H, W)."""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.ndim != 4 or x.shape[1] not in (1, 3) or not x.size:
        raise ValueError(f"{path}: {key} has shape {x.shape}; images are (n, H, W), (n, H, W, 1) or (n, H, W, 3)")
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind not in "iuf" or not np.isfinite(x).all():
        raise ValueError(f"{path}: {key} has values that are not pixels ({x.dtype}): use bytes, or floats of 0 to 1")
    low, high = float(x.min()), float(x.max())
    if low < 0 or high > 255:
        raise ValueError(f"{path}: {key} runs from {low:g} to {high:g}: use bytes (0 to 255) or floats of 0 to 1")
    scale = 255 if x.dtype.kind == "f" and high <= 1 else 1
    return np.rint(x * scale).astype(np.uint8)


def _labels(path: Path, key: str, y: np.ndarray) -> np.ndarray:
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1 or y.dtype.kind not in "iu" or not y.size:
        raise ValueError(f"{path}: {key} has shape {y.shape}, {y.dtype}: labels are whole numbers, one per image")
    return y.astype(np.int64)
