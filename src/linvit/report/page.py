"""A result → report.html, report.md, results.csv and figures/ in its folder."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from linvit.files import write_atomically
from linvit.report import theme
from linvit.report.result import Result, markdown, results_csv

HERE = Path(__file__).parent


def write(result: Result, figures: bool = True) -> None:
    """All files of a result; `figures=False` leaves the figure files out."""
    folder = result.page.parent
    folder.mkdir(parents=True, exist_ok=True)
    sections = {name: found for name, found in result.sections().items() if found.drawn or found.tables or found.notes}
    every = [chart for found in sections.values() for chart in found.drawn]
    shown = every if figures else []
    write_atomically(folder / "results.csv", results_csv(result))
    write_atomically(folder / "report.md", markdown(result, [(chart.name, chart.title) for chart in shown]))
    context = {"result": result, "sections": sections} | result.context()
    write_atomically(
        result.page, render(f"{result.kind}.html", {chart.name: chart.page() for chart in every}, **context)
    )
    if figures:
        draw_files({chart.name: chart.figure() for chart in every}, folder / "figures")


def draw_files(specs: dict[str, Any], folder: Path) -> None:
    """Charts as SVG and PNG files."""
    import vl_convert

    for name, spec in specs.items():
        svg = renumbered(vl_convert.vegalite_to_svg(spec))
        write_atomically(folder / f"{name}.svg", svg)
        write_atomically(folder / f"{name}.png", vl_convert.svg_to_png(svg, scale=2))


def renumbered(svg: str) -> str:
    """With clip paths and gradients numbered from 0: Vega counts them over all drawings of a process, but the same
    chart should give the same bytes."""
    numbers: dict[str, int] = {}

    def renamed(found: re.Match[str]) -> str:
        return f"{found[1]}{numbers.setdefault(found[2], len(numbers))}"

    return re.sub(r'((?:id="|url\(#)(?:clip|gradient_))(\d+)', renamed, svg)


def render(template: str, specs: Mapping[str, Any], **context: Any) -> str:
    """A page that needs no other file: its charts, style and scripts are inside."""
    return (
        _templates()
        .get_template(template)
        .render(
            **context,
            specs=script_json(specs),
            style=Markup(theme.css() + (HERE / "page.css").read_text(encoding="utf-8")),
            library=Markup(_library()),
            script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        )
    )


@functools.cache
def _templates() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    found.globals |= {"colours": len(theme.PALETTE), "shapes": theme.SHAPES}
    found.filters |= {"percent": "{:.0%}".format, "breakable": breakable, "parts": parts}
    return found


@functools.cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, from vl-convert: nothing is fetched."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")


def script_json(value: Any) -> Markup:
    """JSON that cannot end the script element that holds it."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def breakable(spec: str) -> Markup:
    """A spec that may wrap after its separators."""
    return Markup("<wbr>").join(re.split(r"(?<=[:,+])", spec))


def parts(spec: str) -> Markup:
    """A spec as a headline: its name, and its options smaller below."""
    name, colon, options = spec.partition(":")
    if not colon or set(spec) & set("+@"):
        return breakable(spec)
    return Markup("{}<small>{}</small>").format(name, Markup(" <wbr>").join(options.split(",")))
