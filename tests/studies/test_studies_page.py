"""The page of the published studies: what it looks up, how it judges, what its experiments show, and in a browser.

No number that is made up here was measured.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import altair as alt
import numpy as np
import pytest
from synthetic import record

from linvit.cli import main
from linvit.models import create_model
from linvit.records import Records
from linvit.report import reproduction
from linvit.report.statistics import LEVEL
from linvit.studies import page, published, study
from linvit.studies.claims import (
    CLAIMS,
    FAILS,
    HOLDS,
    MISSING,
    OPEN,
    Claim,
    at_least,
    better,
    diverges,
    equal,
    faster,
    grows_with_depth,
    judge,
    near_the_limit,
    ratio,
    trains,
)
from linvit.studies.mistakes import MISTAKES
from linvit.studies.results import Ref, Results

ROWS = {"transformer": "softmax", "RF16 softmax": "performer-exp:m=16", "RF64 ReLU": "performer-relu:m=64",
        "deterministic ReLU": "performer-relu:projection=none", "linformer": "linformer:k=16"}  # fmt: skip


def made(
    home: Path, accuracies: dict[str, list[float | None]], *, study: str = "000-mnist", column: str = "fair",
    scale: str = "cpu", speeds: dict[str, tuple[float, float, float]] | None = None, identity: str = "images",
    metric: str = "test_accuracy", half: float | None = None, finished: bool = True,
) -> Path:  # fmt: skip
    """A made-up column of a study: the test accuracies, or another metric, of each row's seeds; None diverged."""
    folder = home / study / scale / column
    folder.mkdir(parents=True, exist_ok=True)
    names = list(accuracies)
    info = {
        "format": 3, "commands": [f"linvit reproduce {study}"], "finished": 1.7e9 if finished else None,
        "dataset": {"name": "mnist", "identity": identity, "classes": list("01"), "image_size": 28, "test": 10_000},
        "variants": [{"id": name, "label": name, "attention": ROWS.get(name, "softmax"), "column": column}
                     for name in names],
        "seeds": {name: list(range(len(of))) for name, of in accuracies.items()},
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(info))
    (folder / "report.html").write_text("a page")
    found = []
    for name, of in accuracies.items():
        about = {"variant": name, "attention": ROWS.get(name, "softmax")}
        for seed, value in enumerate(of):
            found.append(record(metric, value, n=10_000, seed=seed, selection="best", **about))
            if half is not None:
                found.append(record("half_accuracy", value - half, n=10_000, seed=seed, **about))
            if value is None:
                found.append(record("diverged", 41, seed=seed, layer="blocks.2", **about))
        if speeds and name in speeds:
            middle, low, high = speeds[name]
            found += [record("train_step_vs_softmax", middle, n=31, low=low, high=high, clock="cpu", batch=8, **about),
                      record("inference_vs_softmax", middle, n=31, low=low, high=high, clock="cpu", batch=8, **about),
                      record("peak_memory", 1e8 / middle, batch=8, **about)]  # fmt: skip
    Records(folder / "records.jsonl").append(found)
    return home


def noisy(mean: float, seeds: int = 3, sd: float = 0.001) -> list[float | None]:
    shift = [0.0, 1.0, -1.0, 0.5, -0.5]
    return [mean + sd * shift[i] for i in range(seeds)]


A, B = Ref("000-mnist", "RF16 softmax"), Ref("000-mnist", "transformer")


@pytest.mark.parametrize(("test", "difference", "seeds", "word"), [
    (better, 0.03, 3, HOLDS),
    (better, -0.03, 3, FAILS),
    (better, 0.0, 5, FAILS),  # a tie: shown to be no point better, and not shown to be better at all
    (better, 0.03, 1, OPEN),
    (better, 0.03, 2, OPEN),
    (better, 0.005, 5, HOLDS),  # and by less than a point
    (at_least, 0.03, 3, HOLDS),
    (at_least, 0.0, 5, HOLDS),
    (at_least, -0.03, 3, FAILS),
    (at_least, -0.002, 3, OPEN),  # of MNIST, where a fifth of a point is the margin
    (equal, 0.0, 5, HOLDS),
    (equal, 0.03, 3, FAILS),
    (equal, -0.03, 3, FAILS),
    (equal, 0.0, 1, OPEN),
])  # fmt: skip
def test_what_is_said_of_a_difference(tmp_path, test, difference, seeds, word):
    base = noisy(0.9, seeds)
    ours = [(value or 0) + difference + 0.001 * (-1) ** i for i, value in enumerate(base)]
    made(tmp_path, {"transformer": base, "RF16 softmax": ours})
    claim = Claim("000.0", "", "", [test(A, B)], ())
    assert judge([claim], Results(tmp_path))[0].word == word


