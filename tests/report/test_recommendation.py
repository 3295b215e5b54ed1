"""What is recommended, in words and as changes to the request."""

from __future__ import annotations

import shlex

import pytest
from synthetic import document, record, variant

from linvit import report
from linvit.ledger import open_ledger
from linvit.requests import CompareRequest, ReproduceRequest
from linvit.schemas.experiment import Source
from linvit.schemas.study import Plan

REQUEST = CompareRequest.of(data="photos", budget="30m", dropout=0.1, out="runs/mine")


def made(folder, table, half=None, speeds=None, failed=(), diverged=(), requests=(REQUEST,), **fields):
    """attention → seed → accuracy; `half` the same for half of the training, `speeds` relative to softmax."""
    study = {"epochs": 6.0, "steps": 600, "seeds": {name: sorted(seeds) for name, seeds in table.items()}} | fields
    folder.mkdir(exist_ok=True)
    document(tuple(table), requests=[request.stored() for request in requests], **study).save(folder)
    open_ledger(folder).append(
        [
            *(
                record("test_accuracy", value, attention=name, seed=seed, selection="best", n=10_000)
                for name, seeds in table.items()
                for seed, value in seeds.items()
            ),
            *(record("half_accuracy", value, attention=name, seed=0) for name, value in (half or {}).items()),
            *(record("inference_vs_softmax", value, attention=name) for name, value in (speeds or {}).items()),
            *(record("failed", 1, attention=name, seed=seed, why="no memory") for name, seed in failed),
            *(record("diverged", 7, attention=name, seed=0, layer="head") for name in diverged),
        ]
    )
    return report.study_result(folder)


def near(mean, count=5, spread=0.0005):
    return {seed: mean + spread * (-1) ** seed for seed in range(count)}


def words_of(result):
    (command,) = result.suggested
    return shlex.split(command)


OPEN = {"softmax": {0: 0.900, 1: 0.905, 2: 0.910}, "performer-relu": {0: 0.904, 1: 0.900, 2: 0.903}}
SPEEDS = {"softmax": 1.0, "performer-relu": 2.0, "linformer:k=16": 3.0}
EARLY = {"softmax": near(0.6), "performer-relu": near(0.5)}, {"softmax": 0.545, "performer-relu": 0.45}, SPEEDS


def test_the_fastest_that_equals_the_best_is_recommended(built):
    advice = built.recommendation
    assert advice.variant == "performer-relu:m=64,projection=none"
    assert (built.headline, built.confidence) == ("Recommendation", "within 1 point")
    assert advice.use == "performer-relu:m=64,projection=none, 1.7× as fast as softmax."
    assert "points behind softmax, the most accurate (97." in advice.why
    assert "With 95\N{NO-BREAK SPACE}% confidence, no other variant is better by 0." in advice.why
    assert advice.reason.endswith("Confidence is over seeds and test images.")
    assert built.sentences[0].startswith("Attention contributes 6.8 points (95 %: 6.2 to 7.4): the control, uniform, ")
    assert "highest inference speed relative to softmax" in built.reason
    assert advice.changes is None
    assert advice.next == "Run it on your own images:"
    assert words_of(built)[2:] == ["path/to/images", "-a", "softmax", "-a", advice.variant]


