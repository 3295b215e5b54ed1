"""The benchmarks' charts, each a function of their records: one Vega-Lite spec, as a page that needs no network and as
a PNG."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from linvit.files import write_atomically
from linvit.metrics import METRICS
from linvit.records import Record
from linvit.report import theme

BLUE, ORANGE = theme.PALETTE[:2]
CLOSER, NOT_CLOSER = "closer to softmax than uniform", "not closer"
WIDTH = 330  # of a panel with lines
MODES = {"forward": "inference (forward)", "both": "training (forward + backward)"}
Rows = list[dict[str, Any]]


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
    found = [record for record in records if record.metric == "attention_error" and record.value is not None]
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
        f"Dot: mean of {_draws(found)}, line: their range; learnable kernels and linformer are untrained. "
        "Rows that do not sum to one can exceed 1.",
        found[0].where,
    )  # fmt: skip


def speed(records: Iterable[Record]) -> alt.HConcatChart:
    """A cell per attention, length and mode: how many times faster than fused softmax."""
    found = [record for record in records if record.metric == "attention_vs_softmax"]
    tags = found[0].tags
    return _cells(
        found, "tokens", "How many times faster than PyTorch's fused softmax attention",
        f"softmax's time / its time, {tags['clock']} clock, median of {found[0].n} interleaved rounds; "
        f"blue is faster, orange slower.",
        f"batch {tags['batch']}, {tags['heads']} heads, head_dim {tags['head_dim']}; {found[0].where}",
    )  # fmt: skip


def memory(records: Iterable[Record]) -> alt.HConcatChart:
    """A cell per attention, length and mode: how much of fused softmax's memory it takes."""
    found = [record for record in records if record.metric == "memory_vs_softmax"]
    tags = found[0].tags
    return _cells(
        found, "tokens", "Memory of one call, PyTorch's fused softmax attention = 1",
        "Peak beside q, k and v, in a fresh process each; blue is less, orange more.",
        f"batch {tags['batch']}, {tags['heads']} heads, head_dim {tags['head_dim']}; {found[0].where}",
        better=-1,
    )  # fmt: skip


def _cells(found: list[Record], column: str, title: str, *lines: str, better: int = 1) -> alt.HConcatChart:
    """A panel per mode, a row per attention (the best at the greatest length first), a cell per length."""
    values: Rows = [
        {**record.tags, "value": value, "shown": f"{value:.2g}" if value < 10 else f"{value:.0f}",
         "log": better * max(-3.0, min(3.0, math.log2(max(value, 1e-9))))}
        for record in found if (value := record.value) is not None and record.tags["attention"] != "softmax"
    ]  # fmt: skip
    lengths = sorted({row[column] for row in values})
    longest = {row["attention"]: row["log"] for row in values if (row[column], row["mode"]) == (lengths[-1], "both")}
    order = sorted({row["attention"] for row in values}, key=lambda name: -longest.get(name, -4.0))
    scale = alt.Scale(domain=[-3, 0, 3], range=[ORANGE, theme.INKS["card"], BLUE], clamp=True, interpolate="rgb")
    ink = alt.condition("abs(datum.log) > 2", alt.value("white"), alt.value(theme.INKS["ink"]))
    panels = {}
    for mode, name in MODES.items():
        rows = [row for row in values if row["mode"] == mode]
        base = _base(rows, order, not panels, ["attention:N", f"{column}:O", "mode:N"], ".3g").encode(
            x=alt.X(f"{column}:O", title=column, axis=alt.Axis(labelAngle=0, orient="top")))  # fmt: skip
        panels[name] = alt.layer(
            base.mark_rect(stroke="white", strokeWidth=1).encode(color=alt.Color("log:Q", legend=None, scale=scale)),
            base.mark_text(fontSize=11).encode(text="shown:N", color=ink),
        )
    return _beside(panels, 64 * len(lengths), len(order), title, *lines)


