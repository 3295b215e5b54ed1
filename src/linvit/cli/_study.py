"""What `compare` and `report` say when they are done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from linvit.cli._output import print_json, print_table

if TYPE_CHECKING:
    from linvit.report import Result, Summary


def show(summary: Summary, folder: Path, as_json: bool, quiet: bool) -> None:
    """The recommendation and the table, as the page has them."""
    from linvit import report

    advice = report.recommend(summary)
    page = folder / "report.html"
    if as_json:
        print_json({
            "recommendation": advice.variant, "confidence": advice.confidence, "sentences": list(advice.sentences),
            "report": str(page), "results": str(folder / "results.csv"),
        })  # fmt: skip
        return
    if not quiet:
        rows = [_row(variant) for variant in summary.variants]
        print_table(rows, right=[name for name in (rows[0] if rows else {}) if name not in ("variant", "verdict")])
    print(" ".join(advice.sentences))
    print(f"Report: {page}")


def _row(variant: Result) -> dict[str, str]:
    from linvit.report import tables

    numbers = {heading.lower(): tables.shown(variant, metric.name) for heading, metric in tables.HEADINGS.items()}
    return {"variant": variant.label, "test accuracy": tables.points(variant)} | numbers | {"verdict": variant.verdict}