def test_smoke_decides_nothing_and_the_largest_scale_counts(tmp_path):
    claim = Claim("000.0", "", "", [better(A, B)], ())
    made(tmp_path, {"transformer": noisy(0.9, 5), "RF16 softmax": noisy(0.95, 5)}, scale="smoke")
    assert judge([claim], Results(tmp_path))[0].word == MISSING
    made(tmp_path, {"transformer": noisy(0.9, 5), "RF16 softmax": noisy(0.95, 5)}, scale="cpu")
    assert judge([claim], Results(tmp_path))[0].word == HOLDS
    made(tmp_path, {"transformer": noisy(0.97, 5), "RF16 softmax": noisy(0.95, 5)}, scale="full")
    found = judge([claim], Results(tmp_path))[0]
    assert found.word == FAILS
    assert "scale full" in found.parts[0].found


def test_all_tests_must_come_out_and_one_may_refute(tmp_path):
    other = Ref("000-mnist", "RF64 ReLU")
    home = made(tmp_path, {"transformer": noisy(0.9), "RF16 softmax": noisy(0.95), "RF64 ReLU": noisy(0.85)})
    away = Ref("000-cifar10", "RF16 softmax")
    for tests, word in (
        ([better(A, B), better(B, other)], HOLDS),
        ([better(A, B), better(other, B)], FAILS),
        ([better(A, B), better(away, B)], OPEN),  # one was not run
        ([better(other, B), better(away, B)], FAILS),
        ([better(away, B)], MISSING),
        ([], MISSING),
    ):
        assert judge([Claim("000.0", "", "", tests, ())], Results(home))[0].word == word


def test_claims_of_one_report_share_its_risk(tmp_path):
    """A p between 5 % and a tenth of it: said of one claim alone, and not among ten."""
    base, ours = [0.90, 0.901, 0.899], [0.906, 0.9025, 0.9045]
    results = Results(made(tmp_path, {"transformer": base, "RF16 softmax": ours}))
    claims = [Claim(f"000.{i}", "", "", [better(A, B)], ()) for i in range(10)]
    assert LEVEL / 10 < better(A, B)(results).holds < LEVEL
    assert judge(claims[:1], results)[0].word == HOLDS
    assert {found.word for found in judge(claims, results)} == {OPEN}
    elsewhere = [Claim(f"00{i}.1", "", "", [better(A, B)], ()) for i in range(10)]
    assert {found.word for found in judge(elsewhere, results)} == {HOLDS}


def test_true_nulls_are_rarely_called_either_way(tmp_path):
    """Two equally good rows: that one is better is said in at most 5 % of studies."""
    rng, wrong, studies = np.random.default_rng(0), 0, 200
    for i in range(studies):
        pair = {name: list(0.9 + 0.02 * rng.normal(size=3)) for name in ("transformer", "RF16 softmax")}
        results = Results(made(tmp_path / str(i), pair))
        wrong += judge([Claim("000.0", "", "", [better(A, B)], ())], results)[0].word == HOLDS
    assert wrong <= 0.05 * studies + 2 * np.sqrt(0.05 * 0.95 * studies)


@pytest.mark.parametrize(("longer", "word"), [(0.72, HOLDS), (0.76, FAILS), (0.75, FAILS)])
def test_a_checkpoint_saves_training_if_what_its_model_took_is_counted(tmp_path, longer, word):
    """Better than from nothing in the same steps it always is here."""
    rows = {f"{name}{how}": noisy(mean, 5) for name in ("linformer", "RF16 softmax")
            for how, mean in ((" from checkpoint", 0.75), ("", 0.7), (", twice the steps", longer))}  # fmt: skip
    results = Results(made(tmp_path, rows, study="000-cifar10"))
    assert judge([claim for claim in CLAIMS if claim.id == "000.3"], results)[0].word == word


