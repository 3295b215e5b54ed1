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
    config: options.Config = None,
    start: options.From = None,
    task: options.Task = "classification",
    with_scratch: Annotated[bool, typer.Option(
        "--with-scratch", help="With --from: every variant also from nothing, for as many steps.")] = False,
    with_redrawn: Annotated[int | None, typer.Option(
        "--with-redrawn", min=1, metavar="STEPS", help="Variants with random features also with new ones every so many "
        "steps. [the others: every 1,000; --set redraw=0 for never]")] = None,
    epochs: Annotated[float | None, typer.Option(
        min=0, help="Epochs of every run; default: the data set's own.")] = None,
    budget: Annotated[str | None, typer.Option(
        metavar="TIME", help="Time for all of it, e.g. 15m: image size, model, seeds and steps are chosen to fit. "
        "[default: 30m for images that no recipe was tuned for, if --epochs is not given]")] = None,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Print the plan, what more time would buy and how far each job is, and stop.")] = False,
    print_config: options.PrintConfig = False,
    jobs_file: Annotated[bool, typer.Option(
        "--jobs-file", help="Write DIR/jobs.jsonl for a scheduler, and stop; `linvit job` does one of them.")] = False,
    track: options.Track = None,
    seeds: Annotated[int | None, typer.Option(
        min=1, help="Runs of each variant, with seeds SEED … SEED+K−1. "
        "[default: 3, or what fits the budget; 1 with --folds]")] = None,
    folds: options.Folds = None,
    margin: Annotated[float | None, typer.Option(
        metavar="POINTS", help="Accuracy that a faster variant may lose, in points, or hundredths of a bit. "
        "[default: 1]")] = None,
    seed: options.Seed = 0,
    size: options.Size = None,
    settings: options.Settings = None,
    image_size: options.ImageSize = None,
    limit: options.Limit = None,
    match: Annotated[bool, typer.Option(help="Match parameters by the width of the MLP.")] = True,
    skip_bad: options.SkipBad = False,
    controls: Annotated[bool, typer.Option(help="Train `uniform` too, which tells what attention is worth.")] = True,
    out: options.Out = None,
    jobs: options.Jobs = None,
    threads: options.EachThreads = None,
    on: options.On = None,
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

        linvit compare path/to/images --budget 15m --dry-run

        linvit compare path/to/images --from runs/pretrained -a softmax -a performer-relu:m=32 --budget 1h

        linvit compare cifar10 -a softmax -a performer-relu:m=32,dwc=5 -a linformer:k=32 --epochs 10 --seeds 5

        linvit compare path/to/few-images --folds 5

        linvit compare cifar10 --epochs 10 --out runs/c10 --jobs-file

        linvit compare digits --config runs/tune-digits/best.toml --seeds 5

        linvit compare mnist --task next-pixel -a softmax -a performer-relu:m=64 --set levels=16
    """
    from linvit.cli import _output, _study, _training, _tuning
    from linvit.cli._display import Display
    from linvit.study import compare

    extra = _training.settings(settings, epochs=epochs, size=size)
    asked = _tuning.compared(config, attention, start, budget, match, extra)
    again = options.again(ctx, "jobs_file")
    printed = dry_run or print_config or jobs_file
    with Display(quiet or json) as display, _output.warnings_in_one_line():
        try:
            folder = compare(
                data, task=task, controls=controls, with_scratch=with_scratch, with_redrawn=with_redrawn, seeds=seeds,
                folds=folds, seed=seed, margin=None if margin is None else margin / 100, budget=budget, dry_run=dry_run,
                out=out, device=device, runner=on, jobs=jobs, threads=threads, data_root=data_root,
                image_size=image_size, limit=limit, skip_bad=skip_bad, print_config=print_config, jobs_file=jobs_file,
                track=track or (), command=again, say=print if printed else display.say, hear=display.hear,
                progress=display.progress, **asked,
            )  # fmt: skip
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(f"nothing that was trained is lost; go on with: {again}") from stop
    if not printed:
        _study.show(folder, folder, json, quiet)
