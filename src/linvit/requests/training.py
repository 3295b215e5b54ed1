"""What can be asked of train, compare, tune and convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import model_validator

from linvit.requests.base import Duration, Listed, Request, Share, Text, option
from linvit.schemas.conversion import Inherit
from linvit.schemas.recipe import Recipe
from linvit.schemas.search import Pruner, Sampler
from linvit.schemas.study import MAX_MARGIN

DATA = "A data set's name, or the path of an image folder, .npz or .parquet file."


class Data(Request):
    """Images, and how they are read."""

    data: Text = option("digits", DATA, argument=True, metavar="DATA")
    data_root: Path | None = option(None, "Folder of the named data sets. [default: $LINVIT_DATA]")
    image_size: int | None = option(None, "Side of the images. [default: the data set's own]", metavar="PIXELS", ge=1)
    limit: int | None = option(None, "Use at most N images of each split.", metavar="N", ge=1)
    skip_bad: bool = option(False, "Leave out unreadable images, and count them.")


class Options(Request):
    """Where a model starts, and options of model and recipe."""

    start: Text | None = option(
        None,
        "Start from a trained model: a run's folder, a Hugging Face or timm ViT, 'backbones' (those that ship with "
        "linvit) or 'scratch'. [default: backbones for photos, else scratch]",
        flag="--from",
        metavar="MODEL",
    )
    config: Path | None = option(
        None, "The best.toml of `linvit tune`; command-line options override it.", metavar="FILE"
    )
    options: dict[str, Any] = option(
        {}, "Any other option of the model or the recipe; repeatable.", flag="--set", metavar="KEY=VALUE"
    )
    seed: int = option(0, "Seed of everything random.", ge=0)

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [name for name in ("epochs", "steps") if name in self.options]
        if getattr(self, "budget", None) is not None:
            given.append("budget")
        if len(given) > 1:
            raise ValueError(f"give {given[0]} or {given[1]}, not both")
        return self


class Jobs(Request):
    """Where trainings run."""

    device: str = option("auto", "auto, cpu, cuda, cuda:1 or mps.")
    threads: int | None = option(None, "CPU threads of each training.", ge=1)
    jobs: int | None = option(None, "Trainings at a time. [default: chosen by a short benchmark]", ge=1)
    runner: str | None = option(
        None,
        "Where trainings run: here, processes, ray (the cluster of this machine or of $RAY_ADDRESS) or ray://HOST:PORT.",
        flag="--on",
        metavar="WHERE",
    )


class Output(Request):
    """What is written and shown."""

    out: Path | None = option(None, "Folder for the results.", metavar="DIR")
    track: tuple[str, ...] = option((), "Log metrics to tensorboard or mlflow; repeatable.", metavar="NAME")
    dry_run: bool = option(False, "Show what would be done and what is finished, and stop.", transient=True)
    print_config: bool = option(False, "Print the resolved configuration as TOML, and stop.", transient=True)
    as_json: bool = option(False, "Print JSON instead of tables.", flag="--json", transient=True)
    quiet: bool = option(False, "Print only the result.", short="-q", transient=True)


class TrainRequest(Output, Options, Data):
    """Train a vision transformer on a data set or a folder of images.

    Options that are not given are chosen for the data. The same command resumes an interrupted training at any point.
    Test images are used once, at the end. DIR/best holds the model: the last one whose validation accuracy does not
    differ significantly from the best.

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

    verb = "train"
    shortcuts = (
        "epochs",
        "steps",
        "size",
        "stem",
        "patch_size",
        "dim",
        "depth",
        "heads",
        "batch_size",
        "optimizer",
        "lr",
        "schedule",
        "weight_decay",
        "ema",
        "patience",
        "amp",
        "compile",
    )

    attention: str | None = option(
        None,
        "One spec, or one per layer: a@2+b@4. [default: performer-relu:m=32, or the start's]",
        short="-a",
        metavar="SPEC",
    )
    task: str = option(
        "classification", "What is learned: classification, or next-pixel (a likelihood).", metavar="NAME"
    )
    folds: int | None = option(None, "Cross-validate with K stratified folds, each held out once.", metavar="K", ge=2)
    test: bool = option(True, hidden=True)
    device: str = option("auto", "auto, cpu, cuda, cuda:1 or mps.")
    threads: int | None = option(None, "CPU threads. [default: PyTorch's choice]", ge=1)
    checkpoint_seconds: float = option(
        30.0, "Seconds between checkpoints.", flag="--save-every", metavar="SECONDS", ge=0
    )


