"""Pickles are parsed: plain data comes out as `pickle` would give it, and nothing ever runs."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linvit.data import plain_pickle

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=300)
keys = st.text(max_size=5) | st.integers()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=5) | st.tuples(inner, inner) | st.tuples()
    ),
    max_leaves=20,
)


@settings(max_examples=80, deadline=None)
@given(values, st.integers(0, 5))
def test_plain_data_is_what_pickle_gives(value, protocol):
    assert plain_pickle.loads(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "int64", ">i4"])
def test_arrays(protocol, dtype):
    array = np.arange(30, dtype=dtype).reshape(5, 6)
    for wanted in (array, np.asfortranarray(array)):
        found = plain_pickle.loads(pickle.dumps({"data": wanted, "same": wanted}, protocol))
        assert (found["data"] == array).all()
        assert found["data"].dtype == array.dtype
        assert (found["same"] == array).all()


def test_python_2_arrays():
    """As in the original CIFAR files: protocol 2, bytes kept in a string."""
    raw = bytes(range(200, 206))
    program = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85q\x05"
        b"U\x01bq\x06\x87q\x07Rq\x08(K\x01K\x02K\x03\x86q\x09cnumpy\ndtype\nq\x0aU\x02u1q\x0bK\x00K\x01\x87q\x0cRq\x0d"
        b"(K\x03U\x01|q\x0eNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x0fb\x89U\x06" + raw + b"q\x10tq\x11b"
        b"U\x06labelsq\x12]q\x13(K\x03K\x07eu."
    )
    found = plain_pickle.loads(program)
    assert found["labels"] == [3, 7]
    assert found["data"].tolist() == [[200, 201, 202], [203, 204, 205]]
    assert found["data"].dtype == np.uint8


class Bomb:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_bomb_does_not_go_off(tmp_path: Path, protocol: int):
    target = tmp_path / "created"
    for bomb in (
        Bomb(os.system, f"touch {target}"),
        Bomb(eval, f"open({str(target)!r}, 'w')"),
        Bomb(open, str(target), "w"),
    ):
        with pytest.raises(ValueError, match=r"it would run .*, which plain data does not need"):
            plain_pickle.loads(pickle.dumps({"data": bomb}, protocol))
    assert not target.exists()
    pickle.loads(pickle.dumps(Bomb(os.system, f"touch {target}"), protocol))
    assert target.exists(), "the bomb must be a real one"


@pytest.mark.parametrize(
    "program",
    [
        b"cnumpy\ndtype\n(U\x01OtR.",  # an array of objects could hold anything
        b"cnumpy\ndtype\n.",
        b"(cos\nsystem\nU\x02lso.",
        b"(U\x02lsios\nsystem\n.",
        b"U\x01xU\x01x\x93.",
        b"}(U\x01aU\x01bub.",
        b"U\x01aQ.",
        b"\x80\x02}q\x01",
        b"",
        b"garbage",
        b"R.",
        b"h\x05.",
        b"e.",
    ],
)
def test_anything_else_is_refused(program):
    with pytest.raises(ValueError):
        plain_pickle.loads(program)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_end_in_a_value_or_a_value_error(program):
    with contextlib.suppress(ValueError):
        plain_pickle.loads(program)


def test_shared_parts_stay_shared():
    """Forty doublings of a list: a copy would need 2⁴⁰ elements."""
    value: list[object] = []
    for _ in range(40):
        value = [value, value]
    found = plain_pickle.loads(pickle.dumps(value))
    assert found[0] is found[1]


def test_a_list_that_contains_itself_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ValueError):
        plain_pickle.loads(pickle.dumps(loop))
