"""The page of the published studies: what it looks up, how it shows it, and in a browser."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import altair as alt
import pytest
from results_of import made, noisy, sizes

from linvit.cli import main
from linvit.studies import STUDIES, page, sheets
from linvit.studies.beliefs import beliefs
from linvit.studies.claims import CLAIMS
from linvit.studies.declaration import all_published
from linvit.studies.hypotheses import MISSING
from linvit.studies.results import Results


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Some run, one diverged, one only shown to run."""
    home = tmp_path_factory.mktemp("reproduced")
    speeds = {
        "transformer": (1.0, 1.0, 1.0),
        "RF16 softmax": (0.8, 0.7, 0.9),
        "RF64 ReLU": (0.6, 0.5, 0.7),
        "linformer": (1.2, 1.1, 1.3),
    }
    fair = {
        "transformer": noisy(0.991),
        "RF16 softmax": noisy(0.9921),
        "RF64 ReLU": [0.99, None, 0.99],
        "linformer": noisy(0.93),
        "uniform": noisy(0.9),
    }
    made(home, fair, speeds=speeds)
    made(home, {"transformer": [0.97], "linformer": [0.96], "RF16 softmax": [None]}, column="literal")
    made(home, {"transformer": [0.4711]}, study="000-cifar10", scale="smoke")
    page.write(home)
    return home


@pytest.fixture(scope="module")
def book(home):
    return page.gather(home)


def test_with_nothing_run_everything_is_shown_and_nothing_claimed(tmp_path):
    book = page.gather(tmp_path)
    assert len(book.printed) == 68
    assert [sheet.study.name for sheet in book.sheets if sheet.study.report == "001"][:3] == [
        "001-I",
        "001-II",
        "001-III",
    ]
    assert not book.run("literal") + book.run("fair")
    assert book.counts[MISSING] >= len(CLAIMS) - 3  # what can be computed is
    first, second, _ = beliefs(book.verdicts)
    assert first == "Accuracy: none of 14 comparisons of a Performer with a Transformer has been run yet."
    assert second == "Cost: nothing has been measured at the reports' own sizes yet."
    text = page.write(tmp_path).read_text()
    for result in [result for rows in all_published().values() for result in rows.values()]:
        if result.accuracy is not None:
            assert f"{100 * result.accuracy:.2f}\N{NO-BREAK SPACE}%" in text
    assert "linvit reproduce 000-mnist" in text


def test_a_row_shows_what_was_printed_and_what_was_found(home):
    sheet = sheets.sheet(STUDIES["000-mnist"], Results(home))
    lines = {line.name: line for line in sheet.lines}
    assert len(sheet.printed) == 9
    line = lines["RF16 softmax"]
    assert sheets.printed(line.published).text == "99.12\N{NO-BREAK SPACE}%"
    fair = sheets.rerun(line, sheet, "fair")
    assert (fair.text, fair.small) == ("99.2\xa0±\xa00.2\xa0%", ["3 seeds, cpu"])
    assert sheets.rerun(line, sheet, "literal").text == "diverged"
    one = sheets.rerun(lines["linformer"], sheet, "literal")
    assert (one.text, one.small) == ("96.0\N{NO-BREAK SPACE}%", ["one seed, cpu"])
    assert sheets.rerun(lines["RF128 ReLU"], sheet, "fair").text == "not run"
    assert lines["linformer, twice the steps"].columns == ["fair"]
    found = sheets.table(sheet).rows[sheet.lines.index(line)]
    assert (found["Time, printed"].text, found["Time, printed"].small) == ("340 ms per step", ["speed 0.98×"])
    assert (found["Training speed here"].text, found["Training speed here"].small) == (
        "0.80×",
        ["inference 0.80×", "a smaller model, which decides nothing"],
    )
    assert found["Memory here"].text == "125\N{NO-BREAK SPACE}%"
    assert sheet.columns["literal"].smaller == STUDIES["000-mnist"].reduced("literal", "cpu")
    assert sheet.flags == [
        "time not comparable across rows: different framework, width, heads and batch size",
        "single run",
    ]


def test_a_study_without_a_literal_column_has_rows_in_one(tmp_path):
    made(tmp_path, {"Transformer": [1.21, 1.22, 1.2]}, study="paper-fig18", metric="bits_per_dim")
    sheet = sheets.sheet(STUDIES["paper-fig18"], Results(tmp_path))
    assert {tuple(line.columns) for line in sheet.lines} == {("fair",)}
    assert sheets.rerun(sheet.lines[0], sheet, "fair").text == "1.210\xa0±\xa00.025 bits"
    assert "Published" not in sheets.table(sheet).columns
    alt.LayerChart.from_dict(page.chart(sheet).page())


