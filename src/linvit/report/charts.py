"""The charts, as Vega-Lite specs: one for the page, and for its figure files.

User text is only ever data or a scale's domain. A `sort` of names would be compiled into an expression: never use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import altair as alt

from linvit import metrics
from linvit.metrics import Metric
from linvit.report import curves, tables, theme
from linvit.report.curves import Rows
from linvit.report.merit import ACCURACY
from linvit.report.summary import Result, Summary


@dataclass(frozen=True)
class Chart:
    name: str  # of the figure file
    title: str
    height: int
    layers: list[alt.Chart]
    note: str = ""
    beside: str = ""  # what is drawn beside the variants, in grey

    def page(self) -> dict[str, Any]:
        return self._spec(True, width="container", autosize=alt.AutoSizeParams(type="fit-x"))

    def _spec(self, page: bool, **properties: Any) -> dict[str, Any]:
        """Not validated here, which takes longer than all else: the tests do it."""
        spec = alt.layer(*self.layers).properties(height=self.height, **properties)
        return spec.to_dict(validate=False) | {"config": theme.config(page)}

    def figure(self) -> dict[str, Any]:
        spec = self._spec(False, width=640, title=self.title)
        for layer in spec["layer"]:
            if "name" in layer:  # the points that answer the pointer: no file needs those that are not seen
                layer["transform"] = [{"filter": "datum.marked"}]
        return spec


def build(summary: Summary, chosen: str | None) -> dict[str, list[Chart]]:
    """Section → its charts; a section without data is absent."""
    return present({
        "pareto": [pareto(summary, chosen)],
        "cost": [bars(summary, metric) for metric in metrics.TABLE if metric.bar],
        "scaling": [scaling(summary, mode) for mode in ("forward", "both")],
        "growth": [growth(summary)],
        "learning": [learning(summary, *what) for what in _curves(summary)],
        "learned": [learned(summary, *found) for found in curves.learned(summary).items()],
        "confusion": [confusion(summary, v) for v in summary.variants],
        "classes": [classes(summary), scores(summary, chosen)],
        "error": [error(summary)],
    })  # fmt: skip


def present(sections: dict[str, list[Chart | None]]) -> dict[str, list[Chart]]:
    """The charts that there are, and no section without one."""
    found = {name: [chart for chart in charts if chart] for name, charts in sections.items()}
    return {name: charts for name, charts in found.items() if charts}


def _data(rows: Iterable[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(rows)))


def _looks(summary: Summary, *channels: str) -> dict[str, Any]:
    """What tells a variant from the others, the same in every chart; ranges that are too short begin again."""
    names = [v.label for v in summary.variants]
    every = {
        "color": alt.Color("variant:N", scale=alt.Scale(domain=names)),
        "shape": alt.Shape("variant:N", scale=alt.Scale(domain=names, range=list(theme.SHAPES))),
        "strokeDash": alt.StrokeDash("variant:N", scale=alt.Scale(domain=names, range=list(theme.DASHES))),
    }
    return {channel: every[channel] for channel in channels}


def _span(values: Iterable[float], room: float = 0.12) -> list[float]:
    values = list(values)
    low, high = min(values), max(values)
    pad = room * (high - low or abs(high) or 1)
    return [low - pad, high + pad]


def _decades(values: list[float]) -> list[float]:
    """Ticks of a logarithmic axis: powers of ten, or 1, 2 and 5 times them over a short range."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    steps = (1,) if high - low > 2 else (1, 2, 5)
    return [step * 10.0**power for power in range(low, high + 1) for step in steps]


