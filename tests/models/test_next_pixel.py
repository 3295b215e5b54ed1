"""A model that predicts each pixel from those before it: causality, decoding, levels and sampling."""

from __future__ import annotations

import math

import pytest
import torch
from cases import can, defaults

from linvit.models import create_model, estimate
from linvit.models.sampling import sample
from linvit.models.stems import from_levels, to_levels
from linvit.registry import parse

SIDE, CHANNELS, LEVELS = 4, 2, 7
TINY = {
    "stem": "next-pixel",
    "image_size": SIDE,
    "channels": CHANNELS,
    "levels": LEVELS,
    "dim": 22,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 13,
}
CAUSAL = [spec for spec in defaults() if can(spec, causal=True)]


def build(spec: str = "softmax", **options):
    return create_model(**TINY | {"attention": spec} | options).double().eval()


def pictures(count: int = 3, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, CHANNELS, SIDE, SIDE), generator=source).double() / 255


def test_most_attentions_can():
    names = {parse(spec).name for spec in CAUSAL}
    assert {"softmax", "uniform", "identity", "performer-relu", "performer-exp", "performer-theta"} <= names
    assert not {"linformer", "efficient", "window"} & names


@pytest.mark.parametrize(("spec", "order"), [*((spec, "raster") for spec in CAUSAL), ("softmax", "reversed")])
def test_a_pixel_changes_no_logits_up_to_its_own(spec, order):
    model, x = build(spec, order=order), pictures()
    before = model(x)
    assert before.shape == (3, SIDE * SIDE * CHANNELS, LEVELS)
    row, column, channel = 1, 2, 1
    place = (row * SIDE + column) * CHANNELS + channel
    place = place if order == "raster" else SIDE * SIDE * CHANNELS - 1 - place
    other = x.clone()
    other[:, channel, row, column] = (other[:, channel, row, column] + 0.5) % 1
    after = model(other)
    assert (after - before)[:, : place + 1].abs().max() < 1e-9
    assert (after - before)[:, place + 1].abs().max() > 1e-9


@pytest.mark.parametrize(
    ("spec", "positions"), [*((spec, "learned") for spec in CAUSAL), ("softmax", "sincos"), ("softmax", "none")]
)
def test_steps_give_the_logits_of_the_whole(spec, positions):
    model, x = build(spec, positions=positions, dim=24 if positions == "sincos" else 22), pictures()
    whole, levels = model(x), to_levels(x, model.config)
    last, states = levels[:, 0], None
    for place in range(model.tokens):
        logits, states = model.step(last, place, states)
        torch.testing.assert_close(logits, whole[:, place], rtol=1e-7, atol=1e-7)
        last = levels[:, place]


def test_levels_survive_being_made_pixels():
    whole = build().config.model_copy(update={"image_size": 16, "channels": 1})
    for levels in range(2, 257):
        config = whole.model_copy(update={"levels": levels})
        every = torch.arange(256).clamp_max(levels - 1).view(1, 256)
        image = from_levels(every, config)
        assert torch.equal(to_levels(image / 255, config), every)
        assert (image.min(), image.max()) == (0, 255)


def test_levels_are_bins_of_equal_width_in_the_order_of_prediction():
    config, x = build(levels=4).config, pictures()
    levels = to_levels(x, config)
    reversed_ = to_levels(x, config.model_copy(update={"order": "reversed"}))
    assert torch.equal(reversed_, levels.flip(1))
    assert levels[1, (2 * SIDE + 3) * CHANNELS + 1] == round(float(x[1, 1, 2, 3]) * 255) // 64


def test_samples_are_those_of_the_seed_and_follow_the_model():
    model = build("performer-relu:m=11", levels=3)
    one = sample(model, 4, seed=1)
    assert one.shape == (4, CHANNELS, SIDE, SIDE)
    assert torch.equal(one, sample(model, 4, seed=1))
    assert not torch.equal(one, sample(model, 4, seed=2))
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.1, 0.6, 0.3]).log())
    drawn = to_levels(sample(model, 101).double() / 255, model.config)
    share, n = torch.bincount(drawn.flatten(), minlength=3) / drawn.numel(), drawn.numel()
    for found, wanted in zip(share.tolist(), (0.1, 0.6, 0.3), strict=True):
        assert abs(found - wanted) < 3.3 * math.sqrt(wanted * (1 - wanted) / n)  # 99.9 %
    cold = to_levels(sample(model, 7, temperature=0.01).double() / 255, model.config)
    assert (cold == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": 0}, "images=0 must be at least 1"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
    ],
)
def test_bad_samples(options, message):
    with pytest.raises(ValueError, match=message):
        sample(build(), **options)


def test_a_classifier_draws_nothing():
    with pytest.raises(ValueError, match="stem=patch cannot draw images"):
        sample(create_model(image_size=8, dim=8, depth=1, heads=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "linformer:k=5"}, "linformer cannot be causal"),
        ({"attention": "window"}, "window cannot be causal"),
        ({"attention": "performer-relu:m=11,dwc=3"}, "dwc=3 looks at later tokens"),
        ({"pool": "cls"}, "pool=cls has no effect"),
        ({"prefix": 1}, "prefix=1 has no effect"),
        ({"levels": 1}, "levels=1"),
        ({"levels": 257}, "levels=257"),
        ({"order": "spiral"}, "order=spiral"),
        ({"stem": "pixel"}, "levels=7 has no effect: stem=pixel has no levels"),
    ],
)
def test_bad_models(options, message):
    with pytest.raises(ValueError, match=message):
        create_model(**TINY | options)


@pytest.mark.parametrize("spec", ["softmax", "performer-relu:m=11", "performer-theta:m=11"])
def test_parameters_are_known_beforehand(spec):
    model = build(spec, positions="learned", head="wide")
    assert estimate(model.config).parameters == model.parameter_count()