def test_sentences_without_speeds_or_others(tmp_path):
    ahead = made(tmp_path / "ahead", {"softmax": near(0.97), "linformer:k=16": near(0.95)})
    use, why, following = (text for _, text in ahead.answer)
    assert use == "softmax: it is the most accurate."
    assert why.startswith("Test accuracy 97.0\xa0%, the highest of all variants. ")
    assert "on these 10,000 test images" in ahead.reason
    assert "more accurate than every other variant" in why
    assert following.startswith("Run it on your own images")
    assert words_of(ahead) == ["linvit", "compare", "path/to/images"]
    assert "the only variant that is shown" in ahead.reason
    alone = made(tmp_path / "alone", {"softmax": near(0.97)})
    assert (alone.recommendation.variant, alone.confidence) == ("softmax", "not compared")
    begun = made(tmp_path / "begun", {"softmax": near(0.97), "linformer:k=16": {}})
    assert (begun.recommendation.variant, begun.headline) == (None, "Not finished")
    assert "Only softmax has been trained so far" in begun.recommendation.why
    assert begun.suggested == [REQUEST.command()]
    both = made(tmp_path / "both", {"softmax": near(0.971), "performer-relu": near(0.97)})
    assert both.recommendation.variant == "softmax"
    assert "no speed was measured" in both.reason
    (tmp_path / "faster").mkdir()
    table = {"softmax": near(0.95), "performer-relu": near(0.97)}
    faster = made(tmp_path / "faster", table, None, SPEEDS).recommendation
    assert (faster.use, faster.variant) == ("performer-relu, 2× as fast as softmax.", "performer-relu")
    assert "Test accuracy 97.0\xa0% (softmax: 95.0\xa0%), the highest of all variants." in faster.why


def test_diverged_variants_are_never_recommended(tmp_path):
    table = {"softmax": near(0.96), "performer-relu": near(0.97)}
    assert made(tmp_path / "one", table, None, SPEEDS, diverged=["performer-relu"]).recommendation.variant == "softmax"
    every = made(tmp_path / "all", table, None, SPEEDS, diverged=list(table))
    assert every.recommendation.variant is None
    assert every.recommendation.why == "Every variant diverged."
    assert {v.verdict for v in every.summary.variants} == {"diverged"}
    control = made(tmp_path / "control", {"softmax": {}, "uniform": {}}, diverged=["uniform"])
    assert "diverged" not in control.recommendation.why


def test_too_few_seeds(tmp_path):
    """A request decides the start of its variants, and names them by their attentions."""
    started = [
        variant(name, id=f"{name}, from backbones (b9349d)") for name in ("softmax", "linformer:k=16", "uniform")
    ]
    table = {v.id: {0: 0.9 + 0.01 * i} for i, v in enumerate(started[::-1])}
    found = made(tmp_path / "one", table, variants=started)
    assert found.confidence == "too few seeds"
    assert {v.verdict for v in found.summary.variants} == {"most accurate", "too few seeds"}
    assert found.recommendation.changes == {"seeds": 3, "attentions": ("softmax", "linformer:k=16"), "controls": True}
    assert found.suggested == [
        "linvit compare photos --set dropout=0.1 --out runs/mine -a softmax -a linformer:k=16 --budget 30m --seeds 3"
    ]
    assert found.sentences[-1].startswith("In one seed, attention contributed ")
    three, two = {0: 0.970, 1: 0.972, 2: 0.974}, {0: 0.971, 1: 0.971}
    assert made(tmp_path / "half", {"softmax": three, "performer-relu": two}).confidence == "too few seeds"
    apart = made(tmp_path / "apart", {"softmax": three, "performer-relu": {7: 0.9, 8: 0.9, 9: 0.9}})
    assert apart.confidence == "too few seeds"


def test_a_call_from_python_has_no_command(tmp_path):
    found = made(tmp_path, OPEN, None, SPEEDS, requests=())
    assert found.recommendation.changes
    assert not found.suggested
    assert found.answer[-1] == ("Next", "About 17 seeds would resolve it.")
    assert not found.commands


def test_what_was_chosen_for_images_of_ones_own_is_to_be_trained(tmp_path):
    source = Source(data="/home/me/photos", image_size=64)
    table = {"softmax": near(0.97), "performer-relu": near(0.971)}
    request = CompareRequest.of(data="photos", image_size=64, dropout=0.1, budget="30m", seeds=5, out="runs/mine")
    words = words_of(made(tmp_path / "a", table, None, SPEEDS, source=source, requests=[request]))
    assert words[:3] == ["linvit", "train", "photos"]
    assert {"--image-size", "64", "dropout=0.1", "performer-relu", "runs/train-performer-relu"} <= set(words)
    assert not {"--budget", "--seeds", "runs/mine"} & set(words)
    python = made(tmp_path / "b", table, None, SPEEDS, source=source, requests=())
    assert python.answer[-1] == ("Next", "Train it on your images: attention=performer-relu.")


