"""Options of a model: what each does, which have no effect, what cannot be built, and what a model costs."""

from __future__ import annotations

import hashlib
import re
import time

import pytest
import torch
from cases import spec_of
from torch import nn

from linvit.attention import ATTENTIONS, Attention, attention_cost, attention_names, has_random_features
from linvit.models import (
    SIZES,
    ModelConfig,
    VisionTransformer,
    cost,
    create_model,
    estimate,
    model_config,
    without_effect,
)
from linvit.requests import CompareRequest

SMALL = {"image_size": 12, "classes": 5, "dim": 12, "depth": 2, "heads": 3, "mlp_dim": 7}
IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"patch_size": 3, "pool": "cls", "attention": "softmax@1+linformer:k=3@1", "seed": 4}, "bcfd573ec4c8c226"),
        ({"stem": "resnet", "trunk": (3, 5), "head": "wide", "attention": "performer-relu:m=5"}, "4a8f44ead56e93a8"),
        (
            {"image_size": 6, "stem": "pixel", "qkv_bias": False, "attention": "performer-theta:m=5", "seed": 2},
            "bd0e2722c0a58347",
        ),
        ({"stem": "conv", "trunk": (3, 5), "pools": 1, "positions": "sincos", "channels": 1}, "674e7f4eea332aaa"),
    ],
    ids=["patch", "resnet", "pixel", "conv"],
)
def test_first_weights_never_change(options, expected):
    """Experiments are repeated by their seed: these sums were taken before the model had most of its options."""
    sha = hashlib.sha256()
    for name, value in sorted(create_model(**SMALL | options).state_dict().items()):
        sha.update(name.encode() + value.contiguous().numpy().tobytes())
    assert sha.hexdigest()[:16] == expected


def test_norm_eps_reaches_every_norm():
    model = create_model(**SMALL, norm_eps=0.25)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert [norm.eps for norm in norms] == [0.25] * 5
    assert [m.eps for m in create_model(**SMALL).modules() if isinstance(m, torch.nn.LayerNorm)] == [1e-5] * 5


def test_layer_scale_multiplies_the_branches():
    """A factor of one is no factor, a tiny one leaves the stem alone, and each channel has its own."""
    plain = create_model(**SMALL).eval()
    one, tiny = (create_model(**SMALL, layer_scale=value).eval() for value in (1.0, 1e-12))
    assert torch.equal(one(IMAGES), plain(IMAGES))
    without_blocks = create_model(image_size=12, classes=5, dim=12, depth=0).eval()
    shared = {key: value for key, value in tiny.state_dict().items() if not key.startswith("blocks.")}
    without_blocks.load_state_dict(shared)
    assert torch.allclose(tiny(IMAGES), without_blocks(IMAGES), atol=1e-7)
    assert not torch.allclose(plain(IMAGES), without_blocks(IMAGES), atol=1e-3)
    new = one.state_dict().keys() - plain.state_dict().keys()
    assert sorted(new) == [f"blocks.{i}.scale{j}" for i in (0, 1) for j in (1, 2)]
    assert all(one.state_dict()[name].shape == (12,) for name in new)
    one(IMAGES).sum().backward()
    assert all(one.get_parameter(name).grad is not None for name in new)


@pytest.mark.parametrize("block", ["002", "002-exp"])
def test_the_layer_of_report_002(block):
    """Its Algorithms 2 and 4: norm, attention, residual, norm; they differ in what the residual is."""
    model = create_model(**{k: v for k, v in SMALL.items() if k != "mlp_dim"}, block=block).eval()
    assert not [name for name in model.state_dict() if "mlp" in name]
    expected = x = model.embed(IMAGES)
    for one in model.blocks:
        normed = one.norm1(expected)
        residual = normed if block == "002-exp" else expected
        expected = one.norm2(residual + one.attn(normed))
        x = one(x)
    torch.testing.assert_close(x, expected)


def test_rows_and_columns_that_fill_no_patch_are_left_out_if_asked():
    with pytest.raises(ValueError, match="patch_size=5 does not divide image_size=12"):
        create_model(**SMALL | {"patch_size": 5})
    model = create_model(**SMALL | {"patch_size": 5}, crop=True).eval()
    assert model.tokens == 4
    changed = IMAGES.clone()
    changed[:, :, 10:], changed[..., 10:] = 9.0, 9.0
    assert torch.equal(model(changed), model(IMAGES))
    inner = create_model(**SMALL | {"patch_size": 5, "image_size": 10}).eval()
    assert torch.equal(inner(IMAGES[..., :10, :10]), model(IMAGES))


