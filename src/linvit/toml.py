"""Settings as TOML, which Python reads (`tomllib`) but does not write."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any


def to_toml(tree: Mapping[str, Any]) -> str:
    """Plain data as TOML: mappings become tables, lists of mappings arrays of tables. What is None is left out, since
    TOML has no word for it."""
    return "\n".join(_table(tree, ())).strip() + "\n"


def _table(tree: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Its own values first: a line after a table's heading belongs to that table."""
    own = [f"{_key(key)} = {_value(value)}" for key, value in tree.items() if value is not None and not _below(value)]
    for key, value in tree.items():
        place = (*path, key)
        name = ".".join(map(_key, place))
        if isinstance(value, Mapping):
            own += ["", f"[{name}]", *_table(value, place)]
        elif _below(value):
            own += [line for row in value for line in ("", f"[[{name}]]", *_table(row, place))]
    return own


def _below(value: Any) -> bool:
    """Whether it is written under a heading of its own."""
    rows = isinstance(value, (list, tuple)) and bool(value) and all(isinstance(row, Mapping) for row in value)
    return isinstance(value, Mapping) or rows


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # JSON's escapes are TOML's, but for this one


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else str(value)
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case Mapping():
            pairs = (f"{_key(key)} = {_value(inner)}" for key, inner in value.items() if inner is not None)
            return "{" + ", ".join(pairs) + "}"
        case _:
            return _text(str(value))
