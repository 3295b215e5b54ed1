"""Learning curves on logarithmic axes (the paper's figures 16 and 17): they show the best rows, and where a run ended
because a number was not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from linvit.report.summary import number
from linvit.report.vega import Chart, Series, data, lines, tooltips, x_axis, y_axis
from linvit.studies.declaration import Column
from linvit.studies.results import ColumnResult


def log_curves(study: str, columns: Mapping[Column, ColumnResult]) -> list[Chart]:
    """A chart for each column: the first seed of each row, those that diverged with a cross where they ended."""
    return [chart for name, ran in columns.items() if (chart := _curves(study, name, ran)) is not None]


def _curves(study: str, column: str, ran: ColumnResult) -> Chart | None:
    evidence, merit, rows, ends = ran.summary.evidence, ran.summary.merit, [], []
    key, title, label, form = merit.curve
    for row in ran.rows.values():
        curve = next(iter(evidence.of("learning_curve", variant=row.id)), None)
        points = _points(evidence.logs.get(curve.artefact, []), key, row.label) if curve else []
        rows += points
        diverged = curve and any(r.tags.get("seed") == curve.tags.get("seed") for r in _ended(ran, row.id))
        ends += points[-1:] if diverged else []
    if not rows:
        return None
    series = Series(list(dict.fromkeys(row["variant"] for row in rows)))
    x = x_axis("step", "steps (log)", log=True, format="~s", grid=False)
    y = y_axis("value", f"{label} (log)", log=True, format=form)
    tips = tooltips("variant", ("step", "step", "d"), ("value", title.lower(), ".3g"))
    layers = lines(rows, x, y, series, tips)
    if ends:
        crosses = data(ends).mark_point(shape="cross", angle=45, size=150, filled=True, opacity=1)
        layers.append(crosses.encode(x=x, y=y, **series("color")))
    note = "One seed of each row. A cross: a number was not finite, and the run ended." if ends else "One seed of each."
    return Chart(f"log-{column}-{study}", f"{title}, {column}", 320, layers, note, series)


def _ended(ran: ColumnResult, row: str) -> list[Any]:
    return list(ran.summary.evidence.of("diverged", variant=row))


def _points(log: list[dict[str, Any]], key: str, label: str) -> list[dict[str, Any]]:
    pairs = [(number(line.get("step")), number(line.get(key))) for line in log]
    return [{"variant": label, "step": x, "value": y} for x, y in pairs if x and y and x > 0 and y > 0]
