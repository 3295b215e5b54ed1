"""The charts of `bench` and `advise`, each a function of records or plain rows, saved as a page and as a PNG."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from linvit.files import write_atomically
from linvit.metrics import METRICS
from linvit.records import Record
from linvit.report import page, theme, vega
from linvit.report.images import uri

EXACT, CONTROL = "softmax", "uniform"  # what errors are measured against, and what any attention should beat
CLOSER, NOT_CLOSER = "closer to softmax than uniform", "not closer"
WIDTH, HEIGHT = 330, 280  # of a panel with lines
MODES = {"forward": "inference (forward)", "both": "training (forward + backward)"}
ADVICE = "Number of tokens from which an attention layer is faster than fused softmax"
SPAN = (("value", "value", ".3g"), ("low", "low", ".3g"), ("high", "high", ".3g"))


def save(chart: Any, stem: Path) -> list[Path]:
    """`stem`.html and `stem`.png, each whole or not at all."""
    import vl_convert

    spec = chart.properties(config=theme.config(page=False)).to_dict()
    files = [stem.with_suffix(".html"), stem.with_suffix(".png")]
    write_atomically(files[1], vl_convert.vegalite_to_png(spec, scale=2))
    title = spec.pop("title")  # the page has it as text
    lines = title.get("subtitle", [])
    write_atomically(files[0], page.render("figure.html", {"figure": spec}, title=title["text"], lines=lines))
    return files


def error(records: Iterable[Record]) -> alt.HConcatChart:
    """A dot per attention and σ: total variation to softmax, with the uniform control as a line."""
    found = _errors(records)
    rows = [_row(r) for r in found if r.tags["attention"] != EXACT]
    sigmas = sorted({row["sigma"] for row in rows})
    order = _ranked(row for row in rows if row["sigma"] == sigmas[len(sigmas) // 2])
    named = {f"σ = {s:g}": _dots([r for r in rows if r["sigma"] == s], order, s == sigmas[0]) for s in sigmas}
    tags = found[0].tags
    return vega.panels(
        named,
        "Distance from exact softmax",
        f"Total variation, mean over rows; q, k ~ N(0, σ²), {tags['tokens']} tokens, head_dim {tags['head_dim']}; "
        "dashed: uniform attention.",
        f"Dot: mean of {_draws(found)}; line: their range. Learnable kernels and linformer are untrained. "
        "Rows that do not sum to one can exceed 1.",
        found[0].where,
        spacing=16,
        width=190,
        height=19 * len(order),
    )


def layers(records: Iterable[Record]) -> alt.HConcatChart:
    """Total variation to softmax on a trained model's q and k: the mean over layers, and a cell per layer."""
    found = _errors(records)
    rows = [_row(r) for r in found if r.tags["attention"] != EXACT]
    whole = [row for row in rows if "layer" not in row]
    order = _ranked(whole)
    cells = [{**row, "shown": f"{row['value']:.2f}"} for row in rows if "layer" in row]
    base = _grid(cells, order, "layer", False)
    colours = (theme.INKS["paper"], vega.BLUE)
    grid = alt.layer(*vega.heat(base, "value", (0, 1), colours, "datum.value > 0.6"))
    tags = found[0].tags
    found_in = f"{tags['model']}, {tags['images']} images, {tags['tokens']} tokens, head_dim {tags['head_dim']}"
    width = max(100, 42 * len({row["layer"] for row in cells}))
    return vega.panels(
        {"mean over layers": _dots(whole, order).properties(width=260), "by layer": grid.properties(width=width)},
        "Distance from exact softmax, on trained q and k",
        f"Total variation, mean over rows; {found_in}; dashed: uniform attention.",
        f"Dot: mean of {_draws(found)}; line: their range. {found[0].where}",
        spacing=16,
        height=22 * len(order),
    ).resolve_scale(color="independent")


def _errors(records: Iterable[Record]) -> list[Record]:
    return [r for r in records if r.metric == "attention_error" and r.value is not None]


