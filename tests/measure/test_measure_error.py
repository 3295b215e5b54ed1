from __future__ import annotations

import math

import pytest
import torch

from linvit.attention import create_attention
from linvit.measure import trained
from linvit.measure.error import attention_error, measure, oddities, over_features, with_features
from linvit.measure.trained import attention_maps, over_layers, trained_error
from linvit.measure.trained import over_features as over_features_of_model
from linvit.models import create_model
from linvit.randomness import generator

SITE = {"heads": 3, "head_dim": 5, "tokens": 11}


def inputs(tokens: int = 11):
    return torch.randn(3, 2, 3, tokens, 5, generator=generator("test"), dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_has_no_error(causal):
    found = attention_error(create_attention("softmax", **SITE, causal=causal), *inputs())
    assert found["attention_error"] < 1e-12
    assert found["output_error"] < 1e-12


@pytest.mark.parametrize("spec", ["softmax", "performer-exp:m=7", "performer-hyp:m=7", "linformer:k=7",
                                  "performer-exp:m=7,dwc=3,qk_norm=true"])  # fmt: skip
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
    found = list(measure(["softmax"], sigmas=(1.0,), tokens=8, heads=1, head_dim=4, draws=1, dtype=torch.float16))
    assert {record.dtype for record in found} == {"float16"}
    found = list(over_features(["performer-exp"], features=(4,), sigmas=(1.0,), tokens=8, head_dim=4, draws=1,
                               dtype=torch.float32))  # fmt: skip
    assert {record.dtype for record in found} == {"float32"}


def test_normalised_queries_are_compared_with_softmax_of_the_same():
    attention = create_attention("softmax:qk_norm=true", **SITE).double()
    with torch.no_grad():
        attention.q_norm *= 3
    assert attention_error(attention, *inputs())["attention_error"] < 1e-12


def test_a_trained_model_with_normalised_queries_equals_its_softmax():
    config = {"image_size": 8, "channels": 1, "classes": 3, "patch_size": 2, "dim": 16, "depth": 2, "heads": 2}
    model = create_model(**config, attention="softmax:qk_norm=true")
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
        patch.setattr(trained, "PAIRS", 2 * 2 * 17**2)  # two images
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
    values = {r.tags["attention"]: r.value for r in measure(
        ["performer-hyp:m=4", "performer-hyp:m=256"], sigmas=[0.7], tokens=31, heads=2, head_dim=7, draws=3,
    ) if r.metric == "attention_error"}  # fmt: skip
    assert values["performer-hyp:m=256"] < 0.5 * values["performer-hyp:m=4"]
    assert values["performer-hyp:m=256"] < values["uniform"]


def test_records_are_a_function_of_the_seed_and_carry_the_control():
    def values(seed):
        found = measure(["performer-exp:m=5"], sigmas=[1.0, 2.0], tokens=13, heads=2, head_dim=7, draws=2, seed=seed)
        return [(r.metric, r.value, r.unit, r.n, r.tags) for r in found]

    first = values(0)
    assert first == values(0)
    assert first != values(1)
    assert {tags["attention"] for *_, tags in first} == {"performer-exp:m=5", "uniform"}
    assert {metric: unit for metric, _, unit, _, _ in first} == {
        "attention_error": "fraction", "attention_entropy": "nat", "output_error": "fraction",
    }  # fmt: skip
    assert all(tags["low"] <= value <= tags["high"] and n == 2 for _, value, _, n, tags in first)


@pytest.mark.parametrize("bad", [{"tokens": 0}, {"draws": 0}, {"sigmas": [0.0]}, {"sigmas": [math.nan]}])
def test_bad_sizes(bad):
    with pytest.raises(ValueError, match=next(iter(bad)).removesuffix("s")):
        list(measure(["uniform"], **bad))


def test_the_error_of_the_output_falls_as_one_over_the_features():
    """MSE ∝ 1/m for moderate norms; orthogonal rows are no worse than independent ones."""
    specs = ["performer-exp", "performer-exp:projection=iid"]
    records = list(over_features(specs, features=[16, 256], sigmas=[0.4], tokens=64, head_dim=7, draws=12))
    found = {(r.metric, r.tags["family"], r.tags["features"]): r for r in records}
    for spec in specs:
        fall = found["output_mse", spec, 16].value / found["output_mse", spec, 256].value
        assert 8 < fall < 32
    assert found["output_mse", specs[0], 16].value < found["output_mse", specs[1], 16].value
    assert found["output_mse", "uniform", None].n == 12
    assert found["output_mse", specs[0], 16].tags["attention"] == "performer-exp:m=16"


def test_the_error_of_the_output_by_hand():
    records = list(over_features(["performer-relu"], features=[5], sigmas=[0.7], tokens=11, head_dim=7, draws=1))
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
    [("performer-exp", "performer-exp:m=6"), ("performer-hyp:shrink=true", "performer-hyp:shrink=true,m=3"),
     ("performer-trig:m=9", "performer-trig:m=3"), ("linformer", "linformer:k=6")],
)  # fmt: skip
def test_as_many_features_whatever_a_row_makes(spec, given):
    assert with_features(spec, 6, **SITE) == given