def test_controls_do_not_affect_the_others(tmp_path):
    """Softmax and a faster variant are equal among themselves, though identity is better than both."""
    table = {
        "softmax": {0: 0.960, 1: 0.962, 2: 0.964},
        "performer-relu": {0: 0.961, 1: 0.962, 2: 0.963},
        "identity": {0: 0.990, 1: 0.991, 2: 0.992},
    }
    found = made(tmp_path / "control", table, None, SPEEDS)
    assert found.recommendation.variant == "performer-relu"
    assert "Attention hardly matters on these images: the control, identity, has 99.1" in found.recommendation.why
    assert "no other variant (controls aside) is better by" in found.recommendation.why
    assert found.summary["identity"].verdict == "within 1 point"
    worse = table | {"identity": {0: 0.951, 1: 0.952, 2: 0.953}}
    found = report.study_result(made(tmp_path / "worse", worse, None, SPEEDS).page.parent, margin=0.05)
    assert found.summary["identity"].standing.shown  # but significantly worse
    assert "hardly matters" not in found.recommendation.why
    assert found.sentences[-1].startswith("Attention contributes 1.0 points (95 %: 0.")
    for ratio, said in ((2.5, "It is 2.5× as fast as softmax: no attention can make"), (1.0, "It is no faster than")):
        speeds = {"softmax": 1.0, "performer-relu": 0.9, "identity": ratio}
        assert said in made(tmp_path / f"limit {ratio}", worse, None, speeds).sentences[-1]
    assert "faster than" not in made(tmp_path / "no limit", worse, None, SPEEDS | {"identity": 1.5}).sentences[-1]
    del table["performer-relu"]
    assert "All others are controls" in made(tmp_path / "alone", table).recommendation.why
    quiet = {"softmax": table["softmax"], "performer-relu": {0: 0.920, 1: 0.9215, 2: 0.9245}}
    noisy = made(tmp_path / "noisy", quiet | {"uniform": {0: 0.7, 1: 0.9, 2: 0.5}})
    assert [v.verdict for v in noisy.summary.variants[:2]] == ["most accurate", "worse"]


def test_a_pair_without_a_shared_seed_promises_nothing(tmp_path):
    table = {
        "softmax": {s: 0.97 + 0.001 * s for s in range(6)},
        "performer-relu": dict.fromkeys(range(3), 0.97),
        "linformer": dict.fromkeys(range(3, 6), 0.8),
    }
    found = made(tmp_path, table, None, {"softmax": 1, "performer-relu": 2, "linformer": 3})
    assert found.recommendation.variant == "softmax"  # the second and the third were never compared
    assert (
        "performer-relu (−0.1 points) is faster, but whether it loses 1 point or more is undecided"
        in found.sentences[0]
    )
    assert "inf" not in " ".join([*found.sentences, *(text for _, text in found.answer)])


def test_noise_leaves_it_open(tmp_path):
    table = {"softmax": {0: 0.90, 1: 0.96, 2: 0.98}, "performer-relu": {0: 0.97, 1: 0.92, 2: 0.94}}
    found = made(tmp_path, table, None, SPEEDS)
    assert (found.headline, found.confidence) == ("Most accurate so far", "undecided")
    assert found.recommendation.next == "Even 30 seeds would not resolve it: they differ too much."
    assert found.recommendation.use == "softmax for now: it is the most accurate so far."
    slower = made(tmp_path / "slower", table, None, SPEEDS | {"performer-relu": 0.8})
    assert slower.recommendation.use == (
        "softmax: it is the most accurate so far, and no variant that may be as good is faster."
    )


