"""The charts of a study's page, section by section."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import altair as alt
import numpy as np

from linvit import metrics
from linvit.metrics import METRICS, Metric
from linvit.report import classes, scaling, vega
from linvit.report.evidence import run_of
from linvit.report.merit import ACCURACY
from linvit.report.result import Section, Table
from linvit.report.study import accuracy
from linvit.report.summary import Summary, VariantResult, number

CURVES = [  # key of the log, title, axis and its format
    ("train_loss", "Training loss", "Cross-entropy", "~r"),
    ("validation_loss", "Validation loss", "Cross-entropy", "~r"),
    ("gradient_norm", "Gradient norm before clipping", "Norm", "~r"),
]
MAX_POINTS = 120  # of one learning curve
MARKS = 5  # shapes along it
LETTERS = {"alpha": "α", "tau": "τ", "eps": "ε"}
RECOVERY = ("validation_accuracy", "Recovery from the start", "Validation accuracy", "~%")
RECOVERY_NOTE = (
    "Step 0: the pretrained weights with each attention, before any training; a head for other classes is made of "
    "class means. A variant trained from scratch has no such point."
)


def build(summary: Summary, chosen: str | None, early: bool) -> dict[str, Section]:
    """`early`: how accuracy grows with training is why nothing is recommended."""
    front = pareto(summary, chosen)
    run = "fold" if summary.folds else "seed"
    curves = learning_curves(summary)
    return {
        "front": Section(
            "",
            [front],
            notes=[] if front else [f"Speed was not measured, so there is no chart of {summary.merit.noun} and speed."],
        ),
        "early" if early else "growth": Section(
            "More training",
            [growth(summary)],
            "Every variant was also trained for half of the steps, with one seed and its own schedule. If the lines "
            "are still steep, or cross, more training would change the result.",
        ),
        "cost": Section(
            "Cost",
            [costs(summary, metric) for metric in metrics.TABLE if metric.bar],
            "Peak memory is measured in a fresh process. Shorter is cheaper.",
        ),
        "scaling": scaling.section(summary),
        "learning": Section(
            "Learning curves",
            curves,
            f"Mean over {run}s; the band spans the lowest and the highest {run}.",
            small=len(list(filter(None, curves))) == 3,
        ),
        "learned": Section(
            "Learned parameters",
            learned(summary),
            "Parameters of learnable kernels after each epoch, mean over seeds; one line for each layer.",
            small=True,
        ),
        **classes.sections(summary, chosen),
        "error": Section(
            "Distance from softmax",
            [error(summary)],
            "Total variation between the attention of each trained variant and softmax on the same queries and keys: "
            "mean over test images, layers and seeds.",
        ),
        "models": Section(
            "Models",
            [],
            "Layers with parameters, and attentions, in the order of computation, with the shape of their outputs. "
            "Equal blocks are one row.",
            tables=models(summary),
        ),
    }


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
        f"Bars: 95 % intervals over {'folds' if summary.folds else 'seeds'}. Dashed: variants that no other beats in "
        "both. Ring: the recommendation." + " Pale circles: their area is the memory of a training step." * bool(most)
    )
    return vega.Chart("pareto", f"{merit.noun.capitalize()} and inference speed", 340, layers, note, series)


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


def learning_curves(summary: Summary) -> list[vega.Chart | None]:
    started = any(v.get("start_accuracy") is not None for v in summary.variants)
    first = learning(summary, *RECOVERY, over="step", note=RECOVERY_NOTE) if started else None
    usual = [curve for curve in CURVES if summary.merit is ACCURACY or curve[0] != "validation_loss"]  # bits are losses
    return [first or learning(summary, *summary.merit.curve), *(learning(summary, *curve) for curve in usual)]


def _logs(summary: Summary, variant: VariantResult) -> list[dict[str, Any]]:
    """Lines of the learning curves of seeds that did not diverge, or of all if every seed did: a mean must be of the
    same seeds."""
    diverged = {run_of(r) for r in summary.evidence.of("diverged", variant=variant.id)}
    every = summary.evidence.of("learning_curve", variant=variant.id)
    whole = [r for r in every if run_of(r) not in diverged] or every
    return [line for record in whole for line in summary.evidence.logs[record.artefact]]


def _by_place(logs: Iterable[dict[str, Any]], key: str, over: str) -> dict[float, list[float]]:
    seen: dict[float, list[float]] = defaultdict(list)
    for line in logs:
        place, value = number(line.get(over)), number(line.get(key))
        if place is not None and value is not None:
            seen[place].append(value)
    return dict(sorted(seen.items()))


def learning(
    summary: Summary, key: str, title: str, label: str, form: str, over: str = "epoch", note: str = ""
) -> vega.Chart | None:
    """Mean, lowest and highest seed at each epoch, or step."""
    rows: vega.Rows = []
    for variant in summary.variants:
        seen = _by_place(_logs(summary, variant), key, over)
        places, last = list(seen), len(seen) - 1
        if last < 1:
            continue
        points = np.linspace(0, last, min(last + 1, MAX_POINTS)).round().astype(int)
        shift = variant.index / len(summary.variants)  # shapes of different lines do not cover each other
        marks = ((np.arange(MARKS) + shift) / MARKS * last).round().astype(int)
        for i in np.union1d(points, marks):
            values = seen[places[i]]
            row = {"mean": sum(values) / len(values), "low": min(values), "high": max(values)}
            rows.append({"variant": variant.label, over: places[i], "marked": bool(i in marks)} | row)
    if not rows:
        return None
    ticks = vega.whole_ticks(row[over] for row in rows)
    x = vega.x_axis(over, over.capitalize(), nice=False, values=ticks, format="~f", grid=False)
    y = vega.y_axis("mean", label, format=form, tickCount=5)
    shown = ".1%" if form == "~%" else ".4g"
    ends = ("low", "lowest seed", shown), ("high", "highest seed", shown)
    tips = vega.tooltips("variant", (over, over, "~f"), ("mean", title.lower(), shown), *ends)
    series = series_of(summary)
    layers = [vega.band(rows, x, y, series), *vega.lines(rows, x, y, series, tips)]
    return vega.Chart(f"learning-{key.replace('_', '-')}", title, 280, layers, note, series)


def learned(summary: Summary) -> list[vega.Chart]:
    """Parameters of attentions over training: the mean over seeds, a line for each variant and layer."""
    found: dict[str, vega.Rows] = defaultdict(list)
    for variant in summary.variants:
        logs = _logs(summary, variant)
        for key in dict.fromkeys(key for line in logs for key in line if key.startswith("learned.")):
            _, layer, name = key.split(".", 2)
            seen = _by_place(logs, key, "epoch")
            for place, values in seen.items():
                row = {"epoch": place, "value": sum(values) / len(values), "marked": place == max(seen)}
                found[name].append({"variant": variant.label, "layer": f"layer {layer}"} | row)
    return [
        _learned(name, rows, series_of(summary)) for name, rows in found.items() if any(not r["marked"] for r in rows)
    ]


def _learned(name: str, rows: vega.Rows, series: vega.Series) -> vega.Chart:
    letter = LETTERS.get(name, name)
    first, last = (end(row["epoch"] for row in rows) for end in (min, max))
    domain, ticks = [first, last + 0.16 * (last - first)], vega.whole_ticks([last])  # with room for names
    x = vega.x_axis("epoch", "Epoch", domain=domain, values=ticks, format="~f", grid=False)
    y = vega.y_axis("value", letter, tickCount=5, format="~g")
    tips = vega.tooltips("variant", "layer", ("epoch", "epoch", "~f"), ("value", letter, ".4g"))
    ends = vega.data(row for row in rows if row["marked"]).encode(x=x, y=y)
    names = ends.mark_text(align="left", dx=8, style="quiet").encode(text="layer:N")
    layers = [*vega.lines(rows, x, y, series, tips, detail="layer:N"), names]
    return vega.Chart(f"learned-{name}", f"{letter} of each layer", 280, layers, series=series)


def growth(summary: Summary) -> vega.Chart | None:
    """Merit after half of the steps and after all, of the seeds that have both."""
    rows, merit, series = [], summary.merit, series_of(summary)
    for v in summary.variants:
        if v.both:
            half, whole = (sum(of[seed] for seed in v.both) / len(v.both) for of in (v.half, v.scores))
            about = {"variant": v.label, "gain": f"{merit.signed(whole - half)} {merit.unit}"}
            for share, score in ((0.5, half), (1, whole)):
                value = merit.sign * score
                rows.append(about | {"share": share, "merit": value, "shown": merit.show(value)})
    if not rows:
        return None
    ends = {"values": [0.5, 1], "labelExpr": "datum.value < 1 ? 'half' : 'all'", "grid": False}
    x = vega.x_axis("share", "Share of the steps (log)", log=True, base=2, domain=[0.45, 1.1], **ends)
    y = vega.y_axis("merit", merit.title, format=merit.form, tickCount=5)
    tips = vega.tooltips("variant", ("shown", merit.title.lower()), ("gain", "gained"))
    title = f"{merit.title} after half and after all of the training"
    return vega.Chart("growth", title, 280, vega.lines(rows, x, y, series, tips), series=series)


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


def models(summary: Summary) -> list[Table]:
    """The layers of each variant's model, from the file that lists them."""
    layers = summary.evidence.first_artefact("model_summary")
    tables = []
    for v in summary.variants:
        rows = [
            {
                "Layer": row["name"],
                "Kind": row["kind"],
                "Output": " × ".join(map(str, row["shape"])),
                "Parameters": (f"{row['times']} × " if row["times"] > 1 else "") + f"{row['parameters']:,}",
            }
            for row in layers.get(v.id, [])
        ]
        total = sum(row["times"] * row["parameters"] for row in layers.get(v.id, []))
        tables += [Table.of(rows, ["Kind"], title=f"{v.label}: {total:,} parameters")] if rows else []
    return tables
