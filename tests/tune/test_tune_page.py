"""The page of a search: what it says, and in a browser."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import altair as alt
import pytest

from linvit.cli import main
from linvit.records import Record, Records
from linvit.report import tuning

OPTIONS = ({"lr": 0.001, "attention.m": 16}, {"lr": 0.01, "attention.m": 32}, {"lr": 0.003, "attention.m": 64})


def made(
    folder: Path, found: dict[str, list[float | None]], *, images: int = 5000, defaults: bool = True,
    name: str = "digits", hows: dict[tuple[str, int], str] | None = None,
) -> Path:  # fmt: skip
    """A made-up search: the accuracies of each variant's trials. No number here was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = {
        "format": 1, "name": "x", "commands": ["linvit tune '</script><script>alert(3)</script>'"], "started": 1.7e9,
        "finished": 1.7e9 + 60, "variants": [{"id": v, "label": v, "attention": v} for v in found],
        "dataset": {"name": name, "image_size": 8, "train": 100, "validation": images, "test": 100},
        "space": {"name": "<b>mine</b>", "options": {"lr": {"low": 1e-3, "high": 1e-2, "log": True}},
                  "attention": {"m": [16, 32, 64]}, "fixed": {}},
        "sampler": "tpe", "pruner": "median", "trials": 3, "budget": None, "share": None, "defaults": defaults,
        "seed": 0, "match": True, "options": {"epochs": 4}, "model": {}, "recipe": {"epochs": 4.0},
        "storage": "sqlite:///x/trials.db",
    }  # fmt: skip
    (folder / "search.json").write_text(json.dumps(plan))
    records = []
    for variant, accuracies in found.items():
        for i, accuracy in enumerate(accuracies):
            tags = {"variant": variant, "trial": i, "attention": variant, "dataset": name, "seed": 0}
            how = (hows or {}).get((variant, i), "complete" if accuracy is not None else "diverged")
            own = {"how": how, "why": None, "loss": 0.5, "options": json.dumps(OPTIONS[i % len(OPTIONS)])}
            common = {"device": "cpu", "threads": 1, "versions": "linvit 0.1.0", "commit": "0123", "time": 1.7e9}
            records += [
                Record("trial_accuracy", accuracy, "fraction", n=images, tags=tags | own, **common),
                Record("trial_seconds", 12.5, "s", tags=tags, **common),
                Record("trial_steps", 40, "count", tags=tags, **common),
            ]
        for option, share in (("lr", 0.7), ("attention.m", 0.3)):
            tags = {"variant": variant, "option": option, "dataset": name}
            records.append(Record("option_importance", share, "fraction", n=9, tags=tags, **common))
    Records(folder / "records.jsonl").append(records)
    return folder


@pytest.mark.parametrize(("found", "head"), [
    ({"a": [0.90, 0.99, 0.95], "b": [0.80, 0.90, 0.85]}, "Tuning does not change the winner: a"),
    ({"a": [0.90, 0.92, 0.91], "b": [0.80, 0.99, 0.85]}, "Tuning changes the winner, from a to b"),
    ({"a": [0.90, 0.99, 0.95], "b": [0.90, 0.92, 0.85]}, "Tuned, a leads; before, nobody did"),
    ({"a": [0.90, 0.97, 0.95], "b": [0.80, 0.97, 0.85]}, "Tuned, a and b cannot be told apart; before, a led"),
    ({"a": [0.97, 0.97, 0.95], "b": [0.969, 0.971, 0.8]}, "b and a cannot be told apart, tuned or not"),
    ({"a": [0.90, 0.99, 0.95]}, "Tuned, a reaches 99.0\xa0%"),
    ({"a": [None, 0.99, 0.95], "b": [0.80, 0.90, 0.85]}, "Tuned, a leads"),
    ({"a": [None, None, None], "b": [None, None, None]}, "No trial was trained to the end"),
])  # fmt: skip
def test_what_it_says(tmp_path, found, head):
    said = tuning.answer(tuning.read(made(tmp_path / "x", found)))
    assert said.headline == head
    assert "One seed per trial and 5,000 validation images" in said.caution


