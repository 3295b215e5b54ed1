"""The charts of a study's page, section by section."""

from __future__ import annotations

import altair as alt

from linvit import metrics
from linvit.metrics import METRICS, Metric
from linvit.report import curves, vega
from linvit.report.merit import ACCURACY
from linvit.report.study import accuracy
from linvit.report.summary import Summary, VariantResult

CURVES = [  # key of the log, title, axis and its format
    ("train_loss", "Training loss", "Cross-entropy", "~r"),
    ("validation_loss", "Validation loss", "Cross-entropy", "~r"),
    ("gradient_norm", "Gradient norm before clipping", "Norm", "~r"),
]
LETTERS = {"alpha": "α", "tau": "τ", "eps": "ε"}
RECOVERY = ("validation_accuracy", "Recovery from the start", "Validation accuracy", "~%")
RECOVERY_NOTE = (
    "Step 0: the pretrained weights with each attention, before any training; a head for other classes is made of "
    "class means. A variant trained from scratch has no such point."
)


def build(summary: Summary, chosen: str | None) -> dict[str, list[vega.Chart]]:
    """Section → its charts; a section without data is absent."""
    started = any(v.get("start_accuracy") is not None for v in summary.variants)
    recovery = learning(summary, *RECOVERY, over="step", note=RECOVERY_NOTE) if started else None
    usual = [curve for curve in CURVES if summary.merit is ACCURACY or curve[0] != "validation_loss"]  # bits are losses
    return vega.present(
        {
            "pareto": [pareto(summary, chosen)],
            "cost": [costs(summary, metric) for metric in metrics.TABLE if metric.bar],
            "scaling": [scaling(summary, mode) for mode in ("forward", "both")],
            "growth": [growth(summary)],
            "learning": [recovery or learning(summary, *summary.merit.curve), *(learning(summary, *c) for c in usual)],
            "learned": [learned(summary, *found) for found in curves.learned(summary).items()],
            "confusion": [confusion(summary, v) for v in summary.variants],
            "classes": [classes(summary), scores(summary, chosen)],
            "error": [error(summary)],
        }
    )


def series_of(summary: Summary) -> vega.Series:
    return vega.Series([v.label for v in summary.variants])


def pareto(summary: Summary, chosen: str | None) -> vega.Chart | None:
    """Accuracy × inference speed; the dashed front joins the variants that no other beats in both."""
    able, merit, series = [v for v in summary.variants if v.best], summary.merit, series_of(summary)
    relative = sum(v.get("inference_vs_softmax") is not None for v in able) >= max(1, len(able) - 1)
    metric = METRICS["inference_vs_softmax" if relative else "inference_throughput"]
    rows = []
    for v in able:
        speed = v.get(metric.name) or (1.0 if relative and v.baseline else None)
        if v.best is None or speed is None:
            continue
        low, high = (v.best.mean if end is None else end for end in (v.best.low, v.best.high))
        measured = {"speed": speed, "merit": v.best.mean, "low": low, "high": high, "memory": v.get("peak_memory")}
        shown = {"shown": accuracy(v, merit), "pace": metric.show(speed), "taken": metrics.size(measured["memory"])}
        flags = {"verdict": v.verdict, "chosen": v.id == chosen, "sound": not v.diverged}
        rows.append({"variant": v.label} | measured | shown | flags)
    if not rows:
        return None
    ends = vega.padded([row[end] for row in rows for end in ("low", "high")])
    domain = [max(0, ends[0]), min(1, ends[1]) if merit is ACCURACY else ends[1]]
    pace = "Inference speed, softmax = 1 (faster →)" if relative else "Inference, images per second (faster →)"
    upward = merit.title if merit.sign > 0 else f"{merit.title} (fewer ↑)"
    form = "~r" if relative else "~s"
    x = vega.x_axis("speed", pace, domain=vega.padded(row["speed"] for row in rows), tickCount=6, format=form)
    y = vega.y_axis("merit", upward, domain=domain, reverse=merit.sign < 0, tickCount=6, format=merit.form)
    memory = ("taken", "memory of a training step")
    tips = vega.tooltips("variant", ("shown", merit.title.lower()), ("pace", "inference"), memory, "verdict")
    most = max((row["memory"] for row in rows if row["memory"]), default=None)
    base = vega.data(rows).encode(x=x, y=y, tooltip=tips)
    dashed = vega.data(_front(rows, merit.sign)).mark_line(
        strokeDash=[4, 4], strokeWidth=1.5, strokeOpacity=0.7, style="quiet"
    )
    layers = [dashed.encode(x=x, y=y, order="speed:Q")]
    if most:
        size = alt.Size("memory:Q", scale=alt.Scale(domain=[0, most], range=[0, 2600]), legend=None)
        circles = base.mark_circle(opacity=0.16).transform_filter("datum.memory != null")
        layers.append(circles.encode(size=size, **series("color")))
    solid = alt.when("datum.sound").then(alt.value(1)).otherwise(alt.value(0.35))
    layers += [
        vega.spans(base.encode(**series("color")), y),
        base.mark_point(size=620, strokeWidth=1.5, style="quiet", filled=False).transform_filter("datum.chosen"),
        base.mark_point(size=170, filled=True).encode(**series("color", "shape"), opacity=solid),
    ]
    note = (
        "Bars: 95 % intervals over seeds. Dashed: variants that no other beats in both. Ring: the recommendation."
        + " Pale circles: their area is the memory of a training step." * bool(most)
    )
    return vega.Chart("pareto", f"{merit.noun.capitalize()} and inference speed", 340, layers, note)


