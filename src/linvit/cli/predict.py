"""`linvit predict`: what is on these images?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from linvit.cli import _options as options


def run(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE…", help="Image files, or folders of them.")],
    model: Annotated[Path, typer.Option("--model", "-m", metavar="DIR", help="The folder of a run, or of a model.")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to name.")] = 5,
    skip_bad: options.SkipBad = False,
    threads: options.Threads = 0,
    device: options.Device = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """The likeliest classes of images, by a trained model.

    Examples:

        linvit predict cat.jpg --model runs/photos
        linvit predict holiday/ more/*.png --model runs/photos --top 1 --json
    """
    from linvit.cli import _output
    from linvit.cli._display import Display
    from linvit.train import load, pick_device
    from linvit.train.use import find_images, predict

    paths = find_images(images)
    with _output.warnings_in_one_line():
        ready = load(model).to(pick_device(device))
    skipped: list[str] = []
    note = (lambda error: skipped.append(str(error))) if skip_bad else None
    with Display(quiet) as display:
        found = list(predict(ready, paths, top=top, skip=note, progress=display.progress))
    for message in skipped:
        print(f"linvit: skipped: {message}", file=sys.stderr)
    if json:
        _output.print_json([
            {"image": one.image, "top": [{"class": name, "probability": value} for name, value in one.top]}
            for one in found
        ])  # fmt: skip
        return
    _output.print_table([
        {"image": one.image} | {f"{i}.": f"{name} {value:.1%}" for i, (name, value) in enumerate(one.top, 1)}
        for one in found
    ])  # fmt: skip
