"""What a user is told when something is wrong: one line that names it, its value, and what would be right; and how
much memory there is, beyond which a size is wrong; and how a process leaves that is told to."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


try:
    MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # of the machine, in bytes
except (AttributeError, ValueError, OSError):  # no such call here: only what no machine has is refused
    MEMORY = 2**50


REQUEUE = 75  # exit code of a process that was told to leave: BSD's "temporary failure", try again


class Evicted(KeyboardInterrupt):
    """Told to leave by SIGTERM or SIGUSR1, as schedulers do. The same command, started again, goes on."""


def choices(wanted: str, allowed: Iterable[str]) -> str:
    """The tail of an error message: the nearest match, then everything that would have been right."""
    allowed = list(allowed)
    near = difflib.get_close_matches(wanted, allowed, n=1, cutoff=0.5)
    return (f"; did you mean '{near[0]}'? " if near else "; ") + "choose from: " + ", ".join(allowed)


def clear(error: ValidationError) -> ValueError:
    """Pydantic's report as one line that names the argument, the value and what is allowed."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return ValueError(f"unknown option '{place}'")
    return ValueError(f"{place}={first['input']!r}: {message}" if place else message)