def _front(rows: vega.Rows, sign: int) -> vega.Rows:
    front: vega.Rows = []
    for row in sorted((row for row in rows if row["sound"]), key=lambda r: (-r["speed"], -sign * r["merit"])):
        if not front or sign * row["merit"] > sign * front[-1]["merit"]:
            front.append(row)
    return [{"speed": row["speed"], "merit": row["merit"]} for row in front]


def costs(summary: Summary, metric: Metric) -> vega.Chart | None:
    baseline = next((v.get(metric.name) for v in summary.variants if v.baseline), None)
    rows = []
    for v in summary.variants:
        if (value := v.get(metric.name)) is not None:
            relative = f"{value / baseline:.0%}" if baseline else "–"
            rows.append({"variant": v.label, "value": value, "shown": metric.show(value), "relative": relative})
    if not rows:
        return None
    x = vega.x_axis("value", domain=[0, 1.22 * (max(row["value"] for row in rows) or 1)], axis=False)
    tips = vega.tooltips("variant", ("shown", metric.bar.lower()), ("relative", "of softmax's"))
    return vega.Chart(metric.name, metric.bar, vega.ROW * len(rows), vega.bars(rows, x, series_of(summary), tips))


def scaling(summary: Summary, mode: str) -> vega.Chart | None:
    rows, breaks = curves.scaling(summary, mode)
    if not rows:
        return None
    series, (name, other) = series_of(summary), curves.reference(summary, mode)
    every = [*rows, *other]
    tokens = sorted({row["tokens"] for row in every})
    x = vega.x_axis("tokens", "Tokens N (log)", log=True, values=tokens, labelOverlap=True, grid=False)
    ticks = vega.decades(row["seconds"] for row in every)
    y = vega.y_axis(
        "seconds", "Time per layer (log)", log=True, values=ticks, labelExpr="format(datum.value, '~s') + 's'"
    )
    tips = vega.tooltips("variant", ("tokens", "tokens", "d"), ("shown", "time"))
    layers, notes = [], []
    if breaks:
        faster = vega.tooltips("variant", ("tokens", "faster than softmax from N =", ".0f"))
        rule = vega.data(breaks).mark_rule(strokeWidth=1.5, strokeOpacity=0.5, strokeDash=[2, 3])
        layers.append(rule.encode(x=x, tooltip=faster, **series("color")))
        notes.append("Vertical lines: the number of tokens from which a variant is faster than softmax.")
    if other:
        base, last = (vega.data(part).encode(x=x, y=y) for part in (other, other[-1:]))
        layers += [
            base.mark_line(strokeWidth=2, strokeDash=[6, 4], style="quiet"),
            base.mark_point(size=50, filled=True, style="quiet").encode(tooltip=tips),
            last.mark_text(align="right", dx=-8, dy=-8, style="quiet").encode(text="variant:N"),
        ]
    if any("+" in v.attention for v in summary.variants):
        notes.append("Where layers differ, the mean is shown.")
    notes += curves.partly_timed(summary) if mode == "forward" else []
    title = {"forward": "One attention layer, inference", "both": "One attention layer, training"}[mode]
    layers += vega.lines(rows, x, y, series, tips)
    return vega.Chart(f"scaling-{mode}", title, 300, layers, " ".join(notes), name if other else "")


