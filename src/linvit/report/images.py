"""Arrays that records name → small PNG images inside the page: examples, attention maps, patches, augmentations."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from linvit.report.evidence import read_arrays
from linvit.report.summary import Summary, number

EXAMPLES = 12
SIDE, THUMB = 160, 72  # longest side of a stored image, and of one behind a map, in pixels
HEAT = (230, 97, 0)  # seen on grey, on colour and by the colour-blind
FULL = 3.0  # times the average: where a map is opaque


def uri(pixels: np.ndarray, side: int = SIDE) -> str:
    """uint8 (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) → a data: address; photos as JPEG, the page must stay small."""
    pixels = np.ascontiguousarray(pixels)
    image = Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels)
    if max(image.size) > side:
        image.thumbnail((side, side))
    kind = "jpeg" if max(image.size) > 64 and image.mode != "RGBA" else "png"
    file = io.BytesIO()
    image.save(file, kind, optimize=True)
    return f"data:image/{kind};base64," + base64.b64encode(file.getvalue()).decode()


def _pictures(array: Any, ndim: int) -> np.ndarray | None:
    """uint8 images, or None if the array is no such thing."""
    ok = isinstance(array, np.ndarray) and array.ndim == ndim and array.size and array.shape[-1] in (1, 3)
    return np.clip(array, 0, 255).astype(np.uint8) if ok else None


def heat(attention: np.ndarray) -> str:
    """Where it looks more than on average; one scale for all, so that a flat map looks flat."""
    grid = np.nan_to_num(np.asarray(attention, dtype=float))
    above = grid / (grid.mean() or 1) - 1
    alpha = (215 * np.clip(above / (FULL - 1), 0, 1)).astype(np.uint8)
    colour = np.broadcast_to(np.array(HEAT, np.uint8), (*alpha.shape, 3))
    return uri(np.concatenate([colour, alpha[..., None]], axis=-1))


def examples(summary: Summary) -> list[dict[str, Any]]:
    """Test images with what each variant said, those that most variants got wrong first."""
    for record in summary.study.of("examples"):
        arrays = read_arrays(record)
        pictures, labels = _pictures(arrays.get("images"), 4), arrays.get("labels")
        if pictures is None or labels is None or len(labels) != len(pictures):
            continue
        said = {v.id: arrays.get(f"predictions/{v.id}") for v in summary.variants}
        told = [(v, x) for v in summary.variants if (x := said[v.id]) is not None and x.shape == labels.shape]
        wrong = sum((x != labels).astype(int) for _, x in told) + np.zeros(len(labels), int)
        return [
            {
                "image": uri(pictures[i]), "thumb": uri(pictures[i], THUMB), "label": _name(summary, labels[i]),
                "wrong": int(wrong[i]), "of": len(told),
                "answers": [_answer(summary, arrays, v, x, labels, i) for v, x in told],
            }
            for i in map(int, np.argsort(-wrong, kind="stable")[:EXAMPLES])
        ]  # fmt: skip
    return []


def _answer(summary: Summary, arrays: dict[str, np.ndarray], variant: Any, said: Any, labels: Any, i: int) -> dict:
    sure, maps = arrays.get(f"confidence/{variant.id}"), arrays.get(f"maps/{variant.id}")
    return {
        "variant": variant,
        "said": _name(summary, said[i]),
        "right": bool(said[i] == labels[i]),
        "confidence": number(float(sure[i])) if sure is not None and len(sure) == len(labels) else None,
        "map": heat(maps[i]) if maps is not None and maps.ndim == 3 and len(maps) == len(labels) else "",
    }


def _name(summary: Summary, label: Any) -> str:
    names, label = summary.study.classes, int(label)
    return names[label] if 0 <= label < len(names) else str(label)


def illustration(summary: Summary) -> dict[str, Any]:
    """An image, its patches as the model sees them, its colour channels, and its augmentations."""
    for record in summary.study.of("illustration"):
        arrays = read_arrays(record)
        original = _pictures(arrays.get("original"), 3)
        if original is None:
            continue
        augmented = _pictures(arrays.get("augmented"), 4)
        found: dict[str, Any] = {"original": uri(original), "channels": channels(original)}
        found["patches"], found["grid"] = "", []
        found["augmented"] = [] if augmented is None else [uri(picture) for picture in augmented[:10]]
        grid = arrays.get("grid", np.zeros(0)).ravel()
        if len(grid) == 2 and all(0 < side <= 64 for side in grid):
            found["patches"], found["grid"] = patches(original, int(grid[0]), int(grid[1])), [int(n) for n in grid]
        return found
    return {}


def patches(original: np.ndarray, rows: int, columns: int) -> str:
    """The image cut along the patch grid, with transparent gaps between the patches."""
    height, width = original.shape[0] // rows, original.shape[1] // columns
    if not height or not width:
        return ""
    zoom = max(1, SIDE // max(original.shape[:2]) - 1)
    gap = max(1, height * zoom // 6)
    size = (rows * (height * zoom + gap) - gap, columns * (width * zoom + gap) - gap, 4)
    sheet = np.zeros(size, np.uint8)
    for r in range(rows):
        for c in range(columns):
            patch = original[r * height : (r + 1) * height, c * width : (c + 1) * width]
            patch = np.broadcast_to(patch, (height, width, 3)).repeat(zoom, axis=0).repeat(zoom, axis=1)
            top, left = r * (height * zoom + gap), c * (width * zoom + gap)
            sheet[top : top + height * zoom, left : left + width * zoom, :3] = patch
            sheet[top : top + height * zoom, left : left + width * zoom, 3] = 255
    return uri(sheet)


def channels(original: np.ndarray) -> list[dict[str, Any]]:
    """Red, green and blue alone, each with a histogram of its values (32 bins, tallest = 1)."""
    if original.shape[-1] != 3:
        return []
    found = []
    for i, name in enumerate(("red", "green", "blue")):
        alone = np.zeros_like(original)
        alone[..., i] = original[..., i]
        bins = np.histogram(original[..., i], bins=32, range=(0, 256))[0]
        found.append({"name": name, "image": uri(alone), "bins": (bins / max(1, bins.max())).round(3).tolist()})
    return found
