"""`linvit export`: a trained model for use without linvit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from linvit.cli import _options as options


def run(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, or of a model (…/best).")],
    format: Annotated[Literal["onnx", "torch", "hf"], typer.Option(
        "--format", "-f", help="An ONNX file, PyTorch's .pt2, or a folder that transformers loads.")] = "onnx",
    out: Annotated[Path | None, typer.Option(
        metavar="PATH", help="File, or folder for hf. [default: DIR/model.onnx, DIR/model.pt2 or DIR/hf; of a model "
        "of the hub, org-name/…]")] = None,
    threads: options.Threads = 0,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Write a trained model for use elsewhere, once it has shown the same logits.

    ONNX and .pt2 files take batches of any size of decoded pixels, uint8 (batch, channels, size, size), and normalise
    them themselves; classes and all else that a user must know are in the file. ONNX is timed beside PyTorch.

    Examples:

        linvit export runs/photos
        linvit export runs/photos --format torch --out photos.pt2
        linvit export runs/photos --format hf --out photos-vit
    """
    from linvit.cli import _output
    from linvit.cli._display import Display
    from linvit.convert.export import export

    with Display(quiet) as display, _output.warnings_in_one_line():
        done = export(model, format, out, progress=display.progress)
    if json:
        ratios = [dict(zip(("batch", "low", "median", "high"), (n, *r), strict=True)) for n, r in done.speed.items()]
        found = {"path": str(done.path), "format": done.format, "use": done.note, "difference": done.difference}
        _output.print_json(found | {"speed_vs_eager": ratios})
        return
    print(done.path)
    if quiet:
        return
    print(done.note)
    print(f"logits differ from the model's by at most {done.difference:.1e}")
    for batch, (low, middle, high) in done.speed.items():
        images = "one image" if batch == 1 else f"{batch} images"
        print(f"onnxruntime is {middle:.2f}× as fast as PyTorch [{low:.2f}, {high:.2f}] on {images}")
