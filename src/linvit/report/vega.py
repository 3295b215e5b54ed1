"""The vocabulary of all charts: axes, series, and the marks that they are built from, in Altair.

User text is only ever data or the domain of a scale. A `sort` of names would be compiled into an expression: never use
it, give `names` instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import altair as alt

from linvit.report import theme

Rows = list[dict[str, Any]]
ROW = 44  # height of a labelled bar
SCALE = {"domain", "zero", "clamp", "reverse", "nice", "base", "padding"}  # options of scales; all others are of axes
BLUE, ORANGE = theme.PALETTE[:2]


@dataclass(frozen=True)
class Chart:
    name: str  # of the figure file
    title: str
    height: int
    layers: list[alt.Chart]
    note: str = ""
    series: Series | None = None  # what its legend explains; None: names are in the chart

    @property
    def legend(self) -> dict[str, int]:
        """Names that have data → the index of their symbol."""
        if self.series is None:
            return {}
        shown = {row.get(self.series.field) for layer in self.layers for row in layer.data.values}
        return {name: i for i, name in enumerate(self.series.names) if name in shown}

    def page(self) -> dict[str, Any]:
        return self._spec(True, width="container", autosize=alt.AutoSizeParams(type="fit-x"))

    def figure(self) -> dict[str, Any]:
        spec = self._spec(False, width=640, title=self.title)
        for layer in spec["layer"]:
            if "name" in layer:  # points for the pointer, most of which are not visible
                layer["transform"] = [{"filter": "datum.marked"}]
        return spec

    def _spec(self, page: bool, **properties: Any) -> dict[str, Any]:
        """Not validated here, which takes longer than everything else: the tests do it."""
        spec = alt.layer(*self.layers).properties(height=self.height, **properties)
        return spec.to_dict(validate=False) | {"config": theme.config(page)}


def data(rows: Iterable[Mapping[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(rows)))


def _quantity(channel: Any, field: str, title: str | None = None, *, log: bool = False, **options: Any) -> Any:
    """An axis of numbers; options are those of Vega-Lite's scales and axes. By default it need not include zero."""
    scale: dict[str, Any] = {"type": "log"} if log else {"zero": False}
    scale |= {"nice": False} if log or "domain" in options else {}
    scale |= {name: options.pop(name) for name in list(options) if name in SCALE}
    axis = alt.Axis(**options) if options.pop("axis", True) else None
    return channel(f"{field}:Q", title=title, scale=alt.Scale(**scale), axis=axis)


def _names(channel: Any, field: str, names: Sequence[str] | None = None, title: str | None = None, **axis: Any) -> Any:
    """An axis of names, in their order or as the rows have them; without `names` it is not drawn."""
    if names is None:
        return channel(f"{field}:N", sort=None, title=title, axis=None)
    return channel(f"{field}:N", scale=alt.Scale(domain=list(names)), title=title, axis=alt.Axis(**axis))


x_axis, y_axis = partial(_quantity, alt.X), partial(_quantity, alt.Y)
x_names, y_names = partial(_names, alt.X), partial(_names, alt.Y)


def at(axis: Any, field: str) -> Any:
    """The same axis for another field."""
    found = axis.copy(deep=False)
    found.shorthand = f"{field}:Q"
    return found


def tooltips(*fields: str | tuple[str, str] | tuple[str, str, str]) -> list[alt.Tooltip]:
    """Of fields, fields with titles, or numeric fields with titles and formats."""
    found = []
    for one in fields:
        field, title, form = (*([one] if isinstance(one, str) else one), "", "")[:3]
        more: dict[str, Any] = {"format": form} if form else {}
        found.append(alt.Tooltip(f"{field}:{'Q' if form else 'N'}", title=title or field, **more))
    return found


@dataclass(frozen=True)
class Series:
    """Names with a colour, shape and dash each, the same in every chart; short ranges begin again."""

    names: Sequence[str]
    field: str = "variant"

    def __call__(self, *channels: str) -> dict[str, Any]:
        kinds = {"color": alt.Color, "shape": alt.Shape, "strokeDash": alt.StrokeDash}
        ranges = {"shape": list(theme.SHAPES), "strokeDash": list(theme.DASHES)}
        found = {}
        for channel in channels:
            own = {"range": ranges[channel]} if channel in ranges else {}
            scale = alt.Scale(domain=list(self.names), **own)
            found[channel] = kinds[channel](f"{self.field}:N", scale=scale)
        return found