def learning(
    summary: Summary, key: str, title: str, label: str, form: str, over: str = "epoch", note: str = ""
) -> vega.Chart | None:
    rows, series = curves.learning(summary, key, over), series_of(summary)
    if not rows:
        return None
    ticks = vega.whole_ticks(row[over] for row in rows)
    x = vega.x_axis(over, over.capitalize(), nice=False, values=ticks, format="~f", grid=False)
    y = vega.y_axis("mean", label, format=form, tickCount=5)
    shown = ".1%" if form == "~%" else ".4g"
    ends = ("low", "lowest seed", shown), ("high", "highest seed", shown)
    tips = vega.tooltips("variant", (over, over, "~f"), ("mean", title.lower(), shown), *ends)
    layers = [vega.band(rows, x, y, series), *vega.lines(rows, x, y, series, tips)]
    return vega.Chart(f"learning-{key.replace('_', '-')}", title, 280, layers, note)


def learned(summary: Summary, name: str, rows: vega.Rows) -> vega.Chart:
    """One parameter of attentions over training, a line for each layer."""
    letter = LETTERS.get(name, name)
    first, last = (end(row["epoch"] for row in rows) for end in (min, max))
    domain, ticks = [first, last + 0.16 * (last - first)], vega.whole_ticks([last])  # with room for names
    x = vega.x_axis("epoch", "Epoch", domain=domain, values=ticks, format="~f", grid=False)
    y = vega.y_axis("value", letter, tickCount=5, format="~g")
    tips = vega.tooltips("variant", "layer", ("epoch", "epoch", "~f"), ("value", letter, ".4g"))
    ends = vega.data(row for row in rows if row["marked"]).encode(x=x, y=y)
    names = ends.mark_text(align="left", dx=8, style="quiet").encode(text="layer:N")
    layers = [*vega.lines(rows, x, y, series_of(summary), tips, detail="layer:N"), names]
    return vega.Chart(f"learned-{name}", f"{letter} of each layer", 280, layers)


def growth(summary: Summary) -> vega.Chart | None:
    """Merit after half of the steps and after all, of the seeds that have both."""
    rows, merit = curves.growth(summary), summary.merit
    if not rows:
        return None
    ends = {"values": [0.5, 1], "labelExpr": "datum.value < 1 ? 'half' : 'all'", "grid": False}
    x = vega.x_axis("share", "Share of the steps (log)", log=True, base=2, domain=[0.45, 1.1], **ends)
    y = vega.y_axis("merit", merit.title, format=merit.form, tickCount=5)
    tips = vega.tooltips("variant", ("shown", merit.title.lower()), ("gain", "gained"))
    title = f"{merit.title} after half and after all of the training"
    return vega.Chart("growth", title, 280, vega.lines(rows, x, y, series_of(summary), tips))


def confusion(summary: Summary, variant: VariantResult) -> vega.Chart | None:
    rows, names = curves.confusion(summary, variant)
    if not rows:
        return None
    label = {"labelLimit": 80, "labelPadding": 4, "grid": False}
    tips = vega.tooltips("true", "predicted", ("count", "test images", "d"), ("share", "of the true class", ".1%"))
    base = vega.data(rows).encode(
        x=vega.x_names("predicted", names, "Predicted", **label),
        y=vega.y_names("true", names, "True", **label),
        tooltip=tips,
    )
    opacity = alt.FillOpacity("share:Q", legend=None, scale=alt.Scale(type="sqrt", domain=[0, 1], range=[0.03, 0.95]))
    colour = series_of(summary)("color")["color"].legend(None)
    layers = [base.mark_rect().encode(color=colour, fillOpacity=opacity)]
    if len(names) <= 10:
        digits = base.transform_filter("datum.share >= 0.005").encode(text=alt.Text("share:Q", format=".0%"))
        layers += [
            digits.transform_filter("datum.share < 0.5").mark_text(fontSize=9),
            digits.transform_filter("datum.share >= 0.5").mark_text(fontSize=9, style="paper", fontWeight=600),
        ]
    return vega.Chart(f"confusion-{variant.index}", variant.label, min(420, max(200, 30 * len(names))), layers)


