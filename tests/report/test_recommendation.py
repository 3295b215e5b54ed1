"""What is recommended when runs are missing, speeds unknown, seeds unequal, or the order still changes."""

from __future__ import annotations

import json
import shlex

import pytest
from synthetic import record

from linvit import report
from linvit.records import Records

COMMAND = "linvit compare --budget 30m --set dropout=0.1 --out runs/mine photos"


def made(folder, table, half=None, speeds=None, failed=(), diverged=(), **info):
    """attention → seed → accuracy; `half` the same for half of the training, `speeds` beside softmax."""
    folder.mkdir(exist_ok=True)
    found = {
        "format": 3, "commands": [COMMAND], "dataset": {"name": "photos", "classes": ["a", "b"]}, "epochs": 6.0,
        "variants": [{"id": name, "label": name, "attention": name} for name in table],
        "seeds": {name: sorted(seeds) for name, seeds in table.items()}, "steps": 600, **info,
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(found))
    Records(folder / "records.jsonl").append([
        *(record("test_accuracy", value, attention=name, seed=seed, selection="best", n=10_000)
          for name, seeds in table.items() for seed, value in seeds.items()),
        *(record("half_accuracy", value, attention=name, seed=0) for name, value in (half or {}).items()),
        *(record("inference_vs_softmax", value, attention=name) for name, value in (speeds or {}).items()),
        *(record("failed", 1, attention=name, seed=seed, why="no memory") for name, seed in failed),
        *(record("diverged", 7, attention=name, seed=0, layer="head") for name in diverged),
    ])  # fmt: skip
    summary = report.summarise(report.read(folder))
    return report.recommend(summary), summary


def near(mean, count=5, spread=0.0005):
    return {seed: mean + spread * (-1) ** seed for seed in range(count)}


OPEN = {"softmax": {0: 0.900, 1: 0.905, 2: 0.910}, "performer-relu": {0: 0.904, 1: 0.900, 2: 0.903}}
SPEEDS = {"softmax": 1.0, "performer-relu": 2.0, "linformer:k=16": 3.0}


def test_a_slower_one_that_is_about_to_pass_makes_it_too_early(tmp_path):
    table = {"softmax": near(0.90), "performer-relu": near(0.93)}
    found, _ = made(tmp_path / "a", table, {"softmax": 0.84, "performer-relu": 0.92}, SPEEDS)
    assert found.headline == "Too early to tell"
    assert "softmax gained 5.0 points on performer-relu" in found.sentences[0]
    calm, _ = made(tmp_path / "b", table, {"softmax": 0.885, "performer-relu": 0.92}, SPEEDS)
    assert calm.variant == "performer-relu"


def test_the_gain_of_another_tells_where_the_best_was_not_trained_for_half(tmp_path):
    table = {"softmax": near(0.70), "performer-relu": near(0.65)}
    found, summary = made(tmp_path, table, {"performer-relu": 0.45}, SPEEDS)
    assert found.headline == "Too early to tell"
    assert any("change the place of softmax" in text for text in summary.warnings)


def test_longer_training_keeps_what_the_budget_chose(tmp_path):
    """A larger budget would buy a larger model and more seeds, and leave training as short."""
    plan = {"image_size": 48, "seeds": 3, "options": {"trunk": [16, 32, 64], "batch_size": 64}}
    table = {"softmax": near(0.6), "performer-relu": near(0.5)}
    found, _ = made(tmp_path, table, {"softmax": 0.545, "performer-relu": 0.45}, SPEEDS, plan=plan, budget="30m")
    words = shlex.split(found.command)
    assert "--budget" not in words
    for flag, value in {"--image-size": "48", "--seeds": "3", "--epochs": "12", "--out": "runs/mine-longer"}.items():
        assert words[words.index(flag) + 1] == value
    assert {"trunk=16,32,64", "batch_size=64", "dropout=0.1"} <= set(words)


def test_a_published_study_is_trained_longer_by_its_scale(tmp_path):
    table = {"softmax": near(0.6), "performer-relu": near(0.5)}
    words = ["linvit reproduce --scale cpu --threads 1 001-I"]
    found, _ = made(tmp_path, table, {"softmax": 0.545, "performer-relu": 0.45}, SPEEDS, commands=words)
    assert found.command == "linvit reproduce --scale full --threads 1 001-I"


def test_one_that_was_trained_for_longer_is_shown_and_not_chosen(tmp_path):
    table = {"softmax": near(0.90), "performer-relu": near(0.90), "linformer:k=16": near(0.95), "uniform": near(0.88)}
    variants = [{"id": name, "attention": name, "beside": name.startswith("linformer")} for name in table]
    half = {"softmax": 0.84, "performer-relu": 0.84, "linformer:k=16": 0.94}
    found, summary = made(tmp_path / "calm", table, None, SPEEDS, variants=variants)
    assert found.variant == "performer-relu"  # though the Linformer is more accurate, and faster
    assert "worth 2.0 points" in found.attention_worth
    assert summary["linformer:k=16"].verdict == "not compared"
    assert summary["softmax"].verdict != "worse"
    early, _ = made(tmp_path / "early", table, half, SPEEDS, variants=variants)
    assert early.headline == "Too early to tell"  # by those that were trained as long as each other


