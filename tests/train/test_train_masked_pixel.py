"""The task `masked-pixel`: hidden values are predicted from both sides, and only these count."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import can, defaults

from linvit import create_model, data, metrics
from linvit.data.augment import Draw
from linvit.measure.likelihood import hidden_places, likelihood
from linvit.models import estimate
from linvit.models.sampling import sample
from linvit.models.stems import hide, to_levels
from linvit.pipeline.train import train
from linvit.training.checkpoint import load
from linvit.training.evaluate import evaluate_folder
from linvit.training.predict import predict

DATA = "synthetic:images=72,size=6,channels=1"
SMALL = {"stem": "masked-pixel", "image_size": 6, "channels": 1, "dim": 22, "heads": 2, "mlp_dim": 13, "depth": 2}
TINY = {"task": "masked-pixel", "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24, "levels": 8, "batch_size": 8,
        "device": "cpu"}  # fmt: skip
BIDIRECTIONAL = [spec for spec in defaults() if can(spec, causal=False) and spec != "identity"]


def pictures(count: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (count, 1, 6, 6), generator=torch.Generator().manual_seed(0)).double() / 255


def test_places_are_those_of_the_image_and_the_epoch():
    places = hidden_places(36, torch.arange(11), 3, 7)
    assert places.shape == (11, 5)  # 15 % of 36
    assert all(len(set(row)) == 5 for row in places.tolist())
    assert torch.equal(places[4:6], hidden_places(36, torch.tensor([4, 5]), 3, 7))  # in whatever batch
    assert not torch.equal(places, hidden_places(36, torch.arange(11), 4, 7))
    assert not torch.equal(places, hidden_places(36, torch.arange(11), 3, 8))


def test_several_draws_are_those_of_their_numbers():
    draw = Draw(1, 2, torch.arange(5))
    assert torch.equal(draw.several("mask", torch.arange(7))[:, 3], draw.here("mask", 3))


@pytest.mark.parametrize("spec", BIDIRECTIONAL)
def test_a_hidden_value_has_no_effect_and_both_sides_have(spec):
    model = create_model(levels=7, attention=spec, **SMALL).double().eval()
    x, place = pictures(), 14
    places = torch.full((3, 1), place)

    def logits(at: int) -> torch.Tensor:
        other = x.clone()
        other[:, 0, at // 6, at % 6] = (other[:, 0, at // 6, at % 6] + 0.5) % 1
        return model(hide(other, places))[:, place]

    before = model(hide(x, places))
    assert before.shape == (3, 36, 7)
    assert torch.equal(logits(place), before[:, place])
    for side in (place - 1, place + 1):
        assert (logits(side) - before[:, place]).abs().max() > 1e-9


def test_hiding_follows_the_order_of_tokens():
    config = create_model(levels=256, **SMALL | {"channels": 2}).config
    x = torch.rand(3, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    places = torch.tensor([[0, 5], [1, 70], [71, 33]])
    shown = to_levels(hide(x, places).clamp_min(0), config)
    assert (shown.gather(1, places) == 0).all()
    assert ((shown == to_levels(x, config)).sum(1) >= 70).all()


def test_bits_are_of_hidden_values_alone():
    images = data.load_data(DATA).test
    model = create_model(levels=5, **SMALL).double().eval()
    x = torch.from_numpy(images.images).double() / 255
    places = hidden_places(36, torch.arange(len(x)))
    p, levels = model(hide(x, places)).softmax(-1).detach(), to_levels(x, model.config)
    expected = [
        np.mean([-math.log2(float(p[i, t, levels[i, t]])) for t in row]) for i, row in enumerate(places.tolist())
    ]
    assert likelihood(model, model.config, images, batch=7).bits == pytest.approx(expected, abs=1e-6)


def test_it_learns_and_every_number_has_its_place(tmp_path):
    options = TINY | {"levels": 16, "lr": 0.01, "epochs": 3}
    trained = train("digits", attention="linformer:k=5", limit=150, out=tmp_path / "run", **options)
    assert [problem for record in trained.records for problem in metrics.problems(record)] == []
    best = trained.value("bits_per_dim", "best")
    assert best is not None
    assert best < 3.4  # of log2(16) = 4
    again = evaluate_folder(tmp_path / "run")
    assert again.result.bits_per_dim == pytest.approx(best, abs=1e-6)  # type: ignore[union-attr]
    assert "masked-pixel model with linformer:k=5" in (tmp_path / "run" / "best" / "README.md").read_text()
    with pytest.raises(ValueError, match=r"masked-pixel model without classes$"):
        next(predict(trained.model, []))
    with pytest.raises(ValueError, match="stem=masked-pixel cannot draw images"):
        sample(load(tmp_path / "run" / "best"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stem": "next-pixel"}, "stem=next-pixel cannot be combined with task masked-pixel, which needs stem=mask"),
        ({"order": "reversed"}, "order=reversed has no effect: stem=masked-pixel has no order"),
        ({"mixup": 0.2}, "mixup=0.2 cannot be combined with task masked-pixel"),
        ({"task": "next-pixel", "stem": "masked-pixel"}, "stem=masked-pixel cannot be combined with task next-pixel"),
    ],
)
def test_what_cannot_be_combined(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(DATA, out=tmp_path / "run", attention="softmax", **TINY | {"epochs": 1} | options)


@pytest.mark.parametrize("positions", ["learned", "none"])
def test_parameters_are_known_beforehand(positions):
    model = create_model(levels=5, positions=positions, **SMALL)
    assert estimate(model.config).parameters == model.parameter_count()
