"""The page of a conversion: in a browser, and what stands beside it."""

from __future__ import annotations

import csv
import json
import shutil

import altair as alt
import pytest

import linvit
from linvit.cli import main
from linvit.report import conversion


@pytest.fixture(scope="module")
def folder(teacher, tmp_path_factory):
    """A conversion with a search, on larger images, so that every section is there."""
    out = tmp_path_factory.mktemp("page") / "</script><b>x"
    done = linvit.convert(
        teacher, to="performer-hyp", data="digits", out=out, max_drop=0.45, stages=(2,), steps=8, device="cpu",
        image_size=12, limit=300, command="linvit convert '</script><script>alert(1)</script>'",
    )  # fmt: skip
    return done.folder


def test_files(folder):
    assert {path.name for path in folder.iterdir()} >= {"report.html", "report.md", "results.csv", "figures", "best"}
    rows = list(csv.DictReader((folder / "results.csv").open()))
    assert [row["model"] for row in rows] == ["teacher", "zero-shot", "stage 2", "mix", "mix, stage 2"]
    assert [row["chosen"] for row in rows].count("True") == 1
    evidence = conversion.read(folder)
    assert " ".join(conversion.headline(evidence).split()) in (folder / "report.md").read_text()
    assert len(evidence.layers) == 4
    found = conversion.charts(evidence)
    assert {chart.name for charts in found.values() for chart in charts} == {
        "stages", "layers", "speed", "growth-accuracy", "growth-speed"}  # fmt: skip
    for charts in found.values():
        for chart in charts:
            alt.LayerChart.from_dict(chart.page())
            assert (folder / "figures" / f"{chart.name}.svg").exists()


def test_report_builds_it_again(folder, capsys):
    page = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    assert main(["report", str(folder), "--json"]) == 0
    assert (folder / "report.html").read_bytes() == page
    said = json.loads(capsys.readouterr().out)
    assert said["headline"].startswith(f"{said['rows'][-1]['linear_layers']} of 4 layers linear")


def test_an_unfinished_conversion_says_so(folder, tmp_path):
    shutil.copy(folder / "convert.json", tmp_path)
    with pytest.raises(ValueError, match="this conversion has not finished"):
        conversion.build(tmp_path)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_in_a_browser(opened, folder, width, scheme):
    page = opened(folder, width, scheme)
    assert "layers linear" in page.locator("h1").inner_text()
    assert page.locator(".strip span").count() == 4
    assert page.locator("[data-chart] svg").count() == 5
    assert page.evaluate("document.scripts.length") == 3
    assert "<script>alert(1)" in page.locator("body").inner_text()
