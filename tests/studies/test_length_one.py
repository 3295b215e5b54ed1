"""Report 002's model sees one token (M1): no kernel can matter, and the proof goes to the last bit."""

from __future__ import annotations

import pytest
import torch
from cases import build, specs
from safetensors.torch import load_file

from linvit import create_model
from linvit.attention.performer import Performer
from linvit.attention.plain import plain_attention
from linvit.data import load_data
from linvit.pipeline.train import train

SHAPE = {
    "image_size": 12,
    "channels": 1,
    "classes": 5,
    "stem": "length-one",
    "trunk": (3, 5),
    "pools": 1,
    "dim": 21,
    "depth": 2,
    "heads": 3,
    "mlp_dim": 11,
}
KERNELS = (
    "softmax",
    "performer-relu:m=7",
    "performer-elu:m=7",
    "performer-gelu:m=7",
    "performer-exp:m=7",
    "performer-hyp:m=7",
    "performer-gexp:m=7",
    "performer-sigmoid:m=7",
    "uniform",
    "identity",
)
pytestmark = pytest.mark.filterwarnings("ignore:stem=length-one")


@pytest.mark.parametrize("spec", [spec for spec in specs() if spec.startswith("performer-") and "dwc" not in spec])
def test_computed_in_float64_one_token_is_v_in_float32_to_the_last_bit(spec):
    """The long way round, φ(q)[φ(k)ᵀv]/φ(q)·φ(k): whatever the kernel, rounding takes back what computing added."""
    q, k, v = torch.randn(3, 50, 3, 1, 7, generator=torch.Generator().manual_seed(1))
    attention = build(spec, tokens=1)
    assert isinstance(attention, Performer)
    prepared = attention.double().prepare(*attention.normalised(q.double(), k.double()))
    if not prepared.features.divide:
        pytest.skip("an RMS norm stands in place of the denominator")
    out = plain_attention(prepared, v.double().flatten(0, 1)).view_as(v)
    same = out.float() == v
    if prepared.features.least:  # a denominator near zero is moved away from it: there the output is a part of v
        same |= (out / v.double()).abs() < 1 - 1e-9
        assert same.float().mean() > 0.5
    assert same.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_are_equal_for_all_kernels_to_the_last_bit(dtype):
    x = torch.randn(7, 1, 12, 12, generator=torch.Generator().manual_seed(2), dtype=dtype)
    logits = [create_model(**SHAPE, attention=spec).to(dtype).eval()(x) for spec in KERNELS]
    assert all(torch.equal(logits[0], other) for other in logits[1:])
    tokens = SHAPE | {"stem": "conv"}
    differ = [create_model(**tokens, attention=spec).to(dtype).eval()(x) for spec in KERNELS]
    assert not any(torch.equal(differ[0], other) for other in differ[1:])


def test_training_ends_with_the_same_weights_for_all_kernels(tmp_path):
    """With dropout, clipping and redrawing, too; the trunk's activation makes a difference."""
    data = load_data("synthetic:classes=3,images=90,size=12,channels=1")
    shape = {key: value for key, value in SHAPE.items() if key not in ("image_size", "channels", "classes")}
    options = shape | {"dropout": 0.1, "steps": 5, "batch_size": 16, "pad_crop": 0, "redraw": 2}

    def weights(spec: str, **more: object) -> dict[str, torch.Tensor]:
        folder = tmp_path / f"{spec} {more}".replace(":", "-")
        train(data, attention=spec, seed=3, out=folder, device="cpu", test=False, **options | more)
        found = load_file(folder / "best" / "model.safetensors")
        return {key: value for key, value in found.items() if ".attention." not in key}

    first = weights("softmax")
    for spec in ("performer-relu:m=7", "performer-gelu:m=7", "performer-exp:m=7", "performer-theta:m=7", "uniform"):
        other = weights(spec)
        assert first.keys() == other.keys()
        assert all(torch.equal(first[key], other[key]) for key in first), spec
    assert not torch.equal(first["head.weight"], weights("softmax", activation="elu")["head.weight"])