def speed_to_the_limit(records: Iterable[Record]) -> alt.HConcatChart:
    """A line per attention: the time of one call over the length, to where it was refused; identity is the limit."""
    return _to_the_limit(records, "attention_time", "Time of one call, to the limit of time or memory", "s",
                         "identity returns v: nothing is faster.")  # fmt: skip


def memory_to_the_limit(records: Iterable[Record]) -> alt.HConcatChart:
    """A line per attention: the memory of one call over the length, to where it was refused."""
    return _to_the_limit(records, "attention_memory", "Memory of one call, to the limit", "B",
                         "Peak beside q, k and v, in a fresh process each.")  # fmt: skip


def _to_the_limit(records: Iterable[Record], metric: str, title: str, unit: str, line: str) -> alt.HConcatChart:
    found = [record for record in records if record.metric == metric]
    show = METRICS[metric].show
    timed = [record for record in found if record.value]
    names = list(dict.fromkeys(str(record.tags["attention"]) for record in found))
    panels, refused = {}, []
    for mode, name in MODES.items():
        rows: Rows = [
            {"attention": r.tags["attention"], "tokens": r.tags["tokens"], "value": r.value, "shown": show(r.value)}
            for r in timed if r.tags["mode"] == mode
        ]  # fmt: skip
        ends = {row["attention"]: row for row in sorted(rows, key=lambda row: row["tokens"])}
        last = [r for r in found if r.value is None and r.tags["mode"] == mode and r.tags["attention"] in ends
                and r.tags["tokens"] > ends[r.tags["attention"]]["tokens"]]  # fmt: skip
        gone = {r.tags["attention"] for r in last}
        refused += last
        x = alt.X("tokens:Q", title="tokens", scale=alt.Scale(type="log", base=2, nice=False),
                  axis=alt.Axis(values=sorted({row["tokens"] for row in rows}), grid=False,
                                labelOverlap=True))  # fmt: skip
        word = title.split()[0]
        y = alt.Y("value:Q", title=f"{word} (log)", scale=alt.Scale(type="log", nice=False),
                  axis=alt.Axis(values=_decades([row["value"] for row in rows]),
                                labelExpr=f"format(datum.value, '~s') + '{unit}'"))  # fmt: skip
        tips = ["attention:N", "tokens:Q", alt.Tooltip("shown:N", title=word.lower())]
        crosses = _data([ends[key] for key in ends if key in gone]).encode(x=x, y=y, color=_colour(names))
        panels[name] = alt.layer(
            *_lines(rows, x, y, names, tips),
            crosses.mark_point(shape="cross", angle=45, size=130, filled=True, opacity=1),
        )
    tags = timed[0].tags
    return _charts_beside(
        panels, title, f"{line} {_ended(refused)}",
        f"batch {tags['batch']}, {tags['heads']} heads, head_dim {tags['head_dim']}; {timed[0].where}",
    )  # fmt: skip


def _ended(refused: Iterable[Record]) -> str:
    """What crosses say: what each attention met at the next length."""
    met: dict[str, dict[str, None]] = {}
    for record in refused:
        found = re.fullmatch(r"it (?:would take about .+, |takes )(more than .+)", str(record.tags.get("refused", "")))
        met.setdefault(f"takes {found[1]}" if found else "cannot be run", {})[str(record.tags["attention"])] = None
    *few, most = sorted(met, key=lambda what: len(met[what])) or [""]
    parts = [*(f"{what} ({', '.join(met[what])})" for what in few), f"{most} (the others)" if few else most]
    return f"A cross: the next length {' or '.join(parts)}." if met else ""