def pareto(summary: Summary, chosen: str | None) -> Chart | None:
    """Accuracy × inference speed; the dashed front joins the variants that no other beats in both."""
    able, merit = [v for v in summary.variants if v.best], summary.merit
    beside = sum(v.get("inference_vs_softmax") is not None for v in able) >= max(1, len(able) - 1)
    metric = "inference_vs_softmax" if beside else "inference_throughput"
    rows = []
    for v in able:
        speed = v.get(metric) or (1.0 if beside and v.attention == "softmax" else None)
        if v.best is None or speed is None:
            continue
        low, high = (v.best.mean if end is None else end for end in (v.best.low, v.best.high))
        rows.append({"variant": v.label, "speed": speed, "merit": v.best.mean, "low": low, "high": high,
                     "score": merit.sign * v.best.mean, "shown": tables.points(v, merit),
                     "pace": metrics.METRICS[metric].show(speed),
                     "verdict": v.verdict, "chosen": v.id == chosen, "sound": not v.diverged,
                     "memory": v.get("peak_memory"), "taken": metrics.size(v.get("peak_memory"))})  # fmt: skip
    if not rows:
        return None
    ends = _span([r["low"] for r in rows] + [r["high"] for r in rows])
    title = "Inference speed, softmax = 1 (faster →)" if beside else "Inference, images per second (faster →)"
    x = alt.X("speed:Q", title=title, scale=alt.Scale(domain=_span([r["speed"] for r in rows]), nice=False, zero=False),
              axis=alt.Axis(tickCount=6, format="~r" if beside else "~s"))  # fmt: skip
    top = min(1, ends[1]) if merit is ACCURACY else ends[1]
    scale = alt.Scale(domain=[max(0, ends[0]), top], nice=False, zero=False, reverse=merit.sign < 0)  # better is higher
    upward = merit.title if merit.sign > 0 else f"{merit.title} (fewer ↑)"
    y = alt.Y("merit:Q", title=upward, axis=alt.Axis(format=merit.form, tickCount=6), scale=scale)
    tips = [
        "variant:N",
        alt.Tooltip("shown:N", title=merit.title.lower()),
        alt.Tooltip("pace:N", title="inference"),
        alt.Tooltip("taken:N", title="memory of a training step"),
        "verdict:N",
    ]
    most = max((row["memory"] for row in rows if row["memory"]), default=None)
    base = _data(rows).encode(x=x, y=y)
    layers = [
        _data(_front(rows)).mark_line(strokeDash=[4, 4], strokeWidth=1.5, strokeOpacity=0.7, style="quiet").encode(
            x=x, y=y, order="speed:Q"),
        *_bubbles(base, most, summary),
        base.mark_rule(strokeWidth=2, strokeOpacity=0.55).encode(
            y=alt.Y("low:Q", title=upward), y2="high:Q", **_looks(summary, "color"), tooltip=tips),
        base.mark_point(size=620, strokeWidth=1.5, style="quiet", filled=False).transform_filter(
            "datum.chosen"),
        base.mark_point(size=170, filled=True).encode(
            **_looks(summary, "color", "shape"), tooltip=tips,
            opacity=alt.when("datum.sound").then(alt.value(1)).otherwise(alt.value(0.35))),
    ]  # fmt: skip
    return Chart("pareto", f"{merit.title.removeprefix('Test ').capitalize()} and inference speed", 340, layers,
                 "Bars are 95 % intervals over seeds; the dashed line joins variants that none beats in both; "
                 "the ring marks the recommendation."
                 + (" The pale circles' areas are the memory of a training step." if most else ""))  # fmt: skip


def _bubbles(base: alt.Chart, most: float | None, summary: Summary) -> list[alt.Chart]:
    """Behind each point a circle whose area is its variant's memory; none if no memory was measured."""
    if not most:
        return []
    size = alt.Size("memory:Q", scale=alt.Scale(domain=[0, most], range=[0, 2600]), legend=None)
    drawn = base.mark_circle(opacity=0.16).transform_filter("datum.memory != null")
    return [drawn.encode(size=size, **_looks(summary, "color"))]


def _front(rows: Rows) -> Rows:
    front: Rows = []
    for row in sorted((row for row in rows if row["sound"]), key=lambda r: (-r["speed"], -r["score"])):
        if not front or row["score"] > front[-1]["score"]:
            front.append(row)
    return [{"speed": row["speed"], "merit": row["merit"]} for row in front]


