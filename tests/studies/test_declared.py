"""What studies declare: each published result has a row, each option exists, each system and strategy is in some."""

from __future__ import annotations

import re
from typing import Any

import pytest

from linvit.models import create_model
from linvit.pipeline.design import DataShape, resolve
from linvit.registry import parse
from linvit.studies import STUDIES, Figure, NotReproducible, PublishedStudy
from linvit.studies.declaration import COLUMNS, SCALES, all_published, register, studies_in_order
from linvit.training import defaults

SHIPPED = [study for _, study in STUDIES.items()]
TABLES = [study for study in SHIPPED if isinstance(study, PublishedStudy)]
SHAPES = {
    "mnist": (28, 1, 10),
    "cifar10": (32, 3, 10),
    "cifar100": (32, 3, 100),
    "tiny-imagenet": (64, 3, 200),
    "cifar10:grey=true": (32, 1, 10),
}
# rows of published tables that are ours: what a report asks for, claims or leaves open without printing a number
LONGER = {f"{name}, twice the steps" for name in ("transformer", "linformer", "RF16 softmax", "RF16 ReLU")}
SWEEP = {"RF32 softmax", "RF64 softmax", "RF128 softmax", "RF16 ReLU", "RF32 ReLU", "RF16 ReLU from checkpoint"}
OURS = {
    "ViT, patch 8",
    "MLP, dropout 0.05",
    "softmax",
    "ReLU, 512 features",
    "fθ, positive",
    "EXP, not clamped",
    "ELU, Adam",
    "ELU, AdamW",
    "its EXP, clamped",
    "its EXP, not clamped",
}
UNPUBLISHED = {"000-cifar100", "000-hybrid", "002-factorial", "002-precision", "002-pretraining"}


def table(name: str) -> PublishedStudy:
    study = STUDIES[name]
    assert isinstance(study, PublishedStudy)
    return study


def printed() -> dict[tuple[str, str], Any]:
    return {(study, row): result for study, rows in all_published().items() for row, result in rows.items()}


def test_there_are_68_published_results():
    assert len(printed()) == 68
    assert all(result.flags for result in printed().values())
    accuracies = [result.accuracy for result in printed().values() if result.accuracy is not None]
    assert len(accuracies) == 67  # one ended in NaN
    assert all(0.25 < accuracy < 1 for accuracy in accuracies)


def test_a_place_names_every_section_that_prints_something_of_the_result():
    """Of report 002, whose numbers of one run are not always in the section about it."""
    places = {study: re.findall(r"§[\d.]*\d", result.place) for (study, _), result in printed().items()}
    several = {name: found for name, found in places.items() if name.startswith("002") and len(found) != 1}
    assert several == {
        "002-relu": ["§5.5", "§6.1.7"],  # 3.06 s and 0.4277
        "002-gelu-2": ["§6.2.3", "§6.2.5"],  # 55 epochs
        "002-gelu-3": ["§6.2.4", "§6.2.5", "§6.2.3"],  # 57 epochs; clipping and schedule
        "002-gelu-4": ["§6.2.5", "§6.2.3"],
        "002-exp": ["§7.3", "§7.2"],  # hyperparameters
    }


def test_each_published_result_has_a_row_and_each_row_a_result():
    rows = {(study.name, row.name) for study in TABLES for row in study.rows}
    assert set(printed()) <= rows
    assert all(set(study.published) <= {row.name for row in study.rows} for study in TABLES)
    reports = {study.name for study in TABLES if study.report not in ("", "004", "2026")} - UNPUBLISHED
    beyond = {(name, row) for name, row in rows if name in reports} - set(printed())
    assert {row for name, row in beyond if not name.startswith("000-")} == OURS
    for name in ("000-mnist", "000-cifar10"):
        assert {row for study, row in beyond if study == name} == SWEEP | LONGER
    assert not set(all_published()) & UNPUBLISHED


def test_a_plugin_has_its_published_numbers_in_its_own_file(plugin):
    assert table("tiny").published["transformer"].accuracy == 0.915


@pytest.mark.parametrize("study", SHIPPED, ids=lambda study: study.name)
def test_a_study_says_what_it_is(study):
    assert study.report or not study.mistakes  # these are a report's
    assert study.title
    assert "\n" not in study.about
    assert all(re.fullmatch(r"M\d+", mistake) for mistake in study.mistakes)
    if isinstance(study, NotReproducible):
        assert not study.durations
        return
    assert re.search("Expected|No expectation", study.about)
    if isinstance(study, PublishedStudy):
        assert bool(study.literal) == bool(study.kept) == bool(study.changed)
    assert tuple(study.durations) == SCALES
    assert study.reduction("smoke")
    assert isinstance(study.reduction("cpu"), str)
    if isinstance(study, Figure):
        assert tuple(study.scales) == SCALES


