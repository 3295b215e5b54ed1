"""What can be asked of train, compare, tune and convert."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import model_validator

from linvit.requests.base import Duration, Listed, Several, Share, Text, option
from linvit.requests.groups import DATA, Data, Jobs, Options, Output, Resumed, Started, specs
from linvit.schemas.conversion import AUTO, Inherit
from linvit.schemas.recipe import Recipe
from linvit.schemas.search import Pruner, Sampler
from linvit.schemas.study import MAX_MARGIN

LENGTH, RECIPE = ("epochs", "steps"), ("batch_size", "optimizer", "lr", "amp")  # options with a flag of their own
SHAPE = ("size", "stem", "patch_size", "dim", "depth", "heads")


class TrainRequest(Output, Resumed, Started, Data):
    """Train a vision transformer on a data set or a folder of images.

    Options that are not given are chosen for the data. The same command resumes an interrupted training at any point.
    Test images are used once, at the end. DIR/best holds the model: the last one whose validation accuracy is within
    one standard error of the highest.

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
    shortcuts = (*LENGTH, *SHAPE, *RECIPE, "schedule", "weight_decay", "ema", "patience", "compile")

    attention: str | None = option(
        None,
        "One spec, or one per layer: a@2+b@4. [default: performer-relu:m=32, or the start's]",
        short="-a",
        metavar="SPEC",
    )
    task: str = option(
        "classification",
        "Task: classification, multi-label (several labels per image), next-pixel or masked-pixel (pixel values).",
        metavar="NAME",
    )
    test: bool = option(True, hidden=True)


