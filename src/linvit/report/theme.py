"""How every chart looks. On the page colours are CSS variables, so charts follow dark mode and print without a redraw;
in figure files they are the light values."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's palette, which colour-blind readers can distinguish; its yellow is darkened to be seen on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#3B3F46", "#B5A300")
PALETTE_DARK = ("#2E93D4", "#E8743B", "#1BB587", "#D88FB8", "#F0AE2B", "#7CC8F2", "#D5D9DF", "#F0E442")
INKS = {"ink": "#16191D", "soft": "#5C6570", "line": "#E4E7EB", "paper": "#FFFFFF", "card": "#F6F7F9"}
INKS_DARK = {"ink": "#ECEEF1", "soft": "#9BA4AF", "line": "#2C3138", "paper": "#111316", "card": "#191C20"}

SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4], [4, 2, 1, 2, 1, 2])
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def css() -> str:
    """The colours as CSS variables: `--ink`, …, `--c0`, …"""
    light, dark = _variables(INKS, PALETTE), _variables(INKS_DARK, PALETTE_DARK)
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _variables(inks: dict[str, str], palette: tuple[str, ...]) -> str:
    named = [f"--{name}:{value};" for name, value in inks.items()]
    return "".join(named + [f"--c{i}:{value};" for i, value in enumerate(palette)])


def config(page: bool) -> dict[str, Any]:
    """Vega-Lite's configuration. The page has one legend of its own; a figure file carries its legend."""
    ink = {name: f"var(--{name})" if page else value for name, value in INKS.items()}
    palette = [f"var(--c{i})" if page else value for i, value in enumerate(PALETTE)]
    return {
        "font": FONT,
        "background": "transparent" if page else ink["paper"],
        "padding": 2 if page else 16,
        "view": {"stroke": None},
        "range": {"category": palette, "symbol": list(SHAPES)},
        "axis": {
            "domain": False,
            "ticks": False,
            "gridColor": ink["line"],
            "labelColor": ink["soft"],
            "labelFontSize": 12,
            "labelPadding": 8,
            "titleColor": ink["soft"],
            "titleFontSize": 12,
            "titleFontWeight": 500,
            "titlePadding": 12,
            "labelLimit": 150,
        },
        "axisY": {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "end", "titleX": 0, "titleY": -14},
        "axisBand": {"grid": False},
        "title": {"color": ink["ink"], "fontSize": 14, "fontWeight": 600, "anchor": "start", "offset": 12},
        "legend": {
            "disable": page,
            "orient": "bottom",
            "columns": 2,
            "title": None,
            "labelColor": ink["ink"],
            "labelFontSize": 12,
            "labelLimit": 300,
            "symbolSize": 90,
            "symbolOpacity": 1,
            "symbolStrokeWidth": 0,
        },
        "text": {"color": ink["ink"], "fontSize": 12},
        "rule": {"color": ink["soft"]},
        "tick": {"color": ink["ink"]},
        "style": {"quiet": {"color": ink["soft"]}, "paper": {"color": ink["paper"]}},
    }
