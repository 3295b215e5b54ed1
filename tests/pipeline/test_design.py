"""Design: defaults in layers, and experiments of variants that can be compared."""

from __future__ import annotations

import pytest

from linvit.data import Dataset, folded, load_data
from linvit.execute import work
from linvit.models import VisionTransformer, estimate
from linvit.pipeline import design
from linvit.pipeline.design import DataShape, Designer, default_layers, resolve
from linvit.schemas.experiment import Fold
from linvit.schemas.model import ModelConfig
from linvit.schemas.study import Variant
from linvit.training.defaults import GENTLER, OF_TASK, TUNED
from linvit.training.source import open_source, source_of
from linvit.training.start import architecture

DIGITS = DataShape("digits", 8, 1, 10)
COLOUR = DataShape("mine", 8, 3, 3)


@pytest.fixture
def like(start) -> ModelConfig:
    found = architecture(start)
    assert found is not None
    return found


def options_of(data: DataShape = DIGITS, **given) -> dict[str, object]:
    """All options of the model and the recipe."""
    model, recipe = resolve(data, "softmax", 0, given)
    return model.model_dump() | recipe.model_dump()


def test_layers_are_in_order(like):
    def origins(*args):
        return [layer.origin for layer in default_layers(*args)]

    given = {"size": "nano", "optimizer": "sgd"}
    assert origins(DIGITS, {}, None, False, "classification") == ["data set"]
    assert origins(COLOUR, {}, like, False, "classification") == ["data set", "start"]
    every = ["data set", "start", "fine-tuning", "size", "optimizer"]
    assert origins(COLOUR, given, like, True, "classification") == every


def test_the_data_set_decides_what_nothing_else_does():
    found = options_of()
    assert {name: found[name] for name in TUNED["digits"]} == TUNED["digits"]
    assert (found["image_size"], found["channels"], found["classes"]) == (8, 1, 10)
    assert options_of(DataShape("mine", 8, 3, 5))["epochs"] == TUNED["digits"]["epochs"]  # the nearest in size
    assert options_of(DataShape("mine", 28, 1, 5))["epochs"] == TUNED["mnist"]["epochs"]
    large = options_of(DataShape("mine", 128, 3, 5))
    assert (large["epochs"], large["pools"]) == (TUNED["cifar10"]["epochs"], 4)


def test_given_options_come_last():
    found = options_of(epochs=3, lr=0.125, dim=32, optimizer="sgd", batch_size=None)
    assert (found["epochs"], found["lr"], found["dim"]) == (3, 0.125, 32)
    assert found["batch_size"] == TUNED["digits"]["batch_size"]  # None is not given
    assert options_of(steps=7)["steps"] == 7


def test_defaults_without_effect_are_dropped():
    found = options_of(stem="patch", patch_size=2)
    assert (found["trunk"], found["pools"], found["patch_size"]) == (None, None, 2)


@pytest.mark.parametrize(
    ("optimizer", "pretrained", "expected"),
    [
        (None, False, {"lr": 5e-3, "weight_decay": 0.05, "epochs": 20}),
        ("muon", True, {"lr": GENTLER["lr"], "epochs": GENTLER["epochs"]}),
        ("adamw", False, {"lr": 2e-3, "weight_decay": 0.05}),
        ("sgd", False, {"lr": 0.05, "weight_decay": 5e-4}),
        ("adamw", True, {"lr": 1e-3, "epochs": GENTLER["epochs"]}),
        ("sgd", True, {"lr": 0.025, "weight_decay": 5e-4}),
    ],
)
def test_the_optimizer_has_its_own_rate_and_trained_weights_a_gentler_one(optimizer, pretrained, expected, like):
    recipe = resolve(COLOUR, "softmax", 0, {"optimizer": optimizer}, like if pretrained else None, pretrained)[1]
    assert {name: getattr(recipe, name) for name in expected} == expected


