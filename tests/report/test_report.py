"""Study folder → files: what they say, what they escape, and what may be missing."""

from __future__ import annotations

import base64
import csv
import functools
import html
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import altair as alt
import numpy as np
import pytest
from jsonschema import ValidationError
from PIL import Image
from synthetic import ATTENTIONS, record, study

from linvit import report
from linvit.records import Records
from linvit.report import charts, images
from linvit.report.page import script_json

COLUMNS = (
    "attention,test_accuracy,test_accuracy_low,test_accuracy_high,seeds,final_accuracy,verdict,behind_best,"
    "behind_low_seeds,behind_high_seeds,behind_low_images,behind_high_images,loses_at_most,loses_at_least,"
    "balanced_accuracy"
)


def rows(folder):
    with open(folder / "results.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


build = functools.partial(report.build, figures=False)


def advice(folder):
    return report.recommend(report.summarise(report.read(folder)))


def text_of(page):
    """The page's words, without its scripts and styles."""
    body = re.sub(r"<(script|style).*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.S)
    return html.unescape(re.sub(r"<[^>]+>", " ", body.replace("<wbr>", "")))


def test_the_full_report(built):
    page = built / "report.html"
    assert page.stat().st_size < 5_000_000
    words = text_of(page)
    for heading in ("Results", "What it costs", "Where linear attention starts to pay", "How they learned",
                    "Class by class", "What gets confused", "How close to softmax", "Examples", "What the model sees",
                    "What was run", "Where this comparison is weak", "Training was cut short.",
                    "seed 2 diverged in blocks.2.attention at step 412"):  # fmt: skip
        assert heading in words
    markdown = (built / "report.md").read_text(encoding="utf-8")
    assert all(name.split(":")[0] in markdown for name in ATTENTIONS)
    figures = {path.name for path in (built / "figures").iterdir()}
    assert {"pareto.svg", "pareto.png", "scaling-forward.svg", "confusion-0.png"} <= figures
    assert len({name.split(".")[0] for name in figures}) * 2 == len(figures)
    linked = re.findall(r"\(figures/(.*?)\)", markdown)
    assert linked
    assert set(linked) <= figures


def test_every_chart_is_valid_vega_lite(built):
    summary = report.summarise(report.read(built))
    found = [chart for section in charts.build(summary, "softmax").values() for chart in section]
    assert len(found) > 15
    for chart in found:
        for spec in (chart.page(), chart.figure()):
            alt.LayerChart.from_dict(spec, validate=True)
    with pytest.raises(ValidationError):
        alt.LayerChart.from_dict(found[0].page() | {"layer": [{"mark": "no such mark"}]}, validate=True)


def test_figures_that_cannot_be_drawn_are_an_error(copy):
    (copy / "figures").write_text("in the way")
    with pytest.raises(OSError, match=r"could not be drawn \(.*figures"):
        report.build(copy)


def test_results_csv(built):
    found = rows(built)
    assert (built / "results.csv").read_text().startswith(COLUMNS)
    assert [row["attention"] for row in found] == list(ATTENTIONS)
    first = found[0]
    assert (
        0 < float(first["test_accuracy_low"]) < float(first["test_accuracy"]) < float(first["test_accuracy_high"]) <= 1
    )
    assert (first["seeds"], first["parameters"]) == ("5", "201482")
    accuracy = [r.value for r in report.read(built).of("test_accuracy", attention="softmax", selection="best")]
    assert float(first["test_accuracy"]) == pytest.approx(np.mean(accuracy))
    assert {row["attention"]: row["verdict"] for row in found}["performer-theta:m=32"] == "diverged"


def test_a_report_is_a_pure_function_of_its_folder(built, copy):
    report.build(copy)
    for name in ("report.html", "report.md", "results.csv", "figures/pareto.svg"):
        assert (copy / name).read_bytes() == (built / name).read_bytes()


def test_the_recommendation_is_the_fastest_that_equals_the_best(built):
    found = advice(built)
    assert found.variant == "performer-relu:m=64,projection=none"
    assert (found.headline, found.confidence) == ("Recommendation", "within 1 point")
    assert "it loses less than 0." in found.sentences[1]
    assert "over seeds and test images" in found.sentences[1]
    assert "inference throughput" in found.reason


def test_one_seed_is_not_enough(tmp_path):
    folder = study(tmp_path / "one", seeds=(0,))
    build(folder)
    assert advice(folder).confidence == "not enough seeds to tell"
    assert {row["verdict"] for row in rows(folder)} == {"most accurate", "not enough seeds to tell"}
    assert all(row["test_accuracy_low"] == "" for row in rows(folder))


def test_what_is_open_is_run_by_the_command_that_began(tmp_path):
    """A start is chosen by the command, so its variants are named by their attentions there."""
    began = "linvit compare --budget 15m --out 'my runs' photos"
    folder = study(tmp_path, attentions=("softmax", "linformer:k=16", "uniform"), seeds=(0,), command=began)
    path = folder / "study.json"
    info = json.loads(path.read_text())
    for variant in info["variants"]:
        name = f"{variant['id']}, from backbones (b9349d)"
        info["seeds"][name] = info["seeds"].pop(variant["id"])
        variant["id"] = name
    path.write_text(json.dumps(info))
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    for line in lines:
        if "variant" in line:
            line["variant"] += ", from backbones (b9349d)"
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = advice(folder)
    assert found.command == ("linvit compare -a softmax -a linformer:k=16 --seeds 3 --budget 15m "
                             "--out 'my runs' photos")  # fmt: skip
    assert found.attention_worth.startswith("In one seed, attention was worth ")


def test_a_diverged_variant_is_never_recommended(tmp_path):
    winner = "performer-relu:m=64,projection=none"
    assert advice(study(tmp_path / "ok", seeds=range(5))).variant == winner
    folder = study(tmp_path / "diverged", seeds=range(5), diverged=[(winner, 3)])
    assert advice(folder).variant != winner
    every = study(tmp_path / "all", seeds=(0, 1), diverged=[(name, 1) for name in ATTENTIONS])
    build(every)
    assert advice(every).variant is None
    assert {row["verdict"] for row in rows(every)} == {"diverged"}


def test_the_advice_in_words(tmp_path):
    """The most accurate is also the fastest; it is far ahead; it is alone."""
    folder = study(tmp_path / "ahead", attentions=("softmax", "linformer:k=16"), seeds=range(5), artefacts=False)
    first, second = advice(folder).sentences
    assert first.startswith("Use softmax: ")
    assert "more than any other" in first
    assert "on these 10,000 test images" in second
    assert "more accurate than every other" in second
    alone = advice(study(tmp_path / "alone", attentions=("softmax",), artefacts=False))
    assert (alone.variant, alone.confidence) == ("softmax", "not compared")
    asked = [{"id": name, "label": name, "attention": name} for name in ("softmax", "linformer:k=16")]
    begun = advice(study(tmp_path / "begun", attentions=("softmax",), artefacts=False, variants=asked))
    assert (begun.variant, begun.headline) == (None, "Not finished")
    assert "Only softmax is trained so far" in begun.sentences[0]


def accuracies(folder, table):
    """A study of these test accuracies alone: attention → seed → accuracy; the second is twice as fast."""
    folder.mkdir()
    Records(folder / "records.jsonl").append([
        *(record("test_accuracy", value, attention=name, seed=seed, selection="best", n=10_000)
          for name, seeds in table.items() for seed, value in seeds.items()),
        *(record("inference_vs_softmax", 1.0 + i, attention=name) for i, name in enumerate(table)),
    ])  # fmt: skip
    return folder


def test_nothing_is_claimed_of_what_was_not_compared(tmp_path):
    three, two = {0: 0.970, 1: 0.972, 2: 0.974}, {0: 0.971, 1: 0.971}
    half = advice(accuracies(tmp_path / "half", {"softmax": three, "performer-relu": two}))
    assert half.confidence == "not enough seeds to tell"
    assert "so far" in half.sentences[0]
    apart = advice(accuracies(tmp_path / "apart", {"softmax": three, "performer-relu": {7: 0.9, 8: 0.9, 9: 0.9}}))
    assert apart.confidence == "not enough seeds to tell"
    assert "test" not in apart.reason


def test_a_control_that_is_best_does_not_hide_a_tie(tmp_path):
    """Softmax and a faster one are equal among themselves, though identity is better than both."""
    table = {"softmax": {0: 0.960, 1: 0.962, 2: 0.964}, "performer-relu": {0: 0.961, 1: 0.962, 2: 0.963},
             "identity": {0: 0.990, 1: 0.991, 2: 0.992}}  # fmt: skip
    found = advice(accuracies(tmp_path / "control", table))
    assert found.variant == "performer-relu"
    assert found.sentences[0].startswith("These images hardly need attention: identity, which mixes no tokens, ")
    verdicts = {v.id: v.verdict for v in report.summarise(report.read(tmp_path / "control")).variants}
    assert verdicts["identity"] == "within 1 point"
    del table["performer-relu"]
    assert "only controls" in advice(accuracies(tmp_path / "alone", table)).sentences[2]


def test_a_noisy_control_does_not_blur_the_others(tmp_path):
    table = {"softmax": {0: 0.960, 1: 0.962, 2: 0.964}, "performer-relu": {0: 0.920, 1: 0.9215, 2: 0.9245}}
    quiet = report.summarise(report.read(accuracies(tmp_path / "quiet", table)))
    noisy = report.summarise(report.read(accuracies(tmp_path / "noisy", table | {"uniform": {0: 0.7, 1: 0.9, 2: 0.5}})))
    assert [v.verdict for v in quiet.variants] == [v.verdict for v in noisy.variants[:2]] == ["most accurate", "worse"]


def test_a_pair_without_a_shared_seed_promises_nothing(tmp_path):
    table = {"softmax": {s: 0.97 + 0.001 * s for s in range(6)}, "performer-relu": dict.fromkeys(range(3), 0.97),
             "linformer": dict.fromkeys(range(3, 6), 0.8)}  # fmt: skip
    found = advice(accuracies(tmp_path / "x", table))
    assert found.variant == "softmax"  # as fast as the second would be enough, but who knows of it and the third?
    assert "performer-relu (−0.1 points) is faster, but it is undecided" in found.sentences[2]
    assert "inf" not in " ".join(found.sentences)


def test_noise_leaves_it_open(tmp_path):
    table = {"softmax": {0: 0.90, 1: 0.96, 2: 0.98}, "performer-relu": {0: 0.97, 1: 0.92, 2: 0.94}}
    found = advice(accuracies(tmp_path / "wide", table))
    assert (found.headline, found.confidence) == ("Most accurate so far", "undecided")
    assert found.sentences[2] == "Not even 30 seeds would settle it: they differ too much."


def test_controls_are_never_recommended(tmp_path):
    folder = study(tmp_path, attentions=("softmax", "uniform"), seeds=range(4), artefacts=False)
    records = Records(folder / "records.jsonl")
    records.append(
        record("test_accuracy", 0.999, attention="uniform", seed=s, selection="best", n=360) for s in range(4)
    )
    assert advice(folder).variant == "softmax"
    assert "hardly need attention" in advice(folder).sentences[0]


def test_without_speeds_the_most_accurate_is_recommended(tmp_path):
    folder = study(tmp_path, speeds=False, seeds=range(5))
    build(folder)
    assert advice(folder).variant == "softmax"
    assert "no speed" in advice(folder).reason


def test_everything_a_user_names_is_escaped(hostile):
    page = (hostile / "report.html").read_text(encoding="utf-8")
    assert page.count("</script>") == page.count("<script") == 3
    assert "<img src=x" not in page
    assert "<img src=//" not in page
    assert "<b>bold" not in page
    markdown = (hostile / "report.md").read_text(encoding="utf-8")
    assert not re.search(r"(?<!\\)<(script|img|b)", markdown.split("## Run it again")[0])
    assert markdown.count("```") == 2
    assert rows(hostile)[1]["attention"].startswith("'=cmd()")
    assert rows(hostile)[0]["attention"] == "softmax"


def test_json_cannot_leave_its_script():
    text = script_json({"a": "</script><!--", "b": "\u2028"})
    assert "<" not in text
    assert "\u2028" not in text
    assert json.loads(text) == {"a": "</script><!--", "b": "\u2028"}


def test_missing_artefacts_are_said(copy):
    for file in [*copy.rglob("*.npz"), *copy.rglob("confusion.json"), *copy.rglob("log.jsonl")]:
        file.unlink()
    words = text_of(build(copy))
    assert "files that the records name are missing" in words
    assert "Examples" not in words
    assert "How they learned" not in words


@pytest.mark.parametrize("content", [b"", b"{", b"PK\x03\x04torn", b"[1, 2", b'{"matrix": [["a"]]}', b"\xff\xfe\x00"])
def test_broken_artefacts_are_left_out(copy, content):
    for file in [*copy.rglob("*.npz"), *copy.rglob("confusion.json"), *copy.rglob("log.jsonl")]:
        file.write_bytes(content)
    assert "Results" in text_of(build(copy))


def test_pickles_and_files_outside_the_study_are_not_read(copy, tmp_path):
    np.savez(copy / "examples.npz", images=np.array([{"a": 1}], dtype=object))
    (tmp_path / "secret.json").write_text('{"matrix": [[1, 0], [0, 1]]}')
    Records(copy / "records.jsonl").append(
        [record("confusion", 1, attention="softmax", seed=0, artefact="../secret.json")]
    )
    loaded = report.read(copy)
    assert [r.artefact for r in loaded.of("confusion", attention="softmax", seed=0)][-1] == ""
    assert "Examples" not in text_of(build(copy))


@pytest.mark.parametrize(
    "metric", ["test_accuracy", "parameters", "inference_vs_softmax", "attention_time", "f1", "train_step"]
)
def test_any_metric_may_be_missing_or_not_finite(copy, metric):
    file = copy / "records.jsonl"
    kept = [r for r in Records(file) if r.metric != metric]
    nulls = [record(metric, None, attention=name, seed=0) for name in ATTENTIONS]
    for lines in (kept, kept + nulls):
        file.unlink()
        Records(file).append(lines)
        report.summarise(report.read(copy))
        report.recommend(report.summarise(report.read(copy)))
    build(copy)


def test_the_smallest_study(tmp_path):
    Records(tmp_path / "records.jsonl").append([record("test_accuracy", 0.9, attention="softmax", seed=0)])
    assert "softmax" in text_of(build(tmp_path))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "study.json").write_text("{}")
    assert "Nothing to recommend" in text_of(build(tmp_path / "empty"))


def test_folders_that_hold_no_study(tmp_path):
    with pytest.raises(ValueError, match="holds no study"):
        build(tmp_path)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        build(tmp_path)
    (tmp_path / "study.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        build(tmp_path)


def test_merging(tmp_path):
    first = study(tmp_path / "a", attentions=ATTENTIONS[:2], command="first")
    second = study(tmp_path / "b", attentions=ATTENTIONS[1:], command="second")
    page = build([first, second], tmp_path / "merged")
    assert page == tmp_path / "merged" / "report.html"
    assert [row["attention"] for row in rows(tmp_path / "merged")] == list(ATTENTIONS)
    assert report.read([first, second]).info["commands"] == ["first", "second"]
    with pytest.raises(ValueError, match="different data"):
        report.read([first, study(tmp_path / "c", name="mnist", artefacts=False)])
    with pytest.raises(ValueError, match="not the same"):
        report.read([first, study(tmp_path / "d", classes=("cat", "dog"), artefacts=False)])
    with pytest.raises(ValueError, match="give --out"):
        build([first, second])
    with pytest.raises(ValueError, match="a study of its own"):
        build([first], second)
    with pytest.raises(ValueError, match="a study of its own"):
        build([first, second], first)
    assert build(first, os.path.relpath(first)).samefile(first / "report.html")


def test_other_protocols_are_other_variants(tmp_path):
    """Twenty epochs and one are not six seeds of one variant."""
    folders = [study(tmp_path / name, attentions=("softmax",), artefacts=False) for name in ("long", "short")]
    info = json.loads((folders[1] / "study.json").read_text())
    (folders[1] / "study.json").write_text(json.dumps(info | {"steps": 21}))
    build(folders, tmp_path / "both")
    assert [(row["variant"], row["seeds"]) for row in rows(tmp_path / "both")] == [
        ("softmax (long)", "3"), ("softmax (short)", "3"),
    ]  # fmt: skip


def test_the_same_name_is_not_the_same_data(tmp_path):
    folders = [study(tmp_path / name, artefacts=False) for name in ("v1", "v2")]
    for folder in folders:
        info = json.loads((folder / "study.json").read_text())
        info["dataset"]["identity"] = {"pixels": folder.name}
        (folder / "study.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match="not the same"):
        report.read(folders)


def test_doubts_are_stated(tmp_path):
    folder = study(tmp_path, artefacts=False)
    Records(folder / "records.jsonl").append([
        record("parameters", 400_000, attention="linformer:k=16"),
        record("test_accuracy", 0.97, attention="softmax", seed=9, selection="best", n=360),
    ])  # fmt: skip
    found = " ".join(report.summarise(report.read(folder)).warnings)
    assert "Parameters are not matched: linformer:k=16 has 99%" in found
    assert "same seeds" in found
    assert "versions of linvit" not in found


def test_like_must_be_compared_with_like(tmp_path):
    """Speeds of another version than the accuracies are fair; speeds of two versions are not."""
    folder = study(tmp_path, artefacts=False)
    records = Records(folder / "records.jsonl")
    speeds = [r for r in records if r.metric == "train_step"]
    records.append(replace(r, commit="other", time=r.time + 1) for r in speeds)
    assert "versions of linvit" not in " ".join(report.summarise(report.read(folder)).warnings)
    records.append([replace(speeds[0], time=speeds[0].time + 2)])
    found = " ".join(report.summarise(report.read(folder)).warnings)
    assert f"different versions of linvit: {', '.join(sorted([speeds[0].commit, 'other']))}" in found


def test_many_classes_and_variants(tmp_path):
    names = [f"class {i}" for i in range(60)]
    many = tuple(f"performer-exp:m={8 * i}" for i in range(1, 12))
    folder = study(tmp_path, attentions=many, classes=names, seeds=(0, 1, 2))
    page = build(folder)
    assert page.stat().st_size < 5_000_000
    assert "taken for" in text_of(page)


def test_photos_do_not_make_the_page_large(tmp_path):
    """Noise is the worst there is to store."""
    many = tuple(f"performer-exp:m={8 * i}" for i in range(1, 9))
    page = build(study(tmp_path, attentions=many, side=224, channels=3))
    assert "data:image/jpeg" in page.read_text(encoding="utf-8")
    assert page.stat().st_size < 5_000_000


def test_a_grid_too_fine_to_draw_is_left_out(copy):
    record = next(r for r in report.read(copy).records if r.metric == "illustration")
    with np.load(record.artefact) as file:
        arrays = dict(file) | {"grid": np.array([112, 112])}
    np.savez(record.artefact, **arrays)
    assert "A training image" in text_of(build(copy))


def test_a_mean_is_over_the_seeds(tmp_path):
    folder = study(tmp_path, artefacts=False, speeds=False)
    Records(folder / "records.jsonl").append([
        record("attention_error", (s + 1) / 4, attention="linformer:k=16", seed=s) for s in range(3)
    ])  # fmt: skip
    assert report.summarise(report.read(folder))["linformer:k=16"].get("attention_error") == 0.5


def test_recovery_from_a_start_and_fixed_beside_redrawn_features(tmp_path):
    folder = study(tmp_path / "started", ATTENTIONS[:2])
    usual = charts.build(report.summarise(report.read(folder)), None)["learning"][0]
    assert (usual.title, usual.note) == ("Validation accuracy", "")
    for place in folder.glob("run-*/log.jsonl"):
        place.write_text('{"epoch": 0.0, "step": 0, "validation_accuracy": 0.31}\n' + place.read_text())
    Records(folder / "records.jsonl").append([
        *(record("start_accuracy", 0.31, attention=name, seed=0) for name in ATTENTIONS[:2]),
        record("draw_spread", 0.012, attention=ATTENTIONS[1], seed=0, draws=5),
        record("redrawn_accuracy", 0.876, attention=ATTENTIONS[1], seed=0, draws=5),
    ])  # fmt: skip
    summary = report.summarise(report.read(folder))
    chart = charts.build(summary, None)["learning"][0]
    assert (chart.name, chart.title) == ("learning-validation-accuracy", "Recovery from the start")
    alt.LayerChart.from_dict(chart.page())
    points = next(iter(chart.page()["datasets"].values()))
    assert {row["mean"] for row in points if row["step"] == 0} == {0.31}
    assert max(row["step"] for row in points) == 630
    words = " ".join(text_of(build(folder)).split())
    assert "nothing learned yet" in words
    assert "± 1.2 by the draw alone 87.6 % with features drawn anew" in words.replace("\N{NO-BREAK SPACE}", " ")


def test_variants_are_told_apart_by_what_differs(tmp_path):
    """Two variants of one attention, a printed number and a failed run: each has a row, a label and its own verdict."""
    folder = study(tmp_path, attentions=("softmax",), seeds=range(5), artefacts=False)
    info = json.loads((folder / "study.json").read_text())
    info["variants"] = [
        {"id": "softmax", "label": "lr 0.1", "attention": "softmax"},
        {"id": "slow", "label": "lr 0.2", "attention": "softmax"},
        {"id": "paper", "label": "published", "attention": "softmax", "column": "published"},
    ]
    (folder / "study.json").write_text(json.dumps(info))
    tags = {"attention": "softmax", "selection": "best"}
    Records(folder / "records.jsonl").append([
        *(replace(record("test_accuracy", 0.5, n=360, seed=s, **tags), tags={"variant": "slow", "seed": s, **tags})
          for s in range(4)),
        replace(record("failed", None, **tags), tags={"variant": "slow", "seed": 4, "why": "ended by SIGKILL"}),
        replace(record("test_accuracy", 0.999, n=360), tags={"variant": "paper", **tags}),
    ])  # fmt: skip
    page = build(folder)
    found = {row["variant"]: row for row in rows(folder)}
    assert [row["attention"] for row in found.values()] == ["softmax"] * 3
    assert {name: row["verdict"] for name, row in found.items()} == {
        "softmax": "most accurate", "slow": "worse", "paper": "published",
    }  # fmt: skip
    assert found["paper"]["test_accuracy"] == "0.999"
    assert advice(folder).sentences[0].startswith("Use lr 0.1: ")
    assert "lr 0.2 failed: seed 4: ended by SIGKILL. The same command tries it again." in text_of(page)


def test_maps_share_one_scale():
    """A map that is nearly flat looks nearly flat; one that looks at a tenth of the image is opaque there."""

    def alpha(grid):
        file = io.BytesIO(base64.b64decode(images.heat(grid).partition(",")[2]))
        return np.asarray(Image.open(file))[..., 3]

    flat, peak = np.full((4, 4), 1 / 16), np.zeros((4, 4))
    flat[0, 0], peak[0, 0] = 1.01 / 16, 1.0
    assert alpha(flat).max() < 5
    assert alpha(peak)[0, 0] > 200
    assert alpha(peak)[1:].max() == 0


def test_imports_neither_torch_nor_the_rest_of_linvit():
    code = "import sys, linvit.report; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'linvit')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(re.findall(r"'(.*?)'", found))
    rest = {name for name in loaded if not name.startswith("linvit.report")}
    assert rest == {"linvit", "linvit.records", "linvit.metrics", "linvit.files", "linvit.locks"}


def test_bubbles_have_the_area_of_the_memory(tmp_path):
    def circles(folder):
        chart = charts.pareto(report.summarise(report.read(folder)), "softmax")
        assert chart is not None
        spec = chart.page()
        found = [layer for layer in spec["layer"] if layer["mark"]["type"] == "circle"]
        return found, [row for rows in spec["datasets"].values() for row in rows if "memory" in row], chart.note

    (circle,), rows, note = circles(study(tmp_path))
    memory = [row["memory"] for row in rows]
    assert all(memory)
    size = circle["encoding"]["size"]
    assert size["field"] == "memory"
    assert size["scale"]["domain"] == [0, max(memory)]  # from zero, so that areas are in proportion
    assert size["scale"]["range"][0] == 0
    assert "memory" in note
    records = Records(tmp_path / "records.jsonl")
    others = [record for record in records if record.metric != "peak_memory"]
    records.path.unlink()
    records.append(others)
    none, _, note = circles(tmp_path)
    assert not none
    assert "memory" not in note
