"""`linvit sample`: images that a next-pixel model draws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linvit.cli import _options as options


def run(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, or of a model (…/best).")],
    images: Annotated[int, typer.Option(min=1, help="How many.")] = 16,
    temperature: Annotated[float, typer.Option(help="Below 1 likelier values are preferred.")] = 1.0,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="One PNG with all of them.")] = Path("samples.png"),
    threads: options.Threads = 0,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Draw images, pixel by pixel, from a model trained with --task next-pixel.

    With linear attention each pixel costs the same: what is remembered of those before it has a fixed size.

    Examples:

        linvit train mnist --task next-pixel -a performer-relu:m=64 --out runs/pixels
        linvit sample runs/pixels --images 16 --out samples.png
    """
    from linvit.cli import _output
    from linvit.cli._display import Display
    from linvit.train import load, pick_device
    from linvit.train.use import draw_images

    if out.suffix.lower() != ".png":
        raise ValueError(f"out={out} must end in .png")
    with Display(quiet) as display, _output.warnings_in_one_line():
        ready = load(model).to(pick_device(device))
        draw_images(ready, out, images, seed=seed, temperature=temperature, progress=display.progress)
    if not quiet:
        print(f"{out}: {images} images of {ready.config.attention}, seed {seed}")
