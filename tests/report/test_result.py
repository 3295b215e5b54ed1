"""A result folder → a result and its files: what they hold, what they escape, and what may be missing."""

from __future__ import annotations

import csv
import html
import json
import os
import re
import subprocess
import sys

import altair as alt
import numpy as np
import pytest
from jsonschema import ValidationError
from synthetic import ATTENTIONS, document, record, search, study

from linvit import report
from linvit.cli._output import show
from linvit.ledger import open_ledger
from linvit.records import Records
from linvit.report.page import script_json
from linvit.requests import ReportRequest

COLUMNS = (
    "attention,test_accuracy,test_accuracy_low,test_accuracy_high,seeds,final_accuracy,verdict,behind_best,"
    "behind_low_seeds,behind_high_seeds,behind_low_images,behind_high_images,loses_at_most,loses_at_least,"
    "balanced_accuracy"
)


def rows(folder):
    with open(folder / "results.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def build(folder, out=None):
    return report.build(folder, out, figures=False)


def text_of(page):
    """The page's words, without its scripts and styles."""
    body = re.sub(r"<(script|style).*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body.replace("<wbr>", ""))).split())


def test_files_of_a_study(built):
    folder, words = built.page.parent, text_of(built.page)
    assert built.page.stat().st_size < 5_000_000
    for heading in ("Limitations", "Results", "Cost", "Learning curves", "Classes", "Confusion", "Examples", "Input"):
        assert heading in words
    found = rows(folder)
    assert (folder / "results.csv").read_text().startswith(COLUMNS)
    assert [row["attention"] for row in found] == [*ATTENTIONS, "uniform"]
    first, accuracies = found[0], built.summary.evidence.of("test_accuracy", variant="softmax", selection="best")
    assert float(first["test_accuracy"]) == pytest.approx(np.mean([r.value for r in accuracies]))
    assert (first["seeds"], first["parameters"]) == ("5", "201482")


def test_figures(tmp_path):
    result = report.build(study(tmp_path, ATTENTIONS[:2], artefacts=False))
    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"pareto.svg", "pareto.png", "scaling-forward.svg"} <= figures
    linked = re.findall(r"\(figures/(.*?)\)", (tmp_path / "report.md").read_text())
    assert linked
    assert set(linked) <= figures
    (tmp_path / "figures/pareto.svg").unlink()
    (tmp_path / "figures/pareto.svg").mkdir()
    with pytest.raises(OSError, match="cannot be written"):
        report.build(result.page.parent)


def test_every_output_shows_the_same_result(built, capsys):
    request = ReportRequest.of(folders=(built.page.parent,))
    show(built, request)
    printed = capsys.readouterr().out
    words, markdown = text_of(built.page), (built.page.parent / "report.md").read_text().replace("\\", "")
    sentences = [" ".join(text.split()) for text in (*built.sentences, *(text for _, text in built.answer))]
    for text in (built.headline, *sentences, *built.limitations, *(cell.text for cell in built.table.rows[2].values())):
        assert " ".join(text.split()) in words
        assert " ".join(text.split()) in " ".join(markdown.split())
    assert all(text in printed for text in built.sentences)
    assert str(built.page) in printed
    use, why, following = printed.splitlines()[-3:]
    assert [line.split()[0] for line in (use, why, following)] == ["Use", "Why", "Next"]
    assert [line[6:] for line in (use, why)] == [text for _, text in built.answer[:2]]
    assert following[6:] == f"{built.answer[2][1]} {built.suggested[0]}"
    show(built, request.replaced(as_json=True))
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads(json.dumps(built.json()))
    assert said["sentences"] == built.sentences
    assert (said["use"], said["why"], said["next"]) == tuple(text for _, text in built.answer)
    assert [row["verdict"] for row in said["variants"]] == [row["Verdict"] for row in built.table.texts]
    show(built, request.replaced(quiet=True))
    assert "softmax  " not in capsys.readouterr().out  # no table


def test_the_table(built):
    table = built.table
    assert table.columns[:4] == ["Variant", "Test accuracy", "Verdict", "To the best, points"]
    assert "Verdict" not in table.right
    assert [row["Verdict"] for row in table.texts] == [
        "most accurate",
        "undecided",
        "within 1 point",
        "diverged",
        "worse",
        "worse",
    ]
    assert table.chosen == 2
    intervals, times = built.details
    assert intervals.texts[2]["Loses, points"].startswith("at most 0.")
    assert intervals.texts[4]["Loses, points"].startswith("at least 2.")
    assert times.texts[0]["Training vs identity"] == "0.43×"


def test_every_chart_is_valid_vega_lite(built, searched, converted):
    for result, count in ((built, 20), (searched, 5), (converted, 5)):
        found = [chart for section in result.sections().values() for chart in section.drawn]
        assert len(found) >= count
        for chart in {chart.name.split("-")[0]: chart for chart in found}.values():  # one of each kind
            alt.LayerChart.from_dict(chart.page(), validate=True)
        alt.LayerChart.from_dict(found[0].figure(), validate=True)
    with pytest.raises(ValidationError):
        alt.LayerChart.from_dict(found[0].page() | {"layer": [{"mark": "no such mark"}]}, validate=True)


def test_a_report_is_a_pure_function_of_its_folder(built, copy):
    build(copy)
    for name in ("report.html", "results.csv"):
        assert (copy / name).read_bytes() == (built.page.parent / name).read_bytes()


def test_everything_a_user_names_is_escaped(hostile):
    page = (hostile / "report.html").read_text(encoding="utf-8")
    assert page.count("</script>") == page.count("<script") == 3
    for attack in ("<img src=x", "<img src=//", "<b>bold"):
        assert attack not in page
    markdown = (hostile / "report.md").read_text(encoding="utf-8")
    assert not re.search(r"(?<!\\)<(script|img|b)", markdown.split("```")[0])
    assert markdown.count("```") == 4  # what to run next, and what was run
    assert [row["attention"][:7] for row in rows(hostile)] == ["softmax", "'=cmd()"]


def test_json_cannot_leave_its_script():
    text = script_json({"a": "</script><!--", "b": "\u2028"})
    assert "<" not in text
    assert "\u2028" not in text
    assert json.loads(text) == {"a": "</script><!--", "b": "\u2028"}


def test_a_page_that_cannot_be_made_is_an_error_of_one_line(copy):
    """What files hold that linvit did not write cannot be foreseen."""
    (copy / "models.json").write_text(json.dumps({name: [1] for name in ATTENTIONS}))
    with pytest.raises(ValueError, match=r"the page cannot be made from the files there \(TypeError: ") as caught:
        build(copy)
    assert str(copy) in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)


