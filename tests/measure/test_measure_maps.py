"""Attention matrices of every layer and head, against softmax by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from linvit.measure.maps import model_maps, store_maps
from linvit.measure.trained import Subject
from linvit.models import create_model
from linvit.randomness import generator

MODEL = {"image_size": 8, "channels": 1, "classes": 3, "patch_size": 2, "dim": 21, "depth": 2, "heads": 3}


@pytest.fixture(scope="module")
def image():
    return torch.randn(1, 8, 8, generator=generator("maps"))


def test_softmax_and_others_on_the_same_queries(image):
    model = create_model(**MODEL, pool="cls").eval()
    found = {
        maps.attention: maps
        for maps in model_maps(Subject(model, image[None], "mine"), ["uniform", "softmax", "identity"])
    }
    assert list(found) == ["softmax", "uniform", "identity"]
    own = found["softmax"].weights
    assert own.shape == (2, 3, 17, 17)
    with torch.no_grad():
        block = model.blocks[0]
        q, k, _ = block.attn.split(block.norm1(model.embed(image[None])))
    exact = torch.softmax(q.double() @ k.double().transpose(-1, -2) / math.sqrt(7), -1)[0]
    np.testing.assert_allclose(own[0], exact.numpy(), rtol=1e-5)
    np.testing.assert_allclose(found["uniform"].weights, 1 / 17, rtol=1e-6)

    def value(metric, name, layer=1, head=2):
        (record,) = [
            r for r in found[name].records if r.metric == metric and (r.tags["layer"], r.tags["head"]) == (layer, head)
        ]
        return record.value

    assert value("map_entropy", "uniform") == pytest.approx(math.log(17))
    assert value("map_entropy", "identity") == pytest.approx(0)
    assert value("map_entropy", "softmax") == pytest.approx(
        torch.special.entr(exact[1]).sum(-1).mean().item(), rel=1e-5
    )
    assert value("map_error", "softmax") == 0
    assert value("map_error", "uniform") == pytest.approx(
        0.5 * (exact[1] - 1 / 17).abs().sum(-1).mean().item(), rel=1e-5
    )
    assert len(found["softmax"].records) == 2 * 2 * 3


def test_a_model_with_normalised_queries_gives_others_the_same(image):
    model = create_model(**MODEL, attention="softmax:qk_norm=head").eval()
    torch.nn.init.constant_(model.attentions()[0].q_norm, 4.0)
    _, plain = model_maps(Subject(model, image[None], "mine", "softmax:qk_norm=head"), ["softmax"])
    assert max(r.value for r in plain.records if r.metric == "map_error") < 1e-6


def test_nothing_to_look_into(image):
    with pytest.raises(ValueError, match="mine has no attention"):
        list(model_maps(Subject(torch.nn.Flatten(), image[None], "mine")))
    with pytest.raises(ValueError, match="image=2: there are only 1 images"):
        list(model_maps(Subject(create_model(**MODEL), image[None], "mine"), image=2))


def test_maps_are_stored_with_the_record_that_names_them(image, tmp_path):
    (found,) = model_maps(Subject(create_model(**MODEL), image[None], "mine"))
    record = store_maps(found, tmp_path)
    assert (record.metric, record.value, record.tags["image"]) == ("attention_maps", 6, 0)
    with np.load(tmp_path / record.artefact) as stored:
        np.testing.assert_array_equal(stored["maps"], found.weights)


def test_maps_that_are_too_large_are_refused_before_they_are_made(image, monkeypatch):
    monkeypatch.setattr("linvit.measure.maps.MAX_NUMBERS", 2 * 3 * 16**2 - 1)
    with pytest.raises(ValueError, match="1,536 numbers"):
        list(model_maps(Subject(create_model(**MODEL), image[None], "mine")))
