"""Scores by class, and which classes are confused."""

from __future__ import annotations

import itertools
from collections import defaultdict

import altair as alt
import numpy as np

from linvit.report import vega
from linvit.report.result import Section, Table
from linvit.report.summary import Summary, VariantResult, number

MAX_CLASSES = 20  # of one per-class chart, or one confusion matrix
MAX_PAIRS = 8  # of confused classes, where there are too many for a matrix
SCORES = ("precision", "recall", "f1")


def sections(summary: Summary, chosen: str | None) -> dict[str, Section]:
    matrices = [v for v in summary.variants if len(summary.study.dataset.classes) <= MAX_CLASSES]
    return {
        "classes": Section(
            "Classes",
            _score_charts(summary, chosen),
            tables=[table for v in summary.variants if (table := _precisions(summary, v, v.id == chosen))],
        ),
        "confusion": Section(
            "Confusion",
            [confusion(summary, v) for v in matrices],
            "Share of each true class by predicted class, over all seeds. Faint colours are amplified so that rare "
            "mistakes are visible.",
            tables=[] if matrices else [table for v in summary.variants if (table := confused(summary, v))],
            small=True,
        ),
    }


def _matrix(summary: Summary, variant: VariantResult) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Test images by (true, predicted) class, summed over seeds; their shares of the true class; distinct names of the
    classes."""
    known = summary.study.dataset.classes
    names = [name if known.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(known)]
    records = summary.evidence.of("confusion", variant=variant.id)
    files = [summary.evidence.artefact(r) for r in records if r.tags.get("selection", "best") == "best"]
    found = [file["matrix"] for file in files if np.shape(file.get("matrix", ())) == (len(names), len(names))]
    matrix = np.sum(found, axis=0, dtype=float) if found else np.zeros((0, 0))
    return matrix, matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1), names


def confusion(summary: Summary, variant: VariantResult) -> vega.Chart | None:
    matrix, share, names = _matrix(summary, variant)
    rows = []
    for (i, j), count in np.ndenumerate(matrix):
        cell = {"true": names[i], "predicted": names[j], "count": int(count), "share": round(float(share[i, j]), 5)}
        rows.append({"variant": variant.label} | cell)
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
    colour = vega.Series([v.label for v in summary.variants])("color")["color"].legend(None)
    layers = [base.mark_rect().encode(color=colour, fillOpacity=opacity)]
    if len(names) <= 10:
        digits = base.transform_filter("datum.share >= 0.005").encode(text=alt.Text("share:Q", format=".0%"))
        layers += [
            digits.transform_filter("datum.share < 0.5").mark_text(fontSize=9),
            digits.transform_filter("datum.share >= 0.5").mark_text(fontSize=9, style="paper", fontWeight=600),
        ]
    return vega.Chart(f"confusion-{variant.index}", variant.label, min(420, max(200, 30 * len(names))), layers)


def confused(summary: Summary, variant: VariantResult) -> Table | None:
    """The pairs of classes most often confused."""
    _, share, names = _matrix(summary, variant)
    if not len(share):
        return None
    np.fill_diagonal(share, 0)
    cells = [divmod(int(place), len(share)) for place in np.argsort(-share, axis=None, kind="stable")[:MAX_PAIRS]]
    rows = [
        {"True": names[i], "Predicted": names[j], "Share": f"{share[i, j]:.0%}"} for i, j in cells if share[i, j] > 0
    ]
    return Table.of(rows, ["Predicted"], title=variant.label)


def _precisions(summary: Summary, variant: VariantResult, shown: bool) -> Table | None:
    """Of images with several labels: each class with its average precision and thresholds, means over seeds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    names = {name: name.replace("_", " ").capitalize() for name in ("average_precision", *SCORES, "threshold")}
    for name in names:
        for r in summary.evidence.of(name, variant=variant.id, selection="best"):
            if (value := number(r.value)) is not None:
                found[str(r.tags.get("class"))][name].append(value)
    rows = [
        {"Class": label} | {head: f"{np.mean(of[name]):.1%}" for name, head in names.items() if of[name]}
        for label, of in found.items()
        if of["average_precision"]
    ]
    note = "An image is given a class from its threshold on, a probability with the best F1 on validation images."
    return Table.of(rows, title=variant.label, note=note, open=shown) if rows else None