class CompareRequest(Output, Jobs, Options, Data):
    """Train several attentions on your images and recommend one.

    Every variant gets the same data, steps and parameters; accuracy, speed and memory are measured on this machine. The
    same command resumes an interrupted study, and a further variant or seed runs only what is new.

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

    verb = "compare"
    shortcuts = ("epochs", "size")

    attentions: tuple[str, ...] = option(
        (),
        "A variant; repeatable. [default: softmax, performer-exp, -relu and -theta with m=32, linformer:k=16]",
        flag="--attention",
        short="-a",
        metavar="SPEC",
    )
    task: str | None = option(None, "What is learned: classification, or next-pixel (a likelihood).", metavar="NAME")
    with_scratch: bool = option(False, "With --from: train every variant from scratch, too, for as many steps.")
    with_redrawn: int | None = option(
        None,
        "Train variants with random features once more, redrawing them every N steps. [the others: every 1,000; "
        "--set redraw=0 for never]",
        metavar="N",
        ge=1,
    )
    budget: Duration | None = option(
        None,
        "Time for the whole study, e.g. 15m; image size, model, seeds and steps are chosen to fit. [default: 30m for "
        "images without a tuned recipe, unless --epochs is given]",
        metavar="TIME",
    )
    seeds: int | None = option(
        None,
        "Runs of each variant, with seeds SEED to SEED+K-1. [default: 3, or what fits the budget; 1 with --folds]",
        metavar="K",
        ge=1,
    )
    folds: int | None = option(None, "Cross-validate with K stratified folds, each held out once.", metavar="K", ge=2)
    margin: Share | None = option(
        None,
        "Accuracy that a faster variant may lose, e.g. 1% (or bits per dimension). [default: 1%]",
        metavar="SHARE",
        gt=0,
        le=MAX_MARGIN,
    )
    match: bool = option(True, "Match the number of parameters by the width of the MLP.")
    controls: bool = option(True, "Train `uniform` as well, which shows what attention is worth.")
    measured: bool = option(True, hidden=True)
    jobs_file: bool = option(
        False, "Write DIR/jobs.jsonl for a scheduler, and stop; `linvit job` runs one job.", transient=True
    )


class TuneRequest(Output, Jobs, Options, Data):
    """Search the best options for several attentions alike, and show whether that changes which one wins.

    Every variant gets as many trials (or as much time) from one space. Validation images decide; test images are never
    read. The best options are written to DIR/best.toml for the --config of train and compare. The same command resumes
    an interrupted search.

    Examples:

        linvit tune digits -a softmax -a performer-relu:m=32 --trials 15
        linvit tune mnist --limit 6000 --epochs 2 --budget 30m --dry-run
        linvit tune cifar10 -a performer-elu --space 002-elu --sampler grid --trials 40
        linvit tune photos/ --space mine.toml --pruner hyperband --storage postgresql://me@server/db
        linvit tune path/to/few-images --folds 5 --trials 12
        linvit tune cifar10 --trials 40 --on ray://head:10001 --out runs/search
        linvit compare digits --config runs/tune-digits/best.toml --seeds 5
    """

    verb = "tune"
    shortcuts = ("epochs", "size")

    attentions: tuple[str, ...] = option(
        (), "A variant; repeatable. [default: those of compare]", flag="--attention", short="-a", metavar="SPEC"
    )
    trials: int | None = option(None, "Trials of every variant. [default: 20]", ge=1)
    budget: Duration | None = option(
        None, "Time for the whole search, e.g. 2h, divided equally among the variants.", metavar="TIME"
    )
    space: Text = option(
        "default", "What is searched: a name (see `linvit list spaces`) or a TOML file.", metavar="NAME|FILE"
    )
    sampler: Sampler = option("tpe", "tpe (learns from earlier trials), random, or grid (all points of lists).")
    pruner: Pruner = option("median", "Stops unpromising trials early: median, hyperband or none.")
    storage: str | None = option(
        None,
        "Where trials are stored: postgresql://…, another URL that Optuna takes, or a journal file. "
        "[default: trials.db in DIR]",
        metavar="URL|FILE",
        secret=True,
    )
    folds: int | None = option(
        None, "Judge trials by K-fold cross-validation on training and validation images.", metavar="K", ge=2
    )
    match: bool = option(True, "Match the number of parameters by the width of the MLP.")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.trials is not None and self.budget is not None:
            raise ValueError("give trials or a budget, not both")
        if "steps" in self.options:
            raise ValueError("a search compares after equal epochs, whatever the batch size: give epochs, not steps")
        return self


class ConvertRequest(Output, Data):
    """Make the attention of a trained model linear, and show what that costs and gains.

    Each stage reports its accuracy, agreement with the teacher, steps and time. The same command resumes an interrupted
    conversion. DIR/best holds the model for `linvit evaluate`, `predict` and `train`, DIR/report.html the results.

    Examples:

        linvit convert runs/teacher --to performer-relu:m=64,dwc=3 --data cifar10
        linvit convert runs/teacher --to linformer:k=64 --data photos/ --budget 10m --out runs/linear
        linvit convert runs/teacher --to performer-hyp --data cifar10 --max-drop 1% --stages none
        linvit convert runs/teacher --to performer-relu:m=64 --data photos/ --image-size 448
        linvit convert org/name --to linformer:k=64 --data photos/ --patch-size 8
    """

    verb = "convert"
    shortcuts = ("epochs", "steps", "batch_size", "optimizer", "lr", "amp")
    takes = (Recipe,)

    model: Text = option(
        ...,
        "The folder of a trained model or its run, or its id on the Hugging Face hub.",
        argument=True,
        metavar="MODEL",
    )
    data: Text = option(..., f"Images like those the model is for. {DATA}", metavar="DATA")
    to: str = option(..., "The attention it gets, or one per layer: a@2+b@4.", metavar="SPEC")
    max_drop: Share | None = option(
        None,
        "Share of the teacher's accuracy that may be lost, e.g. 1%: as many layers become linear as that allows.",
        metavar="SHARE",
        gt=0,
        lt=1,
    )
    stages: Annotated[tuple[Literal[1, 2, 3], ...], Listed] = option(
        (1, 2, 3), "1: each attention by itself. 2: all blocks. 3: labels. Or none.", metavar="LIST", separator=","
    )
    inherit: Inherit = option(
        "all", "What converted layers keep: all weights, all but q and k (not-qk), or the MLP (mlp)."
    )
    budget: Duration | None = option(None, "Time to train, instead of epochs, e.g. 10m.", metavar="TIME")
    patch_size: int | None = option(None, "Side of a patch, other than the model's.", metavar="PIXELS", ge=1)
    options: dict[str, Any] = option(
        {}, "Any other option of the recipe; repeatable.", flag="--set", metavar="KEY=VALUE"
    )
    seed: int = option(0, "Seed of everything random.", ge=0)
    device: str = option("auto", "auto, cpu, cuda, cuda:1 or mps.")
    threads: int | None = option(None, "CPU threads. [default: PyTorch's choice]", ge=1)
    checkpoint_seconds: float = option(
        30.0, "Seconds between checkpoints.", flag="--save-every", metavar="SECONDS", ge=0
    )
    report: bool = option(True, hidden=True)

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if sum(name in self.options for name in ("epochs", "steps")) + (self.budget is not None) > 1:
            raise ValueError("give one of epochs, steps and budget")
        return self
