"""`linvit tune`: the same search for every attention, and what it changes."""

from __future__ import annotations

from typing import Annotated

import typer

from linvit.cli import _options as options


def run(
    ctx: typer.Context,
    data: options.Data = "digits",
    attention: Annotated[list[str] | None, typer.Option(
        "--attention", "-a", metavar="SPEC", help="A variant; repeat it. Default: those of compare.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Trials of every variant. [default: 20]")] = None,
    budget: Annotated[str | None, typer.Option(
        metavar="TIME", help="Time for all of it, e.g. 2h, instead of trials: every variant gets as much.")] = None,
    space: Annotated[str, typer.Option(
        metavar="NAME|FILE", help="What is searched: a name (see `linvit list spaces`) or a TOML file.")] = "default",
    sampler: Annotated[str, typer.Option(help="tpe (learns from trials), random, or grid (points of lists).")] = "tpe",
    pruner: Annotated[str, typer.Option(help="Ends hopeless trials early: median, hyperband or none.")] = "median",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its expected time, and stop.")] = False,
    print_config: options.PrintConfig = False,
    track: options.Track = None,
    storage: Annotated[str | None, typer.Option(
        metavar="URL|FILE", help="Where trials are kept: postgresql://…, any other URL of Optuna's, or a journal file. "
        "[default: trials.db in the folder]")] = None,
    join: Annotated[bool, typer.Option(
        "--join", help="Work together with other processes that give the same command.")] = False,
    start: options.From = None,
    epochs: Annotated[float | None, typer.Option(
        min=0, help="Epochs of every trial; default: the data set's own.")] = None,
    seed: options.Seed = 0,
    folds: Annotated[int | None, typer.Option(
        metavar="K", help="Judge trials by K-fold cross-validation: deal training and validation images out into K "
        "stratified folds, hold each out once.")] = None,
    size: options.Size = None,
    settings: options.Settings = None,
    image_size: options.ImageSize = None,
    limit: options.Limit = None,
    match: Annotated[bool, typer.Option(help="Match parameters by the width of the MLP.")] = True,
    skip_bad: options.SkipBad = False,
    out: options.Out = None,
    jobs: Annotated[int | None, typer.Option(
        min=1, help="Trainings at a time. [default: one per core, at most 8; of a cluster, as many as its CPUs allow]",
    )] = None,
    threads: options.EachThreads = None,
    on: options.On = None,
    device: options.Device = "auto",
    data_root: options.DataRoot = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Search the best options for several attentions alike, and say whether that changes which one wins.

    Every variant gets as many trials (or as much time) from one space; validation images decide, test images are never
    read. The best options are written to DIR/best.toml, which train and compare take with --config. The same command
    again goes on where it stopped, at any moment; with --join, on several machines.

    Examples:

        linvit tune digits -a softmax -a performer-relu:m=32 --trials 15

        linvit tune mnist --limit 6000 --epochs 2 --budget 30m --dry-run

        linvit tune cifar10 -a performer-elu --space 002-elu --sampler grid --trials 40

        linvit tune photos/ --space mine.toml --pruner hyperband --storage postgresql://me@server/db --join

        linvit tune path/to/few-images --folds 5 --trials 12

        linvit tune cifar10 --trials 40 --on ray://head:10001 --out runs/search

        linvit compare digits --config runs/tune-digits/best.toml --seeds 5
    """
    from linvit.cli import _output, _training, _tuning
    from linvit.cli._display import Display

    extra = _training.settings(settings, epochs=epochs, size=size)

    from linvit.tune import tune  # takes seconds: what is wrong above is said at once
    from linvit.tune.storage import hidden

    again = options.again(ctx)
    with Display(quiet or json) as display, _output.warnings_in_one_line():
        try:
            folder = tune(
                data, attentions=attention, trials=trials, budget=budget, space=space, sampler=sampler, pruner=pruner,
                storage=storage, join=join, start=start, seed=seed, folds=folds, out=out, device=device, runner=on,
                jobs=jobs, threads=threads, data_root=data_root, image_size=image_size, limit=limit,
                skip_bad=skip_bad, match=match, dry_run=dry_run, print_config=print_config, track=track or (),
                command=again, say=print if dry_run or print_config else display.say, progress=display.progress,
                **extra,
            )  # fmt: skip
        except KeyboardInterrupt as stop:
            shown = again if storage is None else again.replace(storage, hidden(storage))
            raise KeyboardInterrupt(f"nothing that was trained is lost; go on with: {shown}") from stop
    if not dry_run and not print_config:
        _tuning.show(folder, json, quiet)
