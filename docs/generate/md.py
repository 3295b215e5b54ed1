"""Markdown from docstrings, and tables."""

from __future__ import annotations

import html
import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import Any

WRITTEN = "<!-- Written by `make docs` from the code; do not edit. -->"


def page(title: str, *parts: str) -> str:
    return "\n\n".join(filter(None, (f"# {title}", WRITTEN, *parts))) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells may hold any text: `|` and, outside of code, `<` are escaped as GitHub and Python-Markdown both read it."""
    rows = [head, ["---"] * len(head), *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _escaped(cell: str) -> str:
    return "".join(map(_part, re.split(r"(`[^`]*`)", cell.replace("\n", " "))))


def _part(text: str) -> str:
    """Of a cell: a text, or a code span; one with a `|` becomes HTML, since the two disagree about `\\|` in code."""
    if not text.startswith("`"):
        return text.replace("|", r"\|").replace("<", "&lt;")
    return f"<code>{html.escape(text[1:-1], quote=False).replace('|', '&#124;')}</code>" if "|" in text else text


def words(thing: Any) -> str:
    """Its own docstring, not an inherited one, nor what a dataclass writes for itself."""
    found = inspect.cleandoc((vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__) or "")
    name = getattr(thing, "__name__", "")
    return "" if found.startswith(f"{name}(") else found


def comment(owner: type, name: str) -> tuple[str, str]:
    """The annotation of a field as the source has it, and the comment on its line or the lines above."""
    sources = (inspect.getsource(one) for one in owner.__mro__ if one.__module__.startswith("linvit"))
    source = "\n".join(map(textwrap.dedent, sources))
    above, kind, beside = re.findall(rf"^((?:    # .+\n)*)    {name}: (.+?)(?: = .+?)?(?:  # (.+))?$", source, re.M)[0]
    return kind, beside or " ".join(line.removeprefix("    # ") for line in above.splitlines())
