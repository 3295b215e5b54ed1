"""What `compare` and `report` say when they are done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from linvit.cli._output import print_json, print_table


def show(studies: Path | Sequence[Path], folder: Path, as_json: bool, quiet: bool, margin: float | None = None) -> None:
    """The recommendation and the table, as the page in the folder has them."""
    from linvit import report
    from linvit.report.tables import headings, points, shown

    summary = report.summarise(report.read(studies), margin)
    advice = report.recommend(summary)
    page = folder / "report.html"
    if as_json:
        print_json({
            "recommendation": advice.variant, "headline": advice.headline, "confidence": advice.confidence,
            "sentences": list(advice.sentences), "attention_worth": advice.attention_worth, "command": advice.command,
            "report": str(page), "results": str(folder / "results.csv"),
        })  # fmt: skip
        return
    if not quiet:
        name = summary.merit.title.lower()
        rows = [
            {"variant": v.label, name: points(v, summary.merit)}
            | {heading.lower(): shown(v, metric.name) for heading, metric in headings(summary).items()}
            | {"verdict": v.verdict}
            for v in summary.variants
        ]
        print_table(rows, right=[name, *map(str.lower, headings(summary))])
    print(f"{advice.headline}. {' '.join(advice.sentences)}")
    if advice.command:
        print(f"  {advice.command}")
    if advice.attention_worth:
        print(advice.attention_worth)
    print(f"Report: {page}")