def lines(rows: Rows, x: Any, y: Any, series: Series, tooltip: list[Any], **encoding: Any) -> list[alt.Chart]:
    """A line with its points per name. Rows with `marked` false have a point only while the pointer is on it."""
    base = data(rows).encode(x=x, y=y, **series("color"), **encoding)
    points = base.mark_point(filled=True, size=60, opacity=1).encode(tooltip=tooltip, **series("shape"))
    if any(not row.get("marked", True) for row in rows):
        hover = alt.selection_point(on="pointerover", nearest=False, empty=False, clear="pointerout")
        visible = alt.when(hover | alt.datum.marked).then(alt.value(1)).otherwise(alt.value(0))
        points = points.encode(opacity=visible).add_params(hover)
    return [base.mark_line(strokeWidth=2, clip=True).encode(**series("strokeDash")), points]


def band(rows: Rows, x: Any, y: Any, series: Series) -> alt.Chart:
    """From low to high."""
    return data(rows).mark_area(fillOpacity=0.13).encode(x=x, y=at(y, "low"), y2="high:Q", **series("color"))


def spans(base: alt.Chart, axis: Any) -> alt.Chart:
    """Rules from low to high along an axis."""
    channel = "x" if isinstance(axis, alt.X) else "y"
    ends: dict[str, Any] = {channel: at(axis, "low"), f"{channel}2": "high:Q"}
    return base.mark_rule(strokeWidth=2, strokeOpacity=0.6, clip=True).encode(**ends)


def threshold(value: float, axis: Any, **mark: Any) -> alt.Chart:
    """A dashed line across the chart."""
    field, how = axis.shorthand.removesuffix(":Q"), {"strokeDash": [4, 3], "strokeWidth": 1.5} | mark
    where: dict[str, Any] = {"x" if isinstance(axis, alt.X) else "y": axis}
    return data([{field: value}]).mark_rule(**how).encode(**where)


def bars(
    rows: Rows, x: Any, series: Series, tooltip: list[Any], name: str = "variant", *, right: bool = False
) -> list[alt.Chart]:
    """One bar per row, the number (`shown`) at its end or at the right edge, and the name above it, where it has the
    width of a phone."""
    base = data(rows).encode(y=y_names(name), tooltip=tooltip)
    place = {"align": "right", "dx": 0} if right else {"align": "left", "dx": 8}
    return [
        base.mark_bar(cornerRadiusEnd=3, height=14, yOffset=8).encode(x=x, **series("color")),
        base.mark_text(dy=9, fontWeight=600, **place).encode(x=alt.value("width") if right else x, text="shown:N"),
        base.mark_text(align="left", dy=-9, style="quiet").encode(x=alt.value(0), text=f"{name}:N"),
    ]


def heat(base: alt.Chart, field: str, domain: Sequence[float], colours: Sequence[str], dark: str) -> list[alt.Chart]:
    """A cell per row with its text (`shown`), white where the expression `dark` is true."""
    scale = alt.Scale(domain=list(domain), range=list(colours), clamp=True, interpolate="rgb")
    ink = alt.condition(dark, alt.value("white"), alt.value(theme.INKS["ink"]))
    cell = base.mark_rect(stroke="white", strokeWidth=1)
    return [
        cell.encode(color=alt.Color(f"{field}:Q", legend=None, scale=scale)),
        base.mark_text(fontSize=11).encode(text="shown:N", color=ink),
    ]


DIVERGING = (ORANGE, theme.INKS["card"], BLUE)


def panels(named: Mapping[str, Any], title: str, *subtitle: str, spacing: int = 56, **size: int) -> alt.HConcatChart:
    """Charts side by side under one title."""
    charts = [
        panel.properties(title=alt.TitleParams(name, frame="group", fontSize=12), **size)
        for name, panel in named.items()
    ]
    return alt.hconcat(*charts, spacing=spacing, title=alt.TitleParams(title, subtitle=list(filter(None, subtitle))))


def decades(values: Iterable[float]) -> list[float]:
    """Ticks of a logarithmic axis: powers of ten, or 1, 2 and 5 times them over a short range."""
    logs = [math.log10(value) for value in values if value > 0] or [0.0]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    steps = (1,) if high - low > 2 else (1, 2, 5)
    return [step * 10.0**power for power in range(low, high + 1) for step in steps]


def whole_ticks(places: Iterable[float]) -> Any:
    """Ticks at some of the whole numbers, such as epochs, if there are several."""
    last = int(max(places))
    return list(range(0, last + 1, max(1, round(last / 6)))) if last > 1 else alt.Undefined


def padded(values: Iterable[float], room: float = 0.12) -> list[float]:
    """A domain with some room at both ends."""
    low, high = min(values := list(values)), max(values)
    pad = room * (high - low or abs(high) or 1)
    return [low - pad, high + pad]
