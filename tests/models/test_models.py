"""Models: every attention and every stem trains, costs are counted as PyTorch counts them, sizes build and match."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from cases import spec_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from linvit.attention import attention_names
from linvit.attention.grid import CONVENTIONS, Rotation
from linvit.measure.trained import captured
from linvit.models import (
    SIZES,
    ModelConfig,
    VisionTransformer,
    create_model,
    match_parameters,
    model_config,
    without_effect,
)
from linvit.models.stems import STEMS as ALL_STEMS
from linvit.site import Site

SMALL = {"image_size": 8, "patch_size": 2, "classes": 3, "dim": 12, "depth": 2, "heads": 3, "mlp_dim": 7}
STEMS = {
    "patch": {},
    "conv": {"trunk": (5, 7)},
    "conv of odd images": {"stem": "conv", "trunk": (5, 7, 11), "image_size": 13},
    "resnet": {"trunk": (3, 5)},
    "resnet of odd images": {"stem": "resnet", "trunk": (3, 5, 7), "image_size": 13},
    "pixel": {},
    "length-one": {},
}


def small_config(**options) -> ModelConfig:
    """SMALL with these options, without what they leave no use for."""
    return model_config(**{key: SMALL[key] for key in SMALL.keys() - without_effect(SMALL | options)} | options)


def small(**options) -> VisionTransformer:
    return VisionTransformer(small_config(**options))


def stem_options(name: str) -> dict:
    return {"stem": name.split()[0]} | STEMS[name]


def backward(model: VisionTransformer) -> list[str]:
    """The names of parameters that get no gradient in two steps; one is not enough for what lies behind a layer that
    starts at zero."""
    config = model.config
    source = torch.Generator().manual_seed(1)
    x = torch.randn(5, config.channels, config.image_size, config.image_size, generator=source)
    missed = set(dict(model.named_parameters()))
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(x), torch.arange(5) % config.classes).backward()
        missed -= {n for n, p in model.named_parameters() if p.grad is not None and (p.grad != 0).any()}
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return sorted(missed)


@pytest.mark.parametrize("pool", ["mean", "cls"])
@pytest.mark.parametrize("name", attention_names())
def test_every_parameter_of_every_attention_gets_a_gradient(name, pool):
    if (name, pool) == ("identity", "cls"):
        pytest.skip("a cls token never sees the image: that is what the control is for")
    model = small(attention=spec_of(name), pool=pool)
    assert backward(model) == []
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:stem=length-one")
@pytest.mark.parametrize("stem", STEMS)
def test_every_parameter_of_every_stem_gets_a_gradient(stem):
    attention = "identity" if stem == "length-one" else "softmax"  # one token: softmax has nothing to choose
    assert backward(small(**stem_options(stem), attention=attention)) == []


class Convolutions(TorchDispatchMode):
    """Notes (side of the kernel, stride) of every convolution that runs."""

    def __init__(self):
        super().__init__()
        self.seen: set[tuple[int, int]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            self.seen.add((args[1].shape[-1], args[3][0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:stem=length-one")
@pytest.mark.parametrize("trunk", [None, (1, 2), (3, 5, 7), (4, 8, 8, 16), (32, 64, 128)], ids=str)
@pytest.mark.parametrize("stem", ALL_STEMS)
def test_no_convolution_steps_over_pixels(stem, trunk):
    """Fewer than eight channels through a strided 1 × 1 convolution: oneDNN then writes past its gradient's end on
    processors with AVX2 alone, and the process dies later, somewhere else."""
    bare = ("patch", "pixel", "next-pixel", "masked-pixel")
    if trunk and stem in bare:
        pytest.skip("it has no widths to choose")
    for side in (16, 13):
        model = small(stem=stem, image_size=side, trunk=trunk, **({"patch_size": 1} if stem == "patch" else {}))
        with Convolutions() as convolutions, torch.no_grad():  # no backward pass: a wrong one would end the tests
            model(torch.randn(2, 3, side, side))
        assert bool(convolutions.seen) == (stem not in bare)
        assert all(stride <= kernel for kernel, stride in convolutions.seen), convolutions.seen


@pytest.mark.parametrize("side", [12, 13])
def test_a_shortcut_is_the_strided_convolution(side):
    block = small(stem="resnet", trunk=(3, 5)).stem.layers[2].double().eval()
    assert block.stride == 2
    x = torch.randn(2, 3, side, side, dtype=torch.float64)
    convolution, norm = block.shortcut
    strided = norm(F.conv2d(x, convolution.weight, stride=2))
    assert torch.allclose(block(x), F.relu(block.second(block.first(x)) + strided), rtol=0, atol=1e-14)


@pytest.mark.parametrize("positions", ["learned", "sincos", "none"])
@pytest.mark.parametrize("stem", ["patch", "pixel"])
def test_positions(stem, positions):
    """Without positions a mean over tokens cannot tell where they were; with them it can."""
    model = small(stem=stem, positions=positions, pool="mean").eval()
    x = torch.randn(2, 3, 8, 8)
    moved = x.roll((2, 2), (2, 3))  # whole patches, whole pixels
    same = torch.allclose(model(x), model(moved), atol=1e-5)
    assert same == (positions == "none")


@pytest.mark.parametrize("options", [{"head": "wide"}, {"qkv_bias": False}, {"head_dim": 5}, {"channels": 1}], ids=str)
def test_options(options):
    assert backward(small(**options)) == []


def test_layers_of_their_own():
    model = small(depth=4, attention="softmax@2+performer-relu:m=5@1+linformer:k=3")
    kinds = [type(attention).__name__ for attention in model.attentions()]
    assert kinds[0] == kinds[1] != kinds[2] != kinds[3]
    assert backward(model) == []
    with pytest.raises(ValueError, match="describes 3 layers, but the model has depth=4"):
        model_config(depth=4, attention="softmax@2+linformer:k=3")


def test_layerwise_linformers_store_their_projections_once():
    one, three = (small(depth=d, attention="linformer:k=3,sharing=layerwise") for d in (1, 3))
    names = [name for name in three.state_dict() if "projection" in name]
    assert names == [name for name in one.state_dict() if "projection" in name]
    again = small(depth=3, attention="linformer:k=3,sharing=layerwise", seed=9)
    again.load_state_dict(three.state_dict())
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again.eval()(x), three.eval()(x))


@pytest.mark.parametrize("stem", ["patch", "conv", "resnet", "pixel"])
def test_depth_zero_is_the_stem_alone(stem):
    model = small(depth=0, stem=stem, dim=13)  # 13 is no multiple of any number of heads, and need not be
    assert backward(model) == []
    assert not model.attentions()
    with pytest.raises(ValueError, match="pool=mean"):
        small(depth=0, pool="cls")


MODERN = [
    *({"mlp": mlp} for mlp in ("gelu-tanh", "swiglu", "swiglu-norm", "geglu")),
    {"pool": "attention", "prefix": 2},
    {"pool": "norm-mean", "prefix": 2},
    *({"rope": rope, "positions": "none", "head_dim": 8} for rope in CONVENTIONS),
]


@pytest.mark.parametrize("options", MODERN, ids=str)
def test_options_of_newer_models(options):
    assert backward(small(**options)) == []
    model = small(**options, attention="identity").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(1, 3, 8, 8))
    unseen = 2 * model.tokens * 12 if model.pooling else 0  # PyTorch does not count its fused attention on a CPU
    assert 2 * (model.macs() - unseen) == counter.get_total_flops()


@pytest.mark.parametrize("name", attention_names())
def test_rotary_positions_are_the_models_whatever_its_attention(name):
    """Every attention gets q and k rotated, v and the prefix token's as they are."""
    options = {"head_dim": 8, "attention": spec_of(name), "pool": "cls", "depth": 1}
    plain, rotary = small(**options).eval(), small(**options, rope="dinov3").eval()
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    ((_, *parts),), ((attention, *found),) = (next(captured(model, images)) for model in (plain, rotary))
    rotate = Rotation(attention.site, "dinov3")
    for turned, one in zip(found, [rotate(parts[0]), rotate(parts[1]), parts[2]], strict=True):
        torch.testing.assert_close(turned, one)
    assert torch.equal(found[0][:, :, 0], parts[0][:, :, 0])
    assert (found[0] - parts[0]).abs().max() > 0.01
    assert rotary.state_dict().keys() == plain.state_dict().keys()
    assert torch.isfinite(rotary(images)).all()