def test_missing_and_broken_artefacts_are_left_out(copy, tmp_path):
    files = [*copy.rglob("*.npz"), *copy.rglob("confusion.json"), *copy.rglob("log.jsonl"), copy / "models.json"]
    for content in (b"", b"PK\x03\x04torn", b"[1, 2", b'{"matrix": [["a"]]}', b"\xff\xfe\x00"):
        for file in files:
            file.write_bytes(content)
        result = report.study_result(copy)
        sections = result.sections()
        assert not any(sections[name].drawn for name in ("learning", "learned", "confusion"))
        assert not sections["models"].tables
        assert not result.context()["examples"]
    for file in files:
        file.unlink()
    result = build(copy)
    assert any("files named by the records are missing" in text for text in result.limitations)
    assert "Examples" not in text_of(result.page)


def test_pickles_and_files_outside_the_folder_are_not_read(copy, tmp_path):
    np.savez(copy / "examples.npz", images=np.array([{"a": 1}], dtype=object))
    (tmp_path / "secret.json").write_text('{"matrix": [[1, 0], [0, 1]]}')
    tags = {"attention": "softmax", "seed": 0, "selection": "best"}
    Records(copy / "records.jsonl").append([record("confusion", 1, artefact="../secret.json", **tags)])
    result = report.study_result(copy)
    assert [r.artefact for r in result.summary.evidence.of("confusion", variant="softmax", seed=0)] == [""]
    assert not result.context()["examples"]


def test_any_metric_may_be_missing_or_not_finite(tmp_path):
    ledger = open_ledger(study(tmp_path, ATTENTIONS[:2], artefacts=False))
    every = list(ledger)
    for metric in ("test_accuracy", "parameters", "inference_vs_softmax", "attention_time", "f1"):
        kept = [r for r in every if r.metric != metric]
        nulls = [record(metric, None, attention=name, seed=0) for name in ATTENTIONS[:2]]
        for records in (kept, kept + nulls):
            ledger.replace(records)
            report.study_result(tmp_path).sections()


def test_folders_that_cannot_be_read(tmp_path, searched):
    with pytest.raises(ValueError, match=r"does not hold a study\.json"):
        build(tmp_path)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read by this version"):
        build(tmp_path)
    (tmp_path / "study.json").write_text(json.dumps(document().stored() | {"format": 3}))
    with pytest.raises(ValueError, match="has format 3"):
        build(tmp_path)
    folder = searched.page.parent
    with pytest.raises(ValueError, match="only studies can be merged or have a margin"):
        report.build(folder, margin=0.02)
    with pytest.raises(ValueError, match="no trial of this search has finished"):
        build(search(tmp_path / "begun", {"softmax": []}))


def test_merging(tmp_path):
    first = study(tmp_path / "a", attentions=ATTENTIONS[:2], artefacts=False)
    second = study(tmp_path / "b", attentions=ATTENTIONS[1:], artefacts=False)
    result = build([first, second], tmp_path / "merged")
    assert result.page == tmp_path / "merged" / "report.html"
    assert [row["attention"] for row in rows(tmp_path / "merged")] == list(ATTENTIONS)
    for more, why in (({"name": "mnist"}, "different data"), ({"classes": ("cat", "dog")}, "differ")):
        with pytest.raises(ValueError, match=why):
            report.study_result([first, study(tmp_path / why, artefacts=False, **more)])
    with pytest.raises(ValueError, match="give --out"):
        build([first, second])
    for folders, out in (([first], second), ([first, second], first)):
        with pytest.raises(ValueError, match="holds another study"):
            build(folders, out)
    assert build(first, os.path.relpath(first)).page.samefile(first / "report.html")


def test_other_protocols_are_other_variants(tmp_path):
    """Twenty epochs and one are not six seeds of one variant."""
    lengths = {"long": 630, "short": 21}
    folders = [study(tmp_path / name, ("softmax",), artefacts=False, steps=n) for name, n in lengths.items()]
    found = report.study_result(folders).summary.variants
    assert [(v.id, v.label, v.seeds) for v in found] == [(f"softmax ({n})", f"softmax ({n})", 3) for n in lengths]


def test_imports_neither_torch_nor_altair():
    """A result for the terminal needs no chart."""
    code = "import sys, linvit.report; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'altair')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