def classes(summary: Summary) -> vega.Chart | None:
    """F1 of every variant, the hardest class first."""
    rows, names, cut = curves.classes(summary)
    if not rows:
        return None
    y = vega.y_names("class", names, labelLimit=120, grid=False)
    x = vega.x_axis("f1", "F1", format="~%", tickCount=5)
    tips = vega.tooltips("variant", "class", *((key, key, ".1%") for key in curves.SCORES))
    base = vega.data(rows).encode(y=y)
    range_of = base.mark_rule(strokeWidth=1, strokeOpacity=0.5).encode(x=alt.X("min(f1):Q", title="F1"), x2="max(f1):Q")
    points = base.mark_point(size=90, filled=True, fillOpacity=0.9)
    points = points.encode(x=x, tooltip=tips, **series_of(summary)("color", "shape"))
    note = "Hardest class first, mean over seeds." + (f" The {len(names)} hardest of {cut} classes." if cut else "")
    return vega.Chart("classes", "F1 by class", 26 * len(names), [range_of, points], note)


def scores(summary: Summary, chosen: str | None) -> vega.Chart | None:
    """Precision, recall and F1 of the recommended variant, by class."""
    rows, names, _ = curves.classes(summary)
    kinds = ["precision", "recall", "f1"]
    label = next((v.label for v in summary.variants if v.id == chosen), "")
    found = [
        {"variant": label, "class": row["class"], "metric": kind, "value": row[kind]}
        for row in rows
        for kind in kinds
        if row["variant"] == label and row.get(kind) is not None
    ]
    if not found:
        return None
    layer = (
        vega.data(found)
        .mark_bar(cornerRadiusEnd=2)
        .encode(
            y=vega.y_names("class", names, labelLimit=120, grid=False),
            yOffset=alt.YOffset("metric:N", sort=kinds),
            x=vega.x_axis("value", "Precision, recall, F1 (top to bottom)", domain=[0, 1], format="~%", tickCount=5),
            fillOpacity=alt.FillOpacity("metric:O", legend=None, scale=alt.Scale(domain=kinds, range=[0.45, 0.7, 1])),
            tooltip=vega.tooltips("class", "metric", ("value", "value", ".1%")),
            **series_of(summary)("color"),
        )
    )
    height = max(160, 36 * len({row["class"] for row in found}))
    return vega.Chart("class-scores", f"Precision, recall and F1 of {label}", height, [layer])


def error(summary: Summary) -> vega.Chart | None:
    rows: vega.Rows = []
    for v in summary.variants:
        if (value := v.get("attention_error")) is not None:
            uniform, entropy = v.get("attention_error_uniform"), v.get("attention_entropy")
            row = {"variant": v.label, "error": min(1.0, value), "shown": f"{value:.2f}"}
            rows.append(row | {"uniform": uniform, "entropy": entropy})
    if not rows:
        return None
    top = 1.12 * max(0.1, *(max(row["error"], row["uniform"] or 0) for row in rows))
    x = vega.x_axis("error", "Total variation to softmax (0 = equal)", domain=[0, top], tickCount=5)
    uniform = ("uniform", "uniform attention's distance", ".3f")
    tips = vega.tooltips("variant", ("shown", "distance to softmax"), uniform, ("entropy", "entropy", ".3f"))
    mark = vega.data(rows).encode(x=vega.at(x, "uniform"), y=vega.y_names("variant"), tooltip=tips)
    mark = mark.transform_filter("datum.uniform != null").mark_tick(thickness=2.5, size=24, yOffset=8)
    layers = [*vega.bars(rows, x, series_of(summary), tips), mark]
    note = (
        "Mark: uniform attention on the same queries and keys. A bar beyond it is further from softmax than equal "
        "weights. Bars are cut at 1, which only rows that do not sum to one can exceed."
    )
    return vega.Chart("attention-error", "Distance from softmax", vega.ROW * len(rows), layers, note)
