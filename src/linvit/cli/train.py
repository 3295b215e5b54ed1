"""`linvit train`: a data set's name or a folder of images in, a trained vision transformer out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linvit.cli import _options as options


def run(
    ctx: typer.Context,
    data: options.Data = "digits",
    attention: Annotated[str | None, typer.Option(
        "--attention", "-a", metavar="SPEC", help="One spec, or one per layer: a@2+b@4.")] = None,
    config: options.Config = None,
    start: options.From = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training images.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.")] = None,
    size: options.Size = None,
    stem: Annotated[str | None, typer.Option(help="patch, conv, resnet or pixel.")] = None,
    patch_size: Annotated[int | None, typer.Option(help="Side of a patch, with --stem patch.")] = None,
    dim: Annotated[int | None, typer.Option(help="Width of the tokens.")] = None,
    depth: Annotated[int | None, typer.Option(help="Layers; 0 is the stem alone.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per step.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="muon, adamw, adam or sgd.")] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate.")] = None,
    schedule: Annotated[str | None, typer.Option(help="cosine, onecycle, restarts, step or constant.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of matrices and filters.")] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of averaged weights; 0: none.")] = None,
    patience: Annotated[int | None, typer.Option(help="Stop after so many epochs without a lower loss.")] = None,
    amp: Annotated[str | None, typer.Option(help="off, bf16 or fp16.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile: slow to start, then faster.")] = False,
    settings: options.Settings = None,
    image_size: options.ImageSize = None,
    limit: options.Limit = None,
    skip_bad: options.SkipBad = False,
    data_root: options.DataRoot = None,
    out: Annotated[Path | None, typer.Option(
        metavar="DIR", help="Folder of this experiment. [default: runs/DATA-id]")] = None,
    seed: options.Seed = 0,
    threads: options.Threads = 0,
    device: options.Device = "auto",
    save_every: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Time between checkpoints.")] = 30.0,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Train a vision transformer on a data set or a folder of images.

    What is not said is chosen for the data. The same command again goes on where it was stopped, at any moment. The
    test images are used once, at the end; the model kept in DIR/best is the best on validation images.

    Examples:

        linvit train digits
        linvit train photos/ --attention performer-exp:m=64 --epochs 20 --out runs/photos
        linvit train cifar10 -a softmax@2+performer-relu:m=32@2 --depth 4 --lr 1e-3 --set mixup=0.2
        linvit train mnist --limit 12000 --epochs 2 --json
        linvit train photos/ --from runs/pretrained -a performer-relu:m=32 --epochs 5
        linvit train mnist --config runs/tune-mnist/best.toml --epochs 4
    """
    from linvit.cli import _output, _training, _tuning
    from linvit.cli._display import Display

    chosen = _training.settings(
        settings, attention=attention, epochs=epochs, steps=steps, size=size, stem=stem, patch_size=patch_size, dim=dim,
        depth=depth, heads=heads, batch_size=batch_size, optimizer=optimizer, lr=lr, schedule=schedule,
        weight_decay=weight_decay, ema=ema, patience=patience, amp=amp, compile=compile or None,
    )  # fmt: skip
    if "steps" in chosen and "epochs" in chosen:
        raise ValueError("give --epochs or --steps, not both")

    asked = _tuning.trained(config, attention, start, chosen)

    from linvit.train import train  # takes seconds: what is wrong above is said at once

    with Display(quiet) as display, _output.warnings_in_one_line():
        try:
            trained = train(
                data, out=out, seed=seed, device=device, data_root=data_root, image_size=image_size,
                limit=limit, skip_bad=skip_bad, listeners=[display.listen], progress=display.progress,
                checkpoint_seconds=save_every, **asked,
            )  # fmt: skip
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(f"{stop or 'nothing is lost'}; go on with: {options.again(ctx)}") from stop
    if json:
        _output.print_json(_training.summary(trained))
    elif not quiet:
        _training.print_summary(trained, already=not display.heard)
    if trained.diverged:
        raise typer.Exit(_training.explain_divergence(trained))
