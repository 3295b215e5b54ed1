"""One image file → uint8 pixels, whatever it is inside: palette, alpha, 16-bit, CMYK, rotated by EXIF, animated.

The header is checked before anything is decoded, so that a file claiming 100,000 × 100,000 pixels costs no memory.
An image is read by its content: a JPEG named .png is fine, text named .png is not. Of an image of another shape than
the one wanted, the largest centre of that shape is cut out, so that things keep theirs; with resize=squeeze all of it
is squeezed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from linvit.schemas.experiment import Resize
from linvit.schemas.pixels import MAX_SIDE, MIN_SIDE, ImageSize, sides

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
CODECS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # no codec that runs other programs
SMALLEST, LARGEST = MIN_SIDE, MAX_SIDE
MAX_PIXELS = LARGEST**2  # 200 MB decoded


class BadImage(ValueError):
    """One unreadable image; the message names the file, what is wrong and what to do."""


Source = Path | bytes | BadImage  # where an image is, or why it cannot be read


@dataclass(frozen=True)
class Header:
    width: int
    height: int
    colour: bool


def read_header(name: str, source: Source) -> Header:
    with _opened(name, source) as image:
        return Header(image.width, image.height, _is_colour(image))


def read_image(
    source: Source, image_size: ImageSize, channels: int, name: str = "", resize: Resize = "crop"
) -> np.ndarray:
    """uint8 (channels, height, width) of this size."""
    with _opened(name or (str(source) if isinstance(source, Path) else "image"), source) as image:
        enough = 2 * max(sides(image_size))  # even if EXIF then turns it
        image.draft(None, (enough, enough))  # a large JPEG is decoded at a fraction of its size
        return _fitted(_plain(image, "L" if channels == 1 else "RGB"), image_size, resize)


def resized(images: np.ndarray, image_size: ImageSize, channels: int, resize: Resize = "crop") -> np.ndarray:
    """uint8 (n, C, H, W) → (n, channels, height, width) of this size."""
    out = np.empty((len(images), channels, *sides(image_size)), np.uint8)
    for row, pixels in enumerate(images):
        image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
        out[row] = _fitted(image.convert("L" if channels == 1 else "RGB"), image_size, resize)
    return out


def _fitted(image: Image.Image, size: ImageSize, resize: Resize) -> np.ndarray:
    """(C, height, width)."""
    height, width = sides(size)
    scale = min(image.width / width, image.height / height)
    shape = max(1, round(scale * width)), max(1, round(scale * height))  # the largest part of the wanted shape
    if resize == "crop" and image.size != shape:
        left, top = ((length - part) // 2 for length, part in zip(image.size, shape, strict=True))
        image = image.crop((left, top, left + shape[0], top + shape[1]))
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


@contextmanager
def _opened(name: str, source: Source) -> Iterator[Image.Image]:
    """The image, if its header is right; whatever goes wrong with it is a BadImage."""
    if isinstance(source, BadImage):
        raise source
    too_large = f"; the limit is {MAX_PIXELS:,}: make it smaller or remove it"
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=CODECS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise BadImage(f"{name}: claims {width:,} × {height:,} pixels{too_large}")
            if min(width, height) < SMALLEST:
                too_small = f"under the smallest side of {SMALLEST}: remove it"
                raise BadImage(f"{name}: is {width} × {height} pixels, {too_small}")
            yield image
    except BadImage:
        raise
    except Image.DecompressionBombError:
        raise BadImage(f"{name}: claims an unreasonable number of pixels{too_large}") from None
    except Exception as error:  # Pillow's codecs raise anything from struct.error to SyntaxError on a broken file
        if isinstance(error, UnidentifiedImageError):
            why = "is not an image of a known kind (PNG, JPEG, WebP, GIF, BMP, TIFF)"
        elif isinstance(error, OSError) and error.strerror:
            why = f"cannot be opened ({error.strerror})"
        else:
            why = f"cannot be decoded ({error or type(error).__name__})".replace("\n", " ")
        raise BadImage(f"{name}: {why}: replace or remove it, or skip such images with skip_bad") from None


def _is_colour(image: Image.Image) -> bool:
    if image.mode in ("P", "PA"):
        red, green, blue = np.array(image.getpalette("RGB") or [0, 0, 0], np.uint8).reshape(-1, 3).T
        return bool((red != green).any() or (green != blue).any())
    return image.mode not in ("1", "L", "LA", "La", "I", "F") and not image.mode.startswith("I;")


def _plain(image: Image.Image, mode: str) -> Image.Image:
    """Upright, eight bits, opaque on white, grey or RGB."""
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed white; save it with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;"):
        wide = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        image = Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)