def test_speeds_need_quartiles_apart(tmp_path):
    speeds = {"RF16 softmax": (1.5, 1.4, 1.6), "RF64 ReLU": (1.45, 1.39, 1.5), "linformer": (0.8, 0.7, 0.9)}
    rows: dict[str, list[float | None]] = {name: [0.9] for name in ("transformer", *speeds)}
    results = Results(made(tmp_path, rows, speeds=speeds))
    relu, linformer = Ref("000-mnist", "RF64 ReLU"), Ref("000-mnist", "linformer")
    for a, b, word in ((A, B, HOLDS), (B, A, FAILS), (A, relu, OPEN), (A, linformer, HOLDS), (linformer, B, FAILS)):
        assert judge([Claim("0.0", "", "", [faster(a, b)], ())], results)[0].word == word, (a, b)


@pytest.mark.parametrize(("large", "word"), [(0.8, HOLDS), (1.2, FAILS)])
def test_small_patches_are_held_against_large_ones_of_the_same_images(tmp_path, large, word):
    """CIFAR-10 (I) in its 64 patches of 4 says nothing of patch sizes."""
    for number, speed in (("I", 1.2 if large < 1 else 0.8), ("VI", 1.3), ("VII", 1.1), ("VIII", large), ("IX", large)):
        rows: dict[str, list[float | None]] = {name: [0.3] for name in ("ViT", "relu", "exp", "fθ")}
        speeds = {name: (speed, speed - 0.01, speed + 0.01) for name in rows if name != "ViT"}
        made(tmp_path, rows, study=f"001-{number}", speeds=speeds)
    (claim,) = (claim for claim in CLAIMS if claim.id == "001.3")
    assert judge([claim], Results(tmp_path))[0].word == word
    features = [study(name).title.rpartition(" ")[0].rpartition(" ")[2] for name in claim.needs]
    patches = [re.findall(r"patches of (\d)", study(name).title)[0] for name in claim.needs]
    assert (sorted(features), patches) == (["32", "32", "64", "64"], ["4", "4", "8", "8"])


def test_rows_of_two_studies_are_compared_if_their_images_are_the_same(tmp_path):
    a, b = Ref("001-I", "relu"), Ref("001-II", "relu")
    for name, mean, identity in (("001-I", 0.9, "x"), ("001-II", 0.8, "x"), ("001-V", 0.7, "y")):
        made(tmp_path, {"relu": noisy(mean)}, study=name, identity=identity)
    results = Results(tmp_path)
    assert judge([Claim("001.0", "", "", [better(a, b)], ())], results)[0].word == HOLDS
    found = judge([Claim("001.0", "", "", [better(a, Ref("001-V", "relu"))], ())], results)[0]
    assert (found.word, found.parts[0].found) == (OPEN, "run on other images or at another scale")


def test_bits_are_better_if_they_are_fewer(tmp_path):
    bits = {"Transformer": [1.21, 1.22, 1.2], "Performer-ReLU": [1.31, 1.32, 1.3]}
    made(tmp_path, bits, study="paper-fig18", metric="bits_per_dim")
    first, second = (Ref("paper-fig18", row) for row in bits)
    found = judge([Claim("004.0", "", "", [better(first, second)], ())], Results(tmp_path))[0]
    assert (found.word, found.parts[0].found[:12]) == (HOLDS, "+0.1000 bits")
    sheet = next(sheet for sheet in page.gather(tmp_path).sheets if sheet.name == "paper-fig18")
    assert reproduction.rerun(sheet.lines[0], sheet, "fair").text == "1.210 ± 0.025 bits"
    assert "Published" not in reproduction.columns(sheet)
    alt.LayerChart.from_dict(reproduction.chart(sheet).page())


def test_runs_that_diverge_are_told_and_compared_with_nothing(tmp_path):
    results = Results(made(tmp_path, {"transformer": noisy(0.9), "RF16 softmax": [0.9, None, 0.9]}))
    for test, word in ((better(B, A), OPEN), (diverges(A), HOLDS), (diverges(B), OPEN), (trains(A), FAILS),
                       (trains(B), HOLDS), (diverges(Ref("000-mnist", "RF64 ReLU")), MISSING)):  # fmt: skip
        found = judge([Claim("0.0", "", "", [test], ())], results)[0]
        assert found.word == word
    assert "seed 1 diverged in blocks.2 at step 41" in better(B, A)(results).found


def test_the_closed_form_of_the_papers_second_figure():
    assert ratio(np.pi / 2) == pytest.approx(0.43233, abs=1e-5)
    assert ratio(1.7426) == pytest.approx(1, abs=1e-3)
    assert ratio(3 * np.pi / 4) == pytest.approx(17.8, abs=0.05)