def _ranked(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [row["attention"] for row in sorted(rows, key=lambda row: row["value"])]


def _dots(rows: vega.Rows, order: Sequence[str], named: bool = True) -> Any:
    """A dot and its range per attention, and the control as a line."""
    control = next(row["value"] for row in rows if row["attention"] == CONTROL)
    rows = [{**row, "beats": CLOSER if row["value"] < control else NOT_CLOSER} for row in rows]
    x = vega.x_axis("value", "total variation", domain=[0, 1], clamp=True, values=[0, 0.5, 1])
    colour = alt.Color("beats:N", scale=alt.Scale(domain=[CLOSER, NOT_CLOSER], range=[vega.BLUE, vega.ORANGE]))
    names = vega.y_names("attention", order, labels=named, labelLimit=300)
    base = vega.data(rows).encode(y=names, color=colour, tooltip=vega.tooltips("attention", *SPAN))
    dots = base.mark_point(filled=True, size=70, opacity=1).encode(x=x)
    return alt.layer(vega.threshold(control, x), vega.spans(base, x), dots)


def _grid(rows: vega.Rows, order: Sequence[str], column: str, named: bool) -> alt.Chart:
    """A row per attention, a column per length or layer."""
    top = alt.X(f"{column}:O", title=column, axis=alt.Axis(labelAngle=0, orient="top"))
    tips = vega.tooltips("attention", column, *SPAN)
    return vega.data(rows).encode(x=top, y=vega.y_names("attention", order, labels=named, labelLimit=300), tooltip=tips)


def speed(records: Iterable[Record]) -> alt.HConcatChart:
    """A cell per attention, length and mode: how many times faster than fused softmax."""
    found = [record for record in records if record.metric == "attention_vs_softmax"]
    how = f"{found[0].tags['clock']} clock, median of {found[0].n} interleaved rounds"
    title = "Speed relative to PyTorch's fused softmax attention"
    return _by_length(found, title, f"softmax's time / own time, {how}; blue is faster, orange slower.")


def memory(records: Iterable[Record]) -> alt.HConcatChart:
    """A cell per attention, length and mode: its memory relative to fused softmax's."""
    found = [record for record in records if record.metric == "memory_vs_softmax"]
    line = "Peak in addition to q, k and v, in a fresh process each; blue is less, orange more."
    return _by_length(found, "Memory of one call, PyTorch's fused softmax attention = 1", line, better=-1)


def _by_length(found: list[Record], title: str, line: str, better: int = 1) -> alt.HConcatChart:
    """A panel per mode, a row per attention (the best at the greatest length first), a cell per length."""
    rows: vega.Rows = []
    for record in found:
        if (value := record.value) is not None and record.tags["attention"] != EXACT:
            shown = f"{value:.2g}" if value < 10 else f"{value:.0f}"
            log = better * max(-3.0, min(3.0, math.log2(max(value, 1e-9))))
            rows.append({**_row(record), "shown": shown, "log": log})
    lengths = sorted({row["tokens"] for row in rows})
    longest = {row["attention"]: row["log"] for row in rows if (row["tokens"], row["mode"]) == (lengths[-1], "both")}
    order = sorted({row["attention"] for row in rows}, key=lambda name: -longest.get(name, -4.0))
    named = {}
    for mode, name in MODES.items():
        base = _grid([row for row in rows if row["mode"] == mode], order, "tokens", not named)
        named[name] = alt.layer(*vega.heat(base, "log", (-3, 0, 3), vega.DIVERGING, "abs(datum.log) > 2"))
    size = {"width": 64 * len(lengths), "height": 19 * len(order)}
    return vega.panels(named, title, line, _about(found[0]), spacing=16, **size)


def speed_to_the_limit(records: Iterable[Record]) -> alt.HConcatChart:
    """A line per attention: the time of one call over the length, until it was refused; identity is the limit."""
    title, line = "Time of one call, to the limit of time or memory", "identity returns v: nothing is faster."
    return _to_the_limit(records, "attention_time", title, "s", line)


def models_to_the_limit(records: Iterable[Record]) -> alt.HConcatChart:
    """The same of whole models: an inference, and a training step."""
    title, line = "Time of whole models, to the limit of time or memory", "identity returns v: nothing is faster."
    return _to_the_limit(records, "model_time", title, "s", line)


def memory_to_the_limit(records: Iterable[Record]) -> alt.HConcatChart:
    """A line per attention: the memory of one call over the length, until it was refused."""
    line = "Peak in addition to q, k and v, in a fresh process each."
    return _to_the_limit(records, "attention_memory", "Memory of one call, to the limit", "B", line)


def _to_the_limit(records: Iterable[Record], metric: str, title: str, unit: str, line: str) -> alt.HConcatChart:
    found = [record for record in records if record.metric == metric]
    series = vega.Series(list(dict.fromkeys(str(record.tags["attention"]) for record in found)), "attention")
    named, refused, word = {}, [], title.split()[0]
    for mode, name in MODES.items():
        own = [r for r in found if r.tags["mode"] == mode]
        rows = [{**_row(r), "shown": METRICS[metric].show(r.value)} for r in own if r.value]
        ends = {row["attention"]: row for row in sorted(rows, key=lambda row: row["tokens"])}
        last = {r.tags["attention"]: r for r in own if r.value is None and _beyond(r, ends)}
        refused += last.values()
        tokens = sorted({row["tokens"] for row in rows})
        x = vega.x_axis("tokens", "tokens", log=True, base=2, values=tokens, grid=False, labelOverlap=True)
        ticks = {
            "values": vega.decades(row["value"] for row in rows),
            "labelExpr": f"format(datum.value, '~s') + '{unit}'",
        }
        y = vega.y_axis("value", f"{word} (log)", log=True, **ticks)
        tips = vega.tooltips("attention", ("tokens", "tokens", "d"), ("shown", word.lower()))
        crosses = vega.data(ends[key] for key in last).mark_point(
            shape="cross", angle=45, size=130, filled=True, opacity=1
        )
        crosses = crosses.encode(x=x, y=y, **series("color"))
        named[name] = alt.layer(*vega.lines(rows, x, y, series, tips), crosses)
    timed = next(r for r in found if r.value)
    return vega.panels(named, title, f"{line} {_ended(refused)}", _about(timed), width=WIDTH, height=HEIGHT)


def _beyond(record: Record, ends: Mapping[Any, dict[str, Any]]) -> bool:
    """Whether it is of a greater length than the last that could be measured."""
    end = ends.get(record.tags["attention"])
    return end is not None and record.tags["tokens"] > end["tokens"]


def _ended(refused: Iterable[Record]) -> str:
    """What crosses mean: why the next length of each attention was not measured."""
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
    tags, trained = found[0].tags, "model" in found[0].tags
    metric, word = ("attention_error", "Total variation") if trained else ("output_mse", "Mean squared error")
    found = [record for record in found if record.metric == metric and "layer" not in record.tags]
    families = dict.fromkeys(str(r.tags["family"]) for r in found)
    series = vega.Series([name for name in families if name != CONTROL], "family")
    named = {}
    for sigma in sorted({float(r.tags.get("sigma") or 0) for r in found}):
        every = [_row(r) for r in found if float(r.tags.get("sigma") or 0) == sigma]
        rows = [row for row in every if row["family"] != CONTROL]
        control = next(row["value"] for row in every if row["family"] == CONTROL)
        counts = sorted({row["features"] for row in rows})
        x = vega.x_axis("features", "features", log=True, base=2, values=counts, grid=False)
        ends = [row[key] for row in rows for key in ("low", "high") if row[key] is not None] + [control]
        y = vega.y_axis(
            "value", f"{word} (log)", log=True, values=vega.decades(ends), format="~g" if trained else ".0e"
        )
        label = vega.data([{"value": control, "shown": CONTROL}]).mark_text(align="left", dx=5, style="quiet")
        label = label.encode(x=alt.value(WIDTH), y=y, text="shown:N")
        curves = vega.lines(rows, x, y, series, vega.tooltips("family", ("features", "features", "d"), *SPAN))
        name = "" if trained else f"σ = {sigma:g}"
        named[name] = alt.layer(vega.threshold(control, y), label, vega.band(rows, x, y, series), *curves)
    source = f"q and k of {tags['model']}, {tags['images']} images" if trained else "q, k ~ N(0, σ²), v ~ N(0, 1)"
    return vega.panels(
        named,
        "Error against softmax, by the number of features",
        f"{source}; {tags['tokens']} tokens, head_dim {tags['head_dim']}; dashed: uniform attention.",
        f"Line: mean of {_draws(found)}; band: their range. hyp and trig make two features of each row of Ω.",
        found[0].where,
        width=WIDTH,
        height=HEIGHT,
    )


def depth(records: Iterable[Record]) -> alt.HConcatChart:
    """A line per attention: the error of the tokens after each layer."""
    found = [record for record in records if record.metric == "depth_error"]
    rows, tags = [_row(record) for record in found], found[0].tags
    series = vega.Series(list(dict.fromkeys(row["attention"] for row in rows)), "attention")
    x = vega.x_axis("layer", "layers", nice=False, values=sorted({row["layer"] for row in rows}), grid=False)
    y = vega.y_axis("value", "Relative error of the tokens", zero=True, format="~%")
    curves = vega.lines(rows, x, y, series, vega.tooltips("attention", ("layer", "layer", "d"), *SPAN))
    return vega.panels(
        {"": alt.layer(vega.band(rows, x, y, series), *curves)},
        "Error through depth",
        "Norm of the difference to softmax's tokens, relative to their norm; the same weights in every layer.",
        f"{tags['model']}, {tags['images']} images, {tags['tokens']} tokens.",
        f"Line: mean of {_draws(found)}; band: their range. {found[0].where}",
        width=520,
        height=HEIGHT,
    )


def angle(records: Sequence[Record]) -> alt.HConcatChart:
    """The ratio of mean squared errors, trigonometric over positive, over angle and length; and slices of it."""
    every = [_row(r) for r in records if r.metric == "mse_ratio" and r.value and math.isfinite(r.value)]
    every = [{**row, "slice": f"l = {row['length']:g}"} for row in every]
    closed, drawn = ([row for row in every if (row["by"] == "closed form") is exact] for exact in (True, False))
    lengths = sorted({row["length"] for row in closed})
    slices = sorted({row["length"] for row in drawn}) or lengths[-1:]
    series = vega.Series([f"l = {one:g}" for one in slices], "slice")
    labels = "['0', 'π/4', 'π/2', '3π/4', 'π'][round(4 * datum.value / PI)]"
    turns = {"values": [i * math.pi / 4 for i in range(5)], "grid": False, "labelExpr": labels}
    x = vega.x_axis("angle", "angle φ", domain=[0, math.pi], **turns)
    y = vega.y_axis(
        "value", "r (log)", log=True, domain=[1e-4, 1e4], values=[10.0**p for p in range(-4, 5, 2)], format="~g"
    )
    tips = vega.tooltips(*((name, name, ".3g") for name in ("angle", "length", "value")))
    dots = vega.data({**row, "low": max(row["low"], 1e-9)} for row in drawn).encode(
        x=x, tooltip=tips, **series("color")
    )
    curves = vega.data(row for row in closed if row["length"] in slices and row["angle"])
    right = alt.layer(
        vega.threshold(1.0, y),
        curves.mark_line(strokeWidth=2, clip=True).encode(x=x, y=y, **series("color")),
        vega.spans(dots, y),
        dots.mark_point(size=70, filled=True, opacity=1, clip=True).encode(y=y),
    )
    count = max((r.n for r in records if r.tags.get("by") == "Monte Carlo"), default=0)
    sampled = f"; dots: Monte Carlo over {count:,} rows with 95 % intervals, where ‖x + y‖² ≤ 2" if count else ""
    return vega.panels(
        {"closed form": _field(closed, lengths, x, tips), "slices": right},
        "Positive or trigonometric features?",
        "r = MSE of trigonometric / MSE of positive features, with equal rows of Ω; blue, above 1: positive is better.",
        f"Lines: closed form{sampled}.",
        width=WIDTH,
        height=HEIGHT,
    )


def _field(closed: vega.Rows, lengths: list[float], x: Any, tips: list[Any]) -> alt.Chart:
    """A cell per angle and length."""
    wide = math.pi / len({row["angle"] for row in closed}) / 2
    high = (lengths[1] - lengths[0] if len(lengths) > 1 else lengths[0]) / 2
    ends = (("left", "angle", -wide), ("right", "angle", wide), ("low", "length", -high), ("high", "length", high))
    cells = [row | {end: row[of] + d for end, of, d in ends} | {"log": math.log10(row["value"])} for row in closed]
    scale = alt.Scale(domain=[-3, 0, 3], range=list(vega.DIVERGING), clamp=True, interpolate="rgb")
    legend = alt.Legend(orient="right", title="log10 r", gradientLength=180)
    y = vega.y_axis("low", "length l", domain=[lengths[0] - high, lengths[-1] + high])
    colour = alt.Color("log:Q", scale=scale, legend=legend)
    base = vega.data(cells).mark_rect(clip=True)
    return base.encode(x=vega.at(x, "left"), x2="right:Q", y=y, y2="high:Q", color=colour, tooltip=tips)


def maps(found: Mapping[str, np.ndarray], records: Iterable[Record]) -> alt.ConcatChart:
    """A picture per layer (row) and head (column) of each attention's matrices, (layers, heads, N, N)."""
    each = [record for record in records if "head" in record.tags]
    known = {(r.metric, r.tags["attention"], r.tags["layer"], r.tags["head"]): r.value for r in each}
    count, heads, tokens, _ = next(iter(found.values())).shape
    side = max(56, min(132, 900 // count))
    entropy, distance = ("entropy", "entropy (nat)", ".3f"), ("error", "total variation to the model's own", ".3f")
    charts = []
    for spec, weights in found.items():
        rows = []
        for layer, head in np.ndindex(count, heads):
            numbers = {name: known[f"map_{name}", spec, layer + 1, head + 1] for name in ("entropy", "error")}
            rows.append(
                {"layer": layer + 1, "head": head + 1, "picture": picture(weights[layer, head], side)} | numbers
            )
        top = alt.X("head:O", title="head", axis=alt.Axis(orient="top", labelAngle=0))
        tips = vega.tooltips("layer", "head", entropy, distance)
        chart = vega.data(rows).mark_image(width=side, height=side)
        chart = chart.encode(x=top, y=alt.Y("layer:O", title="layer"), url="picture:N", tooltip=tips)
        size = {"width": heads * (side + 6), "height": count * (side + 6)}
        charts.append(chart.properties(**size, title=alt.TitleParams(spec, frame="group", fontSize=12)))
    subtitle = [
        "Rows are queries, columns keys, from the top left; white: a tenth of 1/N or less, darkest: 1.",
        f"{tokens} tokens: log N = {math.log(tokens):.2f} nat is the entropy of uniform rows; {each[0].versions}",
    ]
    title = alt.TitleParams(f"Attention maps of {each[0].tags['model']}", subtitle=subtitle)
    return alt.concat(*charts, columns=max(1, 1200 // (heads * (side + 6))), spacing=24, title=title)


def picture(weights: np.ndarray, side: int) -> str:
    """A matrix of weights as a data: address; from white at a tenth of 1/N to ink at 1, by the logarithm."""
    n = len(weights)
    share = np.log(np.clip(np.abs(weights) * n, 0.1, n) / 0.1) / math.log(n / 0.1)
    stops = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (theme.INKS["paper"], vega.BLUE, "#06243B")])
    colours = np.stack([np.interp(share, [0, 0.6, 1], stops[:, i]) for i in range(3)], -1).astype(np.uint8)
    zoom = max(1, math.ceil(2 * side / n))
    return uri(colours.repeat(zoom, axis=0).repeat(zoom, axis=1), n * zoom, "png")


def advice(
    forecast: Mapping[str, vega.Rows],
    measured: Mapping[str, vega.Rows],
    names: Sequence[str],
    tokens: int,
    *subtitle: str,
    title: str = ADVICE,
) -> alt.HConcatChart:
    """How many times faster than softmax a layer is over the number of tokens: lines as forecast, dots as measured.

    Args:
        forecast: Panel title → rows with attention, tokens and ratio.
        measured: The same, of what was measured.
        names: The attentions, in the order of their colours.
        tokens: Of the model in question, drawn as a dashed line.
        subtitle: Lines below the title.
        title: Above all panels.
    """
    every = [row for part in (forecast, measured) for rows in part.values() for row in rows]
    ratios = [row["ratio"] for row in every]
    span = [min([*ratios, 0.5]) / 1.1, max([*ratios, 2.0]) * 1.1]
    reach = [end([tokens, *(row["tokens"] for row in every)]) for end in (min, max)]
    series = vega.Series(names, "attention")
    x = vega.x_axis("tokens", "tokens", log=True, domain=reach, values=[4**i for i in range(7)])
    powers = [2.0**i for i in range(-8, 11) if span[0] <= 2.0**i <= span[1]]
    y = vega.y_axis("ratio", log=True, domain=span, values=powers, format="~g")
    tips = vega.tooltips("attention", ("tokens", "tokens", "d"), ("ratio", "ratio", ".3g"))
    named = {}
    for name, rows in forecast.items():
        base, dots = (
            vega.data(part).encode(x=x, y=y, tooltip=tips, **series("color")) for part in (rows, measured[name])
        )
        named[name] = alt.layer(
            vega.threshold(1, y, strokeDash=[1, 0]),
            vega.threshold(tokens, x, clip=True),
            base.mark_line(strokeWidth=2),
            dots.mark_point(filled=True, size=70, opacity=1, clip=True),
        )
    return vega.panels(named, title, *subtitle, spacing=20, width=230, height=230)


def _row(record: Record) -> dict[str, Any]:
    return {**record.tags, "value": record.value}


def _about(record: Record) -> str:
    """The shape of a call, and where it was measured."""
    tags = record.tags
    shape = f", {tags['heads']} heads, head_dim {tags['head_dim']}" if "heads" in tags else ""
    return f"batch {tags['batch']}{shape}; {record.where}"


def _draws(records: Iterable[Record]) -> str:
    most = max(record.n for record in records)  # a trained attention has one
    return f"{most} draw{'s' * (most != 1)}"
