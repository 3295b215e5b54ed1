"""A conversion that names no target finds it, or keeps softmax; and several targets are mixed."""

from __future__ import annotations

import math

import pytest
import torch

from linvit import metrics, report
from linvit.attention import attention_names
from linvit.conversion import candidates, run, target
from linvit.conversion.budget import MAX_DECIDED, MIN_IMAGES, Pace, make_plan, passes
from linvit.conversion.candidates import SAME, TABLE, Candidate, fast_from, forecast_speeds
from linvit.conversion.stages import stage_shares, training_seconds
from linvit.conversion.target import choose_kinds
from linvit.models import model_config
from linvit.pipeline.convert import convert
from linvit.registry import parse
from linvit.schemas.conversion import Conversion
from linvit.training.checkpoint import load

ASKED = {"data": "digits", "max_drop": 0.15, "device": "cpu", "report": False}
NEAR, FAR, SLOW = "linformer:k=13", "performer-relu:m=3", "window:size=3"
LOSES = "no faster attention is shown to lose at most 15\xa0% of the accuracy"
SPEEDS = {NEAR: 1.3, FAR: 1.6, SLOW: 1.01, "identity": 2.0}


@pytest.fixture
def raced(monkeypatch):
    """A race whose result is known, instead of one that depends on the machine."""
    speeds, asked = dict(SPEEDS), []

    def times(c, specs, batch, seconds):
        asked.append(list(specs))
        here = {"image_size": c.config.image_size, "patch_size": c.config.patch_size}
        return [
            c.record("conversion_candidate", speeds[spec], model=spec, limit=spec == "identity", **here)
            for spec in specs
        ]

    monkeypatch.setattr(candidates, "TABLE", (NEAR, FAR, SLOW, "linformer:k=99", "twoscale"))
    monkeypatch.setattr(candidates, "_raced", times)
    monkeypatch.setattr(target, "measure_speeds", lambda c, student: None)
    monkeypatch.setattr(run, "measure_speeds", lambda c, student: None)
    monkeypatch.setattr(target, "speed_of", lambda c, student: 1.2)
    return speeds, asked


def find(done, metric, **tags):
    return [r for r in done.records if r.metric == metric and all(r.tags.get(k) == v for k, v in tags.items())]


@pytest.fixture
def found(raced, teacher, tmp_path):
    events = []
    done = convert(teacher, out=tmp_path / "one", on_event=events.append, **ASKED)
    return done, "\n".join(getattr(event, "text", "") for event in events)


def test_what_is_fast_and_accurate_replaces_softmax(found, teacher):
    done, said = found
    assert "comparing 3 attentions on " in said
    assert "others: at most about " in said
    assert done.chosen.replaced > 0
    assert NEAR in done.chosen.attention
    assert {record.tags["model"] for record in find(done, "conversion_drop", passed=True)} >= {done.chosen.attention}
    (chosen,) = find(done, "conversion_target")
    assert str(chosen.tags["kinds"]).split()[-1] == NEAR
    (kept,) = find(done, "conversion_kept")
    assert (kept.value, kept.tags["why"]) == (0, "")
    refused = {r.tags["model"]: r.tags["refused"] for r in find(done, "conversion_candidate") if r.tags.get("refused")}
    assert list(refused) == ["linformer:k=99", "twoscale"]
    assert refused["twoscale"] == SAME
    evaluated = {r.tags["model"] for r in find(done, "conversion_accuracy", split="candidates")}
    assert evaluated == {"softmax", NEAR, FAR, SLOW}
    assert [problem for record in done.records for problem in metrics.problems(record)] == []
    assert Conversion.read(done.folder / "convert.json").to == ("auto",)


def test_candidates_are_evaluated_as_models(found, teacher, digits):
    """The shared pass over the images gives what each model gives alone."""
    done, _ = found
    student = candidates.make_student(load(teacher), NEAR, "all", 0)
    exact = load(done.folder / "teacher")
    (record,) = find(done, "conversion_agreement", split="candidates", model=NEAR)
    images = digits.validation
    # the images of the search are among those of validation, whose agreement is close
    x = images.batch(slice(None))[0].float() / 255
    x = (x - torch.tensor(digits.mean)) / torch.tensor(digits.std)
    with torch.no_grad():
        same = (student(x).argmax(1) == exact(x).argmax(1)).float().mean().item()
    assert abs(record.value - same) < 4 * math.sqrt(0.25 / record.n)


