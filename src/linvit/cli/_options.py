"""Options that verbs share: one name, one meaning, one help text."""

from __future__ import annotations

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
    typer.Option("--attention", "-a", metavar="SPEC", help="A spec; repeat it for several. Default: all."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other option of model or recipe; repeat it."),
]
Size = Annotated[str | None, typer.Option(metavar="NAME", help="A model size by name; see `linvit list sizes`.")]
Threads = Annotated[int, typer.Option(min=0, callback=set_threads, help="CPU threads; 0 leaves PyTorch's choice.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
DataRoot = Annotated[Path | None, typer.Option(help="Where named data sets lie. [default: $LINVIT_DATA]")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the results.")]
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
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The best.toml of `linvit tune`; what is given beside it goes first."),
]
ImageSize = Annotated[int | None, typer.Option(metavar="PIXELS", help="Side of the images. [default: the set's own]")]
Limit = Annotated[int | None, typer.Option(metavar="N", help="At most so many images in each split.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave unreadable images out, and count them.")]


def again(ctx: typer.Context) -> str:
    """The command line that was given, as a shell takes it."""
    import shlex

    words, last = ctx.command_path.split(), []
    for parameter in ctx.command.params:
        name, value = str(parameter.name), ctx.params.get(str(parameter.name))
        if getattr(ctx.get_parameter_source(name), "name", "") != "COMMANDLINE":
            continue
        values = [str(one) for one in value] if isinstance(value, (list, tuple)) else [str(value)]
        if parameter.param_type_name == "argument":
            last += values
        elif isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            words += [word for one in values for word in (parameter.opts[0], one)]
    return shlex.join(words + (["--", *last] if any(word.startswith("-") for word in last) else last))
