"""Another attention in softmax's place, layer by layer."""

from __future__ import annotations

import pytest
import torch

from linvit.measure.depth import depth_errors, untrained, with_attention
from linvit.measure.error import Draws
from linvit.measure.trained import Subject
from linvit.models import create_model
from linvit.site import Site


def small() -> Subject:
    return untrained(Site(2, 7, 25), depth=3, images=3)


def test_softmax_has_no_error_and_uniform_what_uniform_gives():
    subject = small()
    model, images = subject.model, subject.images
    found = {(r.tags["attention"], r.tags["layer"]): r for r in depth_errors(subject, ["softmax"], draws=Draws(2))}
    assert {layer for _, layer in found} == {1, 2, 3}
    assert all(record.value == 0 for (name, _), record in found.items() if name == "softmax")
    with torch.no_grad():  # the first block by hand
        x, block = model.embed(images), model.blocks[0]
        _, _, v = block.attn.split(block.norm1(x))
        mean = v.mean(2, keepdim=True).expand_as(v).transpose(1, 2).flatten(2)
        other = x + block.attn.proj(mean)
        other = other + block.mlp(block.norm2(other))
        exact = block(x)
    assert found["uniform", 1].value == pytest.approx(((other - exact).norm() / exact.norm()).item(), rel=1e-5)
    assert found["uniform", 1].n == 2


def test_more_features_and_fewer_layers_are_nearer():
    records = depth_errors(small(), ["performer-hyp:m=4", "performer-hyp:m=512"], draws=Draws(3))
    found = {(r.tags["attention"], r.tags["layer"]): r.value for r in records}
    assert found["performer-hyp:m=512", 3] < 0.5 * found["performer-hyp:m=4", 3]
    assert found["performer-hyp:m=4", 1] < found["performer-hyp:m=4", 3]


def test_the_model_stays_as_it_was():
    model = small().model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    changed = with_attention(model, "performer-relu:m=5", seed=3)
    assert [type(a).__name__ for a in model.attentions()] == ["Softmax"] * 3
    assert [a.site.seed for a in changed.attentions()] == [3] * 3
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(value, before[key]) for key, value in changed.state_dict().items() if key in before)


@pytest.mark.parametrize("attention", ["performer-relu:m=5", "softmax:qk_norm=head", "softmax:dwc=3"])
def test_only_plain_softmax_is_replaced(attention):
    model = create_model(
        image_size=8, channels=1, classes=3, patch_size=2, dim=8, depth=1, heads=2, attention=attention
    )
    with pytest.raises(ValueError, match="layer 1 of the model is not plain softmax"):
        list(depth_errors(Subject(model, torch.zeros(1, 1, 8, 8), "mine"), ["uniform"]))


def test_bad_sizes():
    with pytest.raises(ValueError, match="tokens=26 must be a square"):
        untrained(Site(2, 7, 26))
