"""Options that several verbs share: each is declared once, here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from linvit.requests.base import Request, Text, option
from linvit.schemas.experiment import Resize
from linvit.schemas.pixels import ImageSize

DATA = "A data set's name, or the path of an image folder or of a .npz, .parquet or .csv file."


def specs(help: str) -> Any:
    """A field for several attentions."""
    return option((), help, flag="--attention", short="-a", metavar="SPEC")


class Show(Request):
    """How a result is shown."""

    as_json: bool = option(False, "Print JSON instead of tables.", flag="--json", transient=True)
    quiet: bool = option(False, "Print only the result.", short="-q", transient=True)


class Compute(Request):
    device: str = option("auto", "auto, cpu, cuda, cuda:1 or mps.", metavar="DEVICE")
    threads: int | None = option(None, "CPU threads. [default: PyTorch's choice]", ge=1)


class Seeded(Request):
    seed: int = option(0, "Random seed.", ge=0)


class NamedData(Request):
    data_root: Path | None = option(None, "Folder of the named data sets. [default: $LINVIT_DATA]", metavar="DIR")


class Images(NamedData):
    """How images are read."""

    limit: int | None = option(None, "Use at most N images of each split.", metavar="N", ge=1)
    skip_bad: bool = option(False, "Skip unreadable images and report their number.")


class Data(Images):
    """Images, and the size in which they are read."""

    data: Text = option("digits", DATA, argument=True, metavar="DATA")
    image_size: ImageSize | None = option(
        None,
        "Side of the images, or HEIGHTxWIDTH, e.g. 224x320. [default: the data set's, or the trained model's]",
        metavar="PIXELS",
    )
    resize: Resize | None = option(
        None,
        "How images of another shape fit: crop (keep the centre) or squeeze (the whole image). "
        "[default: the trained model's, or crop]",
    )


class Options(Seeded):
    """Options of model and recipe."""

    options: dict[str, Any] = option(
        {},
        "Any other option of the model or the recipe (see ModelConfig and Recipe in the API), e.g. dropout=0.1; "
        "repeatable.",
        flag="--set",
        metavar="KEY=VALUE",
    )

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [name for name in ("epochs", "steps") if name in self.options]
        if getattr(self, "budget", None) is not None:
            given.append("budget")
        if len(given) > 1:
            raise ValueError(f"give {given[0]} or {given[1]}, not both")
        return self


class Started(Options):
    """Where a model starts, and how often it is trained."""

    start: Text | None = option(
        None,
        "Start from a trained model: a run's folder, a ViT of Hugging Face, timm or torchvision, 'backbones' (those "
        "that ship with linvit) or 'scratch'. [default: backbones for photos, else scratch]",
        flag="--from",
        metavar="MODEL",
    )
    config: Path | None = option(
        None, "Options from the best.toml of `linvit tune`; command-line options override them.", metavar="FILE"
    )
    folds: int | None = option(None, "Cross-validate with K stratified folds, each held out once.", metavar="K", ge=2)


class Resumed(Compute):
    """One training after the other, here."""

    checkpoint_seconds: float = option(
        30.0, "Seconds between checkpoints.", flag="--save-every", metavar="SECONDS", ge=0
    )


class Jobs(Compute):
    """Where trainings run."""

    threads: int | None = option(
        None, "CPU threads of each training. [default: 1 if several run at a time, else PyTorch's choice]", ge=1
    )
    jobs: int | None = option(None, "Number of parallel trainings. [default: chosen by a short benchmark]", ge=1)
    runner: str | None = option(
        None,
        "Where trainings run: here, processes, ray (the cluster of this machine or of $RAY_ADDRESS) or ray://HOST:PORT.",
        flag="--on",
        metavar="WHERE",
    )


class Planned(Request):
    dry_run: bool = option(False, "Show the plan and what is finished, then exit.", transient=True)
    track: tuple[str, ...] = option((), "Log metrics to tensorboard or mlflow; repeatable.", metavar="NAME")


class Output(Planned, Show):
    """What is written and shown."""

    out: Path | None = option(None, "Folder for the results. [default: a new one below runs]", metavar="DIR")
    print_config: bool = option(False, "Print the resolved configuration as TOML, then exit.", transient=True)
