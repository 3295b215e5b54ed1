"""What is said of a search, and where its options are drawn."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
from synthetic import search

from linvit import report
from linvit.report import tuning


def result(folder, found, **more):
    return report.search_result(search(folder, found, **more))


@pytest.mark.parametrize(
    ("found", "head"),
    [
        ({"a": [0.90, 0.99, 0.95], "b": [0.80, 0.90, 0.85]}, "Tuning does not change the winner: a"),
        ({"a": [0.90, 0.92, 0.91], "b": [0.80, 0.99, 0.85]}, "Tuning changes the winner, from a to b"),
        ({"a": [0.90, 0.99, 0.95], "b": [0.90, 0.92, 0.85]}, "Tuned, a leads; before, no variant did"),
        (
            {"a": [0.90, 0.97, 0.95], "b": [0.80, 0.97, 0.85]},
            "Tuned: no significant difference between a and b; before, a led",
        ),
        (
            {"a": [0.97, 0.97, 0.95], "b": [0.969, 0.971, 0.8]},
            "No significant difference between b and a, tuned or not",
        ),
        ({"a": [0.90, 0.99, 0.95]}, "Tuned, a reaches 99.0\xa0%"),
        ({"a": [None, 0.99, 0.95], "b": [0.80, 0.90, 0.85]}, "Tuned, a leads"),
        ({"a": [None, None, None], "b": [None, None, None]}, "No trial was trained to the end"),
    ],
)
def test_headlines(tmp_path, found, head):
    said = result(tmp_path, found)
    assert said.headline == head
    assert "one seed" in said.sentences[1]
    assert "5,000 validation images" in said.sentences[1]
    assert bool(said.suggested) is (head != "No trial was trained to the end")


def test_few_images_show_little(tmp_path):
    found = {"a": [0.90, 0.95, 0.91], "b": [0.80, 0.90, 0.85]}
    said = result(tmp_path / "x", found, images=144)
    assert said.headline == "Tuned: no significant difference between a and b; before, a led"
    assert "Differences below 5.5 points are not significant" in said.sentences[1]
    perfect = result(tmp_path / "z", {"a": [0.5, 1.0], "b": [0.5, 0.5]}, images=2)
    assert "o significant difference" in perfect.headline
    first = result(tmp_path / "y", found, defaults=False)
    assert "from the first trial's options, the same for all" in first.sentences[0]
    assert "First trial" in first.table.columns


def test_folds(tmp_path):
    said = result(tmp_path, {"a": [0.9, 0.95]}, folds=3)
    assert "images in 3-fold cross-validation" in said.sentences[1]
    assert "3-fold cross-validation" in said.table.note
    assert dict(said.facts)["A trial"] == "3 folds of 4 epochs"
    assert said.sections()["search"].drawn[0].page()["layer"][0]["encoding"]["y"]["title"] == "Out-of-fold accuracy"


def test_only_whole_trials_can_be_best_and_the_lower_loss_breaks_ties(tmp_path):
    (row,) = result(tmp_path, {"a": [0.90, 0.99, 0.95]}, hows={("a", 1): "pruned"}).variants
    assert (row.best.number, row.count("pruned"), row.count("complete")) == (2, 1, 2)
    first, second = row.trials[0], row.trials[2]
    assert tuning.best([replace(first, accuracy=0.95), replace(second, loss=0.4)]).number == 2
    assert tuning.best([replace(first, accuracy=0.95), second]).number == 0


def test_what_uses_the_result(tmp_path):
    said = result(tmp_path, {"a": [0.9, 0.95]})
    assert said.suggested == [
        f"linvit {verb} digits --config {tmp_path / 'best.toml'}" for verb in ("compare", "train")
    ]
    assert said.commands == ["linvit tune digits --trials 3"]
    assert said.json()["variants"][0]["best_options"] == {"lr": 0.01, "attention.m": 32}


def test_files_of_a_search(searched):
    with open(searched.page.parent / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == ["0", "1", "2"] * 2
    assert [row["how"] for row in rows] == ["complete"] * 5 + ["diverged"]
    assert {row["lr"] for row in rows} == {"0.001", "0.01", "0.003"}


def test_where_values_are_drawn(searched):
    spec = searched.sections()["coordinates"].drawn[0].page()
    values = spec["datasets"][spec["layer"][1]["data"]["name"]]
    places = {(row["axis"], row["trial"]): row["place"] for row in values}
    assert [places["lr", i] for i in range(3)] == pytest.approx([0.0, 1.0, 0.477], abs=1e-3)
    assert [places["m", i] for i in range(3)] == [0.0, 0.5, 1.0]
    assert [places["accuracy", i] for i in range(3)] == pytest.approx([0.0, 1.0, 0.6])
