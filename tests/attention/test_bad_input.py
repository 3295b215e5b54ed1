"""Bad input gets a ValueError that names the argument, the value and what is allowed."""

from __future__ import annotations

import cases
import pytest
import torch
from cases import build, inputs

import linvit
from linvit.attention import attention_names, break_even
from linvit.kernels import KERNELS
from linvit.site import Site

every_name = pytest.mark.parametrize("name", attention_names())


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("performer-ex", ["performer-ex", "did you mean 'performer-exp'", "linformer"]),
        ("sofmax", ["unknown attention 'sofmax'", "did you mean 'softmax'", "performer-relu"]),
        ("nothing like it", ["nothing like it", "choose from"]),
        ("performer-", ["performer-"]),
        ("exp", ["unknown attention 'exp'", "performer-exp"]),
        ("", ["empty", "name[:key=value"]),
        ("performer-exp:", ["key=value"]),
        ("performer-exp:m", ["'m'", "key=value"]),
        ("performer-exp:m=", ["m=", "key=value"]),
        ("performer-exp:m=8,m=9", ["'m' is given twice"]),
        ("performer-exp:mm=8", ["no option 'mm'", "did you mean 'm'", "projection"]),
        ("softmax:m=8", ["'softmax' has no option 'm'", "dwc"]),
        ("performer-exp:m=0", ["m=0", "at least 1"]),
        ("performer-exp:m=-7", ["m=-7", "at least 1"]),
        ("performer-exp:m=8.5", ["m=8.5", "an integer"]),
        ("performer-exp:m=many", ["m=many", "an integer"]),
        ("performer-exp:m=true", ["m=true", "an integer"]),
        ("performer-exp:projection=random", ["projection=random", "orthogonal, iid, hadamard, none"]),
        ("performer-exp:norms=two", ["norms=two", "chi, sqrt"]),
        ("performer-exp:center=maybe", ["center=maybe", "true or false"]),
        ("performer-exp:center=1", ["center=1", "true or false"]),
        ("performer-exp:scale=big", ["scale=big", "a number"]),
        ("performer-exp:clamp=0", ["clamp=0", "above 0"]),
        ("performer-relu:clamp=-1", ["clamp=-1", "above 0"]),
        ("performer-relu:eps=-1", ["eps=-1", "at least 0"]),
        ("performer-relu:eps=1e999", ["eps=1e999", "a number"]),
        ("performer-gexp:eps=-1", ["eps=-1", "at least 0"]),
        ("performer-exp:eps=-1,stabilizer=reference", ["eps=-1", "at least 0"]),
        ("performer-elu:alpha=0", ["alpha=0", "above 0"]),
        ("performer-theta-linear:eps=-1", ["eps=-1", "at least 0"]),
        ("performer-theta-mixture:tau=0", ["tau=0", "above 0"]),
        ("performer-theta-mixture:clamp=-5", ["clamp=-5", "above 0"]),
        ("performer-identity:negative=shift", ["negative=shift", "no minimum", "clamp"]),
        ("performer-gelu:negative=never", ["negative=never", "shift", "clamp", "rms", "literal"]),
        ("performer-hyp:projection=none", ["projection=none", "hyp"]),
        ("performer-trig:projection=none", ["projection=none", "trig"]),
        ("performer-smreg:projection=none", ["projection=none", "smreg"]),
        ("performer-oprf:projection=none", ["projection=none", "oprf"]),
        ("performer-theta:projection=none", ["projection=none", "theta"]),
        ("performer-exp:stabilizer=reference,center=true", ["stabilizer=reference", "center=true"]),
        ("linformer:k=5,sharing=all", ["sharing=all", "none, headwise, key-value, layerwise"]),
        ("softmax:debug=yes", ["debug=yes", "true or false"]),
        # without effect, unless it is the default
        ("performer-relu:projection=none,m=7", ["m=7 has no effect", "no Ω"]),
        ("performer-gelu:projection=none,norms=sqrt", ["norms=sqrt has no effect", "no Ω"]),
        ("performer-theta-linear:projection=none,m=7", ["m=7 has no effect", "no Ω"]),
        ("performer-exp:eps=0.1", ["eps=0.1 has no effect", "stabilizer=exact"]),
        ("performer-relu:negative=rms", ["negative=rms has no effect", "relu is never negative"]),
        ("performer-gexp:negative=clamp", ["negative=clamp has no effect", "gexp is never negative"]),
        ("linformer:k=5,kind=pool,init=pool", ["init=pool has no effect", "kind=pool"]),
        ("linformer:k=5,kind=conv,init=identity", ["init=identity has no effect", "kind=conv"]),
        ("linformer:k=5,kind=pool,sharing=none", ["sharing=none has no effect", "kind=pool"]),
        ("uniform:qk_norm=head", ["qk_norm=head has no effect", "q and k do not matter"]),
        ("identity:qk_norm=head", ["qk_norm=head has no effect"]),
        ("softmax:exact_cls=true", ["exact_cls=true has no effect", "exact for every query"]),
        # more memory than anyone has
        ("performer-relu:m=1000000000", ["m=1000000000 needs 52.2 GiB for Ω", "the limit is 1 GiB"]),
        ("performer-theta:m=1000000000", ["m=1000000000 needs 52.2 GiB", "the limit is 1 GiB"]),
        ("performer-theta-mlp:m=100003", ["m=100003 needs 74.5 GiB for W₂", "the limit is 1 GiB"]),
        ("performer-theta-linear:m=20011", ["m=20011 needs 3.0 GiB for W", "the limit is 1 GiB"]),
    ],
)
def test_specs(spec, parts):
    with pytest.raises(ValueError) as caught:
        build(spec)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_default_may_be_stated_though_it_has_no_effect():
    q, k, v = inputs()
    stated, plain = build("performer-relu:projection=none,m=64,negative=auto"), build("performer-relu:projection=none")
    assert torch.equal(stated(q, k, v), plain(q, k, v))


