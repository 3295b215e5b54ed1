"""Options that verbs share: one name, one meaning, one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Attentions = Annotated[
    list[str] | None,
    typer.Option("--attention", "-a", metavar="SPEC", help="A spec; repeat it for several. Default: all."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves PyTorch's choice.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
DataRoot = Annotated[Path | None, typer.Option(help="Where named data sets lie. [default: $LINVIT_DATA]")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the results.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no tables; errors only.")]
