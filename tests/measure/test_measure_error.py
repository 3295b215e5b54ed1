from __future__ import annotations

import math

import pytest
import torch

from linvit.attention import create_attention
from linvit.measure import trained
from linvit.measure.error import attention_error, measure
from linvit.measure.trained import attention_maps, trained_error
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


@pytest.mark.parametrize("bad", [{"tokens": 1}, {"draws": 0}, {"sigmas": [0.0]}, {"sigmas": [math.nan]}])
def test_bad_sizes(bad):
    with pytest.raises(ValueError, match=next(iter(bad)).removesuffix("s")):
        list(measure(["uniform"], **bad))