def test_a_slower_one_that_is_about_to_pass_makes_it_too_early(tmp_path):
    table = {"softmax": near(0.90), "performer-relu": near(0.93)}
    found = made(tmp_path / "a", table, {"softmax": 0.84, "performer-relu": 0.92}, SPEEDS)
    assert found.headline == "Too early to tell"
    assert "softmax gained 5.0 points on performer-relu" in found.recommendation.why
    calm = made(tmp_path / "b", table, {"softmax": 0.885, "performer-relu": 0.92}, SPEEDS)
    assert calm.recommendation.variant == "performer-relu"


def test_the_gain_of_another_tells_where_the_best_was_not_trained_for_half(tmp_path):
    table = {"softmax": near(0.70), "performer-relu": near(0.65)}
    found = made(tmp_path, table, {"performer-relu": 0.45}, SPEEDS)
    assert found.headline == "Too early to tell"
    assert any("change the place of softmax" in text for text in found.limitations)


def test_longer_training_keeps_what_the_budget_chose(tmp_path):
    """A larger budget would also allow a larger model and more seeds."""
    options = {"trunk": [16, 32, 64], "stem": "conv", "batch_size": 64}
    plan = Plan(seconds=1800, image_size=48, seeds=3, options=options)
    words = words_of(made(tmp_path, *EARLY, plan=plan, budget="30m"))
    assert "--budget" not in words
    for flag, value in {"--image-size": "48", "--seeds": "3", "--epochs": "12", "--out": "runs/mine-longer"}.items():
        assert words[words.index(flag) + 1] == value
    assert {"trunk=16,32,64", "batch_size=64", "dropout=0.1"} <= set(words)


def test_a_published_study_is_trained_longer_by_its_scale(tmp_path):
    request = ReproduceRequest.of(names=("001-I",), threads=1)
    found = made(tmp_path / "cpu", *EARLY, requests=[request])
    assert found.suggested == ["linvit reproduce 001-I --threads 1 --scale full"]
    assert not made(tmp_path / "full", *EARLY, requests=[request.replaced(scale="full")]).suggested


@pytest.mark.parametrize("given", [{"steps": 600}, {"epochs": 6}, {"budget": "30m"}])
def test_a_length_is_said_once(tmp_path, given):
    request = CompareRequest.of(data="photos", **given)
    words = words_of(made(tmp_path, *EARLY, steps=2_800_000, requests=[request]))
    said = [word for word in words if word.startswith(("steps=", "epochs=", "--epochs", "--budget"))]
    assert said == (["steps=5600000"] if "steps" in given else ["--epochs"])


def test_longer_training_is_of_all_variants(tmp_path):
    """The last request was for one of them."""
    later = REQUEST.replaced(attentions=("softmax",), seeds=9, controls=False)
    words = words_of(made(tmp_path, *EARLY, requests=[REQUEST, later]))
    assert [words[i + 1] for i, word in enumerate(words) if word == "-a"] == ["softmax", "performer-relu"]


def test_one_that_was_trained_for_longer_is_shown_and_not_chosen(tmp_path):
    table = {"softmax": near(0.90), "performer-relu": near(0.90), "linformer:k=16": near(0.95), "uniform": near(0.88)}
    variants = [variant(name, beside=name.startswith("linformer")) for name in table]
    half = {"softmax": 0.84, "performer-relu": 0.84, "linformer:k=16": 0.94}
    found = made(tmp_path / "calm", table, None, SPEEDS, variants=variants)
    assert found.recommendation.variant == "performer-relu"  # though the Linformer is more accurate, and faster
    assert "contributes 2.0 points" in found.sentences[-1]
    assert found.summary["linformer:k=16"].verdict == "not compared"
    assert found.summary["softmax"].verdict != "worse"
    early = made(tmp_path / "early", table, half, SPEEDS, variants=variants)
    assert early.headline == "Too early to tell"  # by those that were trained as long as each other