@pytest.mark.parametrize(("softmax", "so"), [(4.0, True), (1.5, False)])
def test_near_the_limit_is_nearer_to_it_than_to_softmax(softmax, so):
    steps = {"identity": 1.0, "softmax": softmax, "performer-exp:m=64": 1.3}
    found = [record("train_step", value * layers, variant=f"{name}, {layers} layers")
             for layers in (1, 4) for name, value in steps.items()]  # fmt: skip
    text = f"a step of 4 layers takes performer-exp:m=64 1.30×, softmax {softmax:.2f}× the time of one that returns v"
    assert near_the_limit(found) == (so, text)


@pytest.mark.parametrize(("mean", "half"), [(0.9, 0.06), (0.51, 0.0)])  # gains much; hardly above chance of two
@pytest.mark.parametrize(("test", "difference", "word"), [
    (better, 0.03, HOLDS), (better, -0.03, FAILS), (better, 0.0, OPEN), (at_least, 0.0, OPEN), (at_least, -0.03, FAILS),
    (equal, 0.0, OPEN), (equal, 0.03, FAILS),
])  # fmt: skip
def test_models_that_have_hardly_learned_tell_nothing_of_small_differences(
    tmp_path, mean, half, test, difference, word
):
    base = noisy(mean, 5)
    made(tmp_path, {"transformer": base, "RF16 softmax": [value + difference for value in base]}, half=half)
    (found,) = judge([Claim("000.0", "", "", [test(A, B)], ())], Results(tmp_path))
    assert found.word == word
    assert "too early for small differences" in found.parts[0].found


def test_the_largest_scale_that_was_finished_counts(tmp_path):
    made(tmp_path, {"transformer": noisy(0.9)})
    made(tmp_path, {"transformer": noisy(0.95)}, scale="full", finished=False)
    assert Results(tmp_path).column("000-mnist", "fair").scale == "cpu"
    shutil.rmtree(tmp_path / "000-mnist/cpu")
    assert Results(tmp_path).column("000-mnist", "fair").scale == "full"


@pytest.mark.parametrize(("last", "so"), [(0.5, True), (0.05, False)])
def test_errors_grow_with_depth_if_all_do(last, so):
    ends = {"performer-exp:m=32": (0.1, 0.7), "performer-hyp:m=32": (0.1, last), "uniform": (0.9, 0.8)}  # the control
    found = [record("depth_error", value, attention=name, layer=layer)
             for name, of in ends.items() for layer, value in zip((1, 12), of, strict=True)]  # fmt: skip
    assert grows_with_depth(found)[0] is so


def test_every_claim_says_what_it_tests_and_which_studies_it_needs(tmp_path):
    assert [claim.report for claim in CLAIMS] == ["000"] * 5 + ["001"] * 6 + ["002"] * 7 + ["004"] * 6
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.says
        assert claim.test
        for test in claim.tests:
            named = set(re.findall(r"\b(?:00[012]|paper)-[\w-]+", test(Results(tmp_path)).what))
            assert named <= set(claim.needs), claim.id


def test_the_reports_own_numbers():
    said = {claim.id: claim.own() for claim in CLAIMS if claim.own}
    assert said["000.1"][0]
    assert said["000.1"][1].count("0 of 5 Performers are as accurate as the Transformer in less time") == 2
    assert said["000.3"] == (True, "3 of 4 rows are worse from the checkpoint than without")
    assert said["001.1"][1].startswith("7 of 9 experiments have ViT first")
    assert not said["001.2"][0]
    assert not said["001.3"][0]  # which patches of 4 on CIFAR-10 (I) would deny
    assert "faster than ViT in 3 of 3 experiments on TinyImageNet; in patches of 8 one does in 0 of" in said["001.3"][1]
    assert "fθ above relu in 2" in said["001.4"][1]