def features(records: Iterable[Record]) -> alt.HConcatChart:
    """A line per family over the number of features; panels by σ, or one for a trained model."""
    found = [record for record in records if "features" in record.tags and record.value is not None]
    trained = "model" in found[0].tags
    metric = "attention_error" if trained else "output_mse"
    found = [record for record in found if record.metric == metric and "layer" not in record.tags]
    names = [name for name in dict.fromkeys(str(r.tags["family"]) for r in found) if name != "uniform"]
    word = "Total variation (log)" if trained else "Mean squared error (log)"
    panels = {}
    for sigma in sorted({float(r.tags.get("sigma") or 0) for r in found}):
        mine = [r for r in found if float(r.tags.get("sigma") or 0) == sigma]
        rows = [_row(r) for r in mine if r.tags["family"] != "uniform"]
        control = next(r for r in mine if r.tags["family"] == "uniform")
        counts = sorted({row["features"] for row in rows})
        x = alt.X("features:Q", title="features", scale=alt.Scale(type="log", base=2, nice=False),
                  axis=alt.Axis(values=counts, grid=False))  # fmt: skip
        ends = [row[key] for row in rows for key in ("low", "high") if row[key] is not None] + [control.value]
        y = alt.Y("value:Q", title=word, scale=alt.Scale(type="log", nice=False),
                  axis=alt.Axis(values=_decades(ends), format="~g" if trained else ".0e"))  # fmt: skip
        tips = ["family:N", "features:Q", *(alt.Tooltip(f"{key}:Q", format=".3g") for key in ("value", "low", "high"))]
        rule = _data([{"value": control.value, "shown": "uniform"}]).encode(y=y)
        label = rule.mark_text(align="left", dx=5, style="quiet").encode(x=alt.value(WIDTH), text="shown:N")
        panels[f"σ = {sigma:g}" if not trained else ""] = alt.layer(
            rule.mark_rule(strokeDash=[4, 3], strokeWidth=1.5), label,
            *_bands(rows, x, word, names, "family"),
            *_lines(rows, x, y, names, tips, "family"),
        )  # fmt: skip
    tags = found[0].tags
    source = f"q and k of {tags['model']}, {tags['images']} images" if trained else "q, k ~ N(0, σ²), v ~ N(0, 1)"
    return _charts_beside(
        panels, "Error against softmax, by the number of features",
        f"{source}; {tags['tokens']} tokens, head_dim {tags['head_dim']}; dashed: uniform attention.",
        f"Line: mean of {_draws(found)}, band: their range. hyp and trig make two features of each row of Ω.",
        found[0].where,
    )  # fmt: skip


