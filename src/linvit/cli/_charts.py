"""The benchmarks' charts: one Vega-Lite spec each, as a page that needs no network and as a PNG."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import altair as alt

from linvit.files import write_atomically
from linvit.records import Record
from linvit.report import theme

BLUE, ORANGE = theme.PALETTE[0], theme.PALETTE[1]
ROW = 19  # pixels per attention


def save(chart: Any, stem: Path) -> list[Path]:
    """`stem`.html and `stem`.png, each whole or not at all."""
    import vl_convert

    chart = chart.properties(config=theme.config(page=False))
    spec = chart.to_dict()
    menu = {"actions": {"export": True, "source": False, "compiled": False, "editor": False}}
    page = chart.to_html(inline=True, embed_options=menu)
    contents = {".html": page.encode(), ".png": vl_convert.vegalite_to_png(spec, scale=2)}
    written = []
    for suffix, content in contents.items():
        path = stem.with_suffix(suffix)
        write_atomically(path, content)
        written.append(path)
    return written


def _where(records: list[Record]) -> str:
    first = records[0]
    return f"{first.device}, {first.threads} thread{'s' * (first.threads != 1)}, {first.dtype}, {first.versions}"


def _heading(text: str) -> alt.TitleParams:
    return alt.TitleParams(text, frame="group", fontSize=12)


def error(records: Iterable[Record]) -> alt.HConcatChart:
    """A dot per attention and σ: total variation to softmax, with the uniform control as a line."""
    found = [record for record in records if record.metric == "attention_error"]
    values = [{**record.tags, "value": record.value} for record in found if record.tags["attention"] != "softmax"]
    sigmas = sorted({row["sigma"] for row in values})
    middle = sigmas[len(sigmas) // 2]
    order = [row["attention"] for row in sorted(values, key=lambda r: r["value"]) if row["sigma"] == middle]
    panels = []
    for i, sigma in enumerate(sigmas):
        rows = [row for row in values if row["sigma"] == sigma]
        control = next(row["value"] for row in rows if row["attention"] == "uniform")
        for row in rows:
            row["beats"] = "closer to softmax than uniform" if row["value"] < control else "not closer"
        axis = alt.Axis(labels=i == 0, labelLimit=300)
        y = alt.Y("attention:N", sort=order, title=None, axis=axis)
        colour = alt.Color(
            "beats:N", scale=alt.Scale(domain=["closer to softmax than uniform", "not closer"], range=[BLUE, ORANGE])
        )
        tips = ["attention:N", "sigma:Q", *(alt.Tooltip(f"{key}:Q", format=".4f") for key in ("value", "low", "high"))]
        base = alt.Chart(alt.InlineData(values=rows)).encode(y=y, color=colour, tooltip=tips)
        layers = alt.layer(
            alt.Chart(alt.InlineData(values=[{"control": control}]))
            .mark_rule(strokeDash=[4, 3], strokeWidth=1.5)
            .encode(x="control:Q"),
            base.mark_rule(strokeWidth=2, clip=True).encode(x="low:Q", x2="high:Q"),
            base.mark_point(filled=True, size=70, opacity=1).encode(
                x=alt.X(
                    "value:Q", title=None, scale=alt.Scale(domain=[0, 1], clamp=True), axis=alt.Axis(values=[0, 0.5, 1])
                )
            ),
        )
        panels.append(layers.properties(width=190, height=ROW * len(order), title=_heading(f"σ = {sigma:g}")))
    tags = found[0].tags
    lines = [
        f"Total variation, mean over rows; q, k ~ N(0, σ²), {tags['tokens']} tokens, head_dim {tags['head_dim']}; "
        "dashed: uniform attention.",
        f"Dot: mean of {found[0].n} draws, line: their range; learnable kernels and linformer are untrained. "
        "Rows that do not sum to one can exceed 1.",
        _where(found),
    ]
    return alt.hconcat(*panels, spacing=14, title=alt.TitleParams("Distance from exact softmax", subtitle=lines))


def speed(records: Iterable[Record]) -> alt.HConcatChart:
    """A cell per attention, length and mode: how many times faster than fused softmax."""
    found = [record for record in records if record.metric == "attention_vs_softmax"]
    values = [
        {
            **record.tags,
            "value": record.value,
            "shown": f"{record.value:.2g}" if record.value < 10 else f"{record.value:.0f}",
        }
        for record in found
        if isinstance(record.value, (int, float)) and record.tags["attention"] != "softmax"
    ]
    lengths = sorted({row["tokens"] for row in values})
    longest = {
        row["attention"]: row["value"] for row in values if row["tokens"] == lengths[-1] and row["mode"] == "both"
    }
    order = sorted({row["attention"] for row in values}, key=lambda name: -longest.get(name, 0.0))
    for row in values:
        row["log"] = max(-3.0, min(3.0, math.log2(row["value"])))
    panels = []
    for i, (mode, title) in enumerate((("forward", "inference (forward)"), ("both", "training (forward + backward)"))):
        base = alt.Chart(alt.InlineData(values=[row for row in values if row["mode"] == mode])).encode(
            x=alt.X("tokens:O", title="tokens", axis=alt.Axis(labelAngle=0, orient="top")),
            y=alt.Y("attention:N", sort=order, title=None, axis=alt.Axis(labels=i == 0, labelLimit=300)),
            tooltip=["attention:N", "tokens:O", "mode:N",
                     *(alt.Tooltip(f"{key}:Q", format=".3g") for key in ("value", "low", "high"))],
        )  # fmt: skip
        colour = alt.Color(
            "log:Q",
            legend=None,
            scale=alt.Scale(domain=[-3, 0, 3], range=[ORANGE, "#F6F7F9", BLUE], clamp=True, interpolate="rgb"),
        )
        cells = base.mark_rect(stroke="white", strokeWidth=1).encode(color=colour)
        ink = alt.condition("abs(datum.log) > 2", alt.value("white"), alt.value("#16191D"))
        text = base.mark_text(fontSize=11).encode(text="shown:N", color=ink)
        size = {"width": 64 * len(lengths), "height": ROW * len(order)}
        panels.append(alt.layer(cells, text).properties(**size, title=_heading(title)))
    tags = found[0].tags
    lines = [
        f"softmax's time / its time, {tags['clock']} clock, median of {found[0].n} interleaved rounds; "
        f"blue is faster, orange slower.",
        f"batch {tags['batch']}, {tags['heads']} heads, head_dim {tags['head_dim']}; {_where(found)}",
    ]
    title = alt.TitleParams("How many times faster than PyTorch's fused softmax attention", subtitle=lines)
    return alt.hconcat(*panels, spacing=20, title=title)