def bars(summary: Summary, metric: Metric) -> Chart | None:
    softmax = next((v.get(metric.name) for v in summary.variants if v.attention == "softmax"), None)
    rows = [
        {"variant": v.label, "value": value, "shown": metric.show(value),
         "beside": f"{value / softmax:.0%}" if softmax else "–"}
        for v in summary.variants if (value := v.get(metric.name)) is not None
    ]  # fmt: skip
    if not rows:
        return None
    top = max(row["value"] for row in rows) or 1
    x = alt.X("value:Q", title=None, scale=alt.Scale(domain=[0, top * 1.22], nice=False), axis=None)
    tips = [alt.Tooltip("shown:N", title=metric.bar.lower()), alt.Tooltip("beside:N", title="of softmax's")]
    return Chart(metric.name, metric.bar, ROW * len(rows), _bars(_by_row(rows, tips), x, summary))


ROW = 44


def _by_row(rows: Rows, tips: list[alt.Tooltip]) -> alt.Chart:
    return _data(rows).encode(y=alt.Y("variant:N", sort=None, title=None, axis=None), tooltip=["variant:N", *tips])


def _bars(base: alt.Chart, x: alt.X, summary: Summary) -> list[alt.Chart]:
    """A variant's bar, its number behind it and its name above it, where it has the whole width of a phone."""
    return [
        base.mark_bar(cornerRadiusEnd=3, height=14, yOffset=8).encode(x=x, **_looks(summary, "color")),
        base.mark_text(align="left", dx=8, dy=9, fontWeight=600).encode(x=x, text="shown:N"),
        base.mark_text(align="left", dy=-9, style="quiet").encode(x=alt.value(0), text="variant:N"),
    ]


def _nearest(rows: Rows, x: Any, y: Any, tips: list[Any], summary: Summary) -> alt.Chart:
    """Points that answer the pointer. Only the marked ones are seen: they carry the variant's shape along its line."""
    hover = alt.selection_point(on="pointerover", nearest=False, empty=False, clear="pointerout")
    return (
        _data(rows)
        .mark_point(filled=True, size=70)
        .encode(x=x, y=y, **_looks(summary, "color", "shape"), tooltip=tips,
                opacity=alt.when(hover | alt.datum.marked).then(alt.value(1)).otherwise(alt.value(0)))
        .add_params(hover)
    )  # fmt: skip


def scaling(summary: Summary, mode: str) -> Chart | None:
    rows, breaks = curves.scaling(summary, mode)
    if not rows:
        return None
    title = {"forward": "One attention layer, inference", "both": "One attention layer, training"}[mode]
    other = curves.beside(summary, mode)
    every = [*rows, *other]
    tokens = sorted({row["tokens"] for row in every})
    x = alt.X("tokens:Q", title="Tokens N (log)", scale=alt.Scale(type="log", nice=False),
              axis=alt.Axis(values=tokens, labelOverlap=True, grid=False))  # fmt: skip
    y = alt.Y("seconds:Q", title="Time per layer (log)", scale=alt.Scale(type="log"),
              axis=alt.Axis(values=_decades([row["seconds"] for row in every]),
                            labelExpr="format(datum.value, '~s') + 's'"))  # fmt: skip
    tips = ["variant:N", alt.Tooltip("tokens:Q", title="tokens"), alt.Tooltip("shown:N", title="time")]
    lines = _data(rows).mark_line(strokeWidth=2).encode(x=x, y=y, **_looks(summary, "color", "strokeDash"))
    rule = _data(breaks).mark_rule(strokeWidth=1.5, strokeOpacity=0.5, strokeDash=[2, 3]).encode(
        x=alt.X("tokens:Q"), **_looks(summary, "color"),
        tooltip=["variant:N", alt.Tooltip("tokens:Q", title="faster than softmax from N =", format=".0f")],
    )  # fmt: skip
    layers = [*([rule] if breaks else []), *_beside(other, x, y, tips), lines, _nearest(rows, x, y, tips, summary)]
    notes = ["Vertical lines: the number of tokens from which a variant is faster than softmax."] if breaks else []
    if any("+" in v.attention for v in summary.variants):
        notes.append("Of layers that differ, the mean.")
    notes += curves.partly_timed(summary) if mode == "forward" else []
    return Chart(f"scaling-{mode}", title, 300, layers, " ".join(notes), curves.BESIDE if other else "")


