"""One-line error messages: what is wrong, its value, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


def choices(wanted: str, allowed: Iterable[str]) -> str:
    """The tail of an error message: the nearest match, then everything that would have been right."""
    allowed = list(allowed)
    near = difflib.get_close_matches(wanted, allowed, n=1, cutoff=0.5)
    return (f"; did you mean '{near[0]}'? " if near else "; ") + "choose from: " + ", ".join(allowed)


BOUNDS = {  # pydantic's error types → how they are said here
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be one of {expected}",
    "int_parsing": "must be an integer",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
}


def clear(error: ValidationError, name: str = "") -> ValueError:
    """Pydantic's report as one line that names the argument, its value and what is allowed."""
    first = error.errors()[0]
    place = ".".join([name] * bool(name) + [str(part) for part in first["loc"]])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return ValueError(f"{place} is missing")
    if first["type"] == "extra_forbidden":
        return ValueError(f"unknown option '{place}'")
    if not place or first["type"] == "value_error":
        return ValueError(message)
    if first["type"] in BOUNDS:
        limits = {
            key: f"{value:g}" if isinstance(value, float) else value for key, value in first.get("ctx", {}).items()
        }
        expected = str(limits.pop("expected", "")).replace("'", "")
        return ValueError(f"{place}={first['input']} {BOUNDS[first['type']].format(expected=expected, **limits)}")
    return ValueError(f"{place}={first['input']!r}: {message}")
