"""The charts of a search's page."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from linvit.metrics import percent
from linvit.report import vega
from linvit.report.result import Section
from linvit.report.tuning import SearchResult, Trial, TunedVariant, bare, describe, shorten, show
from linvit.schemas.search import Values

GOOD = 0.25  # of a variant's trials are drawn strongly


def build(result: SearchResult) -> dict[str, Section]:
    return {
        "front": Section("", [_spread(result)]),
        "search": Section("Search", [_history(result), _importance(result)]),
        "coordinates": Section(
            "Options and accuracy",
            [_coordinates(result, i, v) for i, v in enumerate(result.variants)],
            "Each line is a trial. It crosses each axis at the value of an option, and the last axis at its accuracy. "
            "The best quarter of the trials is drawn strongly.",
        ),
    }


def _series(result: SearchResult) -> vega.Series:
    return vega.Series([v.label for v in result.variants])


def _measure(result: SearchResult) -> str:
    return "Out-of-fold accuracy" if result.evidence.document.folds else "Validation accuracy"


def _point(variant: TunedVariant, trial: Trial) -> dict[str, Any]:
    shown = {"how": trial.how, "shown": show(trial.accuracy), "options": describe(trial.options)}
    return {"variant": variant.label, "trial": trial.number, "accuracy": trial.accuracy} | shown


def _tips(result: SearchResult) -> list[alt.Tooltip]:
    return vega.tooltips("variant", ("trial", "trial", "d"), "how", ("shown", _measure(result).lower()), "options")


def _spread(result: SearchResult) -> vega.Chart | None:
    """Every whole trial of each variant, with its best and the one that all started with."""
    rows = [
        _point(v, trial) | {"best": trial == v.best, "first": trial == v.first}
        for v in result.variants
        for trial in v.trials
        if trial.how == "complete" and trial.accuracy is not None
    ]
    if not rows:
        return None
    values = sorted(row["accuracy"] for row in rows)
    high, middle = values[-1], values[len(values) // 2]
    ends = [row["accuracy"] for row in rows if row["first"] or row["best"]]
    low = min(max(values[0], high - 4 * max(high - middle, 0.005)), *ends)
    pad = 0.08 * (high - low or 0.01)
    domain = [max(0.0, low - pad), min(1.0, high + pad)]
    x, y = vega.x_axis("accuracy", _measure(result), domain=domain, format="~%", tickCount=5), vega.y_names("variant")
    looks = _series(result)("color", "shape")
    base = vega.data(rows).encode(y=y, x=x, tooltip=_tips(result))
    names = vega.data([{"variant": label} for label in dict.fromkeys(row["variant"] for row in rows)])
    layers = [
        base.mark_point(filled=True, size=60, opacity=0.4, clip=True, yOffset=8).encode(**looks),
        base.transform_filter("datum.first").mark_tick(thickness=3, size=26, yOffset=8),
        base.transform_filter("datum.best").mark_point(filled=True, size=190, yOffset=8).encode(**looks),
        names.mark_text(align="left", dy=-12, style="quiet").encode(y=y, x=alt.value(0), text="variant:N"),
    ]
    first = "the defaults" if result.evidence.document.defaults else "the first trial, whose options all share"
    cut = sum(value < low for value in values)
    note = f"Points: trials that were trained to the end; large: the best; mark: {first}."
    note += f" {cut} trial{'s' * (cut != 1)} further left {'are' if cut != 1 else 'is'} not shown." if cut else ""
    return vega.Chart(
        "spread", "Trials of each variant", (vega.ROW + 8) * len(result.variants), layers, note, _series(result)
    )


def _history(result: SearchResult) -> vega.Chart | None:
    rows, so_far = [], []
    for v in result.variants:
        top = -math.inf
        for trial in v.trials:
            if trial.accuracy is None:
                continue
            rows.append(_point(v, trial) | {"whole": trial.how == "complete"})
            top = max(top, trial.accuracy) if trial.how == "complete" else top
            if top > -math.inf:
                so_far.append({"variant": v.label, "trial": trial.number, "accuracy": top})
    if not rows:
        return None
    ticks = vega.whole_ticks(row["trial"] for row in rows)
    x = vega.x_axis("trial", "Trial", nice=False, padding=8, format="d", values=ticks, grid=False)
    y = vega.y_axis("accuracy", _measure(result), format="~%", tickCount=6)
    whole = alt.when("datum.whole").then(alt.value(0.9)).otherwise(alt.value(0.25))
    line, points = (vega.data(part).encode(x=x, y=y, **_series(result)("color")) for part in (so_far, rows))
    layers = [
        line.mark_line(strokeWidth=2, interpolate="step-after"),
        points.mark_point(filled=True, size=60).encode(
            tooltip=_tips(result), opacity=whole, **_series(result)("shape")
        ),
    ]
    until = "the accuracy of their finished folds" if result.evidence.document.folds else "their best accuracy"
    note = f"Lines: the best so far. Faint: trials that were stopped early, with {until}."
    return vega.Chart("history", "Accuracy of each trial", 300, layers, note, _series(result))


def _coordinates(result: SearchResult, index: int, variant: TunedVariant) -> vega.Chart | None:
    """One line for each trial through the values of its options."""
    whole = [trial for trial in variant.trials if trial.accuracy is not None and trial.options]
    if len(whole) < 2:
        return None
    spaces = {name: _values(result, name) for name in whole[0].options}
    ranked = sorted(whole, key=lambda trial: -(trial.accuracy or 0.0))
    good = {trial.number for trial in ranked[: max(1, round(GOOD * len(whole)))]}
    low, high = ranked[-1].accuracy or 0.0, ranked[0].accuracy or 0.0
    ends = [{"axis": "accuracy", "place": i, "shown": percent(value)} for i, value in enumerate((low, high))]
    for name, values in spaces.items():
        limits = (values[0], values[-1]) if isinstance(values, list) else (values.low, values.high)
        ends += [{"axis": bare(name), "place": i, "shown": shorten(value)} for i, value in enumerate(limits)]
    rows: vega.Rows = []
    for trial in whole:
        about = _point(variant, trial) | {"good": trial.number in good}
        share = ((trial.accuracy or 0.0) - low) / (high - low) if high > low else 1.0
        rows += [about | {"axis": bare(n), "place": _place(v, trial.options[n])} for n, v in spaces.items()]
        rows.append(about | {"axis": "accuracy", "place": share})
    x = vega.x_names("axis", [*map(bare, spaces), "accuracy"], labelAngle=-30, labelLimit=100, grid=True)
    y = vega.y_axis("place", domain=[-0.08, 1.08], axis=False)
    text = vega.data(ends).encode(x=x, y=y, text="shown:N")
    base = vega.data(rows).encode(x=x, y=y, detail="trial:Q", tooltip=_tips(result), **_series(result)("color"))
    layers = [
        base.transform_filter("!datum.good").mark_line(strokeWidth=1, opacity=0.2),
        base.transform_filter("datum.good").mark_line(strokeWidth=2, opacity=0.85),
        text.transform_filter("datum.place < 0.5").mark_text(fontSize=10, dy=10, style="quiet"),
        text.transform_filter("datum.place > 0.5").mark_text(fontSize=10, dy=-10, style="quiet"),
    ]
    return vega.Chart(f"coordinates-{index}", variant.label, 260, layers)


def _values(result: SearchResult, name: str) -> Values:
    """What the space says about an option."""
    space = result.evidence.document.space
    return (space.attention if "." in name else space.options)[bare(name)]


def _place(values: Values, value: Any) -> float:
    """Between 0 and 1: where a value is in its range, or in its list."""
    if isinstance(values, list):
        return values.index(value) / max(1, len(values) - 1)
    if values.log:
        return math.log(value / values.low) / math.log(values.high / values.low)
    return (value - values.low) / (values.high - values.low)


def _importance(result: SearchResult) -> vega.Chart | None:
    labels = {v.id: v.label for v in result.variants}
    found = [r for r in result.evidence.of("option_importance") if str(r.tags["variant"]) in labels]
    rows, sums = [], dict[str, float]()
    for r in found:
        option, share = bare(str(r.tags["option"])), float(r.value or 0.0)
        rows.append({"variant": labels[str(r.tags["variant"])], "option": option, "share": share, "trials": r.n})
        sums[option] = sums.get(option, 0.0) + share
    if not rows:
        return None
    options = sorted(sums, key=lambda name: -sums[name])
    layer = (
        vega.data(rows)
        .mark_bar(cornerRadiusEnd=2)
        .encode(
            y=vega.y_names("option", options, labelLimit=130, grid=False),
            yOffset=alt.YOffset("variant:N", scale=alt.Scale(domain=list(labels.values()))),
            x=vega.x_axis("share", "Share of the variance explained", zero=True, format="~%", tickCount=5),
            tooltip=vega.tooltips("variant", "option", ("share", "share", ".0%"), ("trials", "whole trials", "d")),
            **_series(result)("color"),
        )
    )
    note = f"fANOVA over trials that were trained to the end, at least {min(r.n for r in found)}: an indication only."
    height = max(120, 14 * len(labels) * len(options))
    return vega.Chart("importance", "Importance of the options", height, [layer], note, _series(result))