def test_the_target_is_decided_once(raced, teacher, tmp_path, monkeypatch):
    """An interrupted conversion resumes with the target that it had chosen, whatever a race would say now."""
    best_mix = target.best_mix

    def interrupted(c, speeds):
        raise KeyboardInterrupt

    monkeypatch.setattr(target, "best_mix", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(teacher, out=tmp_path / "one", **ASKED)
    speeds, asked = raced
    speeds[NEAR], races = 0.5, len(asked)
    monkeypatch.setattr(target, "best_mix", best_mix)
    done = convert(teacher, out=tmp_path / "one", **ASKED)
    assert len(asked) == races
    assert NEAR in done.chosen.attention
    assert convert(teacher, out=tmp_path / "one", **ASKED).chosen == done.chosen


@pytest.mark.parametrize(
    ("changes", "why", "headline"),
    [
        ({NEAR: 1.04, FAR: 1.0}, "speed", "no other attention makes this model 5\xa0% faster"),
        ({NEAR: 1.01}, "accuracy", LOSES),
        ({"identity": 1.02, NEAR: 1.01, FAR: 1.01}, "speed", "no other attention makes this model 5\xa0% faster"),
    ],
)
def test_softmax_is_kept_where_nothing_is_better(raced, teacher, tmp_path, changes, why, headline):
    raced[0].update(changes)
    done = convert(teacher, out=tmp_path / "one", **ASKED)
    assert done.chosen.name == "teacher"
    assert find(done, "conversion_kept")[0].tags["why"] == why
    x = torch.randn(7, 1, 8, 8)
    assert torch.equal(done.model(x), load(teacher)(x))
    assert done.test_accuracy() == done.test_accuracy("teacher")
    result = report.build(done.folder, figures=False)
    assert result.headline == f"Keep softmax: at 8\xa0px {headline}"
    verdicts = {row["Attention"]: row["Verdict"] for row in result.table.texts}
    assert verdicts[SLOW] == "too slow"
    assert verdicts["linformer:k=99"] == "not tested"
    assert verdicts["no attention"] == "limit"
    assert any("--image-size" in command or "--to performer-relu:m=3" in command for command in result.suggested)


def test_what_is_not_faster_as_a_whole_is_not_chosen(raced, teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(target, "speed_of", lambda c, student: 1.03)
    done = convert(teacher, out=tmp_path / "one", **ASKED)
    assert (done.chosen.name, find(done, "conversion_kept")[0].tags["why"]) == ("teacher", "mix")


def test_training_is_only_for_what_needs_it(raced, teacher, tmp_path):
    """Within a drop of 15 % a Linformer needs none; Performers that lose more are trained if steps are given."""
    done = convert(teacher, out=tmp_path / "one", steps=6, **ASKED)
    assert [stage.name for stage in done.stages if stage.steps] == []
    raced[0].update({NEAR: 1.01})
    target_of = {"steps": 6, "stages": (2,), "max_drop": 0.2}
    done = convert(teacher, out=tmp_path / "two", **ASKED | target_of)
    trained = [stage.name for stage in done.stages if stage.steps]
    kinds = str(find(done, "conversion_target")[0].tags["kinds"])
    assert trained == (["mix, stage 2"] if kinds else [])
    assert stage_shares((1, 2, 3), auto=True) == {"mix, stage 2": pytest.approx(2 / 3), "stage 3": pytest.approx(1 / 3)}
    assert [training_seconds(text) for text in (None, "3m", "5m", "30m")] == [0, 0, 0, 1500]


def test_the_page_shows_how_the_target_was_chosen(found):
    done, _ = found
    result = report.build(done.folder, figures=False)
    assert result.headline.startswith(f"{done.chosen.replaced} of 4 layers replaced")
    (table,) = [one for one in result.details if one.title == "How the attention was chosen"]
    verdicts = {row["Attention"]: row["Verdict"] for row in table.texts}
    assert verdicts[NEAR] == "chosen"
    assert verdicts[FAR] in ("loses too much", "chosen")
    assert [row["Attention"] for row in table.texts][:2] == ["teacher: softmax", "no attention"]
    page = (done.folder / "report.html").read_text()
    assert "How the attention was chosen" in page
    assert '<details class="more" open>' in page
    assert "## How the attention was chosen" in (done.folder / "report.md").read_text()


def test_several_targets_are_mixed(raced, teacher, tmp_path):
    options = {"to": (NEAR, FAR), "max_drop": 0.15, "stages": (), "out": tmp_path / "two"}
    done = convert(teacher, **ASKED | options)
    assert raced[1] == [[NEAR, FAR, "identity"]]
    names = {str(r.tags["mix"]) for r in find(done, "conversion_accuracy", split="search")}
    assert {"1111", "2222", "0000"} <= names  # from the fastest, which is the second, and from softmax
    assert any(set(name) == {"1", "2"} for name in names)
    assert [stage.name for stage in done.stages[:3]] == ["teacher", "zero-shot", "mix"]
    assert convert(teacher, **ASKED | options).chosen == done.chosen
    assert [problem for record in done.records for problem in metrics.problems(record)] == []


@pytest.mark.parametrize("spec", ["window:size=3", "twoscale:cell=2"])
def test_attentions_that_are_not_linear_can_be_targets_of_max_drop(teacher, tmp_path, spec):
    options = {"to": spec, "stages": (), "out": tmp_path / "one"}
    done = convert(teacher, **ASKED | options)
    assert done.stages[1].replaced == 4
    assert done.test_accuracy() >= 0.8 * done.test_accuracy("teacher")


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        ([("a", 1.5, 0.9), ("b", 1.2, 0.99)], ["a", "b"]),  # b is within the drop; a is faster
        ([("a", 1.5, 0.99), ("b", 1.2, 0.995)], ["a"]),  # a is fastest and within
        ([("a", 1.5, 0.9), ("b", 1.2, 0.95), ("c", 1.1, 0.94)], ["a", "b"]),  # c is worse than b in both
        ([("a", 1.5, 0.6), ("b", 1.4, 0.7), ("c", 1.3, 0.8)], ["b", "c"]),  # the most accurate and the next
        ([("a", 1.5, 0.4), ("b", 1.4, 0.3)], []),  # neither keeps half of the accuracy
        ([("a", 1.5, 0.4), ("b", 1.4, 0.99)], ["b"]),
        ([("a", 1.5, 0.99), ("b", 1.5, 0.99)], ["a"]),
    ],
)
def test_which_attentions_are_mixed(tried, expected):
    candidates = [Candidate(*one) for one in tried]
    assert choose_kinds(candidates, 1.0, 0.015) == expected
    assert choose_kinds(candidates, 1.0, 0.015, most=1) == expected[-1:]


