"""The benchmarks' charts: one Vega-Lite spec each, as a page that needs no network and as a PNG."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import altair as alt

from linvit.cli._output import where
from linvit.files import write_atomically
from linvit.records import Record
from linvit.report import theme

BLUE, ORANGE = theme.PALETTE[:2]
CLOSER, NOT_CLOSER = "closer to softmax than uniform", "not closer"


def save(chart: Any, stem: Path) -> list[Path]:
    """`stem`.html and `stem`.png, each whole or not at all."""
    import vl_convert

    chart = chart.properties(config=theme.config(page=False))
    menu = {"actions": {"export": True, "source": False, "compiled": False, "editor": False}}
    page, image = stem.with_suffix(".html"), stem.with_suffix(".png")
    write_atomically(page, chart.to_html(inline=True, embed_options=menu))
    write_atomically(image, vl_convert.vegalite_to_png(chart.to_dict(), scale=2))
    return [page, image]


def _base(rows: list[dict[str, Any]], order: list[str], first: bool, tips: list[str], form: str) -> alt.Chart:
    """A row per attention, named at the first of several panels; `tips` and the value with its range on hover."""
    return alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("attention:N", sort=order, title=None, axis=alt.Axis(labels=first, labelLimit=300)),
        tooltip=[*tips, *(alt.Tooltip(f"{key}:Q", format=form) for key in ("value", "low", "high"))],
    )


def _beside(panels: dict[str, alt.LayerChart], width: int, rows: int, title: str, *lines: str) -> alt.HConcatChart:
    named = [panel.properties(width=width, height=19 * rows, title=alt.TitleParams(name, frame="group", fontSize=12))
             for name, panel in panels.items()]  # fmt: skip
    return alt.hconcat(*named, spacing=16, title=alt.TitleParams(title, subtitle=lines))


def error(records: Iterable[Record]) -> alt.HConcatChart:
    """A dot per attention and σ: total variation to softmax, with the uniform control as a line."""
    found = [record for record in records if record.metric == "attention_error"]
    values = [{**record.tags, "value": record.value} for record in found if record.tags["attention"] != "softmax"]
    sigmas = sorted({row["sigma"] for row in values})
    middle = sigmas[len(sigmas) // 2]
    order = [row["attention"] for row in sorted(values, key=lambda r: r["value"]) if row["sigma"] == middle]
    colour = alt.Color("beats:N", scale=alt.Scale(domain=[CLOSER, NOT_CLOSER], range=[BLUE, ORANGE]))
    x = alt.X("value:Q", title=None, scale=alt.Scale(domain=[0, 1], clamp=True), axis=alt.Axis(values=[0, 0.5, 1]))
    panels = {}
    for sigma in sigmas:
        rows = [row for row in values if row["sigma"] == sigma]
        control = next(row["value"] for row in rows if row["attention"] == "uniform")
        for row in rows:
            row["beats"] = CLOSER if row["value"] < control else NOT_CLOSER
        base = _base(rows, order, not panels, ["attention:N", "sigma:Q"], ".4f").encode(color=colour)
        uniform = alt.Chart(alt.InlineData(values=[{"control": control}])).encode(x="control:Q")
        panels[f"σ = {sigma:g}"] = alt.layer(
            uniform.mark_rule(strokeDash=[4, 3], strokeWidth=1.5),
            base.mark_rule(strokeWidth=2, clip=True).encode(x="low:Q", x2="high:Q"),
            base.mark_point(filled=True, size=70, opacity=1).encode(x=x),
        )
    tags = found[0].tags
    return _beside(
        panels, 190, len(order), "Distance from exact softmax",
        f"Total variation, mean over rows; q, k ~ N(0, σ²), {tags['tokens']} tokens, head_dim {tags['head_dim']}; "
        "dashed: uniform attention.",
        f"Dot: mean of {found[0].n} draws, line: their range; learnable kernels and linformer are untrained. "
        "Rows that do not sum to one can exceed 1.",
        where(found[0]),
    )  # fmt: skip


def speed(records: Iterable[Record]) -> alt.HConcatChart:
    """A cell per attention, length and mode: how many times faster than fused softmax."""
    found = [record for record in records if record.metric == "attention_vs_softmax"]
    values = [
        {**record.tags, "value": value, "shown": f"{value:.2g}" if value < 10 else f"{value:.0f}",
         "log": max(-3.0, min(3.0, math.log2(value)))}
        for record in found if (value := record.value) and record.tags["attention"] != "softmax"
    ]  # fmt: skip
    lengths = sorted({row["tokens"] for row in values})
    longest = {
        row["attention"]: row["value"] for row in values if (row["tokens"], row["mode"]) == (lengths[-1], "both")
    }
    order = sorted({row["attention"] for row in values}, key=lambda name: -longest.get(name, 0.0))
    scale = alt.Scale(domain=[-3, 0, 3], range=[ORANGE, theme.INKS["card"], BLUE], clamp=True, interpolate="rgb")
    ink = alt.condition("abs(datum.log) > 2", alt.value("white"), alt.value(theme.INKS["ink"]))
    panels = {}
    for mode, title in (("forward", "inference (forward)"), ("both", "training (forward + backward)")):
        rows = [row for row in values if row["mode"] == mode]
        base = _base(rows, order, not panels, ["attention:N", "tokens:O", "mode:N"], ".3g").encode(
            x=alt.X("tokens:O", title="tokens", axis=alt.Axis(labelAngle=0, orient="top")))  # fmt: skip
        panels[title] = alt.layer(
            base.mark_rect(stroke="white", strokeWidth=1).encode(color=alt.Color("log:Q", legend=None, scale=scale)),
            base.mark_text(fontSize=11).encode(text="shown:N", color=ink),
        )
    tags = found[0].tags
    return _beside(
        panels, 64 * len(lengths), len(order), "How many times faster than PyTorch's fused softmax attention",
        f"softmax's time / its time, {tags['clock']} clock, median of {found[0].n} interleaved rounds; "
        f"blue is faster, orange slower.",
        f"batch {tags['batch']}, {tags['heads']} heads, head_dim {tags['head_dim']}; {where(found[0])}",
    )  # fmt: skip
