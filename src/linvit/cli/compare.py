"""`linvit compare`: from images to a recommendation."""

from __future__ import annotations

from typing import Annotated

import typer

from linvit.cli import _options as options


def run(
    ctx: typer.Context,
    data: options.Data = "digits",
    attention: Annotated[list[str] | None, typer.Option(
        "--attention", "-a", metavar="SPEC", help="A variant; repeat it. "
        "Default: softmax, performer-exp, -relu and -theta with m=32, linformer:k=16.")] = None,
    epochs: Annotated[float | None, typer.Option(
        min=0, help="Epochs of every run; default: the data set's own.")] = None,
    budget: Annotated[str | None, typer.Option(
        metavar="TIME", help="Time for all of it, e.g. 10m: as many equal steps as fit.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each variant, with seeds SEED … SEED+K−1.")] = 3,
    seed: options.Seed = 0,
    size: options.Size = None,
    settings: options.Settings = None,
    image_size: options.ImageSize = None,
    limit: options.Limit = None,
    match: Annotated[bool, typer.Option(help="Match parameters by the width of the MLP.")] = True,
    skip_bad: options.SkipBad = False,
    controls: Annotated[bool, typer.Option(help="Train `uniform` too, which tells what attention is worth.")] = True,
    out: options.Out = None,
    jobs: Annotated[int | None, typer.Option(
        min=1, help="Trainings at a time. [default: the faster way, which is measured]")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of each training.")] = None,
    device: options.Device = "auto",
    data_root: options.DataRoot = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Train several attentions on your images and say which to use.

    Every variant gets the same data, steps and parameters; accuracy, speed and memory are measured here. The same
    command again goes on where it stopped, and another variant or seed runs only what is new.

    Examples:

        linvit compare digits

        linvit compare path/to/images --budget 30m --out runs/mine

        linvit compare cifar10 -a softmax -a performer-relu:m=32,dwc=5 -a linformer:k=32 --epochs 10 --seeds 5
    """
    from linvit.cli import _output, _study, _training
    from linvit.cli._display import Display
    from linvit.study import compare

    extra = _training.settings(settings, epochs=epochs, size=size)
    again = options.again(ctx)
    with Display(quiet or json) as display, _output.warnings_in_one_line():
        try:
            folder = compare(
                data, attentions=attention, controls=controls, seeds=seeds, seed=seed, budget=budget, out=out,
                device=device, jobs=jobs, threads=threads, data_root=data_root, image_size=image_size, limit=limit,
                skip_bad=skip_bad, match=match, command=again, hear=display.hear, progress=display.progress, **extra,
            )  # fmt: skip
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(f"nothing that was trained is lost; go on with: {again}") from stop
    _study.show(folder, folder, json, quiet)
