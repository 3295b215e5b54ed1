from __future__ import annotations

import math

import pytest
import torch

from linvit.attention import create_attention
from linvit.measure import trained
from linvit.measure.error import Draws, attention_error, feature_errors, oddities, random_errors, with_features
from linvit.measure.trained import Subject, attention_maps, layer_errors, layer_feature_errors, trained_error
from linvit.models import create_model
from linvit.randomness import generator
from linvit.site import Site

SITE = {"heads": 3, "head_dim": 5, "tokens": 11}


def inputs(tokens: int = 11):
    return torch.randn(3, 2, 3, tokens, 5, generator=generator("test"), dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_has_no_error(causal):
    found = attention_error(create_attention("softmax", **SITE, causal=causal), *inputs())
    assert found["attention_error"] < 1e-12
    assert found["output_error"] < 1e-12


@pytest.mark.parametrize(
    "spec",
    ["softmax", "performer-exp:m=7", "performer-hyp:m=7", "linformer:k=7", "performer-exp:m=7,dwc=3,qk_norm=head"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_a_smaller_dtype_the_error_is_that_of_the_rounded_inputs(spec, dtype):
    """Against softmax of what was really given; beside that, no more than rounding the output is added."""
    q, k, v = (4 * inputs(12)).to(dtype)
    site = SITE | {"tokens": 12, "grid": (3, 4)}
    exact = attention_error(create_attention(spec, **site).double(), q, k, v)
    found = attention_error(create_attention(spec, **site), q, k, v, dtype=dtype)
    assert found["attention_error"] == pytest.approx(exact["attention_error"], abs=1e-4)
    assert found["output_error"] == pytest.approx(exact["output_error"], abs=torch.finfo(dtype).eps + 1e-5)
    assert spec != "softmax" or found["output_error"] > 0


def test_records_say_in_which_dtype_they_were_measured():
    site = Site(1, 4, 8)
    found = random_errors(["softmax"], site, sigmas=(1.0,), draws=Draws(1, dtype=torch.float16))
    assert {record.dtype for record in found} == {"float16"}
    draws = Draws(1, dtype=torch.float32)
    found = feature_errors(["performer-exp"], site, features=(4,), sigmas=(1.0,), draws=draws)
    assert {record.dtype for record in found} == {"float32"}


def test_normalised_queries_are_compared_with_softmax_of_the_same():
    attention = create_attention("softmax:qk_norm=head", **SITE).double()
    with torch.no_grad():
        attention.q_norm *= 3
    assert attention_error(attention, *inputs())["attention_error"] < 1e-12


def test_a_trained_model_with_normalised_queries_equals_its_softmax():
    config = {"image_size": 8, "channels": 1, "classes": 3, "patch_size": 2, "dim": 16, "depth": 2, "heads": 2}
    model = create_model(**config, attention="softmax:qk_norm=head")
    for attention in model.attentions():
        torch.nn.init.constant_(attention.q_norm, 4.0)
    images = torch.randn(5, 1, 8, 8, generator=generator("images"))
    found = trained_error(model, images)
    assert found["attention_error"] < 1e-6
    assert found["attention_error_uniform"] > 1e-3
    halves = [trained_error(model, part) for part in (images[:2], images[2:])]
    assert found["attention_entropy"] == pytest.approx(
        sum(h["attention_entropy"] * n for h, n in zip(halves, (2, 3), strict=True)) / 5
    )


def test_looking_into_a_model_leaves_it_as_it_was():
    """Few images at a time give what all at once give."""
    config = {"image_size": 8, "channels": 1, "classes": 3, "patch_size": 2, "dim": 16, "depth": 2, "heads": 2}
    model = torch.nn.Sequential(create_model(**config, attention="performer-relu:m=5", pool="cls")).train()
    images = torch.randn(5, 1, 8, 8, generator=generator("images"))
    maps = attention_maps(model, images)
    assert maps is not None
    assert maps.shape == (5, 4, 4)
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained, "MAX_PAIRS", 2 * 2 * 17**2)  # two images
        assert [len(layers[0][1]) for layers in trained.captured(model, images)] == [2, 2, 1]
        torch.testing.assert_close(attention_maps(model, images), maps)
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_without_attention_has_nothing_to_tell():
    model, images = torch.nn.Flatten(), torch.zeros(2, 1, 4, 4)
    assert trained_error(model, images) == {}
    assert attention_maps(model, images) is None


def test_uniform_has_the_greatest_entropy():
    found = attention_error(create_attention("uniform", **SITE), *inputs())
    assert found["attention_entropy"] == pytest.approx(math.log(11))
    assert 0 < found["attention_error"] < 1


def test_identity_is_a_permutation():
    q, k, v = inputs()
    found = attention_error(create_attention("identity", **SITE), q, 0 * k, v)
    assert found["attention_error"] == pytest.approx(1 - 1 / 11)  # softmax of equal scores is uniform
    assert found["attention_entropy"] == pytest.approx(0)


@pytest.mark.parametrize("spec", ["uniform", "performer-relu:m=7"])
def test_a_mask_equals_truncation(spec):
    q, k, v = inputs()
    mask = (torch.arange(11) < 7).expand(2, 11)
    attention = create_attention(spec, **SITE)
    masked = attention_error(attention, q, k, v, mask)
    short = attention_error(attention, *(x[:, :, :7] for x in (q, k, v)))
    assert masked == pytest.approx(short)


def test_more_features_come_closer():
    values = {
        r.tags["attention"]: r.value
        for r in random_errors(
            ["performer-hyp:m=4", "performer-hyp:m=256"], Site(2, 7, 31), sigmas=[0.7], draws=Draws(3)
        )
        if r.metric == "attention_error"
    }
    assert values["performer-hyp:m=256"] < 0.5 * values["performer-hyp:m=4"]
    assert values["performer-hyp:m=256"] < values["uniform"]


def test_records_are_a_function_of_the_seed_and_carry_the_control():
    def values(seed):
        found = random_errors(["performer-exp:m=5"], Site(2, 7, 13), sigmas=[1.0, 2.0], draws=Draws(2, seed))
        return [(r.metric, r.value, r.unit, r.n, r.tags) for r in found]

    first = values(0)
    assert first == values(0)
    assert first != values(1)
    assert {tags["attention"] for *_, tags in first} == {"performer-exp:m=5", "uniform"}
    assert {metric: unit for metric, _, unit, _, _ in first} == {
        "attention_error": "fraction",
        "attention_entropy": "nat",
        "output_error": "fraction",
    }
    assert all(tags["low"] <= value <= tags["high"] and n == 2 for _, value, _, n, tags in first)


@pytest.mark.parametrize("sigma", [0.0, math.nan])
def test_bad_sizes(sigma):
    with pytest.raises(ValueError, match="sigma"):
        list(random_errors(["uniform"], Site(2, 7, 13), sigmas=[sigma]))
    with pytest.raises(ValueError, match="features=0"):
        list(feature_errors(["performer-exp"], features=[0]))
    with pytest.raises(ValueError, match="draws=0 must be at least 1"):
        Draws(0)


def test_the_error_of_the_output_falls_as_one_over_the_features():
    """MSE ∝ 1/m for moderate norms; orthogonal rows are no worse than independent ones."""
    specs = ["performer-exp", "performer-exp:projection=iid"]
    records = list(feature_errors(specs, Site(1, 7, 64), features=[16, 256], sigmas=[0.4], draws=Draws(12)))
    found = {(r.metric, r.tags["family"], r.tags["features"]): r for r in records}
    for spec in specs:
        fall = found["output_mse", spec, 16].value / found["output_mse", spec, 256].value
        assert 8 < fall < 32
    assert found["output_mse", specs[0], 16].value < found["output_mse", specs[1], 16].value
    assert found["output_mse", "uniform", None].n == 12
    assert found["output_mse", specs[0], 16].tags["attention"] == "performer-exp:m=16"


def test_the_error_of_the_output_by_hand():
    records = list(feature_errors(["performer-relu"], Site(1, 7, 11), features=[5], sigmas=[0.7], draws=Draws(1)))
    found = {(r.metric, r.tags["family"]): r.value for r in records}
    q, k, v = torch.randn(3, 1, 1, 11, 7, generator=generator("features", 0, 0), dtype=torch.float64)
    exact = torch.softmax(0.49 * q @ k.transpose(-1, -2) / math.sqrt(7), -1) @ v
    off = v.mean(2, keepdim=True) - exact
    assert found["output_mse", "uniform"] == pytest.approx(off.square().mean().item())
    assert found["output_error", "uniform"] == pytest.approx((off.norm() / exact.norm()).item())
    ours = create_attention("performer-relu:m=5", heads=1, head_dim=7, tokens=11)(0.7 * q, 0.7 * k, v) - exact
    assert found["output_mse", "performer-relu"] == pytest.approx(ours.square().mean().item())


@pytest.mark.parametrize(
    ("spec", "given"),
    [
        ("performer-exp", "performer-exp:m=6"),
        ("performer-hyp:shrink=true", "performer-hyp:shrink=true,m=3"),
        ("performer-trig:m=9", "performer-trig:m=3"),
        ("linformer", "linformer:k=6"),
    ],
)
def test_as_many_features_whatever_a_row_makes(spec, given):
    assert with_features(spec, 6, Site(**SITE)) == given


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("performer-hyp", "features=7 is not a multiple of 2"),
        ("efficient", "'efficient' has no number of features"),
        ("performer-no", "unknown attention"),
    ],
)
def test_no_such_number_of_features(spec, words):
    with pytest.raises(ValueError, match=words):
        with_features(spec, 7, Site(**SITE))


