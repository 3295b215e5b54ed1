"""What the best.toml of a search adds to a request: beneath what is given, above defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from linvit.pipeline.configure import configured_comparison, configured_training
from linvit.requests import CompareRequest, TrainRequest
from linvit.schemas.search import Best

WINNERS = [
    {
        "variant": "performer-relu",
        "attention": "performer-relu:m=48",
        "validation_accuracy": 0.75,
        "trial": 3,
        "options": {"lr": 0.003, "batch_size": 32, "dropout": 0.1},
    },
    {
        "variant": "softmax",
        "attention": "softmax",
        "validation_accuracy": 0.5,
        "trial": 1,
        "options": {"lr": 0.001, "batch_size": 32},
    },
]


@pytest.fixture
def best(tmp_path) -> Path:
    facts = {"data": "digits", "epochs": 5, "trials": 7, "seed": 0, "start": "runs/teacher", "winner": WINNERS}
    Best.model_validate(facts).write(tmp_path / "best.toml", "found by a test")
    return tmp_path / "best.toml"


def test_without_a_file_nothing_changes():
    train, compare = TrainRequest.of(lr=0.5), CompareRequest.of(lr=0.5)
    assert configured_training(train) is train
    assert configured_comparison(compare) == (compare, [])


def test_training_takes_the_best_variant_or_the_one_asked_for(best):
    found = configured_training(TrainRequest.of(config=best))
    assert (found.attention, found.start) == ("performer-relu:m=48", "runs/teacher")
    assert found.options == {"epochs": 5, "lr": 0.003, "batch_size": 32, "dropout": 0.1}
    softmax = configured_training(TrainRequest.of(config=best, attention="softmax"))
    assert softmax.options == {"epochs": 5, "lr": 0.001, "batch_size": 32}
    as_searched = configured_training(TrainRequest.of(config=best, attention="performer-relu"))
    assert as_searched.attention == "performer-relu:m=48"


def test_given_options_override_those_of_the_file(best):
    given = TrainRequest.of(config=best, lr=0.5, steps=9, start="scratch", seed=3)
    found = configured_training(given)
    assert (found.start, found.seed) == ("scratch", 3)
    assert found.options == {"steps": 9, "lr": 0.5, "batch_size": 32, "dropout": 0.1}


def test_a_comparison_separates_what_all_share_from_what_is_each_variants_own(best):
    found, variants = configured_comparison(CompareRequest.of(config=best, task="next-pixel"))
    assert found.options == {"epochs": 5, "batch_size": 32}
    assert (found.attentions, found.start, found.match) == ((), "runs/teacher", False)  # the search has matched them
    assert [(v.attention, v.options, v.task) for v in variants] == [
        ("performer-relu:m=48", {"lr": 0.003, "dropout": 0.1}, "next-pixel"),
        ("softmax", {"lr": 0.001}, "next-pixel"),
    ]
    one, variants = configured_comparison(CompareRequest.of(config=best, attentions=["softmax"], lr=0.5, budget="2m"))
    assert one.options == {"batch_size": 32, "lr": 0.5}  # a budget decides the length
    assert [(v.attention, v.options) for v in variants] == [("softmax", {})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "best.toml does not exist: `linvit tune` writes a best.toml"),
        ("= 3", "is not a best.toml of linvit tune"),
        ("format = 1", "is not a best.toml of linvit tune"),
    ],
)
def test_a_file_that_is_no_best_toml(tmp_path, content, message):
    if content is not None:
        (tmp_path / "best.toml").write_text(content)
    for call in (
        lambda: configured_training(TrainRequest.of(config=tmp_path / "best.toml")),
        lambda: configured_comparison(CompareRequest.of(config=tmp_path / "best.toml")),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_what_was_not_searched_is_refused(best):
    with pytest.raises(ValueError, match="attention 'uniform' was not searched; choose from: performer-relu, softmax"):
        configured_training(TrainRequest.of(config=best, attention="uniform"))
    best.write_text(best.read_text().replace("format = 1", "format = 0"))
    with pytest.raises(ValueError, match="has format 0, but this linvit reads 1"):
        configured_training(TrainRequest.of(config=best))
