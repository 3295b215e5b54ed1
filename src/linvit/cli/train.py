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
    task: options.Task = "classification",
    epochs: Annotated[float | None, typer.Option(help="Passes over the training images.")] = None,
    steps: options.Steps = None,
    size: options.Size = None,
    stem: Annotated[str | None, typer.Option(help="patch, conv, resnet or pixel.")] = None,
    patch_size: options.PatchSize = None,
    dim: Annotated[int | None, typer.Option(help="Width of the tokens.")] = None,
    depth: Annotated[int | None, typer.Option(help="Layers; 0 is the stem alone.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    batch_size: options.BatchSize = None,
    optimizer: options.Optimizer = None,
    lr: options.Rate = None,
    schedule: Annotated[str | None, typer.Option(help="cosine, onecycle, restarts, step or constant.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of matrices and filters.")] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of averaged weights; 0: none.")] = None,
    patience: Annotated[int | None, typer.Option(help="Stop after so many epochs without a lower loss.")] = None,
    amp: options.Amp = None,
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile: slow to start, then faster.")] = False,
    settings: options.Settings = None,
    image_size: options.ImageSize = None,
    limit: options.Limit = None,
    skip_bad: options.SkipBad = False,
    folds: options.Folds = None,
    data_root: options.DataRoot = None,
    out: Annotated[Path | None, typer.Option(
        metavar="DIR", help="Folder of this experiment. [default: runs/DATA-id]")] = None,
    seed: options.Seed = 0,
    threads: options.Threads = 0,
    device: options.Device = "auto",
    save_every: options.SaveEvery = 30.0,
    dry_run: options.DryRun = False,
    print_config: options.PrintConfig = False,
    track: options.Track = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Train a vision transformer on a data set or a folder of images.

    What is not said is chosen for the data. The same command again goes on where it was stopped, at any moment. The
    test images are used once, at the end; the model kept in DIR/best is the last of those that validation images cannot
    tell apart from the best.

    Examples:

        linvit train digits
        linvit train photos/ --attention performer-exp:m=64 --epochs 20 --out runs/photos
        linvit train cifar10 -a softmax@2+performer-relu:m=32@2 --depth 4 --lr 1e-3 --set mixup=0.2
        linvit train mnist --limit 12000 --epochs 2 --json
        linvit train photos/ --from runs/pretrained -a performer-relu:m=32 --epochs 5
        linvit train digits --folds 5
        torchrun --nproc-per-node 2 -m linvit train photos/ --out runs/photos
        linvit train mnist --config runs/tune-mnist/best.toml --epochs 4
        linvit train mnist --task next-pixel -a performer-relu:m=64 --set levels=16
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

    from linvit import ranks
    from linvit.train import train  # takes seconds: what is wrong above is said at once

    with Display(quiet) as display, _output.warnings_in_one_line(), options.resumable(ctx):
        trained = train(
            data, out=out, seed=seed, device=device, data_root=data_root, image_size=image_size, limit=limit,
            skip_bad=skip_bad, folds=folds, task=task, dry_run=dry_run or print_config, listeners=[display.listen],
            track=track or (), progress=display.progress, checkpoint_seconds=save_every, **asked,
        )  # fmt: skip
    if ranks.number() > 0:  # what there is to say, the first rank says
        return
    if print_config:
        _training.print_config(trained)
    elif dry_run:
        for one in trained.folds or [trained]:
            _training.print_outlook(one.experiment, one.data, one.folder)
    elif json:
        _output.print_json(_training.summary(trained))
    elif not quiet:
        _training.print_summary(trained, already=not display.heard)
    if trained.diverged:
        raise typer.Exit(_training.explain_divergence(trained))