def _beside(rows: Rows, x: Any, y: Any, tips: list[Any]) -> list[alt.Chart]:
    """A line in grey that is no variant's, with its name at its end."""
    if not rows:
        return []
    base, last = (_data(part).encode(x=x, y=y) for part in (rows, rows[-1:]))
    return [
        base.mark_line(strokeWidth=2, strokeDash=[6, 4], style="quiet"),
        base.mark_point(size=50, filled=True, style="quiet").encode(tooltip=tips),
        last.mark_text(align="right", dx=-8, dy=-8, style="quiet").encode(text="variant:N"),
    ]


CURVES = [
    ("train_loss", "Training loss", "Cross-entropy", "~r"),
    ("validation_loss", "Validation loss", "Cross-entropy", "~r"),
    ("gradient_norm", "Gradient norm before clipping", "Norm", "~r"),
]
LETTERS = {"alpha": "α", "tau": "τ", "eps": "ε"}
RECOVERY = ("validation_accuracy", "Recovery from the start", "Validation images right", "~%", "step",
            "At step 0: the trained weights under each attention, nothing learned yet; a head for other classes is "
            "made of class means. What begins with nothing has no such point.")  # fmt: skip


def _curves(summary: Summary) -> list[tuple[str, ...]]:
    """Accuracy over steps where there were trained weights to begin with: how soon each attention is at home there."""
    started = any(v.get("start_accuracy") is not None for v in summary.variants)
    first = RECOVERY if started else summary.merit.curve
    return [
        first,
        *(curve for curve in CURVES if summary.merit is ACCURACY or curve[0] != "validation_loss"),
    ]  # or bits


def _whole(places: Iterable[float]) -> Any:
    """Ticks at some of the whole epochs, or steps, if there are several."""
    last = int(max(places))
    return list(range(0, last + 1, max(1, round(last / 6)))) if last > 1 else alt.Undefined


def learning(
    summary: Summary, key: str, title: str, label: str, form: str, over: str = "epoch", note: str = ""
) -> Chart | None:
    rows = curves.learning(summary, key, over)
    if not rows:
        return None
    x = alt.X(f"{over}:Q", title=over.capitalize(), scale=alt.Scale(nice=False),
              axis=alt.Axis(values=_whole(row[over] for row in rows), format="~f", grid=False))  # fmt: skip
    y = alt.Y("mean:Q", title=label, axis=alt.Axis(format=form, tickCount=5), scale=alt.Scale(zero=False))
    shown = ".1%" if form == "~%" else ".4g"
    tips = ["variant:N", alt.Tooltip(f"{over}:Q"), alt.Tooltip("mean:Q", title=title.lower(), format=shown),
            alt.Tooltip("low:Q", title="lowest seed", format=shown),
            alt.Tooltip("high:Q", title="highest seed", format=shown)]  # fmt: skip
    base = _data(rows).encode(x=x, y=y, **_looks(summary, "color"))
    return Chart(f"learning-{key.replace('_', '-')}", title, 280, [
        base.mark_area(fillOpacity=0.12).encode(y=alt.Y("low:Q", title=label), y2="high:Q"),
        base.mark_line(strokeWidth=2).encode(**_looks(summary, "strokeDash")),
        _nearest(rows, x, y, tips, summary),
    ], note)  # fmt: skip


