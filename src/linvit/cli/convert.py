"""`linvit convert`: a trained vision transformer in, the same with linear attention out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from linvit.cli import _options as options


def run(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(
        metavar="MODEL", help="The folder of a trained model, or of its run; or its id on the Hugging Face hub.")],
    to: Annotated[str, typer.Option(metavar="SPEC", help="The attention it is to have, or one per layer: a@2+b@4.")],
    data: Annotated[str, typer.Option(
        metavar="DATA", help="Images like those it is for: a data set's name or a path.")],
    max_drop: Annotated[str | None, typer.Option(
        metavar="PERCENT", help="Of the teacher's accuracy, e.g. 1%: as many linear layers as that allows.")] = None,
    stages: Annotated[str, typer.Option(
        metavar="LIST", help="1: each attention by itself. 2: all blocks. 3: labels. Or none.")] = "1,2,3",
    inherit: Annotated[Literal["all", "not-qk", "mlp"], typer.Option(
        help="What layers that change keep: all weights, all but q and k, or the MLP alone.")] = "all",
    epochs: Annotated[float | None, typer.Option(
        help="Passes over the training images, of all stages. [default: 4, and at least 300 steps]")] = None,
    steps: options.Steps = None,
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="Time to train for, e.g. 10m, instead.")] = None,
    batch_size: options.BatchSize = None,
    optimizer: options.Optimizer = None,
    lr: options.Rate = None,
    amp: options.Amp = None,
    settings: options.Settings = None,
    image_size: Annotated[int | None, typer.Option(
        metavar="PIXELS", help="Side of the images; positions are interpolated. [default: the model's own]")] = None,
    patch_size: options.PatchSize = None,
    limit: options.Limit = None,
    skip_bad: options.SkipBad = False,
    data_root: options.DataRoot = None,
    out: Annotated[Path | None, typer.Option(
        metavar="DIR", help="Folder of this conversion. [default: runs/DATA-convert-id]")] = None,
    seed: options.Seed = 0,
    threads: options.Threads = 0,
    device: options.Device = "auto",
    save_every: options.SaveEvery = 30.0,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Make the attention of a trained model linear, with evidence.

    Every stage has its line: accuracy, agreement with the teacher, steps, time. The same command again goes on where it
    was stopped. DIR/best is the model, for `linvit evaluate`, `predict` and `train`; DIR/report.html the evidence.

    Examples:

        linvit convert runs/teacher --to performer-relu:m=64,dwc=3 --data cifar10
        linvit convert runs/teacher --to linformer:k=64 --data photos/ --budget 10m --out runs/linear
        linvit convert runs/teacher --to performer-hyp --data cifar10 --max-drop 1% --stages none
        linvit convert runs/teacher --to performer-relu:m=64 --data photos/ --image-size 448
        linvit convert org/name --to linformer:k=64 --data photos/ --patch-size 8
    """
    from linvit.cli import _output, _training
    from linvit.cli._display import Display

    chosen = _training.settings(settings, batch_size=batch_size, optimizer=optimizer, lr=lr, amp=amp)
    wanted, share = _stages(stages), None if max_drop is None else _share(max_drop)

    from linvit.convert import convert  # takes seconds: what is wrong above is said at once

    with Display(quiet or json) as display, _output.warnings_in_one_line(), options.resumable(ctx):
        done = convert(
            model, to=to, data=data, out=out, stages=wanted, inherit=inherit, max_drop=share, epochs=epochs,
            steps=steps, budget=budget, seed=seed, device=device, data_root=data_root, image_size=image_size,
            patch_size=patch_size, limit=limit, skip_bad=skip_bad, listeners=[display.listen],
            progress=display.progress, checkpoint_seconds=save_every, command=options.again(ctx), **chosen,
        )  # fmt: skip

    from linvit.cli._conversion import show

    show(done.folder, json, quiet)


def _stages(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words in (["none"], ["0"]):
        return []
    if bad := [word for word in words if word not in ("1", "2", "3")]:
        raise ValueError(f"--stages {text}: '{bad[0]}' is not one of 1, 2, 3 (or write none)")
    return [int(word) for word in words]


def _share(text: str) -> float:
    """`1%` or `0.01`."""
    try:
        value = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise ValueError(f"--max-drop {text}: write a share of the teacher's accuracy, e.g. 1% or 0.01")
    return value
