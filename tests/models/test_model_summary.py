"""The table of a model's layers: every parameter is in it once, and shapes are what comes out."""

from __future__ import annotations

import json

import pytest

from linvit import cli
from linvit.models import create_model
from linvit.models.summary import summary
from linvit.schemas.experiment import BACKBONES

SHAPE = {"image_size": 12, "dim": 24, "depth": 3, "heads": 2, "mlp_dim": 31, "classes": 7}


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "performer-relu:m=5"},
        {"attention": "performer-theta:m=5", "pool": "cls", "layer_scale": 0.1},
        {"attention": "linformer:k=5,sharing=layerwise"},
        {"attention": "softmax@1+linformer:k=5@2"},
        {"stem": "conv", "trunk": (3, 5), "pools": 1},
        {"stem": "pixel", "channels": 1},
        {"stem": "resnet"},
        {"stem": "next-pixel", "levels": 11, "channels": 1},
        {"depth": 1, "head": "wide"},
    ],
    ids=str,
)
def test_every_parameter_is_in_it_once(options):
    model = create_model(**SHAPE | options)
    assert sum(layer.times * layer.parameters for layer in summary(model)) == model.parameter_count()


def test_blocks_that_are_alike_are_one_row():
    rows = {
        layer.name: layer for layer in summary(create_model(**SHAPE | {"attention": "softmax@2+performer-relu:m=5@1"}))
    }
    assert rows["stem.embed"].shape == (9, 24)
    assert rows["position"].shape == (9, 24)
    assert rows["blocks.0–1.attn.attention"].kind == "softmax"
    assert rows["blocks.0–1.attn.attention"].times == 2
    assert rows["blocks.2.attn.attention"].kind == "performer-relu:m=5"
    assert rows["blocks.2.mlp.0"].shape == (9, 31)
    assert rows["head"].shape == (7,)
    assert rows["head"].parameters == 7 * 25


def test_the_command_line_shows_it(capsys):
    assert cli.main(["evaluate", str(BACKBONES / "softmax"), "--summary"]) == 0
    text = capsys.readouterr().out
    assert "blocks.0–1.attn.qkv" in text
    assert "parameters, " in text
    assert cli.main(["evaluate", str(BACKBONES / "softmax"), "--summary", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"].startswith("stem")
