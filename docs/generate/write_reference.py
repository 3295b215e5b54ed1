"""The generated pages of the reference, by file name: `make docs` writes them, and tests compare them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from api_page import api_page
from attentions_page import attentions_page
from cli_page import cli_page
from md import page, table

from linvit.metrics import TABLE

PLACE = Path(__file__).parents[1] / "reference"

METRICS = """What linvit measures. Every number in a result folder is a record in `records.jsonl`
([file formats](formats.md)); its `metric` is one of these. *Per*: the tags that distinguish one measurement from
another. *Column*: where it has its own in `results.csv`."""


def metrics_page() -> str:
    rows = [[f"`{m.name}`", m.unit, ", ".join(dict.fromkeys(m.per)) or "study", m.what, m.column] for m in TABLE]
    return page("Metrics", METRICS, table(["metric", "unit", "per", "what", "column"], rows))


PAGES: dict[str, Callable[[], str]] = {
    "api.md": api_page,
    "attentions.md": attentions_page,
    "cli.md": cli_page,
    "metrics.md": metrics_page,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (PLACE / name).write_text(make(), encoding="utf-8")
