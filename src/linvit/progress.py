"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]  # (done, total, what is being done now)


def ignore(done: int, total: int, what: str) -> None:
    """No progress wanted."""
