"""One image file: every kind of pixel comes out right, every broken file gets one line."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile

from linvit.data import BadImage, read_image
from linvit.data.decode import read_header

GRADIENT = np.linspace(0, 255, 13 * 13).reshape(13, 13).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def colourful() -> Image.Image:
    pixels = np.zeros((13, 13, 3), np.uint8)
    pixels[:6, :, 0], pixels[6:, :, 2] = 200, 90
    return Image.fromarray(pixels)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_format(kind):
    options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    pixels = read_image(encoded(colourful(), kind, **options), 13, 3)
    assert pixels.shape == (3, 13, 13)
    wanted = np.asarray(colourful()).transpose(2, 0, 1)
    assert np.abs(pixels.astype(int) - wanted).max() <= (40 if kind == "JPEG" else 0)


def test_grey_stays_grey_and_becomes_colour_when_asked():
    file = encoded(Image.fromarray(GRADIENT), "PNG")
    assert not read_header("x", file).colour
    assert (read_image(file, 13, 1)[0] == GRADIENT).all()
    assert (read_image(file, 13, 3) == GRADIENT).all()


def test_palette():
    file = encoded(colourful().quantize(4), "PNG")
    assert read_header("x", file).colour
    assert np.abs(read_image(file, 13, 3).astype(int) - np.asarray(colourful()).transpose(2, 0, 1)).max() <= 2
    grey = Image.fromarray(GRADIENT).convert("P")
    assert not read_header("x", encoded(grey, "PNG")).colour


def test_alpha_is_laid_on_white():
    pixels = np.zeros((13, 13, 4), np.uint8)
    pixels[0, 0] = 10, 20, 30, 255
    assert read_image(encoded(Image.fromarray(pixels), "PNG"), 13, 3)[:, 0, 0].tolist() == [10, 20, 30]
    assert (read_image(encoded(Image.fromarray(pixels), "PNG"), 13, 3)[:, 1:] == 255).all()
    grey_alpha = Image.fromarray(pixels).convert("LA")
    assert not read_header("x", encoded(grey_alpha, "PNG")).colour
    assert (read_image(encoded(grey_alpha, "PNG"), 13, 1)[:, 1:] == 255).all()
    clear = colourful().quantize(4)
    file = encoded(clear, "PNG", transparency=clear.getpixel((0, 0)))
    assert (read_image(file, 13, 3)[:, 0, 0] == 255).all()
    assert read_image(file, 13, 3)[2, 12, 0] == pytest.approx(90, abs=2)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_range(kind):
    wide = GRADIENT.astype(np.uint16) * 257
    file = encoded(Image.fromarray(wide), kind)
    assert not read_header("x", file).colour
    assert (read_image(file, 13, 1)[0] == GRADIENT).all()


def test_one_bit():
    file = encoded(Image.fromarray(GRADIENT).convert("1"), "PNG")
    assert set(np.unique(read_image(file, 13, 1))) == {0, 255}


def test_cmyk():
    file = encoded(colourful().convert("CMYK"), "JPEG", quality=95)
    assert read_header("x", file).colour
    pixels = read_image(file, 13, 3)
    assert pixels[:, 1, 6] == pytest.approx([200, 0, 0], abs=30)


def test_exif_rotation():
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90° clockwise
    file = encoded(colourful().resize((26, 13)), "JPEG", exif=exif, quality=95)
    pixels = read_image(file, 13, 3)
    assert pixels[0, 6, 11] > 150 > 60 > pixels[0, 6, 1]  # the red top is now on the right


def test_the_first_frame_of_an_animation():
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "blue")]
    file = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert read_image(file, 9, 3)[:, 4, 4].tolist() == [255, 0, 0]


WIDE = Image.fromarray(np.repeat(np.array([[0, 255]], np.uint8), 20, 1).repeat(8, 0))  # 40 × 8: black, then white


def test_squeezing_keeps_the_whole_image():
    pixels = read_image(encoded(WIDE, "PNG"), 16, 1, resize="squeeze")[0]
    assert (pixels[:, :6] == 0).all()
    assert (pixels[:, 10:] == 255).all()


@pytest.mark.parametrize("turned", [False, True])
def test_cropping_keeps_the_shape_of_the_centre(turned):
    """A disc in the middle stays one, whatever surrounds it."""
    y, x = np.mgrid[:29, :53]
    disc = Image.fromarray(np.where((x - 26) ** 2 + (y - 14) ** 2 < 100, 255, 0).astype(np.uint8))
    pixels = read_image(encoded(disc.transpose(Image.Transpose.TRANSPOSE) if turned else disc, "PNG"), 29, 1)[0]
    expected = np.asarray(disc.crop((12, 0, 41, 29)))
    assert (pixels == (expected.T if turned else expected)).all()
    smaller = read_image(encoded(disc, "PNG"), 13, 1)[0]
    assert (smaller == np.asarray(disc.crop((12, 0, 41, 29)).resize((13, 13), Image.Resampling.BICUBIC))).all()


def test_a_square_image_is_the_same_either_way():
    file = encoded(colourful(), "PNG")
    assert (read_image(file, 7, 3) == read_image(file, 7, 3, resize="squeeze")).all()


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
JPEG = encoded(Image.fromarray(NOISE), "JPEG")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"just text", "is not an image of a known kind"),
        (b"", "is not an image of a known kind"),
        (b"%PDF-1.7", "is not an image of a known kind"),
        (JPEG[: len(JPEG) // 2], r"cannot be decoded \(.*truncated"),
        (JPEG[:30], "cannot be|is not an image"),
        (png_header(100_000, 100_000), "claims .* pixels.* limit is"),
        (png_header(9_000, 9_000), "claims 9,000 × 9,000 pixels; the limit is 67,108,864"),
        (png_header(64, 64), "cannot be decoded"),
        (encoded(colourful().resize((3, 40)), "PNG"), "is 3 × 40 pixels, under the smallest"),
        (encoded(Image.fromarray(GRADIENT.astype(np.float32)), "TIFF"), "floating-point pixels"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image of a known kind"),
    ],
)
def test_bad_files_get_one_line(content, message, tmp_path):
    path = tmp_path / "photo.png"
    path.write_bytes(content)
    with pytest.raises(BadImage, match=message) as caught:
        read_image(path, 16, 3)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(BadImage, match=r"gone\.png: cannot be opened \(No such file"):
        read_image(tmp_path / "gone.png", 16, 3)


def test_the_size_is_checked_before_any_pixel_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("pixels were decoded"))
    with pytest.raises(BadImage, match="the limit is"):
        read_image(png_header(100_000, 100_000), 16, 3)
    with pytest.raises(pytest.fail.Exception):  # as those of an image of the right size are
        read_image(encoded(colourful(), "PNG"), 16, 3)


def test_another_shape_covers_the_image_or_all_of_it_is_squeezed():
    """Columns of a wide image are numbered; a crop of 7 × 11 from 14 × 44 has the middle 22 of them."""
    pixels = np.broadcast_to(np.arange(44, dtype=np.uint8) * 5, (14, 44))
    file = encoded(Image.fromarray(pixels), "PNG")
    crop, squeezed = (read_image(file, "7x11", 1, resize=resize)[0] for resize in ("crop", "squeeze"))
    assert crop.shape == squeezed.shape == (7, 11)
    exact = Image.fromarray(pixels).crop((11, 0, 33, 14)).resize((11, 7), Image.Resampling.BICUBIC)
    assert (crop == np.asarray(exact)).all()
    assert squeezed[0, 0] < 11 * 5 < crop[0, 0] < crop[0, -1] < 33 * 5 < squeezed[0, -1]
    tall = read_image(encoded(Image.fromarray(pixels.T), "PNG"), "11x7", 1)[0]
    assert (tall == crop.T).all()
    assert read_image(encoded(Image.fromarray(pixels), "PNG"), "8x1000", 1).shape == (1, 8, 1000)


def test_a_photo_that_exif_turns_is_cropped_upright():
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (400, 600), np.uint8))
    photo = photo.resize((150, 100)).resize((600, 400))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90°
    turned = encoded(photo.transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif, quality=95)
    found, wanted = (read_image(file, "40x60", 1).astype(int) for file in (turned, encoded(photo, "PNG")))
    assert np.abs(found - wanted).mean() < 4