def angle(records: Iterable[Record]) -> alt.HConcatChart:
    """The ratio of mean squared errors, trigonometric over positive, over angle and length; and slices of it."""
    every = [{**record.tags, "value": record.value} for record in records if record.metric == "mse_ratio"]
    every = [row for row in every if row["value"] and math.isfinite(row["value"])]
    closed = [row for row in every if row["by"] == "closed form"]
    drawn = [row for row in every if row["by"] != "closed form"]
    slices = sorted({row["length"] for row in drawn}) or sorted({row["length"] for row in closed})[-1:]
    step, length = math.pi / len({row["angle"] for row in closed}), sorted({row["length"] for row in closed})
    high = length[1] - length[0] if len(length) > 1 else length[0]
    cells = [{**row, "left": row["angle"] - step / 2, "right": row["angle"] + step / 2, "log": math.log10(row["value"]),
              "low": row["length"] - high / 2, "high": row["length"] + high / 2} for row in closed]  # fmt: skip
    turns = alt.Axis(values=[0, math.pi / 4, math.pi / 2, 3 * math.pi / 4, math.pi], grid=False,
                     labelExpr="['0', 'π/4', 'π/2', '3π/4', 'π'][round(4 * datum.value / PI)]")  # fmt: skip
    reach = alt.Scale(domain=[0, math.pi], nice=False)
    field = _data(cells).mark_rect(clip=True).encode(
        x=alt.X("left:Q", title="angle φ", scale=reach, axis=turns), x2="right:Q",
        y=alt.Y("low:Q", title="length l", scale=alt.Scale(domain=[cells[0]["low"], cells[-1]["high"]], nice=False)),
        y2="high:Q",
        color=alt.Color("log:Q", title="log10 r", scale=alt.Scale(
            domain=[-3, 0, 3], range=[ORANGE, theme.INKS["card"], BLUE], clamp=True, interpolate="rgb"),
            legend=alt.Legend(orient="right", title="log10 r", gradientLength=180)),
        tooltip=[alt.Tooltip(f"{key}:Q", format=".3g") for key in ("angle", "length", "value")],
    )  # fmt: skip
    names = [f"l = {one:g}" for one in slices]
    x = alt.X("angle:Q", title="angle φ", scale=reach, axis=turns)
    y = alt.Y("value:Q", title="r (log)", scale=alt.Scale(type="log", domain=[1e-4, 1e4]),
              axis=alt.Axis(values=[10.0**p for p in range(-4, 5, 2)], format="~g"))  # fmt: skip
    tips = [alt.Tooltip(f"{key}:Q", format=".3g") for key in ("angle", "length", "value")]
    lines = [{**row, "slice": f"l = {row['length']:g}"} for row in closed if row["length"] in slices and row["angle"]]
    dots = [{**row, "slice": f"l = {row['length']:g}", "low": max(row["low"], 1e-9)} for row in drawn]
    base = _data(dots).encode(x=x, color=_colour(names, "slice"), tooltip=tips)
    right = alt.layer(
        _data([{"value": 1.0}]).mark_rule(strokeDash=[4, 3], strokeWidth=1.5).encode(y=y),
        _data(lines).mark_line(strokeWidth=2, clip=True).encode(x=x, y=y, color=_colour(names, "slice")),
        base.mark_rule(strokeWidth=2, clip=True).encode(y=alt.Y("low:Q"), y2="high:Q"),
        base.mark_point(size=70, filled=True, opacity=1, clip=True).encode(y=y),
    )
    rows = max((row.n for row in records if row.tags.get("by") == "Monte Carlo"), default=0)
    return _charts_beside(
        {"closed form": field, "slices": right}, "Positive or trigonometric features?",
        "r = MSE of trigonometric / MSE of positive features, as many rows of Ω; blue and above 1: positive ones win.",
        f"Lines: closed form; dots: Monte Carlo over {rows:,} rows with 95 % intervals, where ‖x + y‖² ≤ 2."
        if rows else "Lines: closed form.",
    )  # fmt: skip


def depth(records: Iterable[Record]) -> alt.HConcatChart:
    """A line per attention: the error of the tokens after each layer."""
    found = [record for record in records if record.metric == "depth_error"]
    rows = [_row(record) for record in found]
    names = list(dict.fromkeys(str(r.tags["attention"]) for r in found))
    layers = sorted({row["layer"] for row in rows})
    x = alt.X("layer:Q", title="layers", scale=alt.Scale(nice=False), axis=alt.Axis(values=layers, grid=False))
    word = "Relative error of the tokens"
    y = alt.Y("value:Q", title=word, scale=alt.Scale(zero=True), axis=alt.Axis(format="~%"))
    tips = ["attention:N", "layer:Q", *(alt.Tooltip(f"{key}:Q", format=".3g") for key in ("value", "low", "high"))]
    chart = alt.layer(*_bands(rows, x, word, names), *_lines(rows, x, y, names, tips))
    tags = found[0].tags
    return _charts_beside(
        {"": chart}, "Error through depth",
        "Norm of what the tokens differ by from softmax's, over the norm of those; the same weights in every layer.",
        f"{tags['model']}, {tags['images']} images, {tags['tokens']} tokens.",
        f"Line: mean of {_draws(found)}, band: their range. {found[0].where}", width=520,
    )  # fmt: skip


def _draws(records: Iterable[Record]) -> str:
    most = max(record.n for record in records)  # a trained attention has one
    return f"{most} draw{'s' * (most != 1)}"


