"""What is said of a conversion."""

from __future__ import annotations

import csv

import pytest
from synthetic import conversion

from linvit import report
from linvit.ledger import open_ledger


def test_the_result(converted):
    assert converted.headline == (
        "3 of 4 layers replaced, 98.0\xa0% of the accuracy kept, 0.8\xa0× as fast at 12 px, 1.6\xa0× at 24 px"
    )
    assert "Test accuracy 96.5\xa0% (teacher: 98.5\xa0%) on 359 images: " in converted.sentences[1]
    assert "2.00 points lost (95 %: 0.40 to 3.60)" in converted.sentences[1]
    assert "its layers on other validation images" in converted.sentences[2]
    assert [row["Verdict"] for row in converted.table.texts] == ["", "", "", "chosen"]
    assert converted.table.texts[2]["Steps"] == "1,040, kept after 7"
    assert [row["Verdict"] for row in converted.details[0].texts] == ["not shown", "passed"]
    assert converted.evidence.layers == ["softmax", *["performer-hyp"] * 3]
    assert converted.commands == ["linvit convert runs/teacher --data digits --to performer-hyp"]
    assert converted.suggested == [f"linvit evaluate {converted.page.parent}"]
    assert converted.json()["test_accuracy"] == 0.965


def test_limitations(tmp_path, converted):
    said = " ".join(converted.limitations)
    assert "359 test images: each is worth 0.28 points" in said
    assert "slower than the teacher" in said
    assert "not known what the teacher" not in said
    foreign = report.conversion_result(conversion(tmp_path, trained_on="", images=5000, high=1.1))
    assert "not known what the teacher was trained on" in foreign.limitations[0]
    assert "slower" not in " ".join(foreign.limitations)


def test_files_of_a_conversion(converted):
    with open(converted.page.parent / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["teacher", "zero-shot", "stage 2", "mix"]
    assert [row["chosen"] for row in rows].count("True") == 1
    names = {chart.name for section in converted.sections().values() for chart in section.drawn}
    assert names == {"stages", "layers", "speed", "growth-accuracy", "growth-speed"}
    assert "## Choice of the layers" in (converted.page.parent / "report.md").read_text()


def test_an_unfinished_conversion_says_so(tmp_path):
    ledger = open_ledger(conversion(tmp_path))
    ledger.replace([r for r in ledger if r.tags.get("split") != "test"])
    with pytest.raises(ValueError, match="this conversion has not finished"):
        report.conversion_result(tmp_path)
