"""What is written as TOML is read back the same by Python's own reader."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from linvit.toml import to_toml

TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # half a surrogate is no text
VALUES = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT
TREES = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=15
)


@given(st.dictionaries(TEXT, TREES, max_size=5))
def test_the_same_comes_back(tree):
    assert tomllib.loads(to_toml(tree)) == tree


def test_what_is_none_is_left_out_and_tables_follow_values():
    tree = {"model": {"dim": 3, "patch": None, "trunk": (5, 7)}, "seed": 2, "rows": [{"a": None, "b": 1.5}, {"c": {}}]}
    text = to_toml(tree)
    assert text == "seed = 2\n\n[model]\ndim = 3\ntrunk = [5, 7]\n\n[[rows]]\nb = 1.5\n\n[[rows]]\n\n[rows.c]\n"
    assert tomllib.loads(text)["rows"] == [{"b": 1.5}, {"c": {}}]
