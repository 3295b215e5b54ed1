"""The size of images: the side of a square as an integer, or "HEIGHTxWIDTH" of other shapes."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator

MIN_SIDE, MAX_SIDE = 4, 8192


def parse_size(value: Any) -> int | str:
    """224, "224", "224x320" or (224, 320); equal sides are one number."""
    parts = value.split("x") if isinstance(value, str) else value if isinstance(value, (tuple, list)) else [value]
    try:
        whole = [int(part) for part in parts]
        valid = len(whole) in (1, 2) and min(whole) >= 1 and whole == [float(part) for part in parts]
    except (TypeError, ValueError, OverflowError):
        valid, whole = False, []
    if not valid or isinstance(value, bool):
        raise ValueError(f"image_size={value} must be a side in pixels, e.g. 224, or HEIGHTxWIDTH, e.g. 224x320")
    return join_sides(whole[0], whole[-1])


ImageSize = Annotated[int | str, BeforeValidator(parse_size)]


def join_sides(height: int, width: int) -> ImageSize:
    return height if height == width else f"{height}x{width}"


def sides(size: ImageSize) -> tuple[int, int]:
    """Height and width."""
    if isinstance(size, int):
        return size, size
    height, width = size.split("x")
    return int(height), int(width)


def check_sides(size: ImageSize) -> None:
    if not MIN_SIDE <= min(sides(size)) <= max(sides(size)) <= MAX_SIDE:
        raise ValueError(f"image_size={size} must be between {MIN_SIDE} and {MAX_SIDE}")


def scaled(size: ImageSize, factor: int) -> ImageSize:
    height, width = sides(size)
    return join_sides(factor * height, factor * width)


def with_height(size: ImageSize, height: int, step: int = 1) -> ImageSize:
    """The size of this height with the same shape; the width is rounded to a multiple of `step`."""
    old, width = sides(size)
    return join_sides(height, max(1, round(height * width / old / step)) * step) if old != width else height


def mean_side(size: ImageSize) -> int:
    """Of the square with as many pixels."""
    return round(math.sqrt(math.prod(sides(size))))