def test_few_images_cannot_tell(tmp_path):
    found = {"a": [0.90, 0.95, 0.91], "b": [0.80, 0.90, 0.85]}
    said = tuning.answer(tuning.read(made(tmp_path / "x", found, images=144)))
    assert said.headline == "Tuned, a and b cannot be told apart; before, a led"
    assert "Differences below 5.5 points are within chance" in said.caution
    perfect = tuning.answer(tuning.read(made(tmp_path / "z", {"a": [0.5, 1.0], "b": [0.5, 0.5]}, images=2)))
    assert "cannot be told apart" in perfect.headline
    first = tuning.answer(tuning.read(made(tmp_path / "y", found, defaults=False)))
    assert "from the first trial's options, the same for all" in first.sentence


def test_only_whole_trials_can_be_best_and_the_lower_loss_breaks_ties(tmp_path):
    hows = {("a", 1): "pruned"}
    row = tuning.read(made(tmp_path / "x", {"a": [0.90, 0.99, 0.95]}, hows=hows)).rows[0]
    assert (row.best.number, row.count("pruned"), row.count("complete")) == (2, 1, 2)
    first, second = row.trials[0], row.trials[2]
    from dataclasses import replace

    assert tuning.best([replace(first, accuracy=0.95), replace(second, loss=0.4)]).number == 2
    assert tuning.best([replace(first, accuracy=0.95), second]).number == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = {'=cmd()|"<img src=x onerror=alert(1)>': [0.9, 0.95, 0.93], "softmax": [0.89, 0.94, None]}
    place = made(tmp_path_factory.mktemp("tuned") / "</script><b>x", found, name="<img src=//evil.example/x>")
    tuning.build(place)
    return place


def test_files(folder):
    assert {path.name for path in folder.iterdir()} >= {"report.html", "report.md", "results.csv", "figures"}
    rows = list(csv.DictReader((folder / "results.csv").open()))
    assert [row["trial"] for row in rows] == ["0", "1", "2"] * 2
    assert [row["how"] for row in rows] == ["complete"] * 5 + ["diverged"]
    assert {row["lr"] for row in rows} == {"0.001", "0.01", "0.003"}
    charts = tuning.charts(tuning.read(folder))
    names = {chart.name for found in charts.values() for chart in found}
    assert names == {"spread", "history", "coordinates-0", "coordinates-1", "importance"}
    for found in charts.values():
        for chart in found:
            alt.LayerChart.from_dict(chart.page())
            assert (folder / "figures" / f"{chart.name}.svg").exists()


def test_where_values_stand(folder):
    spec = tuning.charts(tuning.read(folder))["coordinates"][0].page()
    values = spec["datasets"][spec["layer"][1]["data"]["name"]]
    places = {(row["axis"], row["trial"]): row["place"] for row in values}
    assert [places["lr", i] for i in range(3)] == pytest.approx([0.0, 1.0, 0.477], abs=1e-3)
    assert [places["m", i] for i in range(3)] == [0.0, 0.5, 1.0]
    assert [places["accuracy", i] for i in range(3)] == pytest.approx([0.0, 1.0, 0.6])


def test_report_builds_it_again(folder, capsys):
    page = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    assert main(["report", str(folder), "--json"]) == 0
    assert (folder / "report.html").read_bytes() == page
    said = json.loads(capsys.readouterr().out)
    assert [row["best_trial"] for row in said["variants"]] == [1, 1]


def test_a_search_of_which_nothing_is_done_says_so(folder, tmp_path):
    shutil.copy(folder / "search.json", tmp_path)
    with pytest.raises(ValueError, match="no trial of this search has finished"):
        tuning.build(tmp_path)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_in_a_browser(opened, folder, width, scheme):
    page = opened(folder, width, scheme)
    for part in ("h1", ".lead", ".caution"):  # the answer, and how far to trust it, on the first screen
        box = page.locator(part).bounding_box()
        assert box["y"] + box["height"] < 844, part
    assert "leads; before, nobody did" in page.locator("h1").inner_text()
    assert page.locator("[data-chart] svg").count() == 5
    for name, wide, high, right in page.evaluate("""[...document.querySelectorAll('[data-chart]')].map(place => {
            const box = place.querySelector('svg').getBoundingClientRect();
            return [place.dataset.chart, box.width, box.height, box.right]})"""):
        assert min(wide / 200, high / 80) > 1, name
        assert right <= width, name
    mark = page.locator("[data-chart=history] g.mark-symbol path").last
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator("#vg-tooltip-element.visible").wait_for(timeout=5_000)
    assert page.evaluate("document.scripts.length") == 3
    assert "<script>alert(3)" in page.locator("body").inner_text()
