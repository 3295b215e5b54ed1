"""Spaces: what they may say, and what is made of a point."""

from __future__ import annotations

from pathlib import Path

import pytest

from linvit.schemas.search import Range, SearchSpace
from linvit.tuning.space import (
    apply_point,
    check_attentions,
    grid_points,
    is_integer,
    labels,
    read_space,
    shipped_spaces,
    suggested_point,
    variant_space,
)


def read(tmp_path: Path, text: str) -> SearchSpace:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return read_space(path)


def test_the_reports_spaces_are_as_printed():
    assert shipped_spaces() == ["002-elu", "002-exp-grid", "002-exp-optuna", "002-relu", "002-vit", "default"]
    sizes = {
        name: len(list(grid_points(read_space(name), "performer-elu")))
        for name in ("002-vit", "002-elu", "002-exp-grid")
    }
    assert sizes == {
        "002-vit": 2**8,
        "002-elu": 3 * 3 * 3 * 3 * 4 * 3 * 2 * 3 * 2,
        "002-exp-grid": 4 * 5 * 2 * 3 * 5 * 3 * 3,
    }
    relu, optuna = read_space("002-relu"), read_space("002-exp-optuna")
    assert relu.options["lr"] == optuna.options["lr"] == Range(low=1e-5, high=1e-2, log=True)
    assert relu.options["dropout"] == Range(low=0.0, high=0.5)
    assert optuna.options["depth"] == Range(low=1, high=5)
    assert optuna.attention["m"] == [128, 256, 512, 764]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[options]\nlearning_rat = [1]", "unknown option 'learning_rat'"),
        ("[options]\ndropuot = [0.1]", "did you mean 'dropout'?"),
        ("[optoins]\nlr = [0.1]", "unknown table 'optoins'; did you mean 'options'?"),
        ("lr = [0.1]", "unknown table 'lr'"),
        ("", "is empty: it needs [options] or [attention]"),
        ("[options]\nlr = []", "lr is empty: list at least one value"),
        ("[options]\nlr = { low = 0.1, high = 0.1 }", "lr is empty: low=0.1 is not below high=0.1"),
        ("[options]\nlr = { low = 0.1, high = 0.01 }", "lr is empty: low=0.1 is not below high=0.01"),
        (
            "[options]\ndropout = { low = 0.0, high = 0.5, log = true }",
            "dropout: low=0.0 must be above 0 where log = true",
        ),
        ("[options]\nlr = 0.1", "options.lr must be a list of values or { low = …, high = … }"),
        ("[options]\nlr = { from = 0.1, to = 1 }", "options.lr must be a list of values or { low = …, high = … }"),
        ("[options]\nlr = [0.1, -1]", "lr=-1"),
        ("[options]\nlr = [0.1, 0.1]", "lr lists 0.1 twice"),
        ("[options]\ndim = [16, 0]", "dim=0"),
        ("[options]\ndepth = { low = 1, high = 2.5 }", "depth=2.5"),
        ("[options]\noptimizer = ['muon', 'lion']", "unknown optimizer 'lion'"),
        ("[options]\noptimizer = { low = 1, high = 2 }", "optimizer is not a number: list its values"),
        ("[options]\nstem = ['patch', 'brick']", "stem=brick must be one of"),
        ("[options]\nepochs = [1, 2]", "epochs cannot be searched: all trials have the same length"),
        ("[options]\nseed = [1, 2]", "seed cannot be searched: a seed is not tuned"),
        ("[options]\nimage_size = [8, 16]", "image_size cannot be searched: it comes from the data"),
        ("[options]\nlr = {", "is not TOML"),
        ("[options]\nlr = [0.1]\n[fixed]\nlr = 0.2", "lr is in [options] and in [fixed]: leave one of them out"),
    ],
)
def test_a_bad_space_is_one_line(tmp_path, text, says):
    with pytest.raises(ValueError) as error:
        read(tmp_path, text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_nobody_knows():
    with pytest.raises(
        ValueError, match=r"space '002-rleu' is neither a file nor a known name; did you mean '002-relu'\?"
    ):
        read_space("002-rleu")


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (["softmax"], "attention.m: none of softmax has this option"),
        (["performer-relu:m=16"], "attention.m: every spec that has this option sets it already"),
    ],
)
def test_options_of_attentions_are_some_variants(tmp_path, specs, says):
    space = read(tmp_path, "[attention]\nm = [8, 16]")
    with pytest.raises(ValueError, match=says):
        check_attentions(space, specs)
    check_attentions(space, [*specs, "performer-exp"])
    assert [set(variant_space(space, spec)) for spec in (*specs, "performer-exp")] == [set(), {"attention.m"}]


def test_values_of_attentions_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"attention.m: .*m=many must be an integer"):
        check_attentions(read(tmp_path, "[attention]\nm = [8, 'many']"), ["performer-exp"])
    with pytest.raises(ValueError, match=r"attention.mm: none of performer-exp .* did you mean 'm'\?"):
        check_attentions(read(tmp_path, "[attention]\nmm = [8]"), ["performer-exp"])
    with pytest.raises(ValueError, match=r"attention.projection is not a number"):
        check_attentions(read(tmp_path, "[attention]\nprojection = { low = 1, high = 2 }"), ["performer-exp"])


def test_a_point_becomes_a_spec_and_options():
    point = {"lr": 0.1, "attention.m": 8, "attention.alpha": 0.5}
    assert apply_point("performer-elu", point) == ("performer-elu:m=8,alpha=0.5", {"lr": 0.1})
    assert apply_point("performer-elu:m=4", point) == ("performer-elu:m=4,alpha=0.5", {"lr": 0.1})
    assert apply_point("softmax@2+performer-relu@3", point) == ("softmax@2+performer-relu:m=8@3", {"lr": 0.1})
    assert apply_point("softmax", point) == ("softmax", {"lr": 0.1})


def test_whole_numbers_stay_whole(tmp_path):
    space = read(
        tmp_path,
        "[options]\ndepth = { low = 1, high = 3 }\ndropout = { low = 0, high = 0.5 }\n"
        "[attention]\nm = { low = 4, high = 8 }\nalpha = { low = 0.5, high = 1 }\n",
    )
    names = ("depth", "dropout", "attention.m", "attention.alpha")
    assert [is_integer(name, "performer-elu") for name in names] == [True, False, True, False]
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(50):
        point = suggested_point(space, "performer-elu", study.ask())
        assert [type(point[name]) for name in names] == [int, float, int, float]
        assert all(point[name] in variant_space(space, "performer-elu")[name] for name in names)


def test_a_grid_needs_lists_and_has_every_point(tmp_path):
    space = read(tmp_path, "[options]\ndepth = [1, 2]\ntrunk = [[8], [8, 16]]\n[attention]\nm = [4, 8, 16]")
    points = list(grid_points(space, "performer-relu"))
    assert len(points) == 12
    assert len({str(point) for point in points}) == 12
    assert len(list(grid_points(space, "softmax"))) == 4
    assert labels([[8], [8, 16]]) == ["[8]", "[8, 16]"]
    with pytest.raises(ValueError, match="a grid needs lists, but lr is a range"):
        grid_points(read_space("default"), "softmax")
