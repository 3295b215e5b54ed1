"""What `convert` and `report` say of a conversion."""

from __future__ import annotations

from pathlib import Path

from linvit.cli._output import print_json, print_table
from linvit.metrics import percent
from linvit.progress import duration


def show(folder: Path, as_json: bool, quiet: bool) -> None:
    """The answer and the table, as the page in the folder has them."""
    from linvit.report import conversion

    evidence = conversion.read(folder)
    rows, page = evidence.rows(), folder / "report.html"
    if as_json:
        print_json({
            "folder": str(folder), "headline": conversion.headline(evidence),
            "attention": evidence.student.tags["attention"], "teacher_accuracy": evidence.teacher.value,
            "test_accuracy": evidence.student.value, "rows": rows, "report": str(page),
        })  # fmt: skip
        return
    if not quiet:
        table = [
            {"model": row["model"] + (" ←" if row["chosen"] else ""), "linear": row["linear_layers"],
             "validation": percent(row["validation_accuracy"]), "as teacher": percent(row["agreement"]),
             "steps": f"{row['steps']:,.0f}", "time": duration(row["seconds"]),
             "test": "–" if row["test_accuracy"] is None else percent(row["test_accuracy"])}
            for row in rows
        ]  # fmt: skip
        print_table(table, right=[name for name in table[0] if name != "model"])
    print(f"{conversion.headline(evidence)}.")
    print(f"Of {evidence.student.n:,} test images: {conversion.lost(evidence)}.")
    print(f"Model: {folder / 'best'}\nReport: {page}")