def test_a_plan_takes_the_time_that_there_is():
    have = {"search": 512, "decide": 4096, "validation": 2000, "test": 5000}
    shape = {"tokens": 197, "depth": 12, "candidates": 6, "available": have, "needed": 400}
    plan = make_plan(Pace(0.017), 300.0, **shape)
    assert plan.seconds <= 300
    assert plan.seconds > 200
    assert plan.decide >= 400
    assert plan.search >= MIN_IMAGES["search"]
    few = make_plan(Pace(0.2), 300.0, **shape)  # the fewest images take longer than that
    assert few.seconds > 300
    assert (few.search, few.decide, few.validation, few.test) == (64, 400, 64, 256)
    small = make_plan(Pace(1e-4), 300.0, **shape | {"available": dict.fromkeys(have, 50)})
    assert (small.search, small.decide, small.test) == (50, 50, 50)
    slow_disk = make_plan(Pace(0.017, read=0.03), 300.0, **shape)
    assert slow_disk.seconds <= 300
    assert slow_disk.test < plan.test
    assert make_plan(Pace(0.2), 300.0, **shape, kinds=1).seconds < few.seconds
    assert passes(12, 6)["decide"] == MAX_DECIDED + 2


def test_a_forecast_agrees_with_the_race_and_grows_with_the_work():
    config = model_config(image_size=224, patch_size=16, dim=192, depth=12, heads=3, pool="cls", stem="patch")
    speeds = {"linformer:k=64": 1.04, "agent:n=49": 0.9, "softmax": 1.0}
    here = forecast_speeds(config, speeds, 1.2, 224)
    assert here[""] == pytest.approx(1)
    assert {spec: here[spec] for spec in speeds} == pytest.approx(speeds)
    sides = [forecast_speeds(config, speeds, 1.2, side) for side in (448, 896)]
    assert 1.04 < sides[0]["linformer:k=64"] < sides[1]["linformer:k=64"]
    assert sides[0]["softmax"] == pytest.approx(1)
    assert sides[0][""] > 4  # four times the tokens
    fast = fast_from(config, speeds, 1.2)
    assert set(fast) == {"linformer:k=64", "agent:n=49"}
    assert 224 < fast["linformer:k=64"] < fast["agent:n=49"]
    assert all(side % 16 == 0 for side in fast.values())


def test_the_table_names_attentions():
    names = [parse(text).name for text in TABLE]
    assert set(names) <= set(attention_names("candidate"))
    assert len(TABLE) == len(set(TABLE))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": ("auto", "uniform")}, "--to auto --to uniform: name different attentions"),
        ({"to": ("uniform", "uniform"), "max_drop": 0.1}, "name different attentions, or leave --to out"),
        ({"to": ("uniform", "inline"), "max_drop": None}, "2 attentions in --to are mixed by --max-drop"),
        ({"inherit": "mlp"}, "inherit=mlp needs --to"),
        ({"max_drop": None}, r"max_drop=0.01 cannot be shown with fewer than \d+ images, and digits has 75"),
        ({"to": ()}, "to="),
        ({"to": "twoscale"}, "twoscale is exact softmax at this image size: choose other options, another attention"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(teacher, tmp_path, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        convert(teacher, out=tmp_path / "none", **ASKED | options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_a_model_without_softmax_needs_a_target(teacher, tmp_path):
    options = {"stages": (), "limit": 60, "max_drop": None, "out": tmp_path / "one"}
    done = convert(teacher, to="uniform", **ASKED | options)
    with pytest.raises(ValueError, match="has uniform and no softmax to replace: name an attention with --to"):
        convert(done.folder, out=tmp_path / "two", **ASKED)
