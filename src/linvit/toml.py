"""Settings as TOML text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def to_toml(tree: Mapping[str, Any]) -> str:
    """Plain data as TOML. None is left out, since TOML has no word for it."""
    import tomli_w

    return tomli_w.dumps(_without_none(tree))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, (list, tuple)) else value
