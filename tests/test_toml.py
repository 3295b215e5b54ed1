"""Settings as TOML."""

from __future__ import annotations

import tomllib

import pytest

from linvit.toml import parse_toml, to_toml


def test_what_is_none_is_left_out():
    tree = {"model": {"dim": 3, "patch": None, "trunk": (5, 7)}, "seed": 2, "rows": [{"a": None, "b": 1.5}, {"c": {}}]}
    assert tomllib.loads(to_toml(tree)) == {
        "model": {"dim": 3, "trunk": [5, 7]},
        "seed": 2,
        "rows": [{"b": 1.5}, {"c": {}}],
    }


def test_toml_that_is_nested_too_deeply():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_toml("a = " + "[" * 100_000)