class CompareRequest(Output, Jobs, Started, Data):
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
    resumes = True
    shortcuts = ("epochs", "size")

    attentions: tuple[str, ...] = specs(
        "A variant; repeatable. [default: softmax, performer-exp, -relu and -theta with m=32, linformer:k=16; "
        "with --from MODEL: softmax, twoscale:cell=2, performer-relu and -exp with m=32]"
    )
    task: str | None = option(
        None, "Task: classification, multi-label, next-pixel or masked-pixel. [default: classification]", metavar="NAME"
    )
    with_scratch: bool = option(
        False, "With --from: also train every variant from scratch, for the same number of steps."
    )
    with_redrawn: int | None = option(
        None,
        "Also train each variant with random features once more, redrawing them every N steps instead of every 1,000.",
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
    margin: Share | None = option(
        None,
        "Accuracy that a faster variant may lose, e.g. 1% (one point; 0.01 bits per dimension). [default: 1%]",
        metavar="SHARE",
        gt=0,
        le=MAX_MARGIN,
    )
    match: bool = option(True, "Match the number of parameters to softmax's by the width of the MLP. [default: yes]")
    controls: bool = option(
        True, "Train the control `uniform`, which shows how much attention contributes. [default: yes]"
    )
    measured: bool = option(True, hidden=True)
    jobs_file: bool = option(
        False, "Write DIR/jobs.jsonl for a scheduler, then exit; `linvit job` runs one job.", transient=True
    )


class TuneRequest(Output, Jobs, Started, Data):
    """Tune several attentions with the same effort, and show whether that changes which one wins.

    Every variant gets the same number of trials (or the same time) in the same space. Validation images decide; test
    images are never read. The best options are written to DIR/best.toml for the --config of train and compare. The same
    command resumes an interrupted search.

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
    resumes = True
    shortcuts = ("epochs", "size")

    attentions: tuple[str, ...] = specs("A variant; repeatable. [default: those of compare]")
    trials: int | None = option(None, "Trials of every variant. [default: 20]", ge=1)
    budget: Duration | None = option(
        None, "Time for the whole search, e.g. 2h, divided equally among the variants.", metavar="TIME"
    )
    space: Text = option(
        "default", "Search space: a name (see `linvit list spaces`) or a TOML file.", metavar="NAME|FILE"
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
        None, "Evaluate trials by K-fold cross-validation on training and validation images.", metavar="K", ge=2
    )
    match: bool = option(True, "Match the number of parameters to softmax's by the width of the MLP. [default: yes]")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.trials is not None and self.budget is not None:
            raise ValueError("give trials or a budget, not both")
        if "steps" in self.options:
            raise ValueError("a search compares after equal epochs, whatever the batch size: give epochs, not steps")
        return self


class ConvertRequest(Output, Resumed, Options, Data):
    """Replace the attention of a trained model, and report the change in accuracy and speed.

    Without --to, several attentions are timed on this machine at this image size. The fastest mix with softmax is
    chosen that makes the model at least 5 % faster and is shown to lose at most --max-drop (default 1 %). If there is
    none, softmax is kept. No stage is trained unless --budget is more than 5m.

    Each stage reports its accuracy, agreement with the teacher, steps and time. The same command resumes an interrupted
    conversion. DIR/best holds the model for `linvit evaluate`, `predict` and `train`, DIR/report.html the results.

    Examples:

        linvit convert runs/teacher --data photos/
        linvit convert org/name --data photos/ --image-size 448 --budget 30m --out runs/fast
        linvit convert runs/teacher --to performer-relu:m=64,dwc=3 --data cifar10
        linvit convert runs/teacher --to linformer:k=64 --data photos/ --budget 10m --out runs/linear
        linvit convert runs/teacher --to performer-hyp --data cifar10 --max-drop 1% --stages none
        linvit convert runs/teacher --to agent:n=49 --to linformer:k=64 --data photos/ --max-drop 2%
        linvit convert runs/teacher --to performer-relu:m=64 --data photos/ --image-size 448
        linvit convert org/name --to linformer:k=64 --data photos/ --patch-size 8
    """

    verb = "convert"
    resumes = True
    shortcuts = (*LENGTH, *RECIPE)
    takes = (Recipe,)

    model: Text = option(
        ...,
        "The folder of a trained model or its run, or its id on the Hugging Face hub.",
        argument=True,
        metavar="MODEL",
    )
    data: Text = option(..., f"Images for distillation and evaluation. {DATA}", metavar="DATA")
    to: Annotated[tuple[str, ...], Several] = option(
        (AUTO,),
        "The new attention, or one per layer: a@2+b@4. Repeatable with --max-drop, which then mixes them. "
        "[default: chosen by timing several]",
        metavar="SPEC",
        min_length=1,
    )
    max_drop: Share | None = option(
        None,
        "Maximum loss relative to the teacher's accuracy, e.g. 1%; softmax is kept where replacing it would lose more. "
        "[default without --to: 1%]",
        metavar="SHARE",
        gt=0,
        lt=1,
    )
    stages: Annotated[tuple[Literal[1, 2, 3], ...], Listed] = option(
        (1, 2, 3),
        "Stages to train: 1 (each attention by itself), 2 (all blocks), 3 (the whole model, on labels), or none. "
        "[default: 1,2,3]",
        metavar="LIST",
        separator=",",
    )
    inherit: Inherit = option(
        "all", "Weights that converted layers take over: all, all but q and k (not-qk), or only the MLP's (mlp)."
    )
    budget: Duration | None = option(
        None,
        "Training time, instead of epochs, e.g. 10m. Without --to, the first 5m find the attention. [default without "
        "--to: 5m]",
        metavar="TIME",
    )
    patch_size: int | None = option(None, "Side of a patch. [default: the model's]", metavar="PIXELS", ge=1)
    options: dict[str, Any] = option(
        {}, "Any other option of the recipe (Recipe of the API); repeatable.", flag="--set", metavar="KEY=VALUE"
    )
    report: bool = option(True, hidden=True)

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.to == (AUTO,):
            if self.inherit != "all":
                raise ValueError(f"inherit={self.inherit} needs --to: without it, what is chosen keeps all weights")
            return self
        if AUTO in self.to or len(set(self.to)) < len(self.to):
            raise ValueError(f"--to {' --to '.join(self.to)}: name different attentions, or leave --to out")
        if len(self.to) > 1 and self.max_drop is None:
            raise ValueError(f"{len(self.to)} attentions in --to are mixed by --max-drop: give it, or one attention")
        return self