def test_studies_of_no_report_come_last(plugin):
    reports = [study.report for study in studies_in_order()]
    assert reports == sorted(reports, key=lambda report: report or "end")
    assert set(reports) == {"000", "001", "002", "004", "2026", ""}
    assert (table("attentions-2026-bare").report, table("tiny").report) == ("2026", "")


def test_a_name_is_registered_once():
    study = table("002-vit")
    register(study)  # the same again, as when a module is imported twice
    other = NotReproducible("002-vit", title="Another", about="")
    with pytest.raises(ValueError, match=r"study '002-vit' is registered twice: in '002-vit, Vision .* '002-vit, Ano"):
        register(other)


@pytest.mark.parametrize("study", TABLES, ids=lambda study: study.name)
def test_every_option_exists(study):
    """Every row at every scale resolves to a model and a recipe, without images."""
    side, channels, classes = SHAPES[study.data]
    names = [row.name for row in study.rows]
    assert len(set(names)) == len(names)
    for column in study.columns:
        for scale in SCALES:
            for row in study.rows_of(column):
                literal = column == "literal"
                own = (row.literal_data.get("image_size") if literal else None) or study.image_size(column, scale)
                spec = (row.literal if literal else None) or row.attention
                options = study.options(column, scale) | study.row_options(column, scale, row)
                shape = DataShape(study.data, own or side, channels, classes)
                model, recipe = resolve(shape, spec, 0, options, task=study.task)
                assert model.attention == spec
                assert recipe.steps == (row.times if scale == "smoke" else None)


@pytest.mark.parametrize(
    "study", [study for study in TABLES if any(row.checkpoint for row in study.rows)], ids=lambda study: study.name
)
def test_rows_from_a_checkpoint_have_counterparts_from_scratch_with_as_many_steps(study):
    """Teacher and fine-tuning together, with whatever else the row from the checkpoint has; under report 000 all."""
    assert any(row.attention == "softmax" and not row.checkpoint for row in study.rows)
    for scale in ("full", "cpu"):
        base = study.options("fair", scale)
        started, scratch = {}, {}
        for row in study.rows_of("fair"):
            key, options = (row.attention, str(row.options)), base | study.row_options("fair", scale, row)
            if row.checkpoint or (row.times > 1 and row.attention != "softmax"):  # which the others start from
                (started if row.checkpoint else scratch)[key] = options
        assert scratch
        assert set(scratch) <= set(started)
        assert study.report == "004" or set(scratch) == set(started)
        for key, options in scratch.items():
            assert started[key]["lr"] < base["lr"]  # gentler, with trained weights
            assert options == started[key] | {"lr": base["lr"], "epochs": started[key]["epochs"] + base["epochs"]}


def test_every_system_of_the_reports_is_in_some_study():
    found: dict[str, list[dict[str, Any]]] = {}
    for spec in {spec for study in TABLES for row in study.rows for spec in (row.attention, row.literal) if spec}:
        found.setdefault(parse(spec).name, []).append(dict(parse(spec).options))
    kernels = """exp relu elu gelu gexp sigmoid abs cos tanh identity trig smreg hyp elu1 theta-linear theta-mixture
        theta"""
    as_printed = {options["f"] for options in found["literal"]}
    assert as_printed == {"relu", "elu", "gelu", "exp", "mixture", "mlp"}
    assert {"softmax", "linformer", "identity", "uniform"} <= set(found)
    assert {f"performer-{kernel}" for kernel in kernels.split()} <= set(found)
    assert {16, 32, 64, 128} <= {options.get("m") for options in found["performer-exp"]}
    assert {16, 32, 64, 128, 256, 512} <= {options.get("m") for options in found["performer-relu"]}
    for kernel in ("exp", "relu", "elu1"):  # deterministic
        assert {"projection": "none"} in found[f"performer-{kernel}"]
    for name in ("performer-elu", "literal"):
        assert {options.get("alpha") for options in found[name]} >= {1.0, 0.5, 0.3, 0.25}
    assert {"next-pixel", "masked-pixel"} <= {study.task for study in TABLES}  # unidirectional, bidirectional