def learned(summary: Summary, name: str, rows: Rows) -> Chart:
    """One parameter of attentions over training, a line for each layer."""
    letter = LETTERS.get(name, name)
    first, last = (end(row["epoch"] for row in rows) for end in (min, max))
    scale = alt.Scale(domain=[first, last + 0.16 * (last - first)], nice=False)  # with room for names
    x = alt.X("epoch:Q", title="Epoch", scale=scale,
              axis=alt.Axis(values=_whole(row["epoch"] for row in rows), format="~f", grid=False))  # fmt: skip
    y = alt.Y("value:Q", title=letter, axis=alt.Axis(tickCount=5, format="~g"), scale=alt.Scale(zero=False))
    tips = ["variant:N", "layer:N", "epoch:Q", alt.Tooltip("value:Q", title=letter, format=".4g")]
    base = _data(rows).encode(x=x, y=y, detail="layer:N", **_looks(summary, "color"))
    ends = _data(row for row in rows if row["marked"]).encode(x=x, y=y)
    return Chart(f"learned-{name}", f"{letter} of each layer", 280, [
        base.mark_line(strokeWidth=2).encode(**_looks(summary, "strokeDash")),
        _nearest(rows, x, y, tips, summary),
        ends.mark_text(align="left", dx=8, style="quiet").encode(text="layer:N"),
    ])  # fmt: skip


def growth(summary: Summary) -> Chart | None:
    """Merit after half of the steps and after all, of the seeds that have both."""
    rows, merit = curves.growth(summary), summary.merit
    if not rows:
        return None
    scale = alt.Scale(type="log", base=2, domain=[0.45, 1.1], nice=False)
    x = alt.X("share:Q", title="Share of the steps (log)", scale=scale,
              axis=alt.Axis(values=[0.5, 1], labelExpr="datum.value < 1 ? 'half' : 'all'", grid=False))  # fmt: skip
    title = "Test images right" if merit is ACCURACY else merit.title
    y = alt.Y("merit:Q", title=title, axis=alt.Axis(format=merit.form, tickCount=5), scale=alt.Scale(zero=False))
    tips = ["variant:N", alt.Tooltip("shown:N", title=merit.title.lower()), alt.Tooltip("gain:N", title="gained")]
    lines = _data(rows).mark_line(strokeWidth=2).encode(x=x, y=y, **_looks(summary, "color", "strokeDash"))
    return Chart("growth", f"{merit.title} after half and after all of the training", 280,
                 [lines, _nearest(rows, x, y, tips, summary)])  # fmt: skip


def confusion(summary: Summary, variant: Result) -> Chart | None:
    rows, names = curves.confusion(summary, variant)
    if not rows:
        return None
    label = alt.Axis(labelLimit=80, labelPadding=4, grid=False)
    base = _data(rows).encode(
        x=alt.X("predicted:N", scale=alt.Scale(domain=names), title="Predicted", axis=label),
        y=alt.Y("true:N", scale=alt.Scale(domain=names), title="True", axis=label),
        tooltip=[alt.Tooltip("true:N"), alt.Tooltip("predicted:N"), alt.Tooltip("count:Q", title="test images"),
                 alt.Tooltip("share:Q", title="of the true class", format=".1%")],
    )  # fmt: skip
    opacity = alt.FillOpacity("share:Q", legend=None, scale=alt.Scale(type="sqrt", domain=[0, 1], range=[0.03, 0.95]))
    layers = [base.mark_rect().encode(color=_looks(summary, "color")["color"].legend(None), fillOpacity=opacity)]
    if len(names) <= 10:
        digits = base.transform_filter("datum.share >= 0.005").encode(text=alt.Text("share:Q", format=".0%"))
        layers += [
            digits.transform_filter("datum.share < 0.5").mark_text(fontSize=9),
            digits.transform_filter("datum.share >= 0.5").mark_text(fontSize=9, style="paper", fontWeight=600),
        ]
    return Chart(f"confusion-{variant.index}", variant.label, min(420, max(200, 30 * len(names))), layers)