def _score_charts(summary: Summary, chosen: str | None) -> list[vega.Chart | None]:
    """Scores of all variants and of the recommended one, mean over seeds, the hardest class first."""
    seen: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for v, metric in itertools.product(summary.variants, SCORES):
        for r in summary.evidence.of(metric, variant=v.id, selection="best"):
            value, name = number(r.value), r.tags.get("class")
            if value is not None and name is not None and "fold" not in r.tags:  # those of all folds count
                seen[v.label, str(name)][metric].append(value)
    rows = [
        {"variant": label, "class": name} | {metric: sum(values) / len(values) for metric, values in found.items()}
        for (label, name), found in seen.items()
        if "f1" in found
    ]
    if not rows:
        return []
    f1 = defaultdict(list)
    for row in rows:
        f1[row["class"]].append(row["f1"])
    names = sorted(f1, key=lambda name: np.mean(f1[name]))[:MAX_CLASSES]
    rows = [row for row in rows if row["class"] in names]
    label = next((v.label for v in summary.variants if v.id == chosen), "")
    return [_f1(summary, rows, names, len(f1)), _scores(summary, rows, names, label)]


def _f1(summary: Summary, rows: vega.Rows, names: list[str], count: int) -> vega.Chart:
    y = vega.y_names("class", names, labelLimit=120, grid=False)
    x = vega.x_axis("f1", "F1", format="~%", tickCount=5)
    series = vega.Series([v.label for v in summary.variants])
    tips = vega.tooltips("variant", "class", *((key, key, ".1%") for key in SCORES))
    base = vega.data(rows).encode(y=y)
    range_of = base.mark_rule(strokeWidth=1, strokeOpacity=0.5).encode(x=alt.X("min(f1):Q", title="F1"), x2="max(f1):Q")
    points = base.mark_point(size=90, filled=True, fillOpacity=0.9)
    points = points.encode(x=x, tooltip=tips, **series("color", "shape"))
    cut = f" The {len(names)} hardest of {count} classes." if count > len(names) else ""
    note = f"Hardest class first, mean over seeds.{cut}"
    return vega.Chart("classes", "F1 by class", 26 * len(names), [range_of, points], note, series)


def _scores(summary: Summary, rows: vega.Rows, names: list[str], label: str) -> vega.Chart | None:
    """Precision, recall and F1 of one variant, by class."""
    found = [
        {"variant": label, "class": row["class"], "metric": kind, "value": row[kind]}
        for row in rows
        for kind in SCORES
        if row["variant"] == label and kind in row
    ]
    if not found:
        return None
    opacity = alt.FillOpacity("metric:O", legend=None, scale=alt.Scale(domain=list(SCORES), range=[0.45, 0.7, 1]))
    x = vega.x_axis("value", "Precision, recall, F1 (top to bottom)", domain=[0, 1], format="~%", tickCount=5)
    bars = (
        vega.data(found)
        .mark_bar(cornerRadiusEnd=2)
        .encode(
            y=vega.y_names("class", names, labelLimit=120, grid=False),
            yOffset=alt.YOffset("metric:N", sort=list(SCORES)),
            x=x,
            fillOpacity=opacity,
            tooltip=vega.tooltips("class", "metric", ("value", "value", ".1%")),
            **vega.Series([v.label for v in summary.variants])("color"),
        )
    )
    height = max(160, 36 * len({row["class"] for row in found}))
    return vega.Chart("class-scores", f"Precision, recall and F1 of {label}", height, [bars])
