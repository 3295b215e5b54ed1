"""`advise`: the question, what earlier studies showed, and what follows from speeds that are given here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from report import synthetic  # tests/report

from linvit.data import load_data
from linvit.measure import advice, features
from linvit.measure.advice import Workload
from linvit.measure.provenance import machine
from linvit.measure.race import CLOCKS, Times
from linvit.models import VisionTransformer, model_config
from linvit.progress import ignore
from linvit.requests import AdviseRequest
from linvit.site import Site
from linvit.study import advising
from linvit.study.advising import Advice, advise, candidates, choose
from linvit.study.earlier import EarlierStudy, Finding, earlier_studies
from linvit.study.questions import Question, ask
from linvit.training.backbones import shipped
from linvit.training.checkpoint import save_config, save_model
from linvit.training.defaults import ATTENTIONS

SPECS = ["performer-relu:m=8", "linformer:k=4"]
MODEL = {"image_size": 8, "patch_size": 2, "dim": 64, "depth": 2, "heads": 4, "channels": 1}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few small points, a cache of its own, and no studies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))
    few = [
        (Workload(Site(h, 8, n, prefix=1).at(n), b), m) for n, h, b, m in ((10, 1, 1, 8), (26, 2, 2, 16), (50, 1, 3, 8))
    ]
    monkeypatch.setattr(advice, "points", lambda: few)
    monkeypatch.setattr(features, "COUNTS", (8, 16))


def question(about: object, **options: object) -> Question:
    return ask(AdviseRequest.of(about=str(about), **options))


def given_speeds(monkeypatch: pytest.MonkeyPatch, rest: float, layers: dict[str, float]) -> None:
    """Instead of the machine: seconds of a layer by its attention, and of the rest of the model."""

    def seconds(key) -> float:
        if isinstance(key[1], Workload):
            name, tokens = key[0].partition(":")[0], key[1].site.tokens
            return layers[name] * (tokens / 16 if name == "softmax" else 1.0) + 1e-6
        return rest

    def race(calls, *, device, rounds, **_):
        return Times({key: {clock: [seconds(key)] * rounds for clock in CLOCKS} for key in calls}, "cpu", "cpu")

    monkeypatch.setattr(advice, "race", race)
    monkeypatch.setattr("linvit.measure.models.race", race)


def asked(monkeypatch: pytest.MonkeyPatch, tokens: int = 16, **layers: float) -> Advice:
    layers = {name.replace("_", "-"): seconds for name, seconds in layers.items()}
    given_speeds(monkeypatch, 0.010, {"identity": 0.0, "performer-hyp": 0.01, **layers})
    return advise(tokens, attentions=SPECS, size="nano", patch=4, batch=2, fresh=True)


@pytest.mark.parametrize(
    ("speeds", "proven", "chosen"),
    [
        ({"a": 0.7, "b": 0.9}, (), "softmax"),  # slower
        ({"a": 1.04, "b": 0.9}, (), "softmax"),  # a tie
        ({"a": 1.2, "b": 1.5}, (), "b"),
        ({"a": 1.2, "b": 1.5}, ("a",), "a"),  # what was proven goes before what is faster
        ({"a": 1.02, "b": 1.5}, ("a",), "b"),  # but not what is not faster
        ({"a": 0.5}, ("a",), "softmax"),
    ],
)
def test_the_choice(speeds, proven, chosen) -> None:
    assert choose(speeds, proven, warned=lambda spec: "") == chosen


@pytest.mark.parametrize(
    ("speeds", "proven", "chosen"),
    [
        ({"linformer:k=4": 2.0, "efficient": 1.2}, (), "efficient"),  # tests found something against what is faster
        ({"linformer:k=4": 2.0, "efficient": 1.2}, ("linformer:k=4",), "linformer:k=4"),  # but the user's own count
        ({"linformer:k=4": 2.0, "efficient": 0.9}, (), "linformer:k=4"),  # all there is
    ],
)
def test_what_failed_a_test_is_the_last_choice(speeds, proven, chosen) -> None:
    assert choose(speeds, proven) == chosen


def test_stay_with_softmax_where_it_is_fastest(monkeypatch) -> None:
    """Four layers of 1 ms each besides 10 ms; the others take 2 and 3 ms at any length, softmax 1 ms at 16 tokens."""
    found = asked(monkeypatch, softmax=0.001, performer_relu=0.002, linformer=0.003)
    assert found.choice == "softmax"
    assert found.model.share("inference") == pytest.approx(4 / 14, abs=0.01)
    assert found.model.speed("performer-relu:m=8", "inference") == pytest.approx(14 / 18, abs=0.01)
    assert "(performer-relu:m=8: 0.78×)" in found.reason
    assert "28.6" in found.reason
    ((tokens, pixels),) = re.findall(r"from about (\d+) tokens \((\d+) px\) on, performer-relu:m=8 would", found.reason)
    assert int(tokens) > 16
    assert found.command == (
        f"linvit compare path/to/images --image-size {pixels} --size nano --set patch_size=4 -a softmax "
        "-a performer-relu:m=8"
    )  # what the sentence speaks of


def test_try_the_linear_one_where_it_is_faster(monkeypatch) -> None:
    found = asked(monkeypatch, softmax=0.004, performer_relu=0.002, linformer=0.001)
    assert found.choice == "performer-relu:m=8"
    assert "1.44 times as fast" in found.reason  # (10 + 4·4) / (10 + 4·2)
    assert "accuracy must be measured by training" in found.reason
    assert "linformer:k=4 would be 1.86 times as fast, but it did not learn" in found.reason  # (10 + 4·4) / (10 + 4·1)
    assert "-a softmax -a performer-relu:m=8" in found.command
    assert "--image-size 16" in found.command
    layer = found.summary()["attentions"][1]
    assert layer["break_even_tokens"]["inference"] == 16  # the shortest square
    assert layer["break_even_is_at_most"]["inference"] is True


def test_a_class_token_that_is_measured_is_trained(monkeypatch) -> None:
    found = asked(monkeypatch, tokens=17, softmax=0.004, performer_relu=0.002, linformer=0.001)
    assert "--set pool=cls" in found.command


def test_a_tie_is_no_reason_to_change(monkeypatch) -> None:
    assert asked(monkeypatch, softmax=0.001, performer_relu=0.0009, linformer=0.0011).choice == "softmax"


def test_the_summary_is_plain_data(monkeypatch) -> None:
    found = json.loads(json.dumps(asked(monkeypatch, softmax=0.004, performer_relu=0.002, linformer=0.001).summary()))
    assert found["recommendation"] == "performer-relu:m=8"
    assert found["tokens"] == 16
    assert found["layers_measured"] is True
    assert found["limit"]["inference"] == pytest.approx(2.6, abs=0.01)
    assert [row["attention"] for row in found["attentions"]] == SPECS
    assert found["attentions"][1]["speed"]["inference"] == pytest.approx(1.86, abs=0.01)
    assert {row["attention"] for row in found["features"]} == {"performer-hyp"}
    assert "are random" in found["q_and_k"]


@pytest.mark.parametrize(
    ("tokens", "side", "cls"), [(1, 1, 0), (16, 4, 0), (17, 4, 1), (50, 7, 1), (23, 5, 0), (19, 4, 1)]
)
def test_a_number_of_tokens_is_a_grid_and_a_class_token(tokens: int, side: int, cls: int) -> None:
    found = question(tokens, patch=4, size="nano")
    assert (found.tokens, found.config.image_size, found.config.prefix_tokens) == (side**2 + cls, 4 * side, cls)
    assert (f"nearest to {tokens}" in found.text) is (found.tokens != tokens)
    assert found.pixels(found.tokens) == 4 * side
    assert found.pixels(found.tokens + 1) == 4 * (side + 1)


def test_images_are_asked_about_as_compare_would_train_on_them() -> None:
    found = question("digits")
    assert (found.config.stem, found.tokens, found.data, found.trained) == ("conv", 16, "digits", None)
    patches = question("digits", patch=2, image_size=16)
    assert (patches.config.stem, patches.tokens) == ("patch", 64)
    request = patches.comparison("performer-relu:m=8")
    assert (request.data, request.image_size, request.attentions) == ("digits", 16, ("softmax", "performer-relu:m=8"))
    assert request.options == {"stem": "patch", "patch_size": 2}


def test_a_model_is_asked_about_with_its_own_q_and_k(monkeypatch) -> None:
    folder = shipped()["softmax"]
    found = question(folder)
    assert found.trained == folder
    larger = question(folder, image_size=2 * found.config.image_size)
    assert larger.tokens - larger.config.prefix_tokens == 4 * (found.tokens - found.config.prefix_tokens)
    monkeypatch.setattr(features, "COUNTS", (8, 256))
    kept = []
    for images, words in ((None, "noise"), ("digits", "2 images of digits")):
        request = AdviseRequest.of(about=str(folder), data=images)
        errors, origin = advising._errors(ask(request), ["performer-hyp"], request, lambda key, make: make(), ignore)
        assert f"of the softmax backbone of linvit for {words}" in origin
        kept.append(features.control(errors))
    assert kept[0] != kept[1]  # other images, other q and k


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"about": "0"}, "N=0 must be at least 1"),
        ({"about": "-4"}, "N=-4 must be at least 1"),
        ({"about": "64", "image_size": 32}, "image_size=32 has no effect"),
        ({"about": "64", "patch": 0}, "patch=0 must be"),
        ({"about": "64", "size": "huge"}, "unknown size 'huge'"),
        ({"about": "digits", "patch": 3}, "patch_size=3 does not divide image_size=8"),
        ({"about": "digits", "data": "digits"}, "images already"),
        ({"about": "nowhere/near/here"}, "no such file or folder"),
        ({"about": "empty"}, "images"),
        ({"about": str(shipped()["softmax"]), "size": "nano"}, "size=nano has no effect"),
    ],
)
def test_bad_questions(given, words, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=words):
        question(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"task": "sleep"}, "task=sleep"),
        ({"batch": 0}, "batch=0 must be"),
        ({"target": 1.0}, "target=1.0 must be less than 1"),
        ({"sigma": 0.0}, "sigma=0.0 must be more than 0"),
        ({"sigma": 1e200}, r"sigma=1e\+200 is too large"),
        ({"batch": 10**9}, r"batch=1000000000: a training step needs about .* TiB, but .* are free"),
        ({"runs": "nowhere"}, "runs=nowhere is not a folder"),
        ({"attentions": ["softmax", "identity"]}, "no attention to compare"),
        ({"attentions": ["performer-nothing"]}, "unknown attention"),
        ({"attentions": ["linformer:k=65"]}, "k=65 is more than tokens=64"),
    ],
)
def test_bad_options_are_errors_before_anything_is_measured(monkeypatch, given, words) -> None:
    monkeypatch.setattr(advice, "race", lambda *given, **options: pytest.fail("measured"))
    with pytest.raises(ValueError, match=words):
        advise(64, **given)


def test_earlier_studies_are_found_and_another_machine_is_named(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "below" / "there"
    synthetic.study(here, name="photos", machine=machine(), model=MODEL)
    synthetic.study(there, name="digits", model=MODEL)
    for part in ("smoke/fair", "cpu/literal"):  # of a reproduction
        synthetic.study(tmp_path / "reproduce" / "000" / part, name="digits", model=MODEL)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "study.json").write_text("{")
    with pytest.warns(UserWarning, match="broken is left out"):
        found = earlier_studies(tmp_path, question("digits"))
    assert [study.folder for study in found] == [there, here]  # of the same data first
    assert [study.tokens for study in found] == [16, 16]
    assert found[0].machine == "Example CPU, 2 cores, cpu"
    assert found[1].machine == ""
    by_name = {finding.attention.partition(":")[0]: finding for finding in found[0].findings}
    assert by_name["performer-relu"].shown
    assert by_name["performer-relu"].speeds["inference"] > 1
    assert not by_name["linformer"].shown


def test_reproductions_are_found_from_above_and_from_below(tmp_path: Path) -> None:
    deep = tmp_path / "reproduce" / "000" / "cpu" / "fair"
    synthetic.study(deep, name="digits", model=MODEL)
    for runs in (tmp_path, tmp_path / "reproduce", deep.parent, deep):
        assert [study.folder for study in earlier_studies(runs, question("digits"))] == [deep]


def remember(monkeypatch: pytest.MonkeyPatch, finding: Finding) -> None:
    """One earlier study, of 16 tokens, that found this."""
    study = EarlierStudy(Path("runs/mine"), "digits", 16, "", 0.01, (finding,))
    monkeypatch.setattr(advising, "earlier_studies", lambda runs, question: [study])


def test_what_a_similar_study_showed_is_recommended_before_what_is_faster(monkeypatch) -> None:
    remember(monkeypatch, Finding("linformer:k=4", 0.98, "within 1 point", True, False, {"inference": 1.2}))
    found = asked(monkeypatch, softmax=0.004, performer_relu=0.001, linformer=0.002)
    assert found.choice == "linformer:k=4"
    assert "runs/mine showed that it loses less than 1 point on digits (16 tokens)" in found.reason
    far = asked(monkeypatch, tokens=64, softmax=0.004, performer_relu=0.001, linformer=0.002)  # four times as many
    assert far.choice == "performer-relu:m=8"


def test_what_a_similar_study_showed_to_be_bad_is_not_recommended(monkeypatch) -> None:
    remember(monkeypatch, Finding("linformer:k=4", 0.91, "worse", False, True, {"inference": 1.2}))
    assert asked(monkeypatch, softmax=0.004, performer_relu=0.002, linformer=0.001).choice == "performer-relu:m=8"
    found = asked(monkeypatch, softmax=0.004, performer_relu=0.005, linformer=0.001)
    assert found.choice == "softmax"
    assert "in runs/mine it lost more than 1 point on digits, or diverged" in found.reason


def test_more_tokens_than_are_timed_are_refused_at_once(monkeypatch) -> None:
    monkeypatch.setattr(advice, "race", lambda *given, **options: pytest.fail("measured"))
    with pytest.raises(ValueError, match=r"N=6,400 tokens are too many: .*`linvit bench speed --tokens 6400`"):
        advise(6400, size="nano", patch=4)
    with pytest.raises(ValueError, match=r"N=99,999,999,999 tokens are too many: forecasts end at 4,226$"):
        advise(99_999_999_999)
    with pytest.raises(ValueError, match="N=5,184 tokens are too many"):
        advise("digits", patch=1, image_size=72)


def test_a_model_says_what_it_is_and_has_its_own_attention(tmp_path: Path) -> None:
    config = model_config(**MODEL | {"dim": 16, "mlp_dim": 16}, attention="performer-relu:m=4,dwc=3")
    save_config(tmp_path / "mine" / "best", config, load_data("digits"))
    save_model(tmp_path / "mine" / "best", VisionTransformer(config))
    found = question(tmp_path / "mine")
    assert found.text == "model mine (performer-relu:m=4,dwc=3, trained on digits) at 8 px"
    assert candidates(["linformer:k=4"], found) == ["performer-relu:m=4,dwc=3", "linformer:k=4"]
    assert found.comparison("linformer:k=4").start == str(tmp_path / "mine")


def test_random_q_and_k_of_long_sequences_are_shortened(monkeypatch) -> None:
    monkeypatch.setattr(features, "MAX_TOKENS", 30)
    request = AdviseRequest.of(about="36", patch=4, size="nano")
    _, origin = advising._errors(ask(request), ["performer-hyp"], request, lambda key, make: make(), ignore)
    assert origin == "are random, from N(0, σ²) with σ = 1, 30 tokens"


def test_attentions_without_features_have_none_to_count() -> None:
    found = features.estimators(["performer-exp:projection=none", "performer-exp:m=8"])
    assert found == ["performer-exp", "performer-hyp"]


def test_what_a_model_cannot_have_is_left_out_unless_it_was_asked_for() -> None:
    with pytest.warns(UserWarning, match="linformer:k=16 is left out"):
        found = candidates((), question(9, patch=4, size="nano"))
    assert found == [spec for spec in ATTENTIONS if spec not in ("softmax", "linformer:k=16")]
