from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from report import synthetic  # tests/report

from linvit.data import load_data
from linvit.measure import advice, features
from linvit.measure.advice import Shape
from linvit.measure.provenance import machine
from linvit.measure.race import CLOCKS, Times
from linvit.models import VisionTransformer, model_config
from linvit.progress import ignore
from linvit.study import advising
from linvit.study.advising import Advice, Earlier, Trial, advise, ask, choose, command, studies
from linvit.train.backbones import shipped
from linvit.train.checkpoint import save_config, save_model

SPECS = ["performer-relu:m=8", "linformer:k=4"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    """Few small points, a cache of its own, and no studies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))
    few = [(Shape(n, h, 8, b, prefix=1), m) for n, h, b, m in ((10, 1, 1, 8), (26, 2, 2, 16), (50, 1, 3, 8))]
    monkeypatch.setattr(advice, "points", lambda: few)
    monkeypatch.setattr(features, "COUNTS", (8, 16))


class Timed:
    """Instead of the machine: seconds of a layer by its attention, and of the rest of the model."""

    def __init__(self, monkeypatch, rest: float, **layers: float):
        self.layers = {"identity": 0.0, **layers}
        monkeypatch.setattr(advice, "race", self.race)
        self.rest = rest

    def race(self, calls, *, device, rounds):
        def seconds(key):
            if isinstance(key, str):
                return self.rest
            name, tokens = key[0].partition(":")[0], key[1].tokens
            return self.layers[name] * (tokens / 16 if name == "softmax" else 1.0) + 1e-6

        return Times({key: {clock: [seconds(key)] * rounds for clock in CLOCKS} for key in calls}, "cpu", "cpu")


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
def test_the_choice(speeds, proven, chosen):
    assert choose(speeds, proven) == chosen


def asked(monkeypatch, tokens=16, **layers) -> Advice:
    layers = {name.replace("_", "-"): seconds for name, seconds in layers.items()}
    Timed(monkeypatch, 0.010, **{"performer-hyp": 0.01, **layers})
    return advise(tokens, attentions=SPECS, size="nano", patch=4, batch=2)


def test_stay_with_softmax_where_it_is_fastest(monkeypatch):
    """4 layers of 1 ms each beside 10 ms; the others take 2 and 3 ms at any length, softmax 1 ms at 16 tokens."""
    found = asked(monkeypatch, softmax=0.001, performer_relu=0.002, linformer=0.003)
    assert found.choice == "softmax"
    assert found.model.share("inference") == pytest.approx(4 / 14, abs=0.01)
    assert found.model.speed("performer-relu:m=8", "inference") == pytest.approx(14 / 18, abs=0.01)
    assert "performer-relu:m=8 is at 0.78×" in found.reason
    assert "28.6" in found.reason
    ((tokens, pixels),) = re.findall(r"from about (\d+) tokens \((\d+) px\) performer-relu:m=8 would be", found.reason)
    assert int(tokens) > 16
    assert found.command == (f"linvit compare path/to/images --size nano --set patch_size=4 --image-size {pixels} "
                             "-a softmax -a performer-relu:m=8")  # what the sentence speaks of  # fmt: skip


def test_try_the_linear_one_where_it_is_faster(monkeypatch):
    found = asked(monkeypatch, softmax=0.004, performer_relu=0.002, linformer=0.001)
    assert found.choice == "linformer:k=4"
    assert "1.86 times as fast" in found.reason  # (10 + 4·4) / (10 + 4·1)
    assert "only training tells" in found.reason
    assert found.command == ("linvit compare path/to/images --size nano --set patch_size=4 --image-size 16 "
                             "-a softmax -a linformer:k=4")  # fmt: skip
    layer = found.summary()["attentions"][1]
    assert layer["break_even_tokens"]["inference"] == 16  # the shortest square
    assert layer["break_even_is_at_most"]["inference"] is True


def test_a_class_token_that_is_measured_is_trained(monkeypatch):
    found = asked(monkeypatch, tokens=17, softmax=0.004, performer_relu=0.002, linformer=0.001)
    assert "--set pool=cls" in found.command


def test_a_tie_is_no_reason_to_change(monkeypatch):
    found = asked(monkeypatch, softmax=0.001, performer_relu=0.0009, linformer=0.0011)
    assert found.choice == "softmax"


def test_the_summary_is_plain_data(monkeypatch):
    found = asked(monkeypatch, softmax=0.004, performer_relu=0.002, linformer=0.001)
    said = json.loads(json.dumps(found.summary()))
    assert said["recommendation"] == "linformer:k=4"
    assert said["tokens"] == 16
    assert said["layers_measured"] is True
    assert said["limit"]["inference"] == pytest.approx(2.6, abs=0.01)
    assert [row["attention"] for row in said["attentions"]] == SPECS
    assert said["attentions"][1]["speed"]["inference"] == pytest.approx(1.86, abs=0.01)
    assert {row["attention"] for row in said["features"]} == {"performer-hyp"}
    assert "modelled" in said["q_and_k"]


@pytest.mark.parametrize(
    ("tokens", "side", "cls"), [(1, 1, 0), (16, 4, 0), (17, 4, 1), (50, 7, 1), (23, 5, 0), (19, 4, 1)]
)
def test_a_number_of_tokens_is_a_grid_and_a_class_token(tokens, side, cls):
    found = ask(tokens, patch=4, size="nano")
    assert (found.tokens, found.config.image_size, found.config.prefix_tokens) == (side**2 + cls, 4 * side, cls)
    assert (f"nearest to {tokens}" in found.text) is (found.tokens != tokens)
    assert found.pixels(found.tokens) == 4 * side
    assert found.pixels(found.tokens + 1) == 4 * (side + 1)


def test_images_are_asked_about_as_compare_would_train_on_them():
    found = ask("digits")
    assert (found.config.stem, found.tokens, found.data, found.trained) == ("conv", 16, "digits", None)
    patches = ask("digits", patch=2, image_size=16)
    assert (patches.config.stem, patches.tokens) == ("patch", 64)
    line = command(patches, "performer-relu:m=8")
    assert line == ("linvit compare digits --set stem=patch --set patch_size=2 --image-size 16 -a softmax "
                    "-a performer-relu:m=8")  # fmt: skip


def test_a_model_is_asked_about_with_its_own_q_and_k(monkeypatch):
    folder = shipped()["softmax"]
    found = ask(str(folder))
    assert found.trained == folder
    larger = ask(folder, image_size=2 * found.config.image_size)
    assert larger.tokens - larger.config.prefix_tokens == 4 * (found.tokens - found.config.prefix_tokens)
    monkeypatch.setattr(features, "COUNTS", (8, 256))
    kept = []
    ours = "of the shipped softmax backbone for "
    for data, words in ((None, ours + "noise"), ("digits", ours + "2 images of digits")):
        question = ask(folder, data=data)
        errors, origin = advising._errors(question, ["performer-hyp"], 1.0, None, lambda key, make: make(), ignore)
        assert words in origin
        kept.append(features.control(errors))
    assert kept[0] != kept[1]  # other images, other q and k


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"about": 0}, "N=0 must be at least 1"),
        ({"about": "-4"}, "N=-4 must be at least 1"),
        ({"about": 64, "image_size": 32}, "image_size=32 has no effect"),
        ({"about": 64, "patch": 0}, "patch=0 must be at least 1"),
        ({"about": 64, "size": "huge"}, "unknown size 'huge'"),
        ({"about": "digits", "patch": 3}, "patch_size=3 does not divide image_size=8"),
        ({"about": "digits", "data": "digits"}, "images already"),
        ({"about": "nowhere/near/here"}, "no such file or folder"),
        ({"about": str(shipped()["softmax"]), "size": "nano"}, "size=nano has no effect"),
    ],
)
def test_bad_questions(given, words):
    with pytest.raises(ValueError, match=words):
        ask(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"task": "sleep"}, "task=sleep is not one of"),
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"target": 1.0}, "error=1.0 must be between 0 and 1"),
        ({"sigma": 0.0}, "sigma=0.0 must be a positive number"),
        ({"sigma": 1e200}, r"sigma=1e\+200 is too large"),
        ({"batch": 10**9}, r"batch=1000000000: a training step would take about .* TiB, of .* free"),
        ({"runs": "nowhere"}, "runs=nowhere is not a folder"),
        ({"attentions": ["softmax", "identity"]}, "no attention to compare"),
        ({"attentions": ["performer-nothing"]}, "unknown attention"),
        ({"attentions": ["linformer:k=65"]}, "k=65 is more than the 64 tokens"),
    ],
)
def test_bad_options_are_errors_before_anything_is_measured(monkeypatch, given, words):
    monkeypatch.setattr(advice, "measure", lambda *given: pytest.fail("measured"))
    with pytest.raises(ValueError, match=words):
        advise(64, **given)


def test_an_empty_folder_is_no_data(tmp_path):
    with pytest.raises(ValueError, match="images"):
        ask(str(tmp_path))


def test_earlier_studies_are_found_and_another_machine_is_named(tmp_path):
    model = {"image_size": 8, "patch_size": 2, "dim": 64, "depth": 2, "heads": 4, "channels": 1}
    here, there = tmp_path / "here", tmp_path / "below" / "there"
    synthetic.study(here, name="photos", machine=machine(), model=model)
    synthetic.study(there, name="digits", model=model)
    for part in ("smoke/fair", "cpu/literal"):  # of a reproduction
        synthetic.study(tmp_path / "reproduce" / "000" / part, name="digits", model=model)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "study.json").write_text("{")
    with pytest.warns(UserWarning, match="broken is left out"):
        found = studies(tmp_path, ask("digits"))
    assert [study.folder for study in found] == [there, here]  # of the same data first
    assert [study.tokens for study in found] == [16, 16]
    assert found[0].machine == "Example CPU, 2 cores, cpu"
    assert found[1].machine == ""
    relu = next(trial for trial in found[0].trials if trial.attention.startswith("performer-relu"))
    assert relu.shown
    assert relu.speeds["inference"] > 1
    assert not next(trial for trial in found[0].trials if trial.attention == "linformer:k=16").shown


def test_reproductions_are_found_from_above_and_from_below(tmp_path):
    model = {"image_size": 8, "patch_size": 2, "dim": 64, "depth": 2, "heads": 4, "channels": 1}
    deep = tmp_path / "reproduce" / "000" / "cpu" / "fair"
    synthetic.study(deep, name="digits", model=model)
    for runs in (tmp_path, tmp_path / "reproduce", deep.parent, deep):
        assert [study.folder for study in studies(runs, ask("digits"))] == [deep]


def remembers(monkeypatch, trial: Trial) -> None:
    """One earlier study, of 16 tokens, that found this."""
    study = Earlier(Path("runs/mine"), "digits", 16, "", 0.01, (trial,))
    monkeypatch.setattr(advising, "studies", lambda runs, question: [study])


def test_what_a_similar_study_showed_is_recommended_before_what_is_faster(monkeypatch):
    remembers(monkeypatch, Trial("performer-relu:m=8", 0.98, "within 1 point", True, False, {"inference": 1.2}))
    found = asked(monkeypatch, softmax=0.004, performer_relu=0.002, linformer=0.001)
    assert found.choice == "performer-relu:m=8"
    assert "was shown in runs/mine to lose less than 1 point on digits (16 tokens)" in found.reason
    far = asked(monkeypatch, tokens=64, softmax=0.004, performer_relu=0.002, linformer=0.001)  # four times as many
    assert far.choice == "linformer:k=4"


def test_what_a_similar_study_showed_to_be_bad_is_not_recommended(monkeypatch):
    remembers(monkeypatch, Trial("linformer:k=4", 0.91, "worse", False, True, {"inference": 1.2}))
    assert asked(monkeypatch, softmax=0.004, performer_relu=0.002, linformer=0.001).choice == "performer-relu:m=8"


def test_softmax_stays_where_what_is_faster_was_shown_to_be_bad(monkeypatch):
    remembers(monkeypatch, Trial("linformer:k=4", 0.91, "worse", False, True, {"inference": 1.2}))
    found = asked(monkeypatch, softmax=0.004, performer_relu=0.005, linformer=0.001)
    assert found.choice == "softmax"
    assert "in runs/mine it lost more than 1 point on digits, or diverged" in found.reason


def test_more_tokens_than_are_timed_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(advice, "race", lambda *given, **options: pytest.fail("measured"))
    with pytest.raises(ValueError, match=r"N=6,400 tokens are too many: .*`linvit bench speed --tokens 6400`"):
        advise(6400, size="nano", patch=4)
    with pytest.raises(ValueError, match=r"N=99,999,999,999 tokens are too many: forecasts here end at 4,226$"):
        advise(99_999_999_999)
    with pytest.raises(ValueError, match="N=5,184 tokens are too many"):
        advise("digits", patch=1, image_size=72)


def test_a_model_says_what_it_is_and_has_its_own_attention(tmp_path):
    config = model_config(image_size=8, channels=1, patch_size=2, dim=16, depth=2, heads=2, mlp_dim=16,
                          attention="performer-relu:m=4,dwc=3")  # fmt: skip
    save_config(tmp_path / "mine" / "best", config, load_data("digits"))
    save_model(tmp_path / "mine" / "best", VisionTransformer(config))
    question = ask(tmp_path / "mine")
    assert question.text == "model mine (performer-relu:m=4,dwc=3, trained on digits) at 8 px"
    assert advising._candidates(["linformer:k=4"], question) == ["performer-relu:m=4,dwc=3", "linformer:k=4"]
    assert "\n" not in command(question, "linformer:k=4")


def test_what_the_errors_are_of_is_said(monkeypatch):
    """More tokens than are looked at."""
    monkeypatch.setattr(features, "LONGEST", 30)
    _, origin = advising._errors(ask(36, patch=4, size="nano"), ["performer-hyp"], 1.0, None,
                                 lambda key, make: make(), ignore)  # fmt: skip
    assert origin == "modelled: drawn from N(0, σ²) with σ = 1, 30 tokens"


def test_attentions_without_features_have_none_to_count(monkeypatch):
    assert features.estimators(["performer-exp:projection=none", "performer-exp:m=8"]) == [
        "performer-exp",
        "performer-hyp",
    ]


def test_what_a_model_cannot_have_is_left_out_unless_it_was_asked_for():
    with pytest.warns(UserWarning, match="linformer:k=16 is left out"):
        found = advising._candidates(None, ask(9, patch=4, size="nano"))
    assert found == [spec for spec in advising.ATTENTIONS if spec not in ("softmax", "linformer:k=16")]
