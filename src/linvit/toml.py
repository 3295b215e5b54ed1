"""Settings as TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any


def parse_toml(text: str) -> dict[str, Any]:
    """What TOML says. A ValueError also where it is nested so deeply that Python's parser gives up."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def to_toml(tree: Mapping[str, Any]) -> str:
    """Plain data as TOML. None is left out, since TOML has no word for it."""
    import tomli_w

    return tomli_w.dumps(_without_none(tree))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, (list, tuple)) else value