def test_every_strategy_of_the_reports_is_in_some_study():
    used: dict[str, set[Any]] = {}
    for study, column in [(each, column) for each in TABLES for column in each.columns]:
        for scale in SCALES:
            used.setdefault("folds", set()).add(study.size(column, scale).folds)
            for row in study.rows_of(column):
                for key, value in (study.options(column, scale) | study.row_options(column, scale, row)).items():
                    used.setdefault(key, set()).add(value)
    assert {"adam", "adamw", "sgd"} <= used["optimizer"]
    assert {"step", "cosine", "restarts", "constant", "torch-onecycle"} <= used["schedule"]
    assert {0.0, 1.0} <= used["clip_norm"]
    assert {0, 10} <= used["patience"]
    assert {0, 100} <= used["redraw"]
    assert {"fp16", "bf16"} <= used["amp"]
    assert any(0 < share < 1 for share in used["warmup"])
    assert 5 in used["folds"]
    texts = " ".join(study.about for study in SHIPPED)
    assert "--sampler grid" in texts
    assert "--space 002-exp-optuna" in texts


def test_figures_of_the_paper():
    wanted = "1 2 3 4 5 6-7 8 9 10-11 13 14 15 16-17 18 19 20-21"
    assert {f"paper-fig{number}" for number in wanted.split()} <= {study.name for study in SHIPPED}


def test_the_keras_model_is_the_one_that_was_printed():
    """One layer of it has the printed 5,545,489 parameters, but for 7 of Keras's input normalisation."""
    model = create_model("000-keras-cifar", image_size=30, depth=1, classes=10)
    assert model.parameter_count() == 5_545_489 - 7


def test_rows_are_judged_with_those_that_took_as_many_steps():
    """In Fig. 5 most rows start from a trained model, and the Transformer itself is only shown."""
    assert {row.name for row in table("paper-fig5").rows_of("fair") if row.length == 1} == {"Transformer"}
    assert (table("paper-fig5").length("fair"), table("000-cifar10").length("fair")) == (2, 1)


def test_what_a_scale_changes(plugin):
    tiny = table("tiny")
    assert tiny.columns == list(COLUMNS)
    assert tiny.reduction("cpu") == "epochs 1 (full: 9)"
    assert tiny.reduction("smoke").startswith("one step")
    assert table("000-mnist").reduction("cpu") == (
        "literal: 5,000 images, epochs 2 (full: 20); fair: 10,000 images, epochs 3 (full: 20), width 32 (full: 64)"
    )
    smoke = tiny.options("fair", "smoke")
    assert (smoke["steps"], smoke["dim"], "epochs" in smoke) == (1, 32, False)
    assert tiny.options("literal", "cpu")["epochs"] == 1
    assert tiny.row_options("literal", "smoke", tiny.rows[1]) == {"mlp_dim": 13}  # a row's own stay
    assert tiny.row_options("fair", "smoke", tiny.rows[1]) == {}
    assert tiny.row_options("fair", "smoke", tiny.rows[-1]) == {"steps": 2}
    assert tiny.row_options("fair", "cpu", tiny.rows[-1]) == {"epochs": 2}


@pytest.mark.parametrize("study", TABLES, ids=lambda study: study.name)
def test_other_defaults_of_train_change_no_study(study, monkeypatch):
    """Neither those of the data nor the gentler ones of trained weights, nor those of recipes."""
    side, channels, classes = SHAPES[study.data]

    def every() -> list[Any]:
        found = []
        for column, scale in ((column, scale) for column in study.columns for scale in ("full", "cpu")):
            shape = DataShape(study.data.partition(":")[0], study.image_size(column, scale) or side, channels, classes)
            base = study.options(column, scale)
            like, _ = resolve(shape, "softmax", 0, base, task=study.task)
            for row in {str(row.options | row.literal_options): row for row in study.rows_of(column)}.values():
                if row.checkpoint == (row.times > 1):  # not started
                    options = base | study.row_options(column, scale, row)
                    found.append(resolve(shape, "softmax", 0, options, task=study.task))
                elif row.checkpoint and "size" not in base:
                    options = base | study.row_options(column, scale, row)
                    found.append(resolve(shape, "softmax", 0, options, like, pretrained=True, task=study.task))
        return found

    before = every()
    other = {"epochs": 2, "batch_size": 3, "lr": 0.7, "pad_crop": 1, "flip": "random", "weight_decay": 0.3}
    other |= {"dim": 24, "depth": 5, "heads": 3, "schedule": "cosine"}
    for name in defaults.TUNED:
        monkeypatch.setitem(defaults.TUNED, name, other)
    pixels = {"stem": "next-pixel", "dim": 24, "heads": 3, "batch_size": 3, "lr": 0.7}
    for task in ("next-pixel", "masked-pixel"):
        monkeypatch.setitem(defaults.OF_TASK, task, pixels | {"stem": task})
    monkeypatch.setattr("linvit.pipeline.design.GENTLER", {"lr": 0.7, "epochs": 2})
    assert every() == before
