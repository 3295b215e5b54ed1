"""What studies declare: each published result has a row, each option is one, each system and strategy is in some."""

from __future__ import annotations

import re
from typing import Any

import pytest

from linvit.models import create_model
from linvit.registry import parse
from linvit.studies import COLUMNS, SCALES, STUDIES, Figure, NotHere, Row, Table, published, study
from linvit.train.experiment import resolve

NAMES = STUDIES.names()
TABLES = [name for name in NAMES if isinstance(study(name), Table)]
FACTS = {
    "mnist": (28, 1, 10), "cifar10": (32, 3, 10), "cifar100": (32, 3, 100), "tiny-imagenet": (64, 3, 200),
    "cifar10:grey=true": (32, 1, 10),
}  # fmt: skip
# rows of published tables that are ours: what a report asks for, claims or leaves open without printing a number
LONGER = {"linformer, twice the steps", "RF16 softmax, twice the steps"}
OURS = {"ViT, patch 8", "MLP, dropout 0.05", "softmax", "ReLU, 512 features", "fθ, positive", "its EXP, clamped",
        "its EXP, not clamped", *LONGER}  # fmt: skip
UNPUBLISHED = {"000-cifar100", "000-hybrid", "002-factorial"}


def table(name: str) -> Table:
    found = study(name)
    assert isinstance(found, Table)
    return found


def test_there_are_68_published_results():
    assert len(published()) == 68
    assert len({(row.study, row.row) for row in published()}) == 68
    assert all(row.quality for row in published())
    with_number = [row for row in published() if row.accuracy is not None]
    assert len(with_number) == 67  # one ended in NaN
    assert all(0.25 < row.accuracy < 1 for row in with_number)  # type: ignore[operator]


def test_a_place_names_every_section_that_prints_something_of_the_result():
    """Of report 002, whose numbers of one run are not always in the section about it."""
    places = {row.study: re.findall(r"§[\d.]*\d", row.place) for row in published() if row.study.startswith("002")}
    several = {name: sections for name, sections in places.items() if len(sections) != 1}
    assert several == {
        "002-relu": ["§5.5", "§6.1.7"],  # 3.06 s and 0.4277
        "002-gelu-2": ["§6.2.3", "§6.2.5"],  # 55 epochs
        "002-gelu-3": ["§6.2.4", "§6.2.5", "§6.2.3"],  # 57 epochs; clipping and schedule
        "002-gelu-4": ["§6.2.5", "§6.2.3"],
        "002-exp": ["§7.3", "§7.2"],  # hyperparameters
    }


def test_each_published_result_has_a_row_and_each_row_a_result():
    printed = {(row.study, row.row) for row in published()}
    rows = {(name, row.name) for name in TABLES for row in table(name).rows}
    assert printed <= rows
    reports = [name for name in TABLES if not name.startswith("paper-") and name not in UNPUBLISHED]
    beyond = {(name, row.name) for name in reports for row in table(name).rows} - printed
    sweep = {row for name, row in beyond if name == "000-cifar10"}
    assert {row for name, row in beyond if name != "000-cifar10"} == OURS
    assert sweep == {"RF64 softmax", "RF128 softmax", "RF16 ReLU", *LONGER}
    assert not {row.study for row in published()} & UNPUBLISHED


@pytest.mark.parametrize("name", NAMES)
def test_a_study_says_what_it_is(name):
    found = study(name)
    text = " ".join((type(found).__doc__ or "").split())
    assert re.fullmatch(r"00[0-4]", found.report)
    assert found.title
    assert all(re.fullmatch(r"M\d+", mistake) for mistake in found.mistakes)
    if isinstance(found, NotHere):
        assert found.why
        assert not found.takes
        return
    assert f"linvit reproduce {name}" in text
    assert "Expected" in text or "compared" in text or name.endswith("cifar100")
    assert tuple(found.takes) == SCALES
    assert found.gives_way("smoke")
    for scale in SCALES:
        assert isinstance(found.gives_way(scale), str)


@pytest.mark.parametrize("name", TABLES)
def test_every_option_is_one(name):
    """Every row at every scale resolves to a model and a recipe, without images."""
    found = table(name)
    side, channels, classes = FACTS[found.data]
    for scale in SCALES:
        for column in COLUMNS:
            for row in found.of(column):
                own = found.sides.get(column)
                size = row.data.get("image_size") if column == "literal" else None
                facts = {"image_size": size or own or side, "channels": channels, "classes": classes}
                spec = (row.literal if column == "literal" else None) or row.attention
                options = found.options(column, scale) | found.options(column, scale, row)
                model, recipe = resolve(found.data, facts, spec, 0, options, task=found.task)
                assert model.attention == spec
                assert recipe.steps == (row.times if scale == "smoke" else None)


