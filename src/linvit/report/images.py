"""Arrays named by records → small images inside the page: examples, attention maps, patches, augmentations."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from linvit.report.summary import Summary, VariantResult, number

MAX_EXAMPLES = 12
SIDE, THUMB = 160, 72  # longest side of a stored image, and of one behind a map, in pixels
HEAT = (230, 97, 0)  # visible on grey and on colour, also to colour-blind readers
FULL = 3.0  # times the average: where a map is opaque


def uri(pixels: np.ndarray, side: int = SIDE, kind: str = "") -> str:
    """uint8 (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) → a data: address; photos as JPEG, the page must stay small."""
    pixels = np.ascontiguousarray(pixels)
    image = Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels)
    if max(image.size) > side:
        image.thumbnail((side, side))
    kind = kind or ("jpeg" if max(image.size) > 64 and image.mode != "RGBA" else "png")
    file = io.BytesIO()
    image.save(file, kind, optimize=True)
    return f"data:image/{kind};base64," + base64.b64encode(file.getvalue()).decode()


def _pictures(array: Any, ndim: int) -> np.ndarray | None:
    """uint8 images, or None if the array does not hold images."""
    ok = isinstance(array, np.ndarray) and array.ndim == ndim and array.size and array.shape[-1] in (1, 3)
    return np.clip(array, 0, 255).astype(np.uint8) if ok else None


def heat(attention: np.ndarray) -> str:
    """Attention above the average; one scale for all maps, so that a flat map looks flat."""
    grid = np.nan_to_num(np.asarray(attention, dtype=float))
    above = grid / (grid.mean() or 1) - 1
    alpha = (215 * np.clip(above / (FULL - 1), 0, 1)).astype(np.uint8)
    colour = np.broadcast_to(np.array(HEAT, np.uint8), (*alpha.shape, 3))
    return uri(np.concatenate([colour, alpha[..., None]], axis=-1))


def examples(summary: Summary) -> list[dict[str, Any]]:
    """Test images with each variant's prediction, those that most variants got wrong first."""
    arrays = summary.evidence.first_artefact("examples")
    pictures, labels = _pictures(arrays.get("images"), 4), arrays.get("labels")
    if pictures is None or labels is None or len(labels) != len(pictures):
        return []
    known = [v for v in summary.variants if f"predictions/{v.id}" in arrays]
    wrong = sum((arrays[f"predictions/{v.id}"] != labels for v in known), np.zeros(len(labels), int))

    def answer(variant: VariantResult, i: int) -> dict[str, Any]:
        said = arrays[f"predictions/{variant.id}"][i]
        sure, maps = arrays.get(f"confidence/{variant.id}"), arrays.get(f"maps/{variant.id}")
        return {
            "variant": variant,
            "said": _name(summary, said),
            "right": said == labels[i],
            "confidence": None if sure is None else number(float(sure[i])),
            "map": "" if maps is None else heat(maps[i]),
        }

    return [
        {
            "image": uri(pictures[i]),
            "thumb": uri(pictures[i], THUMB),
            "label": _name(summary, labels[i]),
            "wrong": int(wrong[i]),
            "of": len(known),
            "answers": [answer(v, i) for v in known],
        }
        for i in np.argsort(-wrong, kind="stable")[:MAX_EXAMPLES]
    ]


def samples(summary: Summary) -> list[dict[str, Any]]:
    """Images drawn by each variant, after real ones as the models see them."""
    arrays = summary.evidence.first_artefact("samples")
    found = [{"variant": v, "images": arrays.get(f"drawn/{v.id}")} for v in summary.variants]
    rows = [{"variant": None, "images": arrays.get("real")}, *found]
    return [
        row | {"images": [uri(picture) for picture in pictures]}
        for row in rows
        if (pictures := _pictures(row["images"], 4)) is not None
    ]


def _name(summary: Summary, label: Any) -> str:
    names, label = summary.study.dataset.classes, int(label)
    return names[label] if 0 <= label < len(names) else str(label)


def illustration(summary: Summary) -> dict[str, Any]:
    """An image, its patches as the model sees them, its colour channels, and its augmentations."""
    arrays = summary.evidence.first_artefact("illustration")
    original, augmented = _pictures(arrays.get("original"), 3), _pictures(arrays.get("augmented"), 4)
    if original is None:
        return {}
    grid = arrays.get("grid", np.zeros(0)).ravel().tolist()
    return {
        "original": uri(original),
        "channels": channels(original),
        "grid": grid,
        "patches": patches(original, *grid) if len(grid) == 2 and all(0 < side <= 64 for side in grid) else "",
        "augmented": [] if augmented is None else [uri(picture) for picture in augmented[:10]],
    }


def patches(original: np.ndarray, rows: int, columns: int) -> str:
    """The image cut along the patch grid, with transparent gaps between the patches."""
    height, width = original.shape[0] // rows, original.shape[1] // columns
    if not height or not width:
        return ""
    zoom = max(1, SIDE // max(original.shape[:2]) - 1)
    gap = max(1, height * zoom // 6)
    colours = np.broadcast_to(original, (*original.shape[:2], 3))
    opaque = np.pad(colours, ((0, 0), (0, 0), (0, 1)), constant_values=255)[: rows * height, : columns * width]
    cells = opaque.repeat(zoom, axis=0).repeat(zoom, axis=1).reshape(rows, height * zoom, columns, width * zoom, 4)
    apart = np.pad(cells, ((0, 0), (0, gap), (0, 0), (0, gap), (0, 0)))
    return uri(apart.reshape(rows * (height * zoom + gap), columns * (width * zoom + gap), 4)[:-gap, :-gap])


def channels(original: np.ndarray) -> list[dict[str, Any]]:
    """Red, green and blue alone, each with a histogram of its values (32 bins, tallest = 1)."""
    if original.shape[-1] != 3:
        return []
    found = []
    for name, only in zip(("red", "green", "blue"), np.eye(3, dtype=np.uint8), strict=True):
        bins = np.histogram(original @ only, bins=32, range=(0, 256))[0]
        found.append({"name": name, "image": uri(original * only), "bins": (bins / bins.max()).round(3).tolist()})
    return found
