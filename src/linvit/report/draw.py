"""Specs in, files out: `python -P draw.py FOLDER < {name: spec}`, a process of its own.

vl-convert keeps the interpreter's lock while it draws, so the page is written meanwhile; and nothing else is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from linvit.files import write_atomically


def draw(specs: dict[str, dict], folder: Path) -> None:
    """Every chart as an SVG and a PNG file."""
    import vl_convert

    for name, spec in specs.items():
        svg = vl_convert.vegalite_to_svg(spec)
        write_atomically(folder / f"{name}.svg", svg)
        write_atomically(folder / f"{name}.png", vl_convert.svg_to_png(svg, scale=2))


if __name__ == "__main__":
    draw(json.load(sys.stdin), Path(sys.argv[1]))
