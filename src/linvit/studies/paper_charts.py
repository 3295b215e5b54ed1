"""Charts of the paper's figures that the benchmarks do not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import altair as alt
import numpy as np

from linvit.metrics import METRICS
from linvit.records import Record
from linvit.report.benchmarks import picture
from linvit.report.vega import DIVERGING, Series, data, lines, panels, tooltips, x_axis, y_axis, y_names

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


NEAR = 1  # rows and columns between a token and its neighbours


def telling_heads(weights: np.ndarray, side: int) -> dict[str, tuple[int, int]]:
    """Two heads of (layers, heads, N, N), by what they look at: the one with most of its weight on the neighbours of
    each token, and the one whose queries agree most on a few tokens."""
    shares = np.abs(weights) / np.abs(weights).sum(-1, keepdims=True)
    prefix = weights.shape[-1] - side**2
    y, x = np.divmod(np.arange(side**2), side)
    near = (np.abs(y[:, None] - y) <= NEAR) & (np.abs(x[:, None] - x) <= NEAR)
    local = (shares[..., prefix:, prefix:] * near).sum(-1).mean(-1)
    fixed = np.sort(shares.mean(-2), axis=-1)[..., -3:].sum(-1)  # of the three tokens that get most from all queries
    found = {}
    for name, each in (("neighbours", local), ("fixed tokens", fixed)):
        taken = list(found.values())
        order = [divmod(int(i), each.shape[1]) for i in np.argsort(-each, axis=None)]
        found[name] = next(place for place in order if place not in taken)
    return found


def two_heads(weights: np.ndarray, side: int) -> alt.HConcatChart:
    """Both in detail, with the share of all attention that each token gets."""
    prefix, named = weights.shape[-1] - side**2, {}
    for name, (layer, head) in telling_heads(weights, side).items():
        matrix = weights[layer, head]
        place = {"x": alt.value(150), "y": alt.value(150)}
        whole = (
            data([{"picture": picture(matrix, 300)}]).mark_image(width=300, height=300).encode(url="picture:N", **place)
        )
        given = (np.abs(matrix) / np.abs(matrix).sum(-1, keepdims=True)).mean(0)[prefix:]
        rows = [{"row": int(i // side), "column": int(i % side), "share": float(v)} for i, v in enumerate(given)]
        where = {"x": alt.X("column:O", axis=None), "y": alt.Y("row:O", axis=None)}
        cells = (
            data(rows)
            .mark_rect()
            .encode(
                **where,
                color=alt.Color("share:Q", legend=None, scale=alt.Scale(range=[DIVERGING[1], DIVERGING[2]])),
                tooltip=tooltips("row", "column", ("share", "share", ".2%")),
            )
        )
        title = f"Layer {layer + 1}, head {head + 1}: {name}"
        named[title] = whole.properties(width=300, height=300)
        named[f"what it attends to ({layer + 1}, {head + 1})"] = cells.properties(width=300, height=300)
    note = "Matrices: rows are queries, columns keys. Maps: what each place of the image gets from all queries."
    return panels(named, "Two heads in detail", note, spacing=20).resolve_scale(color="independent")


def histograms(records: Sequence[Record]) -> alt.HConcatChart:
    """A bar for each level, by data set."""
    named = {}
    for dataset in dict.fromkeys(str(r.tags["dataset"]) for r in records):
        mine = [r for r in records if r.tags["dataset"] == dataset]
        rows = [{"level": int(r.tags["level"] or 0), "share": r.value, "shown": f"{r.value:.1%}"} for r in mine]
        x, y = x_axis("share", "tokens", format="~%", zero=True), y_names("level", [row["level"] for row in rows])
        named[dataset] = data(rows).mark_bar().encode(x=x, y=y, tooltip=tooltips("level", "shown"))
    note = "Pixels of the training images, from black (0) to white; as many levels as amino acids."
    return panels(named, "How often each token occurs", note, width=260, height=320)


def similarities(records: Sequence[Record]) -> alt.HConcatChart:
    """What is known of two tokens, and what attention shows of them."""
    rows = [
        {
            "level": int(r.tags["level"] or 0),
            "other": int(r.tags["other"] or 0),
            "how near they are": float(r.tags["expected"] or 0),
            "by attention": r.value,
        }
        for r in records
        if r.metric == "token_similarity"
    ]
    named = {}
    for name, ends in (("how near they are", [0, 1]), ("by attention", [-1, 1])):
        colours = list(DIVERGING) if ends[0] < 0 else list(DIVERGING[1:])
        domain = [-1, 0, 1] if ends[0] < 0 else ends
        colour = alt.Color(f"{name}:Q", scale=alt.Scale(domain=domain, range=colours, interpolate="rgb"), legend=None)
        cells = data(row for row in rows if row[name] is not None).mark_rect()
        axis, levels = alt.Axis(labelAngle=0), alt.Scale(domain=sorted({row["level"] for row in rows}))
        named[name] = cells.encode(
            x=alt.X("other:O", title="level", axis=axis, scale=levels),
            y=alt.Y("level:O", title="level", scale=levels),
            color=colour,
            tooltip=tooltips("level", "other", (name, name, ".2f")),
        )
    first, r = records[0], agreement(records)
    note = f"{first.tags['model']}, {first.tags['attention']}, {first.tags['images']} images; blue: alike."
    told = f"Correlation of the two off the diagonal: {r:.2f}."
    charts = panels(named, "Similarity of levels, from attention", note, told, width=340, height=340)
    return charts.resolve_scale(color="independent")


def agreement(records: Sequence[Record]) -> float:
    """The correlation, over pairs of different levels, of similarity by attention with how near they are."""
    pairs = [
        (r.value, float(r.tags["expected"] or 0))
        for r in records
        if r.metric == "token_similarity" and r.value is not None and r.tags["level"] != r.tags["other"]
    ]
    return float(np.corrcoef(np.array(pairs).T)[0, 1]) if len(pairs) > 1 else float("nan")
