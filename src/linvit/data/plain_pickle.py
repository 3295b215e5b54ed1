"""Read the plain data inside a pickle without unpickling it.

The original CIFAR files are pickles, and unpickling runs whatever program a file contains. Here the opcodes are
listed by `pickletools` and interpreted: numbers, text, bytes, lists, tuples and dictionaries, and the one call that
rebuilds a NumPy array, which is recognised by name and never made. Anything else is refused.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np

_GLOBALS = {("numpy", "ndarray"), ("numpy", "dtype")}
_GLOBALS |= {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
_DTYPES = {"u1", "i1", "i2", "i4", "i8"}
_LITERALS = {"INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"}
_LITERALS |= {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_LITERALS |= {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TAKES_ALL = {"TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS"}  # down to the last mark
_TAKES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2, "STACK_GLOBAL": 2, "REDUCE": 2, "BUILD": 1}


@dataclass
class _FromNumPy:
    """A name that the file mentions, or the array or dtype under construction that it stands for."""

    kind: str
    value: Any = None


def loads(data: bytes) -> Any:
    """The object in a pickle of plain data and NumPy arrays; ValueError for everything else."""
    try:
        return _finished(_run(data), {})
    except (LookupError, TypeError, AttributeError, EOFError, OverflowError, RecursionError) as error:
        raise ValueError(f"this is not a whole pickle ({type(error).__name__})") from None


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    below: list[list[Any]] = []  # what lies under each mark
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _TAKES_ALL:
            items, stack = stack, below.pop()
        else:
            items = [stack.pop() for _ in range(_TAKES.get(name, 0))][::-1]
        match name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                below.append(stack)
                stack = []
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "EMPTY_LIST" | "LIST":
                stack.append(items)
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(items))
            case "EMPTY_DICT" | "DICT":
                stack.append(_dictionary(items))
            case "APPEND" | "APPENDS":
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                stack[-1].update(_dictionary(items))
            case "GLOBAL":
                stack.append(_named(*str(argument).split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(_named(*items))
            case "REDUCE":
                stack.append(_call(*items))
            case "BUILD":
                _build(stack[-1], *items)
            case _ if name in _LITERALS:
                stack.append(argument)
            case _ if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case _:
                raise ValueError(f"it contains the pickle opcode {name}, which plain data does not need")
    raise ValueError("this is not a whole pickle (it has no end)")


def _dictionary(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _named(module: str, attribute: str) -> _FromNumPy:
    if (module, attribute) not in _GLOBALS:
        raise ValueError(f"it would run {module}.{attribute}, which plain data does not need")
    return _FromNumPy(attribute)


def _call(function: Any, arguments: Any) -> _FromNumPy:
    kind = function.kind if isinstance(function, _FromNumPy) else None
    if kind == "_reconstruct":
        return _FromNumPy("array")
    if kind == "dtype" and arguments[0] in _DTYPES:
        return _FromNumPy("dtype", np.dtype(arguments[0]))
    raise ValueError("it calls something that plain data does not need")


def _build(target: Any, state: Any) -> None:
    kind = target.kind if isinstance(target, _FromNumPy) else None
    if kind == "dtype":
        order = state[1] if isinstance(state[1], str) else "|"
        target.value = target.value.newbyteorder(order if order in "<>" else "=")
    elif kind == "array":
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _FromNumPy) or not isinstance(dtype.value, np.dtype):
            raise ValueError("it contains an array of unknown type")
        raw = raw.encode("latin-1") if isinstance(raw, str) else raw  # Python 2 kept bytes in strings
        target.value = np.frombuffer(raw, dtype.value).reshape(shape, order="F" if fortran else "C")
    else:
        raise ValueError("it sets the state of an object, which plain data does not need")


def _finished(value: Any, done: dict[int, Any]) -> Any:
    """Replace rebuilt arrays by their arrays. `done` keeps shared parts shared: copies could grow without end."""
    if isinstance(value, _FromNumPy):
        if not isinstance(value.value, np.ndarray):
            raise ValueError("it contains an unfinished object")
        return value.value
    if not isinstance(value, (dict, list, tuple)):
        return value
    if id(value) not in done:
        if isinstance(value, dict):
            done[id(value)] = {key: _finished(item, done) for key, item in value.items()}
        else:
            done[id(value)] = type(value)(_finished(item, done) for item in value)
    return done[id(value)]