CONFIG = {"image_size": 8, "channels": 1, "classes": 3, "patch_size": 2, "dim": 16, "depth": 2, "heads": 2}


def test_errors_on_a_models_own_queries_and_keys_by_hand():
    model, images = create_model(**CONFIG).eval(), torch.randn(5, 1, 8, 8, generator=generator("images"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained, "MAX_PAIRS", 2 * 2 * 16**2)  # two images at a time
        records = list(layer_errors(Subject(model, images, "mine"), ["performer-relu:m=5"], draws=Draws(2, 3)))
    found = {(r.metric, r.tags["attention"], r.tags.get("layer")): r for r in records}
    ((layers),) = trained.captured(model, images)
    each = []
    for i, (_, q, k, v) in enumerate(layers):
        site = {"heads": 2, "head_dim": 8, "tokens": 16, "layer": i}
        drawn = [create_attention("performer-relu:m=5", **site, seed=seed) for seed in (3, 4)]
        values = [attention_error(attention, q, k, v)["attention_error"] for attention in drawn]
        assert found["attention_error", "performer-relu:m=5", i + 1].value == pytest.approx(sum(values) / 2)
        each.append(values)
    whole = found["attention_error", "performer-relu:m=5", None]
    draws = [(a + b) / 2 for a, b in zip(*each, strict=True)]
    assert (whole.tags["low"], whole.tags["high"]) == (pytest.approx(min(draws)), pytest.approx(max(draws)))
    assert (whole.tags["images"], whole.tags["model"], whole.n) == (5, "mine", 2)
    assert found["attention_entropy", "uniform", 2].value == pytest.approx(math.log(16))


def test_a_models_own_attention_stands_beside_the_others_as_it_was_trained():
    spec = "linformer:k=3,qk_norm=head"
    model, images = create_model(**CONFIG | {"attention": spec}).eval(), torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        for weights in (p for a in model.attentions() for p in a.parameters()):
            weights.mul_(1.7)  # trained
    subject = Subject(model, images, "mine", spec)
    records = list(layer_errors(subject, [spec, "performer-relu:m=5"], draws=Draws(2)))
    mine = {r.tags["attention"]: r for r in records if r.metric == "attention_error" and "layer" not in r.tags}
    assert list(mine) == [spec, "performer-relu:m=5", "uniform"]
    assert mine[spec].value == pytest.approx(trained_error(model, images)["attention_error"])
    assert mine["uniform"].value == pytest.approx(trained_error(model, images)["attention_error_uniform"])
    assert (mine[spec].n, mine["uniform"].n) == (1, 2)
    soft = list(layer_errors(Subject(create_model(**CONFIG), images, "mine"), ["uniform"]))
    assert {r.tags["attention"] for r in soft} == {"uniform"}  # which all are compared with


@pytest.mark.parametrize(
    ("spec", "odd", "weights"),
    [
        ("performer-relu:m=8", False, False),
        ("performer-hyp:m=8,dwc=3,exact_cls=true", False, False),
        ("performer-trig:m=8", True, False),
        ("linformer:k=70", True, True),
        ("identity", False, False),
        ("uniform", False, False),
        ("window", False, False),
    ],
)
def test_whose_rows_are_no_distributions(spec, odd, weights):
    assert oddities(spec, 8) == (odd, weights)


def test_a_models_own_queries_and_keys_over_features():
    model, images = create_model(**CONFIG), torch.randn(2, 1, 8, 8, generator=generator("images"))
    subject = Subject(model, images, "mine")
    records = list(layer_feature_errors(subject, ["performer-hyp"], features=[4, 256], draws=Draws(2)))
    found = {
        (r.tags["family"], r.tags["features"]): r.value
        for r in records
        if r.metric == "attention_error" and "layer" not in r.tags
    }
    assert set(found) == {("performer-hyp", 4), ("performer-hyp", 256), ("uniform", None)}
    assert found["performer-hyp", 256] < 0.5 * found["performer-hyp", 4]


def test_a_model_without_attention():
    with pytest.raises(ValueError, match="mine has no attention"):
        list(layer_errors(Subject(torch.nn.Flatten(), torch.zeros(2, 1, 4, 4), "mine"), ["uniform"]))
