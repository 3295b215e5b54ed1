"""Augmentation: the same bits in any batch, the right distribution, and each operation against a plain version."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from linvit import data
from linvit.data import randaugment as ops
from linvit.data.augment import Draw

N, C, H, W = 61, 3, 13, 17
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (N, C, H, W), dtype=torch.uint8, generator=GENERATOR)
LABELS = torch.arange(N) % 7
STATISTICS = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3), "classes": 7}
EVERYTHING = {
    "nothing": {"pad_crop": 0},
    "crop": {},
    "reflect": {"padding": "reflect"},
    "flip": {"flip": "random"},
    "alternating": {"flip": "alternating"},
    "cutout": {"cutout": 5},
    "randaugment": {"randaugment": 3, "magnitude": 14},
    "all": {"padding": "reflect", "flip": "random", "cutout": 4, "randaugment": 2},
}


def augment(options, rows, epoch=3, seed=5):
    rows = torch.as_tensor(rows)
    return data.Augment(**STATISTICS, **options)(IMAGES[rows], LABELS[rows], rows, epoch, seed)


@pytest.mark.parametrize("options", EVERYTHING.values(), ids=EVERYTHING)
def test_a_sample_is_the_same_in_every_batch(options):
    together, targets = augment(options, range(N))
    assert together.shape == (N, C, H, W)
    assert together.dtype == torch.float32
    assert torch.isfinite(together).all()
    assert (targets == LABELS).all()
    backwards, _ = augment(options, list(range(N))[::-1])
    assert torch.equal(backwards.flip(0), together)
    for size in (1, 7, 32):
        parts = [augment(options, range(start, min(start + size, N)))[0] for start in range(0, N, size)]
        assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize("options", [value for key, value in EVERYTHING.items() if key != "nothing"])
def test_seed_and_epoch_change_it_and_the_input_stays(options):
    before = IMAGES.clone()
    base, _ = augment(options, range(N))
    assert torch.equal(base, augment(options, range(N))[0])
    assert not torch.equal(base, augment(options, range(N), epoch=4)[0])
    assert not torch.equal(base, augment(options, range(N), seed=6)[0])
    assert torch.equal(before, IMAGES)


def test_draws_are_uniform_and_independent():
    indices = torch.arange(20_000)
    draws = torch.stack(
        [Draw(0, 0, indices)("a"), Draw(0, 0, indices)("b"), Draw(0, 1, indices)("a"), Draw(1, 0, indices)("a")]
    )
    assert draws.min() >= 0
    assert draws.max() < 1
    expected = 20_000 / 16
    for draw in draws:
        chi2 = float((torch.histc(draw, 16, 0, 1) - expected).square().sum() / expected)
        assert chi2 < 45  # 15 degrees of freedom: p < 1e-4
    correlation = np.corrcoef(draws.numpy()) - np.eye(4)
    assert np.abs(correlation).max() < 5 / np.sqrt(20_000)
    assert abs(np.corrcoef(draws[0, 1:], draws[0, :-1])[0, 1]) < 5 / np.sqrt(20_000)


def test_a_seed_is_not_another_one_moved_by_an_index():
    indices = torch.arange(100)
    assert not set(Draw(0, 0, indices + 1)("a").tolist()) & set(Draw(1, 0, indices)("a").tolist())
    assert not set(Draw(0, 1, indices)("a").tolist()) & set(Draw(1, 0, indices)("a").tolist())


def test_draws_are_fixed_for_all_time():
    """A resumed run must continue with the same augmentation after an update."""
    bits = (Draw(3, 5, torch.tensor([0, 1, 10**9]))("crop y", 1) * 2**24).long()
    assert bits.tolist() == [5764462, 12493288, 11770523]


@pytest.mark.parametrize(("epoch", "seed"), [(0, 2**40), (10**6, -3), (1, 2**63)])
def test_any_seed_is_allowed(epoch, seed):
    assert torch.isfinite(augment({}, range(3), epoch, seed)[0]).all()


def test_normalise():
    x = data.normalise(IMAGES, STATISTICS["mean"], STATISTICS["std"])
    mean, std = (torch.tensor(STATISTICS[key]).view(3, 1, 1) for key in ("mean", "std"))
    assert torch.allclose(x, (IMAGES / 255 - mean) / std, atol=1e-5)
    assert torch.equal(x, augment({"pad_crop": 0}, range(N))[0])


def plain_pixels(x):
    mean, std = (torch.tensor(STATISTICS[key]).view(3, 1, 1) for key in ("mean", "std"))
    return ((x * std + mean) * 255).round().long()


@pytest.mark.parametrize("padding", ["zero", "reflect"])
def test_every_crop_is_a_window_of_the_padded_image(padding):
    found = plain_pixels(augment({"pad_crop": 2, "padding": padding}, range(N))[0])
    mode = "constant" if padding == "zero" else "reflect"
    padded = np.pad(IMAGES.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode)
    shifts = []
    for image, source in zip(found.numpy(), padded, strict=True):
        hits = [(y, x) for y in range(5) for x in range(5) if (source[:, y : y + H, x : x + W] == image).all()]
        assert len(hits) == 1
        shifts += hits
    assert len(set(shifts)) > 15


def test_flips():
    plain = plain_pixels(augment({"pad_crop": 0}, range(N))[0])
    for kind in ("random", "alternating"):
        flips = []
        for epoch in range(4):
            found = plain_pixels(augment({"pad_crop": 0, "flip": kind}, range(N), epoch)[0])
            flipped = (found == plain.flip(3)).flatten(1).all(1)
            assert ((found == plain).flatten(1).all(1) ^ flipped).all()
            assert 15 < int(flipped.sum()) < 46
            flips.append(flipped)
        assert torch.equal(flips[1], ~flips[0]) == (kind == "alternating")
        assert torch.equal(flips[2], flips[0]) == (kind == "alternating")


def test_cutout_blanks_one_square():
    x, _ = augment({"pad_crop": 0, "cutout": 4}, range(N))
    plain, _ = augment({"pad_crop": 0}, range(N))
    hole = (x == 0).all(1) & (plain != 0).any(1)
    area = hole.flatten(1).sum(1)
    assert area.max() == 16
    assert area.min() >= 4  # a corner
    assert torch.equal(torch.where(hole[:, None], plain, x), plain)
    for mask in hole:
        rows, columns = mask.any(1).sum(), mask.any(0).sum()
        assert mask.sum() == rows * columns


def test_mixup():
    plain, _ = augment({"pad_crop": 0}, range(N))
    x, targets = augment({"pad_crop": 0, "mixup": 0.8}, range(N))
    assert torch.allclose(targets.sum(1), torch.ones(N))
    own = torch.nn.functional.one_hot(LABELS, 7).float()
    weight = (targets * own).sum(1)  # neighbours have different labels here, but for the first and the last
    for i in range(1, N):
        assert torch.allclose(x[i], weight[i] * plain[i] + (1 - weight[i]) * plain[i - 1], atol=1e-5)
    assert 0.35 < float(weight[1:].mean()) < 0.65


def test_cutmix():
    plain, _ = augment({"pad_crop": 0}, range(N))
    x, targets = augment({"pad_crop": 0, "cutmix": 1.0}, range(N))
    own = torch.nn.functional.one_hot(LABELS, 7).float()
    for i in range(1, N):
        mine, other = (x[i] == plain[i]).all(0), (x[i] == plain[i - 1]).all(0)
        assert (mine | other).all()
        assert float((targets[i] * own[i]).sum()) == pytest.approx(float(mine.float().mean()), abs=1e-5)


def test_mixup_and_cutmix_share_the_samples():
    plain, _ = augment({"pad_crop": 0}, range(N))
    x, targets = augment({"pad_crop": 0, "mixup": 1.0, "cutmix": 1.0}, range(N))
    pasted = ((x == plain) | (x == plain.roll(1, 0))).flatten(1).all(1)
    assert 15 < int(pasted.sum()) < 46
    assert torch.allclose(targets.sum(1), torch.ones(N))
    again, _ = augment({"pad_crop": 0, "mixup": 1.0, "cutmix": 1.0}, range(N))
    assert torch.equal(x, again)


def test_beta_weights_have_the_right_spread():
    weights = Draw(0, 0, torch.arange(20_000)).beta("w", 0.4).double()
    assert float(weights.mean()) == pytest.approx(0.5, abs=0.015)
    assert float(weights.var()) == pytest.approx(1 / (4 * (2 * 0.4 + 1)), rel=0.03)


@pytest.mark.parametrize(
    "options",
    [
        {"pad_crop": -1},
        {"flip": "up"},
        {"padding": "wrap"},
        {"mixup": 0.2, "classes": 0},
        {"magnitude": 31},
        {"randaugment": 15},
        {"randaugment": 99},
        {"cutmix": -1.0},
    ],
)
def test_wrong_options(options):
    with pytest.raises(ValueError, match="augmentation: "):
        data.Augment(**options)


def test_a_crop_larger_than_the_image_is_refused_in_one_line():
    with pytest.raises(ValueError, match="pad_crop=20 does not fit images of 13 × 17 pixels"):
        augment({"pad_crop": 20, "padding": "reflect"}, range(2))


def test_a_set_builds_its_augmentation():
    digits = data.load_data("digits")
    images, labels = digits.train.batch(range(9))
    x, targets = digits.augment(pad_crop=1, mixup=0.2)(images, labels, torch.arange(9), 0, 0)
    assert x.shape == (9, 1, 8, 8)
    assert targets.shape == (9, 10)


def warp(*coefficients):
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, coefficients)


def with_pillow(function, images=IMAGES):
    results = [np.asarray(function(Image.fromarray(image.permute(1, 2, 0).numpy()))) for image in images]
    return torch.from_numpy(np.stack(results)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("ours", "pillow", "tolerance"),
    [
        (ops.brightness, lambda s: lambda im: ImageEnhance.Brightness(im).enhance(1 + s * 0.45), 1),
        (ops.colour, lambda s: lambda im: ImageEnhance.Color(im).enhance(1 + s * 0.45), 1),
        (ops.contrast, lambda s: lambda im: ImageEnhance.Contrast(im).enhance(1 + s * 0.45), 1),
        (ops.sharpness, lambda s: lambda im: ImageEnhance.Sharpness(im).enhance(1 + s * 0.45), 1),
        (ops.posterize, lambda s: lambda im: ImageOps.posterize(im, 6), 0),
        (ops.solarize, lambda s: lambda im: ImageOps.solarize(im, 128), 0),
        (ops.autocontrast, lambda s: ImageOps.autocontrast, 1),
        (ops.equalize, lambda s: ImageOps.equalize, 0),
        (ops.rotate, lambda s: lambda im: im.rotate(s * 15), None),
        (ops.shear_x, lambda s: warp(1, s * 0.15, -s * 0.15 * H / 2, 0, 1, 0), None),
        (ops.shear_y, lambda s: warp(1, 0, 0, s * 0.15, 1, -s * 0.15 * W / 2), None),
        (ops.translate_x, lambda s: warp(1, 0, s * 4, 0, 1, 0), 0),
        (ops.translate_y, lambda s: warp(1, 0, 0, 0, 1, s * 3), 0),
    ],
)
def test_operations_do_what_pillow_does(ours, pillow, tolerance, sign):
    images = (IMAGES // 2 + 40) if ours is ops.autocontrast else IMAGES
    found = ours(images, torch.full((N,), sign), 0.5).int()
    wanted = with_pillow(pillow(sign), images).int()
    if tolerance is None:  # nearest-neighbour ties may fall to either side
        assert ((found - wanted).abs() <= 1).float().mean() > 0.97
    else:
        assert (found - wanted).abs().max() <= tolerance


def test_every_operation_is_drawn(monkeypatch):
    """Each as often as the others (13 degrees of freedom: p < 1e-4), with either sign, at the strength asked for."""
    signs, strengths = [], set()

    def mark(number):
        def apply(x, sign, strength):
            signs.append(sign)
            strengths.add(strength)
            return torch.full_like(x, number)

        return apply

    monkeypatch.setattr(ops, "OPERATIONS", (None, *(mark(number) for number in range(1, 14))))
    n = 14_000
    chain = data.Augment(pad_crop=0, randaugment=1, magnitude=12, mean=[0.0], std=[1 / 255])
    x, _ = chain(torch.zeros(n, 1, 1, 1, dtype=torch.uint8), torch.zeros(n), torch.arange(n), 0, 0)
    counts = torch.bincount(x.flatten().round().long(), minlength=14)
    assert float((counts - n / 14).square().sum() / (n / 14)) < 42
    assert abs(float(torch.cat(signs).mean())) < 5 / n**0.5
    assert strengths == {0.4}


def test_magnitude_zero_changes_almost_nothing():
    geometric = [ops.rotate, ops.shear_x, ops.shear_y, ops.translate_x, ops.translate_y, ops.posterize, ops.solarize]
    for apply in [*geometric, ops.brightness, ops.colour, ops.contrast, ops.sharpness]:
        assert torch.equal(apply(IMAGES, torch.ones(N), 0.0), IMAGES), apply.__name__


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.sampled_from([1, 3]), st.integers(4, 9), st.integers(0, 30), st.integers(0, 99))
def test_any_shape_and_magnitude(batch, channels, size, magnitude, seed):
    images = torch.full((batch, channels, size, size), seed, dtype=torch.uint8)  # flat images have no contrast
    chain = data.Augment(pad_crop=1, randaugment=3, magnitude=magnitude, mean=[0.5] * channels, std=[0.5] * channels)
    x, _ = chain(images, torch.zeros(batch).long(), torch.arange(batch), 0, seed)
    assert x.shape == images.shape
    assert x.abs().max() <= 1
