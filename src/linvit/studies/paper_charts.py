"""Charts of the paper's figures that the benchmarks do not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import altair as alt
import numpy as np

from linvit.metrics import METRICS
from linvit.records import Record
from linvit.report.vega import DIVERGING, Series, data, lines, panels, tooltips, x_axis, y_axis

Points = Mapping[tuple[str, int], Record]  # by attention and place on the x axis


def _curves(points: Points, x: partial[alt.X], y: alt.Y, title: str, *subtitle: str) -> alt.HConcatChart:
    """One line per attention."""
    rows = [
        {"attention": name, "at": at, "value": record.value, "shown": METRICS[record.metric].show(record.value)}
        for (name, at), record in points.items()
    ]
    series = Series(list(dict.fromkeys(row["attention"] for row in rows)), "attention")
    ticks = x(values=sorted({row["at"] for row in rows}), nice=False, grid=False, format=",d")
    curves = lines(rows, ticks, y, series, tooltips("attention", ("at", "at", "d"), "shown"))
    return panels({"": alt.layer(*curves)}, title, *subtitle, width=420, height=300)


def costs(records: Sequence[Record]) -> alt.HConcatChart:
    """Multiply–accumulates of one call over the number of tokens."""
    points = {(str(r.tags["attention"]), int(r.tags["tokens"] or 0)): r for r in records if r.value}
    x = partial(x_axis, "at", "tokens (log)", log=True, base=2)
    y = y_axis("value", "multiply–accumulates (log)", log=True, format="~s", tickCount=6)
    heads, width = (records[0].tags[name] for name in ("heads", "head_dim"))
    note = f"{heads} heads, head_dim {width}; counted, not timed. Softmax: 2N²d per head, others ∝ N."
    return _curves(points, x, y, "Cost of one call", note)


def layers(records: Sequence[Record], models: Mapping[str, tuple[str, int]]) -> alt.HConcatChart:
    """Time of a training step over the number of layers; `models`: variant → attention and layers."""
    points = {models[str(r.tags["variant"])]: r for r in records if r.metric == "train_step" and r.value}
    first = next(iter(points.values()))
    y = y_axis("value", "training step", zero=True, labelExpr="format(datum.value, '~s') + 's'")
    note = f"Whole models, batch {first.tags['batch']}; identity returns v, the lower bound."
    title = "Training step by the number of layers"
    return _curves(points, partial(x_axis, "at", "layers"), y, title, note, first.where)


def prefix_sums(sums: np.ndarray, outputs: np.ndarray, record: Record) -> alt.VConcatChart:
    """Σ φ(k) vᵀ after each token (steps, F, e), and the output that its query reads from the sum (steps, e)."""
    width, height = 14 * sums.shape[2], 14 * sums.shape[1]
    top, top_output = float(np.abs(sums).max()), float(np.abs(outputs).max())
    matrices = {f"after {step}": _matrix(matrix, top) for step, matrix in enumerate(sums, 1)}
    read = {f"output {step}": _matrix(row[None], top_output) for step, row in enumerate(outputs, 1)}
    subtitle = [
        "Each token adds the product of φ(k) and v to a matrix of fixed size; its query reads a row from it.",
        f"{record.tags['attention']}; relative difference from the masked quadratic form at most {record.value:.1e}.",
    ]
    return alt.vconcat(
        panels(matrices, "", spacing=10, width=width, height=height),
        panels(read, "", spacing=10, width=width, height=14),
        title=alt.TitleParams("Prefix sums of unidirectional attention", subtitle=subtitle),
    )


def _matrix(values: np.ndarray, top: float) -> alt.Chart:
    rows = [{"row": int(i), "column": int(j), "value": float(value)} for (i, j), value in np.ndenumerate(values)]
    x, y = alt.X("column:O", title=None, axis=None), alt.Y("row:O", title=None, axis=None)
    colours = alt.Scale(domain=[-top, 0, top], range=list(DIVERGING), interpolate="rgb")
    colour = alt.Color("value:Q", scale=colours, legend=None)
    return data(rows).mark_rect().encode(x=x, y=y, color=colour, tooltip=tooltips(("value", "value", ".3f")))