@pytest.mark.parametrize(("spec", "words"), [("performer-hyp", "features=7 is not a multiple of 2"),
                                              ("efficient", "'efficient' has no number of features"),
                                              ("performer-no", "unknown attention")])  # fmt: skip
def test_no_such_number_of_features(spec, words):
    with pytest.raises(ValueError, match=words):
        with_features(spec, 7, **SITE)


CONFIG = {"image_size": 8, "channels": 1, "classes": 3, "patch_size": 2, "dim": 16, "depth": 2, "heads": 2}


def test_errors_on_a_models_own_queries_and_keys_by_hand():
    model, images = create_model(**CONFIG).eval(), torch.randn(5, 1, 8, 8, generator=generator("images"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained, "PAIRS", 2 * 2 * 16**2)  # two images at a time
        records = list(over_layers(model, images, ["performer-relu:m=5"], name="mine", draws=2, seed=3))
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
    spec = "linformer:k=3,qk_norm=true"
    model, images = create_model(**CONFIG | {"attention": spec}).eval(), torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        for weights in (p for a in model.attentions() for p in a.parameters()):
            weights.mul_(1.7)  # trained
    records = list(over_layers(model, images, [spec, "performer-relu:m=5"], name="mine", own=spec, draws=2))
    mine = {r.tags["attention"]: r for r in records if r.metric == "attention_error" and "layer" not in r.tags}
    assert list(mine) == [spec, "performer-relu:m=5", "uniform"]
    assert mine[spec].value == pytest.approx(trained_error(model, images)["attention_error"])
    assert mine["uniform"].value == pytest.approx(trained_error(model, images)["attention_error_uniform"])
    assert (mine[spec].n, mine["uniform"].n) == (1, 2)
    soft = list(over_layers(create_model(**CONFIG), images, ["uniform"], name="mine", own="softmax"))
    assert {r.tags["attention"] for r in soft} == {"uniform"}  # which all are compared with


@pytest.mark.parametrize(
    ("spec", "odd", "weights"),
    [("performer-relu:m=8", False, False), ("performer-hyp:m=8,dwc=3,exact_cls=true", False, False),
     ("performer-trig:m=8", True, False), ("linformer:k=70", True, True), ("identity", False, False),
     ("uniform", False, False), ("window", False, False)],
)  # fmt: skip
def test_whose_rows_are_no_distributions(spec, odd, weights):
    assert oddities(spec, 8) == (odd, weights)


def test_a_models_own_queries_and_keys_over_features():
    model, images = create_model(**CONFIG), torch.randn(2, 1, 8, 8, generator=generator("images"))
    records = list(over_features_of_model(model, images, ["performer-hyp"], name="mine", features=[4, 256], draws=2))
    found = {(r.tags["family"], r.tags["features"]): r.value for r in records
             if r.metric == "attention_error" and "layer" not in r.tags}  # fmt: skip
    assert set(found) == {("performer-hyp", 4), ("performer-hyp", 256), ("uniform", None)}
    assert found["performer-hyp", 256] < 0.5 * found["performer-hyp", 4]


def test_a_model_without_attention():
    with pytest.raises(ValueError, match="mine has no attention"):
        list(over_layers(torch.nn.Flatten(), torch.zeros(2, 1, 4, 4), ["uniform"], name="mine"))
