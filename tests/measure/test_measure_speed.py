from __future__ import annotations

import pytest
import torch

from linvit.attention import attention_names, create_attention
from linvit.attention.base import Attention
from linvit.kernels.base import Site
from linvit.measure.cost import macs_formula
from linvit.measure.provenance import pick_device
from linvit.measure.speed import BASELINES, break_even, measure, wrong
from linvit.randomness import generator

SIZES = {"heads": 2, "head_dim": 8, "rounds": 3}


def inputs():
    return torch.randn(4, 1, 2, 19, 8, generator=generator("test"))


class Double(Attention):
    """v in float64, and `factor` times v in float32."""

    factor = 1.0

    def attend(self, q, k, v, mask):
        return v if v.dtype is torch.float64 else self.factor * v

    def macs(self, tokens):
        return tokens


@pytest.mark.parametrize(
    ("factor", "why"), [(1.0, None), (1.00001, None), (1.01, "its output differs"), (float("nan"), "not finite")]
)
def test_the_gate(factor, why):
    attention = Double(Site(2, 8, 19))
    attention.factor = factor
    found = wrong(attention, *inputs())
    assert found is None if why is None else why in (found or "")


def test_the_gate_sees_gradients():
    class Forgetful(Double):
        def attend(self, q, k, v, mask):
            return v if v.dtype is torch.float64 else v.detach() + 0 * v

    assert "∂v" in (wrong(Forgetful(Site(2, 8, 19)), *inputs()) or "")


@pytest.mark.parametrize("name", attention_names())
def test_everything_registered_passes_the_gate(name):
    attention = create_attention(name, heads=2, head_dim=8, tokens=67)
    found = wrong(attention, *torch.randn(4, 1, 2, 67, 8, generator=generator("gate")))
    assert found is None


def test_records():
    records = list(measure(["performer-relu:m=5"], tokens=[7, 29], **SIZES))
    times = [r for r in records if r.metric == "attention_time"]
    assert len(times) == 3 * 2 * 2  # attentions, modes, lengths
    assert {r.tags["attention"] for r in times} == {*BASELINES, "performer-relu:m=5"}
    assert all(r.value > 0 and r.n == 3 and r.tags["low"] <= r.value <= r.tags["high"] for r in times)
    own = [r for r in records if r.metric == "attention_vs_softmax" and r.tags["attention"] == "softmax"]
    assert [r.value for r in own] == [1.0] * 4
    even = [r for r in records if r.metric == "break_even_tokens"]
    assert {(r.tags["attention"], r.tags["mode"]) for r in even} == {
        ("performer-relu:m=5", "forward"), ("performer-relu:m=5", "both"),
    }  # fmt: skip


def test_what_cannot_be_built_is_recorded_with_its_reason():
    records = list(measure(["linformer:k=16"], tokens=[8, 32], **SIZES))
    refused = [r for r in records if r.tags.get("refused")]
    assert {(r.value, r.tags["tokens"], r.tags["attention"]) for r in refused} == {(None, 8, "linformer:k=16")}
    assert "k=16" in str(refused[0].tags["refused"])


@pytest.mark.parametrize("bad", [{"tokens": []}, {"batch": 0}, {"rounds": 0}, {"heads": 0}])
def test_bad_sizes(bad):
    with pytest.raises(ValueError, match="must be at least 1"):
        list(measure(["softmax"], **({"tokens": [8]} | SIZES | bad)))


@pytest.mark.parametrize(
    ("ratios", "tokens"),
    [
        ({64: 2.0, 256: 8.0}, 64),
        ({64: 0.5, 256: 2.0}, 128),  # ratio ∝ N
        ({64: 0.25, 256: 0.5}, None),
        ({64: 2.0, 256: 0.5, 1024: 2.0}, 512),  # from where it stays faster
        ({64: 1.0, 256: 2.0}, 64),
    ],
)
def test_break_even(ratios, tokens):
    assert break_even(ratios) == (None if tokens is None else pytest.approx(tokens))


def test_device():
    assert pick_device("cpu").type == "cpu"
    assert pick_device().type in ("cpu", "cuda", "mps")
    with pytest.raises(ValueError, match="choose auto or cpu"):
        pick_device("nonsense")


@pytest.mark.parametrize(
    ("name", "formula"),
    [("softmax", "2N²d"), ("efficient", "2Nd²"), ("identity", "0"), ("uniform", "Nd"), ("performer-hyp", "8Nmd")],
)
def test_macs_formula(name, formula):
    assert macs_formula(name) == formula