@pytest.mark.parametrize("rope", CONVENTIONS)
def test_rotary_scores_depend_on_differences_of_places(rope):
    rotate = Rotation(Site(3, 8, 31, (5, 6), prefix=1), rope)
    q, k = (x.expand(1, 3, 31, 8) for x in torch.randn(2, 3, 1, 8))
    scores = (rotate(q) @ rotate(k).transpose(2, 3))[:, :, 1:, 1:].reshape(3, 5, 6, 5, 6)
    torch.testing.assert_close(scores[:, 1:, 1:, 1:, 1:], scores[:, :-1, :-1, :-1, :-1], atol=1e-4, rtol=1e-4)
    assert (scores[:, 0, 0, 1, 0] - scores[:, 0, 0, 0, 1]).abs().max() > 0.01
    torch.testing.assert_close(rotate(q).norm(dim=-1), q.norm(dim=-1))


def test_rotary_positions_come_once():
    with pytest.raises(ValueError, match=r"rope=2d of the attention: the model already has rotary positions \(eva02\)"):
        small(head_dim=8, rope="eva02", attention="softmax:rope=2d")


@pytest.mark.filterwarnings("ignore:stem=length-one")
@pytest.mark.parametrize("pool", ["mean", "cls"])
@pytest.mark.parametrize("stem", STEMS)
def test_macs_are_what_pytorch_counts(stem, pool):
    model = small(**stem_options(stem), pool=pool, attention="identity").eval()
    x = torch.randn(1, 3, model.config.image_size, model.config.image_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    elementwise = 3 * 8**2 * 12 if stem == "pixel" else 0  # a product with one number, which is no matrix product
    assert 2 * (model.macs() - elementwise) == counter.get_total_flops()


@pytest.mark.parametrize("head", ["linear", "wide"])
@pytest.mark.parametrize(
    ("attention", "unseen"),
    [
        ("performer-relu:m=5", -3 * 256 * 5),  # the denominators are left out of our count
        ("linformer:k=3", 2 * 256 * 3 * 12),  # the fused softmax over projected keys is not seen by PyTorch's
        ("softmax", 2 * 256 * 256 * 12),
    ],
)
def test_macs_of_attentions(attention, unseen, head):
    counts = []
    for name in ("identity", attention):
        model = small(attention=name, head=head, image_size=32, depth=1).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.randn(1, 3, 32, 32))
        counts.append((model.macs(), counter.get_total_flops() // 2))
    (ours_without, theirs_without), (ours, theirs) = counts
    assert ours - ours_without == theirs - theirs_without + unseen


@pytest.mark.filterwarnings("ignore:stem=length-one")
@pytest.mark.parametrize("name", SIZES)
def test_sizes_build(name):
    patch = SIZES[name].get("patch_size", 4)
    model = create_model(name, image_size=4 * patch, attention="performer-relu:m=4")
    model.eval()
    assert model(torch.randn(1, 3, 4 * patch, 4 * patch)).shape == (1, 10)
    config = SIZES[name]
    inner = config["heads"] * config.get("head_dim", config["dim"] // config["heads"])
    assert [tuple(block.attn.qkv.weight.shape) for block in model.blocks] == [(3 * inner, config["dim"])] * config[
        "depth"
    ]
    assert {block.mlp[0].out_features for block in model.blocks} == {config["mlp_dim"]}


def test_the_length_one_preset_warns():
    with pytest.warns(UserWarning, match="sequence of one token"):
        model = create_model("002-literal", dim=16, mlp_dim=8)
    assert model.tokens == 1


@pytest.mark.parametrize("attention", ["performer-theta:m=16", "linformer:k=16", "performer-exp:m=64", "uniform"])
@pytest.mark.parametrize("size", ["nano", "tiny", "001-I"])
def test_parameters_can_be_matched(size, attention):
    config = model_config(size, attention=attention)
    step = config.depth * (2 * config.dim + 1)  # parameters of one unit of the MLPs' width
    softmax = create_model(size, attention="softmax").parameter_count()
    for target in (softmax, softmax - 20_000, softmax + 77_777):
        matched = match_parameters(config, target)
        assert abs(VisionTransformer(matched).parameter_count() - target) <= step / 2
        assert matched.model_copy(update={"mlp_dim": config.mlp_dim}) == config


def test_common_weights_start_equal():
    one, other = small(attention="softmax", seed=5), small(attention="performer-theta:m=4", seed=5)
    mine, theirs = one.state_dict(), other.state_dict()
    common = mine.keys() & theirs.keys()
    assert {"stem.embed.weight", "blocks.0.attn.qkv.weight", "head.weight", "position"} <= common
    assert all(torch.equal(mine[key], theirs[key]) for key in common)
    assert not torch.equal(mine["head.weight"], small(seed=6).state_dict()["head.weight"])


def test_building_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    small()
    assert torch.equal(torch.rand(3), expected)


def test_stochastic_depth_keeps_the_mean():
    model = small(depth=2, drop_path=0.5)
    block = model.blocks[1].train()
    branch = torch.ones(4000, 1, 1)
    torch.manual_seed(0)
    dropped = block.branch(branch, None)
    assert set(dropped.flatten().tolist()) == {0.0, 2.0}
    assert abs(dropped.mean().item() - 1) < 5 / 4000**0.5
    assert torch.equal(block.eval().branch(branch, None), branch)
    assert model.blocks[0].drop_path == 0.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dim": 10}, "dim=10 is not a multiple of heads=3"),
        ({"image_size": 9}, "patch_size=2 does not divide image_size=9: choose a patch_size of 3"),
        ({"stem": "conv", "pools": 4}, "pools=4 must be between 0 and"),
        ({"stem": "conv", "trunk": ()}, "trunk"),
        ({"stem": "conv", "trunk": (4, 0)}, "trunk"),
        ({"stem": "conv", "trunk": (4,) * 5, "pools": 5}, "cannot be halved pools=5 times"),
        ({"positions": "sincos", "dim": 6}, "multiple of 4, not 6"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": float("nan")}, "dropout"),
        ({"depht": 3}, "did you mean 'depth'"),
        ({"size": "tinny"}, "did you mean 'tiny'"),
        ({"attention": "performer-relu:n=3"}, "has no option 'n'"),
        ({"attention": "sofmax"}, "did you mean 'softmax'"),
    ],
    ids=str,
)
def test_bad_options_are_named(options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        small(**options)


def test_an_image_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"images have shape \(3, 9, 8\), but the model takes \(3, 8, 8\)"):
        small()(torch.zeros(1, 3, 9, 8))


def test_a_configuration_survives_json():
    config = model_config("001-I", attention="softmax@2+performer-relu:m=32@4", stem="conv", trunk=(3, 4))
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