def classes(summary: Summary) -> Chart | None:
    """F1 of every variant, the hardest class first."""
    rows, names, cut = curves.classes(summary)
    if not rows:
        return None
    y = alt.Y("class:N", scale=alt.Scale(domain=names), title=None, axis=alt.Axis(labelLimit=120, grid=False))
    x = alt.X("f1:Q", title="F1", axis=alt.Axis(format="~%", tickCount=5), scale=alt.Scale(zero=False))
    tips = ["variant:N", "class:N", *(alt.Tooltip(f"{key}:Q", format=".1%") for key in ("f1", "precision", "recall"))]
    base = _data(rows)
    layers = [
        base.mark_rule(strokeWidth=1, strokeOpacity=0.5).encode(y=y, x=alt.X("min(f1):Q", title="F1"), x2="max(f1):Q"),
        base.mark_point(size=90, filled=True, fillOpacity=0.9).encode(
            x=x, y=y, **_looks(summary, "color", "shape"), tooltip=tips),
    ]  # fmt: skip
    note = "Hardest class first, mean over seeds." + (f" The {len(names)} hardest of {cut} classes." if cut else "")
    return Chart("classes", "F1 by class", 26 * len(names), layers, note)


def scores(summary: Summary, chosen: str | None) -> Chart | None:
    """Precision, recall and F1 of the recommended variant, class by class."""
    rows, names, _ = curves.classes(summary)
    kinds = ["precision", "recall", "f1"]
    label = next((v.label for v in summary.variants if v.id == chosen), "")
    found = [{"variant": label, "class": row["class"], "metric": kind, "value": row[kind]}
             for row in rows if row["variant"] == label for kind in kinds if row.get(kind) is not None]  # fmt: skip
    if not found:
        return None
    spec = _data(found).mark_bar(cornerRadiusEnd=2).encode(
        y=alt.Y("class:N", scale=alt.Scale(domain=names), title=None, axis=alt.Axis(labelLimit=120, grid=False)),
        yOffset=alt.YOffset("metric:N", sort=kinds),
        x=alt.X("value:Q", title="Precision, recall, F1 (top to bottom)", axis=alt.Axis(format="~%", tickCount=5),
                scale=alt.Scale(domain=[0, 1])),
        fillOpacity=alt.FillOpacity("metric:O", legend=None, scale=alt.Scale(domain=kinds, range=[0.45, 0.7, 1])),
        **_looks(summary, "color"),
        tooltip=["class:N", "metric:N", alt.Tooltip("value:Q", format=".1%")],
    )  # fmt: skip
    height = max(160, 36 * len({row["class"] for row in found}))
    return Chart("class-scores", f"Precision, recall and F1 of {label}", height, [spec])


def error(summary: Summary) -> Chart | None:
    rows = [
        {"variant": v.label, "error": min(1.0, value), "uniform": v.get("attention_error_uniform"),
         "entropy": v.get("attention_entropy"), "shown": f"{value:.2f}"}
        for v in summary.variants
        if (value := v.get("attention_error")) is not None
    ]  # fmt: skip
    if not rows:
        return None
    tips = [alt.Tooltip("shown:N", title="distance to softmax"),
            alt.Tooltip("uniform:Q", title="uniform's distance", format=".3f"),
            alt.Tooltip("entropy:Q", title="entropy", format=".3f")]  # fmt: skip
    title = "Total variation to softmax (0 = equal)"
    top = 1.12 * max(0.1, *(max(row["error"], row["uniform"] or 0) for row in rows))
    x = alt.X("error:Q", title=title, axis=alt.Axis(tickCount=5), scale=alt.Scale(domain=[0, top], nice=False))
    base = _by_row(rows, tips)
    uniform = base.transform_filter("datum.uniform != null").encode(x=alt.X("uniform:Q", title=title))
    layers = [*_bars(base, x, summary), uniform.mark_tick(thickness=2.5, size=24, yOffset=8)]
    return Chart("attention-error", "Distance from softmax", ROW * len(rows), layers,
                 "The mark is uniform attention on the same queries and keys: a bar beyond it is further from softmax "
                 "than giving every patch the same weight. Bars end at 1, more than which only rows with a sum other "
                 "than one can differ.")  # fmt: skip