@pytest.mark.parametrize("spec", [5, None, ["softmax"], b"softmax"])
def test_specs_that_are_no_text(spec):
    with pytest.raises(ValueError, match="spec"):
        build(spec)


@pytest.mark.parametrize("name", ["exp", "hyp", "oprf", "theta"])
def test_centring_and_causality_exclude_each_other(name):
    with pytest.raises(ValueError, match=r"center=true.*causal"):
        build(f"performer-{name}:m=11,center=true", causal=True)


def test_a_maximum_over_all_keys_is_not_causal():
    with pytest.raises(ValueError, match=r"stabilizer=reference.*causal"):
        build("performer-exp:m=11,stabilizer=reference", causal=True)


@pytest.mark.parametrize("name", ["linformer:k=5", "efficient"])
def test_what_cannot_be_causal_says_why(name):
    with pytest.raises(ValueError, match=r"cannot be causal: .*later"):
        build(name, causal=True)


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({"heads": 0}, "heads=0"),
        ({"heads": 2.0}, "heads=2.0"),
        ({"heads": True}, "heads=True"),
        ({"head_dim": -1}, "head_dim=-1"),
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": "13"}, "tokens='13'"),
        ({"layer": -1}, "layer=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"prefix": -1}, "prefix=-1"),
        ({"grid": (3, 5)}, r"grid=\(3, 5\).*tokens=13"),
        ({"grid": (13,)}, "grid"),
        ({"grid": (-1, -13)}, "grid"),
        ({"grid": (0, 5), "prefix": 13}, "grid"),
        ({"grid": (3, 4), "prefix": 2}, "prefix=2"),
    ],
)
def test_sites(site, message):
    with pytest.raises(ValueError, match=message):
        build("softmax", **site)


