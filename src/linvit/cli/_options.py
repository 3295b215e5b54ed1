"""Options that verbs share: one name, one meaning, one help text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer


def set_threads(threads: int) -> int:
    if threads:
        import torch

        torch.set_num_threads(threads)
    return threads


Attentions = Annotated[
    list[str] | None,
    typer.Option(
        "--attention",
        "-a",
        metavar="SPEC",
        help="A spec; repeat it for several. Default: all, or a chart's own.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other option of model or recipe; repeat it."),
]
Size = Annotated[str | None, typer.Option(metavar="NAME", help="A model size by name; see `linvit list sizes`.")]
Threads = Annotated[int, typer.Option(min=0, callback=set_threads, help="CPU threads; 0 leaves PyTorch's choice.")]
EachThreads = Annotated[int | None, typer.Option(min=1, help="CPU threads of each training.")]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Trainings at a time. [default: the faster way, which is measured]")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
DataRoot = Annotated[Path | None, typer.Option(help="Where named data sets lie. [default: $LINVIT_DATA]")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the results.")]
On = Annotated[
    str | None,
    typer.Option(metavar="WHERE", help="Where trainings run: ray (the cluster of this machine or of $RAY_ADDRESS) or "
                 "ray://HOST:PORT. [default: here]"),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and no more than the result.")]
Data = Annotated[
    str, typer.Argument(metavar="DATA", help="A data set's name, or the path of an image folder, .npz or .parquet.")
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="MODEL",
        help="Start from a trained model: a run's folder, a Hugging Face or timm ViT, "
        "'backbones' (those that ship) or 'scratch' (nothing).",
    ),
]
Task = Annotated[
    str, typer.Option(metavar="NAME", help="What is learned: classification, or next-pixel (the likelihood of images).")
]
Steps = Annotated[int | None, typer.Option(help="Steps, instead of epochs.")]
PatchSize = Annotated[int | None, typer.Option(metavar="PIXELS", help="Side of a patch, of a model that has patches.")]
BatchSize = Annotated[int | None, typer.Option(help="Images per step.")]
Optimizer = Annotated[str | None, typer.Option(help="muon, adamw, adam or sgd.")]
Rate = Annotated[float | None, typer.Option(help="The highest learning rate.")]
Amp = Annotated[str | None, typer.Option(help="off, bf16 or fp16.")]
SaveEvery = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Time between checkpoints.")]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The best.toml of `linvit tune`; what is given beside it goes first."),
]
ImageSize = Annotated[int | None, typer.Option(metavar="PIXELS", help="Side of the images. [default: the set's own]")]
Folds = Annotated[
    int | None,
    typer.Option(metavar="K", help="Cross-validate: deal the images out into K stratified folds, hold each out once."),
]
Limit = Annotated[int | None, typer.Option(metavar="N", help="At most so many images in each split.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave unreadable images out, and count them.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and how far it is, and stop.")]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the whole resolved configuration as TOML, and stop.")
]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Tell tensorboard or mlflow how it gets on; repeat it for both."),
]


@contextmanager
def resumable(ctx: typer.Context) -> Iterator[None]:
    """An interrupt says how to go on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"{str(stop) or 'nothing is lost'}; go on with: {again(ctx)}") from stop


def again(ctx: typer.Context, *without: str) -> str:
    """The command line that was given, as a shell takes it, but for these parameters."""
    import shlex

    words, last = ctx.command_path.split(), []
    for parameter in ctx.command.params:
        name, value = str(parameter.name), ctx.params.get(str(parameter.name))
        if name in without or getattr(ctx.get_parameter_source(name), "name", "") != "COMMANDLINE":
            continue
        values = [str(one) for one in value] if isinstance(value, (list, tuple)) else [str(value)]
        if parameter.param_type_name == "argument":
            last += values
        elif isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            words += [word for one in values for word in (parameter.opts[0], one)]
    return shlex.join(words + (["--", *last] if any(word.startswith("-") for word in last) else last))