SHOWN = {
    "M1": "No kernel can matter there: 20 of 20 give softmax's answer to the last bit",
    "M2": "70,000 images of 60,000: at least 10,000 serve twice. 2 published numbers",
    "M3": "up to 3.08 times the weight",
    "M4": "10 places",
    "M5": "9 words",
    "M6": "18 published times",
    "M7": "5,545,489 parameters, as printed, of which 97% are in the head",
    "M8": "0 of 6 Performers beat the Transformer on CIFAR-10, and 0 of 6 are faster on MNIST",
    "M9": "80 epochs end inside a restart cycle",
    "M10": "fθ is above relu in 5 of 9 experiments",
    "M11": "Twice the tokens take 2.00 times the memory",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_what_the_experiments_show(mistake):
    shown = mistake.show()
    assert SHOWN[mistake.id] in shown.says
    assert {len(row) for row in shown.rows} == {len(shown.head)}
    assert mistake.show() == shown


def test_the_experiments_can_come_out_otherwise():
    shown = {mistake.id: mistake.show() for mistake in MISTAKES if mistake.id in ("M1", "M2", "M3", "M5", "M9")}
    kernels = shown["M1"].rows
    assert all(float(row[2].rpartition(" ")[2]) > 1e-3 for row in kernels)  # kept as tokens, they differ
    for norm, _, exact, sampled in shown["M3"].rows:
        assert float(sampled) == pytest.approx(float(exact), rel=0.01), norm
    assert ("cycles of 10", "end at epochs 10, 30, 70, 150") in shown["M9"].rows
    gains = [float(row[1].split()[0]) for row in shown["M2"].rows if row[0].startswith("best of")]
    deviation = 100 * math.sqrt(2_000 / 4) / 10_000
    assert gains == pytest.approx([1.03 * deviation, 1.77 * deviation, 2.83 * deviation], abs=0.02)  # of normal ones
    words = {row[0]: row[3] for row in shown["M5"].rows}
    assert words["Linformer (000)"].endswith("of a window 0%")
    assert words["cost of a Transformer (000)"] == "twice the tokens: × 4, ReLU features × 2"
    assert words["deterministic (002)"].endswith("0 without projection")


def test_the_models_of_report_000_do_not_do_the_same_work():
    """What is counted without building them is what they are when they are built."""
    shown = next(mistake for mistake in MISTAKES if mistake.id == "M6").show()
    assert "1.7 (MNIST) and 20.3 (CIFAR-10) times the Performers' work" in shown.says
    sizes = {"torch": ("softmax", 28, 1), "keras": ("performer-exp:m=16", 28, 1)}
    built = [sum(p.numel() for p in create_model(f"000-{kind}-mnist", image_size=side, channels=channels, classes=10,
                                                 attention=spec).parameters())
             for kind, (spec, side, channels) in sizes.items()]  # fmt: skip
    row = next(row for row in shown.rows if row[0].startswith("parameters"))
    assert [text.split()[0] for text in row[1:3]] == [f"{count / 1e6:,.1f}" for count in built]


def test_with_nothing_run_all_is_there_and_nothing_is_claimed(tmp_path):
    book = page.gather(tmp_path)
    assert len(book.printed) == len(published()) == 68
    assert not book.run("literal") + book.run("fair")
    assert book.counts[MISSING] >= len(CLAIMS) - 3  # what can be computed is
    assert reproduction.findings(book)[0] == ("None of the 68 published numbers has been run again under a fair "
                                              "protocol yet.")  # fmt: skip
    text = page.write(tmp_path).read_text()
    for row in published():
        if row.accuracy is not None:
            assert f"{100 * row.accuracy:.2f}\N{NO-BREAK SPACE}%" in text
    assert text.count("linvit reproduce 000-mnist") >= 1


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
    fair = {"transformer": noisy(0.991), "RF16 softmax": noisy(0.9921), "RF64 ReLU": [0.99, None, 0.99],
            "linformer": noisy(0.93), "uniform": noisy(0.9)}  # fmt: skip
    made(home, fair, speeds=speeds)
    made(home, {"transformer": [0.97], "linformer": [0.96], "RF16 softmax": [None]}, column="literal")
    made(home, {"transformer": [0.4711]}, study="000-cifar10", scale="smoke")
    page.write(home)
    return home


def test_a_row_says_what_was_printed_and_what_came_of_it(home):
    sheet = next(sheet for sheet in page.gather(home).sheets if sheet.name == "000-mnist")
    lines = {line.name: line for line in sheet.lines}
    assert len(sheet.printed) == 9
    line = lines["RF16 softmax"]
    assert reproduction.printed(line).text == "99.12\N{NO-BREAK SPACE}%"
    fair = reproduction.rerun(line, sheet, "fair")
    assert (fair.text, fair.small) == ("99.2 ± 0.2\N{NO-BREAK SPACE}%", ["3 seeds, cpu"])
    assert reproduction.rerun(line, sheet, "literal").text == "diverged"
    one = reproduction.rerun(lines["linformer"], sheet, "literal")
    assert (one.text, one.small) == ("96.0\N{NO-BREAK SPACE}%", ["one seed, cpu"])
    assert reproduction.rerun(lines["RF128 ReLU"], sheet, "fair").text == "not run"
    found = {name: cells[sheet.lines.index(line)] for name, cells in reproduction.columns(sheet).items()}
    assert (found["Time, printed"].text, found["Time, printed"].small) == ("340 ms a step", ["speed 0.98×"])
    assert (found["Training speed here"].text, found["Training speed here"].small) == ("0.80×", ["inference 0.80×"])
    assert found["Memory here"].text == "125\N{NO-BREAK SPACE}%"
    assert "Memory, printed" not in found
    assert "Known of it" not in found
    assert sheet.columns["literal"].smaller == study("000-mnist").size("cpu", "literal").text
    assert sheet.flags == ["time not comparable across rows: different framework, width, heads and batch size",
                           "single run"]  # fmt: skip


def test_smoke_is_said_to_mean_nothing(home):
    sheet = next(sheet for sheet in page.gather(home).sheets if sheet.name == "000-cifar10")
    assert sheet.smoke
    assert not sheet.columns
    assert reproduction.rerun(sheet.lines[0], sheet, "fair").text == "it runs"
    text = (home / "report.html").read_text()
    assert "47.1" not in re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert "Its numbers mean nothing" in text


def test_a_page_that_can_be_kept(tmp_path):
    home, into = tmp_path / "runs", tmp_path / "docs"
    made(home, {"transformer": noisy(0.99)})
    folder = home / "000-mnist/cpu/fair"
    (folder / "report.md").write_text("a table")
    (folder / "figures").mkdir()
    (folder / "figures/a.svg").write_text("<svg/>")
    assert main(["reproduce", "--publish", str(into), "--out", str(home)]) == 0
    assert 'href="reports/000-mnist/cpu/fair/report.md"' in (into / "reports.html").read_text()
    kept = sorted(path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file())
    assert kept == ["reports.html", "reports/000-mnist/cpu/fair/figures/a.svg", "reports/000-mnist/cpu/fair/report.md"]


def test_findings_come_from_the_data(home):
    book = page.gather(home)
    first, second, third = reproduction.findings(book)
    assert first.startswith(
        "Under a fair protocol, at scale cpu, far less trained than theirs, 2 of 3 numbers that were"
    )
    assert second.startswith("13 of the 68 published numbers are of models that see an image as one token")
    assert third.startswith("1 of 3 linear attentions train faster than softmax")
    assert "linformer, at 1.20 times" in third
    assert reproduction.headline(book).startswith("Of 24 claims ")


def test_charts_are_valid(home):
    drawn = [found for sheet in page.gather(home).sheets if (found := reproduction.chart(sheet))]
    assert [found.name for found in drawn] == ["dots-000-mnist"]
    alt.LayerChart.from_dict(drawn[0].page())


def test_the_command_writes_it(home, capsys):
    before = (home / "report.html").read_bytes()
    assert main(["reproduce", "--report", "--out", str(home), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(home / "report.html")}
    assert (home / "report.html").read_bytes() == before


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_in_a_browser(home, width, scheme):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("no chromium on the PATH to open the page with")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme).new_page()
        opened.set_default_timeout(120_000)  # milliseconds: a busy machine is no failure
        errors, requests = [], []
        opened.on("console", lambda message: errors.append(message.text))
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.on("request", lambda request: requests.append(request.url))
        opened.goto((home / "report.html").as_uri())
        opened.wait_for_selector("html[data-charts=drawn]", timeout=60_000)
        opened.locator('.tile[href="#claim-000.1"]').click()
        assert opened.locator('[id="claim-000.1"]').is_visible()  # one click opens its evidence
        opened.evaluate("document.querySelectorAll('details').forEach(each => each.open = true); scrollTo(0, 0)")
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        for part in ("h1", ".stats"):
            box = opened.locator(part).bounding_box()
            assert box["y"] + box["height"] < 844, part
        back = opened.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(17, 19, 22)") == (scheme == "dark")
        assert opened.locator("[data-chart=dots-000-mnist] svg").bounding_box()["width"] > 200
        missing = opened.evaluate("""[...document.querySelectorAll('a[href^="#"]')]
            .map(link => link.getAttribute('href').slice(1)).filter(id => !document.getElementById(id))""")
        assert missing == []
        assert errors == []
        assert [url for url in requests if not url.startswith("data:") and not url.endswith("/report.html")] == []
        browser.close()