def test_a_start_gives_its_shape_but_neither_attention_nor_seed(like):
    model, recipe = resolve(COLOUR, "softmax", 5, {"heads": 4}, like)
    own = {"attention": "softmax", "seed": 5, "heads": 4}
    assert model == like.model_copy(update=own)
    assert recipe.lr == TUNED["digits"]["lr"]  # its shape alone, not its weights
    with pytest.raises(ValueError, match="the images have channels=1, but the start takes 3"):
        resolve(DIGITS, "softmax", 0, {}, like)


def test_a_size_replaces_the_shape_and_keeps_the_recipe():
    found = options_of(size="nano", patch_size=4, dim=32)
    assert (found["stem"], found["depth"], found["dim"], found["trunk"]) == ("patch", 4, 32, None)
    assert found["batch_size"] == TUNED["digits"]["batch_size"]
    model, recipe = resolve(DIGITS, "softmax", 0, {"size": "nano"}, task="next-pixel")
    assert (model.stem, model.dim, model.positions) == ("next-pixel", 64, "learned")
    assert recipe.label_smoothing == OF_TASK["next-pixel"]["label_smoothing"] == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 1, "steps": 1}, "give epochs or steps, not both"),
        ({"size": "huge"}, "unknown size 'huge'"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'"),
        ({"momentum": 0.5}, "momentum=0.5 has no effect: only optimizer=sgd has it: leave it out"),
        ({"optimizer": "sgd", "betas": (0.8, 0.9)}, "betas=.* has no effect"),
        ({"step_epochs": 3}, "step_epochs=3 has no effect"),
        ({"restart_epochs": 3}, "restart_epochs=3 has no effect"),
        ({"schedule": "constant", "final_lr": 0.1}, "final_lr=0.1 has no effect"),
        ({"patch_size": 4}, "patch_size=4 has no effect: stem=conv has no patch_size: leave it out"),
        ({"dim": 0}, "dim=0"),
    ],
    ids=str,
)
def test_bad_options_are_one_line(given, message):
    with pytest.raises(ValueError, match=message) as caught:
        resolve(DIGITS, "softmax", 0, given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("side", [4, 5, 15, 17, 33, 50, 97])
def test_the_defaults_fit_images_of_any_size(side):
    for channels in (1, 3):
        model, _ = resolve(DataShape("mine", side, channels, 2), "performer-relu:m=4", 0, {})
        VisionTransformer(model)


OPTIONS = {"stem": "patch", "patch_size": 4, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24, "epochs": 2}


def designer_of(dataset: Dataset, **changes) -> Designer:
    return Designer(dataset, None, **{"seed": 0, "options": OPTIONS} | changes)


@pytest.fixture
def resolved(monkeypatch) -> list[str]:
    """The attentions that were resolved."""
    found: list[str] = []
    monkeypatch.setattr(
        design, "resolve", lambda data, attention, *more: found.append(attention) or resolve(data, attention, *more)
    )
    return found


def test_a_variant_is_designed_once(tiny, resolved):
    designer = designer_of(tiny)
    variant = Variant(attention="performer-relu:m=4")
    first = designer.experiment(variant)
    assert resolved == ["performer-relu:m=4", "softmax"]  # and what its parameters are matched with
    assert designer.experiment(variant.model_copy(update={"id": "named since"})) is first
    assert len(resolved) == 2
    other = designer.experiment(variant, {"mlp_dim": 40})
    assert other.model.mlp_dim > 30
    assert designer.experiment(variant, {"mlp_dim": 40}) is other
    assert designer.experiment(variant.model_copy(update={"options": {"lr": 1e-4}})).recipe.lr == 1e-4
    assert len({designer.experiment(variant).id, other.id}) == 2


def test_variants_match_in_parameters_by_the_width_of_the_mlp(tiny):
    designer = designer_of(tiny)
    exact = designer.experiment(Variant())
    assert exact.model.mlp_dim == 24
    unit = exact.model.depth * (2 * exact.model.dim + 1)
    for attention in ("linformer:k=3", "softmax:dwc=3"):
        matched = designer.experiment(Variant(attention=attention))
        assert matched.model.mlp_dim < 24
        assert abs(estimate(matched.model).parameters - estimate(exact.model).parameters) <= unit / 2
        assert matched.recipe == exact.recipe
    assert designer_of(tiny, match=False).experiment(Variant(attention="linformer:k=3")).model.mlp_dim == 24
    assert designer.experiment(Variant(attention="linformer:k=3", column="literal")).model.mlp_dim == 24
    wider = Variant(attention="linformer:k=3", options={"mlp_dim": 99})
    assert designer.experiment(wider).model == designer.experiment(Variant(attention="linformer:k=3")).model


def test_a_start_fixes_the_shape_of_all_variants(tiny, start, like):
    designer = designer_of(tiny, options={"epochs": 2}, start=start)
    assert designer.base.start == start
    for variant in (Variant(attention="linformer:k=3", start=start), Variant(attention="linformer:k=3")):
        found = designer.experiment(variant)
        assert found.model == like.model_copy(update={"attention": "linformer:k=3", "seed": 0})  # nothing is matched
        assert found.start == variant.start
    rates = [designer.experiment(v).recipe.lr for v in (Variant(start=start), Variant())]
    assert rates == [GENTLER["lr"], TUNED["digits"]["lr"]]


def test_an_experiment_knows_its_images_task_and_label(tiny):
    designer = designer_of(tiny, seed=3)
    found = designer.experiment(Variant(attention="uniform", label="the control"))
    assert (found.data.name, found.data.identity) == (tiny.name, tiny.identity)
    assert (found.seed, found.model.seed, found.label, found.source) == (3, 3, "the control", None)
    assert designer.experiment(Variant(attention="uniform")).label == "uniform"
    assert designer.train_images(found) == len(tiny.train)
    pixels = designer_of(tiny, options={"epochs": 1}).experiment(Variant(task="next-pixel"))
    assert (pixels.task, pixels.model.stem) == ("next-pixel", "next-pixel")


def test_an_attention_that_cannot_be_built_is_an_error(tiny):
    with pytest.raises(ValueError, match="k=5"):
        designer_of(tiny).experiment(Variant(attention="linformer:k=5"))  # of four tokens


def test_options_of_the_data_open_other_images_once(monkeypatch):
    opened = []
    noted = lambda source, progress: opened.append(source.image_size) or open_source(source)  # noqa: E731
    monkeypatch.setattr(work, "open_source", noted)
    source = source_of("synthetic:images=60,size=8,classes=3")
    designer = Designer(open_source(source), source, 0, OPTIONS)
    larger = Variant(attention="uniform", data={"image_size": 16})
    found = [designer.experiment(v) for v in (larger, larger.model_copy(update={"attention": "identity"}), Variant())]
    assert [e.model.image_size for e in found] == [16, 16, 8]
    assert [e.source.image_size for e in found if e.source] == [16, 16, None]
    assert opened == [16]
    with pytest.raises(ValueError, match="image_siez"):
        designer.experiment(Variant(data={"image_siez": 16}))


def test_images_without_a_source_cannot_be_opened_otherwise(tiny):
    with pytest.raises(ValueError, match="'large' has data options, but the images were given as a Dataset"):
        designer_of(tiny).experiment(Variant(id="large", data={"image_size": 16}))


def test_folds_are_held_out_in_turn():
    digits = load_data("digits")
    designer = designer_of(digits, folds=3, seed=5)
    assert designer.fold_list() == [Fold(i, 3, 5) for i in range(3)]
    assert designer_of(digits).fold_list() == []
    variant = Variant(attention="uniform")
    first = designer.experiment(variant)
    held = [designer.hold_out(first, variant, fold) for fold in designer.fold_list()]
    assert held[0].data == first.data
    assert [e.data.identity for e in held] == [folded(digits, fold).identity for fold in designer.fold_list()]
    assert designer.datasets.find(held[2]) is designer.images(variant, Fold(2, 3, 5))[0]
    assert len({e.id for e in held}) == 3