@pytest.mark.parametrize("given", ["--set steps=600", "--set epochs=6 --epochs 6"])
def test_a_length_is_said_once(tmp_path, given):
    table = {"softmax": near(0.6), "performer-relu": near(0.5)}
    found, _ = made(tmp_path, table, {"softmax": 0.545, "performer-relu": 0.45}, SPEEDS, steps=2_800_000,
                    commands=[f"linvit compare {given} photos"])  # fmt: skip
    said = [word for word in shlex.split(found.command) if word.startswith(("steps=", "epochs=", "--epochs"))]
    assert said == (["steps=5600000"] if "steps" in given else ["--epochs"])


def test_looks_are_counted_not_commands(tmp_path):
    first = dict.fromkeys(OPEN, 3)
    once, _ = made(tmp_path / "once", OPEN, None, SPEEDS, commands=[COMMAND, COMMAND], looks=[{"softmax": 3}, first])
    assert "seeds would settle it" in once.sentences[-1]
    assert once.command.count("-a ") == 2
    noisy = {"softmax": [0.90, 0.91, 0.92] * 2, "performer-relu": [0.915, 0.90, 0.905] * 2}
    more = {name: dict(enumerate(values)) for name, values in noisy.items()}
    twice, _ = made(tmp_path / "twice", more, None, SPEEDS, commands=[], looks=[first, dict.fromkeys(OPEN, 6)])
    assert "After a second look" in twice.sentences[-1]
    assert not twice.command


def test_a_second_look_that_was_interrupted_is_to_be_finished(tmp_path):
    seeds = {name: list(range(20)) for name in OPEN}
    found, _ = made(tmp_path, OPEN, None, SPEEDS, seeds=seeds, looks=[dict.fromkeys(OPEN, 3)])
    assert "34 runs of this study are missing" in found.sentences[-1]
    assert found.command == COMMAND


def test_what_was_not_timed_is_not_called_faster(tmp_path):
    found, _ = made(tmp_path / "none", OPEN)
    assert "may be faster, which was not timed" in " ".join(found.sentences)
    table = {"softmax": near(0.93), "performer-relu": near(0.931), "linformer:k=16": near(0.87)}
    two = {name: SPEEDS[name] for name in ("softmax", "performer-relu")}
    found, _ = made(tmp_path / "two", table, None, two)
    assert found.variant == "performer-relu"  # the third is far behind: its speed does not matter
    assert "highest inference throughput" in found.reason


def test_accuracies_are_quoted_over_shared_seeds(tmp_path):
    """Seeds 3 to 11 are harder, and only two variants have them."""
    hard = [0.0] * 3 + [-0.01] * 9
    table = {"softmax": {s: 0.956 + d for s, d in enumerate(hard)},
             "performer-relu": {s: 0.9555 + d for s, d in enumerate(hard)},
             "performer-exp": dict.fromkeys(range(3), 0.9535)}  # fmt: skip
    found, _ = made(tmp_path, table, None, {"softmax": 1.0, "performer-relu": 2.0, "performer-exp": 2.0})
    assert found.variant == "performer-relu"
    assert "94.8" in found.sentences[0]  # of all twelve, as the best's


def test_a_variant_that_fails_does_not_silence_the_rest(tmp_path):
    table = {"softmax": near(0.93), "performer-relu": near(0.931), "linformer:k=16": {0: 0.77, 1: 0.77}}
    found, summary = made(tmp_path, table, None, SPEEDS, failed=[("linformer:k=16", 2)])
    assert found.variant == "performer-relu"
    assert found.headline == "Recommendation"
    assert any("linformer:k=16 failed" in text for text in summary.warnings)


def test_a_control_that_diverged_is_not_every_variant(tmp_path):
    found, _ = made(tmp_path, {"softmax": {}, "uniform": {}}, diverged=["uniform"])
    assert "every variant diverged" not in found.sentences[0]


def test_variants_of_ones_own_are_run_again_by_the_whole_command(tmp_path):
    table = {"softmax": OPEN["softmax"], "performer-relu, redraw 100": OPEN["performer-relu"]}
    variants = [{"id": "softmax", "label": "softmax", "attention": "softmax"},
                {"id": "performer-relu, redraw 100", "label": "redrawn", "attention": "performer-relu"}]  # fmt: skip
    found, _ = made(tmp_path, table, None, {name: 1.0 + i for i, name in enumerate(table)}, variants=variants)
    assert found.command.startswith("linvit compare --seeds ")
    assert found.command.endswith(COMMAND.removeprefix("linvit compare "))