@pytest.mark.parametrize("stem", ["patch", "pixel"])
@pytest.mark.parametrize("prefix", [1, 2, 5])
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_prefix_tokens(pool, prefix, stem):
    model = create_model(**SMALL, stem=stem, pool=pool, prefix=prefix).eval()
    image_tokens = 9 if stem == "patch" else 3 * 144
    assert model.cls.shape == (1, prefix, 12)
    assert model.tokens == prefix + image_tokens
    seen = []
    model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model.blocks[-1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(IMAGES).sum().backward()
    tokens, pooled = seen
    assert tokens.shape == (2, prefix + image_tokens, 12)
    assert torch.equal(pooled, tokens[:, 0] if pool == "cls" else tokens[:, prefix:].mean(1))
    assert (model.cls.grad != 0).any(-1).all(), "every prefix token is attended to"


def test_prefix_by_default():
    assert create_model(**SMALL, pool="cls").cls.shape == (1, 1, 12)
    assert create_model(**SMALL).cls is None
    assert create_model(**SMALL, prefix=0).cls is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stem": "conv", "patch_size": 4}, "patch_size=4 has no effect: stem=conv has no patch_size: leave it out"),
        ({"stem": "pixel", "patch_size": 3}, "patch_size=3 has no effect: stem=pixel has no patch_size"),
        ({"trunk": (3, 4)}, "trunk=(3, 4) has no effect: stem=patch has no trunk"),
        ({"stem": "pixel", "trunk": [3, 4]}, "trunk=(3, 4) has no effect: stem=pixel has no trunk"),
        ({"pools": 2}, "pools=2 has no effect: stem=patch"),
        ({"stem": "resnet", "pools": 1}, "pools=1 has no effect: stem=resnet"),
        ({"size": "000-torch-mnist", "stem": "conv", "patch_size": 7}, "patch_size=7 has no effect"),
        ({"depth": 0, "heads": 2}, "heads=2 has no effect: depth=0 has no blocks"),
        ({"depth": 0, "layer_scale": 0.1}, "layer_scale=0.1 has no effect: depth=0 has no blocks"),
        ({"depth": 0, "prefix": 2}, "prefix=2 has no effect: depth=0 has no blocks"),
        ({"block": "002", "mlp_dim": 7}, "mlp_dim=7 has no effect: block=002 has no MLP"),
        ({"block": "002", "stem": "next-pixel"}, "block=002 is not causal"),
        ({"depth": 1, "drop_path": 0.1}, "drop_path=0.1 has no effect: depth=1"),
        ({"pool": "cls", "prefix": 0}, "pool=cls: prefix=0 has no token: use pool=mean"),
        ({"pool": "attention", "depth": 0}, "pool=attention needs blocks"),
        ({"rope": "dinov3", "dim": 12, "heads": 2}, "multiple of 4, not head_dim=6"),
        ({"rope": "2d", "stem": "next-pixel"}, "rope=2d needs image tokens"),
        ({"norm_eps": 0}, "norm_eps=0 must be more than 0"),
        ({"layer_scale": 0}, "layer_scale=0 must be more than 0"),
    ],
    ids=str,
)
def test_an_option_without_effect_is_an_error(options, says):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        model_config(**options)
    assert "\n" not in str(caught.value)


def test_what_has_no_effect_has_none():
    """Each such option may be changed, behind the back of the check, and the model stays what it was."""
    changed = {
        "patch_size": 6,
        "trunk": (3, 4),
        "pools": 0,
        "heads": 2,
        "head_dim": 5,
        "mlp_dim": 9,
        "mlp": "swiglu",
        "rope": "2d",
        "qkv_bias": False,
        "dropout": 0.5,
        "drop_path": 0.5,
        "layer_scale": 0.1,
        "prefix": None,
        "levels": 7,
        "order": "reversed",
        "pool": "cls-mean",
        "activation": "elu",
        "block": "002",
        "crop": True,
    }
    seen = set()
    stems = ({"stem": stem} for stem in ("resnet", "conv", "pixel", "next-pixel"))
    for base in (*stems, {"depth": 0}, {"depth": 1}, {"depth": 2, "heads": 4, "block": "002"}):
        trunk = {"trunk": (3, 5)} if base.get("stem") in ("resnet", "conv") else {}
        small = {"depth": 2, "heads": 4, "mlp_dim": 8} if "depth" not in base else {}
        config = model_config(image_size=12, dim=16, classes=3, **base, **trunk, **small)
        model = VisionTransformer(config)
        for name in without_effect(dict(config)):
            other = VisionTransformer(config.model_copy(update={name: changed[name]}))
            assert {k: v.shape for k, v in other.state_dict().items()} == {
                k: v.shape for k, v in model.state_dict().items()
            }
            torch.manual_seed(0)
            mine = model(IMAGES)
            torch.manual_seed(0)
            assert torch.equal(other(IMAGES), mine), name
            seen.add(name)
    assert seen == changed.keys()


