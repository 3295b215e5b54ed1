"""Names and specs: `performer-exp:m=128,projection=iid` → a class and its checked options.

A registry maps names to classes. The classes' keyword-only arguments, or the fields of their `Options`, are the schema
of a spec's options, so nothing is declared twice. Modules of the registry's own package are imported on first use; so
is every `.py` file named by the environment variable LINVIT_PLUGINS (files or folders, separated like PATH), so that a
new kernel, attention, data set or study is one file, wherever it lies.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import pkgutil
import sys
import types
import typing
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from linvit.errors import choices

Value = bool | int | float | str | None
T = TypeVar("T")


@dataclass(frozen=True)
class Spec:
    """A parsed `name[:key=value,…]`; `str(spec)` is the text again."""

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        pairs = ",".join(f"{key}={_text(value)}" for key, value in self.options.items())
        return f"{self.name}:{pairs}" if pairs else self.name


def _text(value: Value) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return str(value).replace("e+", "e") if isinstance(value, float) else str(value)  # a + joins layers


def _literal(text: str) -> Value:
    lowered = text.lower()
    if lowered in ("true", "false", "none"):
        return {"true": True, "false": False, "none": "none"}[lowered]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    return value if isinstance(value, (int, float)) and math.isfinite(value) else text


def parse(text: str | Spec) -> Spec:
    """`name[:key=value,…]` → Spec. Values are literals, nothing is evaluated."""
    if isinstance(text, Spec):
        return text
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"spec {text!r} is empty: write name[:key=value,…], e.g. performer-exp:m=128")
    name, colon, rest = text.strip().partition(":")
    if not name.strip():
        raise ValueError(f"spec '{text}' has no name: write name[:key=value,…], e.g. performer-exp:m=128")
    options: dict[str, Value] = {}
    for part in rest.split(",") if colon else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value) or set(value) & set("+@"):
            raise ValueError(f"spec '{text}': '{part}' is not key=value (e.g. {name}:m=128)")
        if key in options:
            raise ValueError(f"spec '{text}': option '{key}' is given twice")
        options[key] = _literal(value)
    return Spec(name.strip(), options)


def parse_layers(text: str | Spec, depth: int) -> list[Spec]:
    """One spec for every layer: `a` for all of them, or `a@2+b@4`, whose counts sum to `depth`."""
    if isinstance(text, Spec) or not set(text) & set("+@"):
        return [parse(text)] * depth
    parts: list[tuple[Spec, int]] = []
    for part in text.split("+"):
        spec, at, count = part.partition("@")
        if at and not (count.isdecimal() and int(count)):
            raise ValueError(f"spec '{text}': '@{count}' must be a positive number of layers, e.g. softmax@2")
        parts.append((parse(spec), int(count) if at else 1))
    if (layers := sum(count for _, count in parts)) != depth:
        raise ValueError(f"spec '{text}' describes {layers} layers, but the model has depth={depth}")
    return [spec for spec, count in parts for _ in range(count)]


def join_layers(specs: Sequence[Spec]) -> str:
    """The text that `parse_layers` makes these specs of."""
    runs = [(str(spec), len(list(same))) for spec, same in itertools.groupby(specs)]
    return runs[0][0] if len(runs) == 1 else "+".join(f"{text}@{count}" for text, count in runs)


@functools.cache
def signature_options(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The keyword-only arguments of a function or class, with their annotations resolved.

    A class may state them as the fields of a dataclass `Options`, which its subclasses extend.
    """
    target: Any = getattr(factory, "Options", factory)
    written = inspect.isclass(target) and not is_dataclass(target)
    # a dataclass's fields may come from several modules, where alone their annotations make sense
    hints = typing.get_type_hints(target.__init__ if written else target)
    return types.MappingProxyType(
        {
            name: parameter.replace(annotation=hints.get(name, Any))
            for name, parameter in inspect.signature(target).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
    )


def _accepts(annotation: Any, value: Value) -> bool:
    if annotation is Any:
        return True
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return value in typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_accepts(part, value) for part in typing.get_args(annotation))
    if annotation is type(None):
        return value is None
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _describe(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        return " or ".join(_describe(part) for part in parts)
    return {int: "an integer", float: "a number", bool: "true or false", str: "a word"}.get(annotation, str(annotation))


def check_options(spec: Spec, allowed: Mapping[str, inspect.Parameter]) -> dict[str, Value]:
    """The options as a constructor takes them, or a ValueError naming the option, its value and what is allowed.

    `none` is a word where that word is allowed (projection=none), and None elsewhere (clamp=none).
    """
    options: dict[str, Value] = {}
    for key, value in spec.options.items():
        if key not in allowed:
            raise ValueError(f"spec '{spec}': '{spec.name}' has no option '{key}'" + choices(key, sorted(allowed)))
        annotation = allowed[key].annotation
        options[key] = None if value == "none" and not _accepts(annotation, value) else value
        if not _accepts(annotation, options[key]):
            raise ValueError(f"spec '{spec}': option {key}={_text(value)} must be {_describe(annotation)}")
    return options


class Registry(typing.Generic[T]):
    """name → class, for one kind of thing."""

    def __init__(self, kind: str, package: str):
        self.kind, self.package = kind, package
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        def add(entry: T) -> T:
            old = self._entries.get(name)
            if old is not None and _source(old) != _source(entry):
                raise ValueError(f"{self.kind} '{name}' is registered twice: in {_source(old)} and {_source(entry)}")
            self._entries[name] = entry
            return entry

        return add

    def names(self) -> list[str]:
        self.discover()
        return list(self._entries)

    def items(self) -> list[tuple[str, T]]:
        self.discover()
        return list(self._entries.items())

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def __getitem__(self, name: str) -> T:
        self.discover()
        if name not in self._entries:
            raise ValueError(f"unknown {self.kind} '{name}'" + choices(name, self._entries))
        return self._entries[name]

    def discover(self) -> None:
        import_submodules(self.package)
        import_plugins(os.environ.get("LINVIT_PLUGINS", ""))


def _source(entry: Any) -> str:
    """Where a class or function is defined; a registered value describes itself."""
    return f"{inspect.getfile(entry)}:{entry.__qualname__}" if hasattr(entry, "__qualname__") else f"'{entry}'"


@functools.cache
def import_submodules(package: str) -> None:
    root = importlib.import_module(package)
    for module in pkgutil.iter_modules(root.__path__):
        importlib.import_module(f"{package}.{module.name}")


@functools.cache
def import_plugins(paths: str) -> None:
    """Import each `.py` file, and each one directly inside a folder."""
    for path in map(Path, filter(None, paths.split(os.pathsep))):
        if not path.exists():
            raise ValueError(f"LINVIT_PLUGINS names '{path}', which does not exist")
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            name = f"linvit_plugin_{file.stem}_{zlib.crc32(bytes(file.resolve())):08x}"
            if name in sys.modules:
                continue
            spec = importlib.util.spec_from_file_location(name, file)
            if spec is None or spec.loader is None:
                raise ValueError(f"LINVIT_PLUGINS names '{file}', which is not a Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