def test_looks_are_counted_not_requests(tmp_path):
    first = dict.fromkeys(OPEN, 3)
    once = made(tmp_path / "once", OPEN, None, SPEEDS, requests=[REQUEST, REQUEST], looks=[{"softmax": 3}, first])
    assert "seeds would resolve it" in once.recommendation.next
    assert words_of(once).count("-a") == 2
    noisy = {"softmax": [0.90, 0.91, 0.92] * 2, "performer-relu": [0.915, 0.90, 0.905] * 2}
    more = {name: dict(enumerate(values)) for name, values in noisy.items()}
    twice = made(tmp_path / "twice", more, None, SPEEDS, looks=[first, dict.fromkeys(OPEN, 6)])
    assert "A second look did not resolve it" in twice.recommendation.next
    assert not twice.suggested


def test_a_second_look_that_was_interrupted_is_to_be_finished(tmp_path):
    seeds = {name: list(range(20)) for name in OPEN}
    found = made(tmp_path, OPEN, None, SPEEDS, seeds=seeds, looks=[dict.fromkeys(OPEN, 3)])
    assert "34 runs of this study are missing" in found.recommendation.next
    assert found.suggested == [REQUEST.command()]


def test_what_was_not_timed_is_not_called_faster(tmp_path):
    assert "may be faster, which was not measured" in made(tmp_path / "none", OPEN).recommendation.why
    table = {"softmax": near(0.93), "performer-relu": near(0.931), "linformer:k=16": near(0.87)}
    two = {name: SPEEDS[name] for name in ("softmax", "performer-relu")}
    found = made(tmp_path / "two", table, None, two)
    assert found.recommendation.variant == "performer-relu"  # the third is far behind: its speed does not matter
    assert "highest inference speed" in found.reason


def test_accuracies_are_quoted_over_shared_seeds(tmp_path):
    """Seeds 3 to 11 are harder, and only two variants have them."""
    hard = [0.0] * 3 + [-0.01] * 9
    table = {
        "softmax": {s: 0.956 + d for s, d in enumerate(hard)},
        "performer-relu": {s: 0.9555 + d for s, d in enumerate(hard)},
        "performer-exp": dict.fromkeys(range(3), 0.9535),
    }
    found = made(tmp_path, table, None, {"softmax": 1.0, "performer-relu": 2.0, "performer-exp": 2.0})
    assert found.recommendation.variant == "performer-relu"
    assert "94.8" in found.recommendation.why  # of all twelve, as the best's


def test_a_variant_that_fails_does_not_silence_the_rest(tmp_path):
    table = {"softmax": near(0.93), "performer-relu": near(0.931), "linformer:k=16": {0: 0.77, 1: 0.77}}
    found = made(tmp_path, table, None, SPEEDS, failed=[("linformer:k=16", 2)])
    assert found.recommendation.variant == "performer-relu"
    assert found.headline == "Recommendation"
    assert any("linformer:k=16 failed" in text for text in found.limitations)


def test_variants_with_their_own_options_are_not_named(tmp_path):
    table = {"softmax": OPEN["softmax"], "performer-relu, redraw 100": OPEN["performer-relu"]}
    redrawn = variant("performer-relu", id="performer-relu, redraw 100", label="redrawn", options={"redraw": 100})
    speeds = {name: 1.0 + i for i, name in enumerate(table)}
    found = made(tmp_path, table, None, speeds, variants=[variant("softmax"), redrawn])
    assert set(found.recommendation.changes) == {"seeds"}


def test_the_margin_is_part_of_the_question(tmp_path):
    found = report.study_result(made(tmp_path, OPEN, None, SPEEDS).page.parent, margin=0.004)
    assert found.recommendation.changes is None or found.recommendation.changes["margin"] == 0.004
    with pytest.raises(ValueError, match=r"margin=0\.3 must be"):
        report.study_result(tmp_path, margin=0.3)