def test_a_size_gives_way_to_the_stem():
    config = model_config("000-torch-mnist", image_size=32, stem="conv")  # whose patch_size=7 nobody asked for here
    assert config.patch_size is None
    assert config.mlp_dim == SIZES["000-torch-mnist"]["mlp_dim"]


def test_a_trunk_of_one_width_needs_no_comma():
    small = {"stem": "conv", "pools": 0, "image_size": 8, "classes": 3}
    assert model_config(**small, trunk="5").trunk == model_config(**small, trunk=5).trunk == (5,)
    assert CompareRequest.of(data="digits", options={"trunk": "5"}).options["trunk"] == (5,)


@pytest.mark.parametrize(
    "options", [{"stem": "conv", "trunk": (3, 4)}, {"stem": "pixel"}, {"depth": 0}, {"depth": 1}], ids=str
)
def test_a_stored_configuration_names_every_option(options):
    config = model_config(image_size=12, **options)
    assert model_config(**config.model_dump(mode="json")) == config
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dim": 10**6}, r"takes [\d,]+ GB with its [\d,]+ parameters and one image, but the machine has \d+ GB"),
        ({"classes": 10**9}, "takes .* GB"),
        ({"mlp_dim": 10**10}, "takes .* GB"),
        ({"heads": 10**9, "head_dim": 64}, "takes .* GB"),
        ({"heads": 10**9}, "dim=128 is not a multiple of heads=1000000000"),
        ({"channels": 10**9}, "takes .* GB"),
        ({"stem": "conv", "trunk": (10**6, 10**6)}, "takes .* GB"),
        ({"stem": "resnet", "trunk": (10**6,)}, "takes .* GB"),
        ({"stem": "pixel", "image_size": 8192}, "takes .* GB"),
        ({"image_size": 8192, "patch_size": 1}, "takes .* GB"),
        ({"dim": 10**30}, "takes .* GB"),
        ({"prefix": 10**10}, "takes .* GB"),
        ({"attention": "performer-relu:m=10000000000"}, "takes .* GB"),
        ({"attention": "linformer:k=10000000,sharing=none"}, "takes .* GB"),
        ({"attention": "softmax:dwc=100001"}, "takes .* GB"),
        ({"depth": 10**6}, "depth=1000000 must be at most 10000"),
        ({"depth": 10**12}, "depth=1000000000000 must be at most 10000"),
        ({"image_size": 100_000}, "image_size=100000 must be between 4 and 8192"),
        ({"stem": "conv", "trunk": (8,) * 5000}, "trunk has 5,000 widths, more than the maximum of 64"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_is_refused_at_once(options, says):
    begun = time.perf_counter()
    with pytest.raises(ValueError, match=says) as caught:
        model_config(**options)
    with pytest.raises(ValueError, match="takes" if "takes" in says else says):  # as a config.json would give it
        model_config(**model_config(stem=options.get("stem", "patch")).model_dump(mode="json") | options)
    assert time.perf_counter() - begun < 0.5
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_changed_copy_is_refused_too():
    with pytest.raises(ValueError, match="but the machine has"):
        VisionTransformer(ModelConfig().model_copy(update={"dim": 10**6}))


def test_the_bound_is_the_memory_of_the_machine(monkeypatch):
    """The model that just fits is built, the next is not; and a thousand empty blocks do not fit into a megabyte."""
    needed = estimate(model_config(**SMALL)).memory
    monkeypatch.setattr(cost, "MEMORY", needed)
    model_config(**SMALL)
    monkeypatch.setattr(cost, "MEMORY", needed - 1)
    with pytest.raises(ValueError, match="but the machine has 0 GB"):
        model_config(**SMALL)
    monkeypatch.setattr(cost, "MEMORY", 2**20)
    model_config(image_size=4, dim=1, heads=1, mlp_dim=1, depth=10, classes=2)
    with pytest.raises(ValueError, match="but the machine has 0 GB"):
        model_config(image_size=4, dim=1, heads=1, mlp_dim=1, depth=1000, classes=2)


COSTS = [
    {"stem": stem} | other
    for stem in ("patch", "conv", "resnet", "pixel", "length-one")
    for other in (
        {"pool": "cls"},
        {"head": "wide"},
        {"positions": "none"},
        {"layer_scale": 0.1},
        {"prefix": 3},
        {"qkv_bias": False, "head_dim": 5},
        {"positions": "sincos"},
        {"image_size": 13, "patch_size": 1},
    )
]
COSTS += [
    {"stem": "conv", "trunk": (3, 5, 7), "pools": 0},
    {"stem": "resnet", "trunk": (3,)},
    {"depth": 0},
    {"dim": 300},
    {"pool": "attention", "prefix": 2},
    {"pool": "norm-mean"},
    *({"mlp": mlp, "pool": "attention"} for mlp in ("gelu-tanh", "swiglu", "swiglu-norm", "geglu")),
    {"rope": "dinov3", "positions": "none"},
    {"block": "002"},
    {"patch_size": 5, "crop": True},
]


@pytest.mark.filterwarnings("ignore:stem=length-one")
@pytest.mark.parametrize("options", COSTS, ids=str)
def test_costs_are_exact_for_softmax(options):
    options = {k: v for k, v in (SMALL | options).items() if k not in without_effect(SMALL | options)}
    model = create_model(**options)
    assert estimate(model.config).parameters == model.parameter_count()
    assert estimate(model.config).macs == model.macs()


KNOWN = [
    "softmax",
    "uniform",
    "efficient",
    "linformer:k=7",
    "linformer:k=7,sharing=layerwise",
    "linformer:sharing=none",
    "linformer:k=7,sharing=key-value,kind=conv",
    "linformer:k=7,kind=pool",
    "performer-relu:m=7",
    "performer-exp",
    "performer-relu:projection=none",
    "performer-theta:m=7",
    "performer-theta-linear:m=7",
    "performer-theta-mlp:m=7",
    "performer-theta-mixture",
    "performer-theta-linear:projection=none",
    "performer-hedgehog",
    "window",
    "window:size=1",
]


@pytest.mark.parametrize("spec", KNOWN)
def test_costs_of_known_attentions(spec):
    """Parameters to the last; and with the buffers, all the numbers that are stored."""
    switches = "dwc=3" if spec == "uniform" else "qk_norm=head,dwc=3"  # what nobody looks at is not normalised
    for attention in (spec, f"{spec}{',' if ':' in spec else ':'}{switches}"):
        model = create_model(**SMALL, attention=attention, prefix=2)
        found = estimate(model.config)
        assert found.parameters == model.parameter_count()
        assert found.parameters + found.kept - 2 * cost.BLOCK == sum(v.numel() for v in model.state_dict().values())


STEM_OPTIONS = [{}, {"stem": "conv", "trunk": (3, 5), "pools": 1}, {"stem": "pixel", "image_size": 4}]


@pytest.mark.parametrize("name", attention_names())
def test_parameters_are_known_without_building(name):
    for options in STEM_OPTIONS:
        given = {k: v for k, v in (SMALL | options).items() if k not in without_effect(SMALL | options)}
        model = create_model(**given, attention=spec_of(name), prefix=2)
        assert estimate(model.config).parameters == model.parameter_count()


def test_layers_of_several_kinds_add_up():
    text = "linformer:k=7,sharing=layerwise@2+softmax@1+linformer:k=7,sharing=layerwise,dwc=3@1+performer-theta:m=5@1"
    model = create_model(**SMALL | {"depth": 5}, attention=text)
    assert estimate(model.config).parameters == model.parameter_count()


class Elsewhere(Attention):
    """As a plugin may be: it says nothing of what it costs."""

    formula, estimates, can_be_causal = "(q kᵀ W) v", "itself", False

    def __init__(self, site, switches, *, m: int = 5):
        super().__init__(site, switches)
        self.weight = nn.Parameter(torch.ones(site.heads, site.head_dim, m))

    def attend(self, q, k, v, mask):
        return (q @ self.weight.to(q)) @ ((k @ self.weight.to(q)).transpose(2, 3) @ v)


def test_an_attention_that_does_not_state_its_cost_is_measured(monkeypatch):
    monkeypatch.setitem(ATTENTIONS._entries, "elsewhere", Elsewhere)
    model = create_model(**SMALL, attention="elsewhere:m=3,dwc=3")
    assert estimate(model.config).parameters == model.parameter_count()
    site = model.config.site
    assert attention_cost("elsewhere:m=3", site).macs == 4 * site.heads * site.tokens * site.head_dim * 3
    assert attention_cost("elsewhere", site.at(10**6)).macs == 4 * site.heads * 10**6 * site.head_dim * 5
    assert not has_random_features("elsewhere")


def test_an_estimate_takes_no_time():
    config = model_config("base", image_size=224, patch_size=16, attention="performer-relu:m=64")
    begun = time.perf_counter()
    for _ in range(100):
        estimate(config)
    assert time.perf_counter() - begun < 0.2  # 2 ms each, on a busy machine