def layers(records: Iterable[Record]) -> alt.HConcatChart:
    """Total variation to softmax on a trained model's q and k: the mean over layers, and a cell per layer."""
    found = [r for r in records if r.metric == "attention_error" and r.value is not None]
    values = [_row(r) for r in found if r.tags["attention"] != "softmax"]
    whole = [row for row in values if "layer" not in row]
    order = [row["attention"] for row in sorted(whole, key=lambda row: row["value"])]
    control = next(row["value"] for row in whole if row["attention"] == "uniform")
    for row in whole:
        row["beats"] = CLOSER if row["value"] < control else NOT_CLOSER
    colour = alt.Color("beats:N", scale=alt.Scale(domain=[CLOSER, NOT_CLOSER], range=[BLUE, ORANGE]))
    x = alt.X("value:Q", title="total variation", scale=alt.Scale(domain=[0, 1], clamp=True),
              axis=alt.Axis(values=[0, 0.5, 1], orient="top"))  # fmt: skip
    base = _base(whole, order, True, ["attention:N"], ".4f").encode(color=colour)
    dots = alt.layer(
        _data([{"value": control}]).mark_rule(strokeDash=[4, 3], strokeWidth=1.5).encode(x=x),
        base.mark_rule(strokeWidth=2, clip=True).encode(x=alt.X("low:Q", title="total variation"), x2="high:Q"),
        base.mark_point(filled=True, size=70, opacity=1).encode(x=x),
    )
    cells = [{**row, "shown": f"{row['value']:.2f}"} for row in values if "layer" in row]
    grid = _base(cells, order, False, ["attention:N", "layer:O"], ".4f").encode(
        x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, orient="top")))  # fmt: skip
    tone = alt.Scale(domain=[0, 1], range=[theme.INKS["paper"], BLUE], clamp=True, interpolate="rgb")
    ink = alt.condition("datum.value > 0.6", alt.value("white"), alt.value(theme.INKS["ink"]))
    heat = alt.layer(
        grid.mark_rect(stroke="white", strokeWidth=1).encode(color=alt.Color("value:Q", legend=None, scale=tone)),
        grid.mark_text(fontSize=11).encode(text="shown:N", color=ink),
    )
    count, tags = len({row["layer"] for row in cells}), found[0].tags
    height = 22 * len(order)
    named = [alt.TitleParams(name, frame="group", fontSize=12) for name in ("mean over layers", "by layer")]
    return alt.hconcat(
        dots.properties(width=260, height=height, title=named[0]),
        heat.properties(width=max(100, 42 * count), height=height, title=named[1]), spacing=16,
        title=alt.TitleParams("Distance from exact softmax, on trained q and k", subtitle=[
            f"Total variation, mean over rows; {tags['model']}, {tags['images']} images, {tags['tokens']} tokens, "
            f"head_dim {tags['head_dim']}; dashed: uniform attention.",
            f"Dot: mean of {_draws(found)}, line: their range. {found[0].where}"]),
    ).resolve_scale(color="independent")  # fmt: skip