@every_name
def test_tensors(name):
    attention, (q, k, v) = build(cases.spec_of(name)), inputs()
    good = torch.ones(2, 13, dtype=torch.bool)
    for wrong, message in [
        ((q[0], k, v), r"q has shape \(3, 13, 7\).*batch, heads, tokens, head_dim"),
        ((q, k[None], v), r"k has shape \(1, 2, 3, 13, 7\)"),
        ((q, k, v[0, 0]), r"v has shape \(13, 7\)"),
        ((q[:, :2], k, v), "q has 2 heads.*heads=3"),
        ((q, k[:, :1], v), "k has 1 heads.*heads=3"),
        ((q, k, v[..., :5]), "v has head_dim 5.*7"),
        ((q, k[:, :, :11], v), "k has batch × tokens 2 × 11, but q has 2 × 13"),
        ((q, k, v[:1]), "v has batch × tokens 1 × 13, but q has 2 × 13"),
        ((q.long(), k, v), "q has dtype torch.int64.*float"),
        ((q[:, :, :0], k[:, :, :0], v[:, :, :0]), "q has no tokens"),
        ((q, k, v, good.float()), "mask has dtype torch.float32.*bool"),
        ((q, k, v, good.long()), "mask has dtype torch.int64.*bool"),
        ((q, k, v, good[:1]), r"mask has shape \(1, 13\).*\(2, 13\)"),
        ((q, k, v, good[:, None, None]), r"mask has shape \(2, 1, 1, 13\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            attention(*wrong)
    with pytest.raises(ValueError, match="mask has dtype"):
        attention.attention_matrix(q, k, good.float())
    with pytest.raises(ValueError, match="k has 1 heads"):
        attention.attention_matrix(q, k[:, :1])


def test_steps_are_causal():
    with pytest.raises(ValueError, match="causal=True"):
        build("performer-exp:m=11").step(*inputs())  # type: ignore[operator]


@pytest.mark.parametrize("head_dim", [1, 3, 5, 7, 61])
def test_hadamard_pads_head_dim(head_dim):
    """Not a power of two: padded, not refused."""
    attention = build("performer-exp:m=11,projection=hadamard", head_dim=head_dim)
    assert dict(attention.named_buffers())["kernel.omega.rows"].shape == (11, head_dim)
    assert attention(*inputs(head_dim=head_dim)).isfinite().all()


def test_kernels_by_name():
    with pytest.raises(ValueError, match=r"unknown kernel 'rely'; did you mean 'relu'\? choose from: .*gelu"):
        linvit.create_kernel("rely", head_dim=7)
    with pytest.raises(ValueError, match="no option 'k'"):
        linvit.create_kernel("relu:k=3", head_dim=7)
    with pytest.raises(ValueError, match="head_dim=0"):
        linvit.create_kernel("relu", head_dim=0)
    assert set(KERNELS.names()) >= {
        "exp",
        "hyp",
        "trig",
        "smreg",
        "oprf",
        "relu",
        "elu",
        "gelu",
        "sigmoid",
        "abs",
        "cos",
        "tanh",
        "identity",
        "elu1",
        "gexp",
        "theta-linear",
        "theta-mixture",
        "theta-mlp",
        "theta",
        "hedgehog",
    }


def test_plain_construction_without_the_registry():
    """The registry is not the only door."""
    from linvit.attention.performer import Performer
    from linvit.kernels.exponential import Hyp

    site = Site(3, 7, 13)
    q, k, v = inputs()
    assert torch.equal(Performer(site, Hyp(site, m=11))(q, k, v), build("performer-hyp:m=11")(q, k, v))


def test_documented_defaults():
    buffers = dict(build("performer-exp").named_buffers())
    assert buffers["kernel.omega.rows"].shape == (64, 7)
    for name, width in (("exp", 64), ("hyp", 128), ("trig", 128), ("theta", 128), ("relu", 64), ("hedgehog", 14)):
        kernel = linvit.create_kernel(name, head_dim=7)
        assert kernel.width == width
        assert kernel.phi(torch.zeros(5, 7)).shape == (5, width)
    site = Site(3, 7, 13)
    assert break_even("performer-exp:m=64", site) == 128  # N = 2m
    assert break_even("performer-relu:projection=none", site) == 7  # N = d
    assert break_even("linformer:k=5", site) == 10