@pytest.mark.parametrize("name", [name for name in TABLES if any(row.checkpoint for row in table(name).rows)])
def test_beside_rows_from_a_checkpoint_stand_some_for_as_many_steps_from_nothing(name):
    """Teacher and fine-tuning together, with whatever else the row from the checkpoint has; under report 000 all."""
    found = table(name)
    for scale in ("full", "cpu"):
        rows = [(row, (row.attention, str(row.fair))) for row in found.of("fair")]
        options = {row.name: found.options("fair", scale) | found.options("fair", scale, row) for row, _ in rows}
        began = {key: options[row.name] for row, key in rows if row.checkpoint}
        alone = {key: options[row.name] for row, key in rows if row.times > 1}
        teacher = found.options("fair", scale)["epochs"]
        assert alone
        assert set(alone) <= set(began)
        assert name.startswith("paper-") or set(alone) == set(began)
        for key, mine in alone.items():
            assert mine == began[key] | {"epochs": began[key]["epochs"] + teacher}


def systems() -> dict[str, list[dict[str, Any]]]:
    """attention → the options that it appears with."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in [row for name in TABLES for row in table(name).rows]:
        for text in filter(None, (row.attention, row.literal)):
            spec = parse(text)
            found.setdefault(spec.name, []).append(dict(spec.options))
    return found


def test_every_system_of_the_reports_is_in_some_study():
    found = systems()
    kernels = ("exp", "relu", "elu", "gelu", "gexp", "sigmoid", "abs", "cos", "tanh", "identity", "trig", "smreg",
               "hyp", "elu1", "theta-linear", "theta-mixture", "theta-mlp", "theta")  # fmt: skip
    assert {"softmax", "linformer", "identity", "uniform", *(f"performer-{kernel}" for kernel in kernels)} <= set(found)
    features = {kernel: {options.get("m") for options in found[f"performer-{kernel}"]} for kernel in ("exp", "relu")}
    assert {16, 32, 64, 128} <= features["exp"]
    assert {16, 32, 64, 128, 256, 512} <= features["relu"]
    for kernel in ("exp", "relu", "elu1"):  # deterministic
        assert {"projection": "none"} in found[f"performer-{kernel}"]
    assert {options.get("alpha") for options in found["performer-elu"]} >= {1.0, 0.5, 0.3, 0.25}
    assert any(table(name).task == "next-pixel" for name in TABLES)  # unidirectional


def test_every_strategy_of_the_reports_is_in_some_study():
    used: dict[str, set[Any]] = {}
    sizes = []
    for name in TABLES:
        found = table(name)
        for column in COLUMNS:
            sizes += [found.size(scale, column) for scale in SCALES if found.of(column)]
            for scale, row in [(scale, row) for scale in SCALES for row in found.of(column)]:
                options = found.options(column, scale) | found.options(column, scale, row)
                for key, value in options.items():
                    used.setdefault(key, set()).add(value)
    assert {"adam", "adamw", "sgd"} <= used["optimizer"]  # and muon, where nobody says
    assert {"step", "cosine", "restarts", "constant"} <= used["schedule"]  # and onecycle
    assert {0.0, 1.0} <= used["clip_norm"]
    assert {0, 10} <= used["patience"]
    assert {0, 100} <= used["redraw"]
    assert {"fp16", "bf16"} <= used["amp"]
    assert any(0 < share < 1 for share in used["warmup"])
    assert 5 in {size.folds for size in sizes}
    assert any(row.checkpoint for name in TABLES for row in table(name).rows)
    docs = " ".join(STUDIES[name].__doc__ or "" for name in NAMES)
    assert "--sampler grid" in docs
    assert "--space 002-exp-optuna" in docs


def test_figures_of_the_paper():
    wanted = "1 2 3 4 5 6-7 8 9 10-11 13 14 15 16-17 18 19 20-21"
    assert {f"paper-fig{number}" for number in wanted.split()} <= set(NAMES)
    for name in NAMES:
        found = study(name)
        if isinstance(found, Figure):
            assert set(found.scales) == set(SCALES)


def test_the_report_has_only_rows_with_columns():
    for name in TABLES:
        for row in table(name).rows:
            assert isinstance(row, Row)
            assert row.columns
            assert set(row.columns) <= set(COLUMNS)
        assert len({row.name for row in table(name).rows}) == len(table(name).rows), name
        if any(row.checkpoint for row in table(name).rows):
            assert any(row.attention == "softmax" and not row.checkpoint for row in table(name).rows)


def test_the_keras_model_is_the_one_that_was_printed():
    """One layer of it has the printed 5,545,489 parameters, but for 7 of Keras's input normalisation."""
    model = create_model("000-keras-cifar", image_size=30, depth=1, classes=10)
    assert model.parameter_count() == 5_545_489 - 7


def test_rows_are_judged_with_those_that_took_as_many_steps():
    """In Fig. 5 most began with a trained model, and the Transformer itself stands beside them."""
    assert {row.name for row in table("paper-fig5").of("fair") if row.lengths == 1} == {"Transformer"}
    assert (table("paper-fig5").length("fair"), table("000-cifar10").length("fair")) == (2, 1)