def maps(found: Mapping[str, np.ndarray], records: Iterable[Record]) -> alt.ConcatChart:
    """A picture per layer (row) and head (column) of each attention's matrices, (layers, heads, N, N)."""
    each = [record for record in records if "head" in record.tags]
    told = {(r.metric, r.tags["attention"], r.tags["layer"], r.tags["head"]): r for r in each}
    any_map = next(iter(found.values()))
    layers, heads, tokens, _ = any_map.shape
    side = max(56, min(132, 900 // layers))
    panels = []
    for spec, weights in found.items():
        rows = []
        for layer, head in np.ndindex(layers, heads):
            key = spec, layer + 1, head + 1
            rows.append({
                "layer": layer + 1, "head": head + 1, "picture": picture(weights[layer, head], side),
                **{name: told[f"map_{name}", *key].value for name in ("entropy", "error")},
            })  # fmt: skip
        panels.append(_data(rows).mark_image(width=side, height=side).encode(
            x=alt.X("head:O", title="head", axis=alt.Axis(orient="top", labelAngle=0)),
            y=alt.Y("layer:O", title="layer"),
            url="picture:N",
            tooltip=["layer:O", "head:O", alt.Tooltip("entropy:Q", format=".3f", title="entropy (nat)"),
                     alt.Tooltip("error:Q", format=".3f", title="total variation to the model's own")],
        ).properties(width=heads * (side + 6), height=layers * (side + 6),
                     title=alt.TitleParams(spec, frame="group", fontSize=12)))  # fmt: skip
    lines = [
        "Rows are queries, columns keys, from the top left; white: a tenth of 1/N or less, darkest: 1.",
        f"{tokens} tokens: log N = {math.log(tokens):.2f} nat is the entropy of uniform rows; {each[0].versions}",
    ]
    title = alt.TitleParams(f"Attention maps of {each[0].tags['model']}", subtitle=lines)
    return alt.concat(*panels, columns=max(1, 1200 // (heads * (side + 6))), spacing=24, title=title)


def picture(weights: np.ndarray, side: int) -> str:
    """A matrix of weights as a data: address; from white at a tenth of 1/N to ink at 1, by the logarithm."""
    from PIL import Image

    n = len(weights)
    share = np.log(np.clip(np.abs(weights) * n, 0.1, n) / 0.1) / math.log(n / 0.1)
    stops = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (theme.INKS["paper"], BLUE, "#06243B")])
    colours = np.stack([np.interp(share, [0, 0.6, 1], stops[:, i]) for i in range(3)], -1).astype(np.uint8)
    image = Image.fromarray(colours)
    zoom = max(1, math.ceil(2 * side / n))
    file = io.BytesIO()
    image.resize((n * zoom, n * zoom), Image.Resampling.NEAREST).save(file, "png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _data(rows: Iterable[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(rows)))


def _decades(values: Iterable[float]) -> list[float]:
    """Ticks of a logarithmic axis: powers of ten, or 1, 2 and 5 times them over a short range."""
    logs = [math.log10(value) for value in values if value > 0] or [0.0]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return [step * 10.0**p for p in range(low, high + 1) for step in ((1,) if high - low > 2 else (1, 2, 5))]


def _row(record: Record) -> dict[str, Any]:
    return {**record.tags, "value": record.value}


def _colour(names: list[str], field: str = "attention") -> alt.Color:
    palette = [theme.PALETTE[i % len(theme.PALETTE)] for i in range(len(names))]
    return alt.Color(f"{field}:N", scale=alt.Scale(domain=names, range=palette))


def _lines(rows: Rows, x: Any, y: Any, names: list[str], tips: list[Any], field: str = "attention") -> list[alt.Chart]:
    """A line with its points per name; those that share a colour differ by their dashes."""
    dashes = [list(theme.DASHES[i // len(theme.PALETTE) % len(theme.DASHES)]) for i in range(len(names))]
    dash = alt.StrokeDash(f"{field}:N", scale=alt.Scale(domain=names, range=dashes))
    base = _data(rows).encode(x=x, y=y, color=_colour(names, field))
    return [base.mark_line(strokeWidth=2).encode(strokeDash=dash),
            base.mark_point(size=45, filled=True, opacity=1).encode(tooltip=tips)]  # fmt: skip


def _bands(rows: Rows, x: Any, title: str | None, names: list[str], field: str = "attention") -> list[alt.Chart]:
    base = _data(rows).mark_area(fillOpacity=0.13).encode(x=x, y2="high:Q", color=_colour(names, field))
    return [base.encode(y=alt.Y("low:Q", title=title))]


def _charts_beside(panels: Mapping[str, Any], title: str, *lines: str, width: int = WIDTH) -> alt.HConcatChart:
    named = [panel.properties(width=width, height=280, title=alt.TitleParams(name, frame="group", fontSize=12))
             for name, panel in panels.items()]  # fmt: skip
    return alt.hconcat(*named, spacing=56, title=alt.TitleParams(title, subtitle=lines))
