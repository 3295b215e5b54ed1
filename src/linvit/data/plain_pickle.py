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

_MARK = object()
_ARRAY, _NDARRAY, _DTYPE = "array", "ndarray", "dtype"
_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"): _ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): _ARRAY,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DTYPE,
}
_DTYPES = {"u1", "i1", "i2", "i4", "i8"}
_NUMBERS = {"INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"}
_TEXTS = {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}


@dataclass
class _Name:
    """A global the file mentions; only ever compared."""

    kind: str


@dataclass
class _Rebuilt:
    """An array or dtype under construction."""

    kind: str
    value: Any = None


def loads(data: bytes) -> Any:
    """The object in a pickle of plain data and NumPy arrays; ValueError for everything else."""
    try:
        return _finished(_run(data), {})
    except ValueError:
        raise
    except (LookupError, TypeError, AttributeError, EOFError, OverflowError, RecursionError) as error:
        raise ValueError(f"this is not a whole pickle ({type(error).__name__})") from None


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        at = next((i for i in reversed(range(len(stack))) if stack[i] is _MARK), None)
        if at is None:
            raise ValueError("this is not a whole pickle (a mark is missing)")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            return stack.pop()
        if name in _NUMBERS | _TEXTS | _BYTES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in ("TUPLE", "LIST"):
            items = since_mark()
            stack.append(tuple(items) if name == "TUPLE" else items)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            items = tuple(stack[-int(name[-1]) :])
            stack[-len(items) :] = [items]
        elif name == "DICT":
            items = since_mark()
            stack.append(dict(zip(items[::2], items[1::2], strict=True)))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else since_mark()
            stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else since_mark()
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "GLOBAL":
            stack.append(_named(*str(argument).split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_named(module, attribute))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_call(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        else:
            raise ValueError(f"it contains the pickle opcode {name}, which plain data does not need")
    raise ValueError("this is not a whole pickle (it has no end)")


def _named(module: str, attribute: str) -> _Name:
    if (module, attribute) not in _GLOBALS:
        raise ValueError(f"it would run {module}.{attribute}, which plain data does not need")
    return _Name(_GLOBALS[module, attribute])


def _call(function: Any, arguments: Any) -> _Rebuilt:
    kind = function.kind if isinstance(function, _Name) else None
    if kind == _ARRAY:
        return _Rebuilt(_ARRAY)
    if kind == _DTYPE and arguments[0] in _DTYPES:
        return _Rebuilt(_DTYPE, np.dtype(arguments[0]))
    raise ValueError("it calls something that plain data does not need")


def _build(target: Any, state: Any) -> None:
    if not isinstance(target, _Rebuilt):
        raise ValueError("it sets the state of an object, which plain data does not need")
    if target.kind == _DTYPE:
        order = state[1] if isinstance(state[1], str) else "|"
        target.value = target.value.newbyteorder(order if order in "<>" else "=")
        return
    _, shape, dtype, fortran, raw = state
    if not isinstance(dtype, _Rebuilt) or dtype.kind != _DTYPE:
        raise ValueError("it contains an array of unknown type")
    raw = raw.encode("latin-1") if isinstance(raw, str) else raw  # Python 2 kept bytes in strings
    target.value = np.frombuffer(raw, dtype.value).reshape(shape, order="F" if fortran else "C")


def _finished(value: Any, done: dict[int, Any]) -> Any:
    """Replace rebuilt arrays by their arrays. `done` keeps shared parts shared: copies could grow without end."""
    if isinstance(value, _Rebuilt) and isinstance(value.value, np.ndarray):
        return value.value
    if isinstance(value, (_Rebuilt, _Name)) or value is _MARK:
        raise ValueError("it contains an unfinished object")
    if not isinstance(value, (dict, list, tuple)):
        return value
    if id(value) not in done:
        if isinstance(value, dict):
            done[id(value)] = {key: _finished(item, done) for key, item in value.items()}
        else:
            done[id(value)] = type(value)(_finished(item, done) for item in value)
    return done[id(value)]