def test_speed_and_memory_at_the_reports_size_stand_next_to_the_printed(tmp_path):
    systems = {"001-V: ViT": (1.0, 1.0), "001-V: softmax": (1.0, 1.0), "001-V: relu": (1.7, 0.5)}
    sizes(tmp_path, "001", systems, busy=True)
    sheet = sheets.sheet(STUDIES["001-V"], Results(tmp_path))
    rows = {line.name: row for line, row in zip(sheet.lines, sheets.table(sheet).rows, strict=True)}
    assert rows["relu"]["Memory, printed"].text == "45\N{NO-BREAK SPACE}%"
    memory, speed = (rows["relu"][f"{what} at the report's size"] for what in ("Memory", "Speed"))
    assert (memory.text, memory.small) == ("50\N{NO-BREAK SPACE}%", ["batch 8"])
    assert (speed.text, speed.small) == ("1.70×", ["inference 1.70×", "measured on a busy core"])


def test_what_a_literal_row_keeps_and_changes_is_on_the_page(home):
    text = (home / "report.html").read_text()
    assert "Literal keeps one token per image; the report" in text
    sheet = sheets.sheet(STUDIES["000-mnist"], Results(home))
    assert sheets.known(next(line for line in sheet.lines if line.name == "RF64 ReLU"), sheet)[-1] == (
        "literal: the Keras model's shape, 30 epochs and batches of 32, in PyTorch"
    )


def test_smoke_is_said_to_mean_nothing(home):
    sheet = sheets.sheet(STUDIES["000-cifar10"], Results(home))
    assert sheet.smoke
    assert not sheet.columns
    assert sheets.rerun(sheet.lines[0], sheet, "fair").text == "smoke only"
    text = (home / "report.html").read_text()
    assert "47.1" not in re.sub(r"<script.*?</script>", "", text, flags=re.S)


def test_what_to_believe_is_counted_from_the_tests(home, tmp_path):
    home = shutil.copytree(home, tmp_path / "home")
    systems = {"000-mnist: transformer": (1.0, 1.0), "000-mnist: RF64 ReLU": (0.5, 2.0)}
    sizes(home, "000", systems | {"000-mnist: RF16 softmax": (1.5, 0.5)})
    first, second, third = beliefs(page.gather(home).verdicts)
    assert first == (
        "Accuracy: wherever it is decided, a Performer loses less than the margin to the Transformer (1 of 2 "
        "comparisons show a loss below the margin, 0 a larger one, 1 neither; 14 are planned)."
    )  # RF64 ReLU diverged with one seed
    assert second == (
        "Cost: at the reports' own sizes a Performer trains faster than softmax in 1 of 2 comparisons and more slowly "
        "in 1, takes less memory in 1 of 2 comparisons and more in 1."
    )
    assert re.fullmatch(r"Reports: \d+ of 53 claims are contradicted by what the same report prints, and 13 .*", third)
    text = page.write(home).read_text()
    assert first in text.partition('id="claims"')[0]  # on the first screen


def test_charts_and_headline_come_from_the_data(book):
    assert page.headline(book).startswith("Of 53 claims ")
    drawn = [found for sheet in book.sheets if (found := page.chart(sheet))]
    assert [found.name for found in drawn] == ["dots-000-mnist"]
    alt.LayerChart.from_dict(drawn[0].page())


def test_the_command_writes_it(home, capsys):
    before = (home / "report.html").read_bytes()
    assert main(["reproduce", "--report", "--out", str(home), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(home / "report.html")}
    assert (home / "report.html").read_bytes() == before


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_in_a_browser(home, opened, width, scheme):
    shown = opened(home, width, scheme)
    shown.locator('.tile[href="#claim-000.2"]').click()
    assert shown.locator('[id="claim-000.2"]').is_visible()  # one click opens its evidence
    shown.evaluate("document.querySelectorAll('details').forEach(each => each.open = true); scrollTo(0, 0)")
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.locator("[data-chart=dots-000-mnist] svg").bounding_box()["width"] > 200
    missing = shown.evaluate("""[...document.querySelectorAll('a[href^="#"]')]
        .map(link => link.getAttribute('href').slice(1)).filter(id => !document.getElementById(id))""")
    assert missing == []
