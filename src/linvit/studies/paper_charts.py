"""Charts of the paper's figures that the benchmarks do not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from linvit.metrics import METRICS
from linvit.records import Record
from linvit.report import theme

Rows = list[dict[str, Any]]


def _data(rows: Iterable[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(rows)))


def _title(text: str, *lines: str) -> alt.TitleParams:
    return alt.TitleParams(text, subtitle=list(lines))


def _lines(rows: Rows, x: alt.X, y: alt.Y, title: alt.TitleParams, width: int = 420) -> Any:
    names = list(dict.fromkeys(row["attention"] for row in rows))
    shown = {"range": [theme.PALETTE[i % len(theme.PALETTE)] for i in range(len(names))], "domain": names}
    base = _data(rows).encode(x=x, y=y, color=alt.Color("attention:N", scale=alt.Scale(**shown)),
                              tooltip=["attention:N", "at:Q", "shown:N"])  # fmt: skip
    layers = base.mark_line(strokeWidth=2), base.mark_point(size=45, filled=True, opacity=1)
    return alt.layer(*layers).properties(width=width, height=300, title=title)


def costs(records: Sequence[Record]) -> Any:
    """A line per attention: multiply–accumulates of one call over the length."""
    found = [record for record in records if record.metric == "attention_macs"]
    show = METRICS["attention_macs"].show
    rows = [
        {"attention": r.tags["attention"], "at": r.tags["tokens"], "value": r.value, "shown": show(r.value)}
        for r in found if r.value
    ]  # fmt: skip
    lengths = sorted({row["at"] for row in rows})
    x = alt.X("at:Q", title="tokens (log)", scale=alt.Scale(type="log", base=2, nice=False),
              axis=alt.Axis(values=lengths, grid=False))  # fmt: skip
    y = alt.Y("value:Q", title="multiply–accumulates (log)", scale=alt.Scale(type="log", nice=False),
              axis=alt.Axis(format="~s", tickCount=6))  # fmt: skip
    tags = found[0].tags
    line = f"{tags['heads']} heads, head_dim {tags['head_dim']}; counted, not timed. Softmax: 2N²d a head, others ∝ N."
    return _lines(rows, x, y, _title("What one call costs", line))


def deeper(records: Sequence[Record], parts: Mapping[str, tuple[str, int]]) -> Any:
    """A line per attention: the time of a training step over the number of layers; `parts` takes variants apart."""
    found = [record for record in records if record.metric == "train_step" and record.value]
    show = METRICS["train_step"].show
    rows = [
        {"attention": spec, "at": depth, "value": r.value, "shown": show(r.value)}
        for r in found for spec, depth in (parts[str(r.tags["variant"])],)
    ]  # fmt: skip
    depths = sorted({row["at"] for row in rows})
    x = alt.X("at:Q", title="layers", scale=alt.Scale(nice=False), axis=alt.Axis(values=depths, grid=False))
    y = alt.Y("value:Q", title="training step", axis=alt.Axis(labelExpr="format(datum.value, '~s') + 's'"))
    lines = f"Whole models, batch {found[0].tags['batch']}; identity returns v: nothing is faster.", found[0].where
    return _lines(rows, x, y, _title("A training step, by the number of layers", *lines))


def prefix_sums(sums: np.ndarray, outputs: np.ndarray, record: Record) -> alt.VConcatChart:
    """Σ φ(k) vᵀ after each token, and the output that its query reads from that: (steps, F, e) and (steps, e)."""
    top = float(np.abs(sums).max())
    cell = {"width": 14 * sums.shape[2], "height": 14 * sums.shape[1]}
    shown = [_heat(matrix, top, f"after {step + 1}", **cell) for step, matrix in enumerate(sums)]
    read = [_heat(row[None], float(np.abs(outputs).max()), "output", width=cell["width"], height=14) for row in outputs]
    lines = ["Each token adds the product of φ(k) and v to a matrix of fixed size; its query reads a row from it.",
             f"{record.tags['attention']}; from the masked quadratic form at most {record.value:.1e}."]  # fmt: skip
    return alt.vconcat(alt.hconcat(*shown, spacing=10), alt.hconcat(*read, spacing=10),
                       title=_title("Prefix sums of unidirectional attention", *lines))  # fmt: skip


def _heat(matrix: np.ndarray, top: float, name: str, width: int, height: int) -> alt.Chart:
    rows = [{"row": int(i), "column": int(j), "value": float(value)} for (i, j), value in np.ndenumerate(matrix)]
    blue, orange = theme.PALETTE[:2]
    colour = alt.Scale(domain=[-top, 0, top], range=[orange, theme.INKS["card"], blue], interpolate="rgb")
    return _data(rows).mark_rect().encode(
        x=alt.X("column:O", title=None, axis=None), y=alt.Y("row:O", title=None, axis=None),
        color=alt.Color("value:Q", scale=colour, legend=None), tooltip=[alt.Tooltip("value:Q", format=".3f")],
    ).properties(width=width, height=height, title=alt.TitleParams(name, fontSize=11, frame="group"))  # fmt: skip
