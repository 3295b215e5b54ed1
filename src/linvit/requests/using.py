"""What can be asked of the verbs that use a model or show results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import model_validator

from linvit.errors import choices
from linvit.requests.base import Request, Share, Text, option
from linvit.requests.groups import Compute, Images, Jobs, NamedData, Planned, Seeded, Show, specs
from linvit.schemas.pixels import ImageSize

Task = Literal["latency", "inference", "training"]
Device = Literal["a100", "h100", "l4", "t4", "4090", "m3"]  # of `linvit.measure.hardware`


class EvaluateRequest(Show, Compute, Images):
    """Show the accuracy of a trained model, overall and per class.

    Examples:

        linvit evaluate runs/photos
        linvit evaluate runs/photos more-photos/ --confusion
        linvit evaluate runs/photos/last --split validation --json
        linvit evaluate runs/photos --summary
    """

    verb = "evaluate"

    model: Text = option(
        ...,
        "The folder of a run or of a model (…/best), or an id on the Hugging Face hub.",
        argument=True,
        metavar="DIR",
    )
    data: Text | None = option(
        None, "A data set's name or a path. [default: that of the training]", argument=True, metavar="DATA"
    )
    split: Literal["test", "validation"] = option("test", "Evaluate on test or validation images.")
    confusion: bool = option(False, "Show the confusion matrix as well.")
    summary: bool = option(False, "Show the model's layers, shapes and parameters instead; no image is read.")


class PredictRequest(Show, Compute):
    """Show the most likely classes of images.

    Examples:

        linvit predict cat.jpg --model runs/photos
        linvit predict holiday/ more/*.png --model runs/photos --top 1 --json
    """

    verb = "predict"

    images: tuple[Path, ...] = option(
        ..., "Image files, or folders of them.", argument=True, metavar="IMAGE", min_length=1
    )
    model: Text = option(
        ...,
        "Required: the folder of a run or of a model, or an id on the Hugging Face hub.",
        short="-m",
        metavar="DIR",
    )
    top: int = option(5, "Number of classes shown.", ge=1)
    skip_bad: bool = option(False, "Skip unreadable images and list them.")


class SampleRequest(Show, Compute, Seeded):
    """Draw images, pixel by pixel, from a model trained with --task next-pixel.

    With linear attention, every pixel costs the same, because the state has a fixed size.

    Examples:

        linvit train mnist --task next-pixel -a performer-relu:m=64 --out runs/pixels
        linvit sample runs/pixels --images 16 --out samples.png
    """

    verb = "sample"

    model: Text = option(..., "The folder of a run or of a model (…/best).", argument=True, metavar="DIR")
    images: int = option(16, "Number of images.", ge=1)
    temperature: float = option(1.0, "Sampling temperature; below 1 favours likely values.", gt=0)
    out: Path = option(Path("samples.png"), "PNG file for all images.", metavar="FILE")


class ExportRequest(Show):
    """Write a trained model as ONNX, torch.export or transformers files, after checking that it gives the same logits.

    ONNX and .pt2 files take batches of decoded pixels, uint8 (batch, channels, size, size), and normalise them.
    Classes and preprocessing are stored in the file. ONNX is timed against PyTorch.

    Examples:

        linvit export runs/photos
        linvit export runs/photos --format torch --out photos.pt2
        linvit export runs/photos --format hf --out photos-vit
    """

    verb = "export"

    model: Text = option(
        ...,
        "The folder of a run or of a model (…/best), or an id on the Hugging Face hub.",
        argument=True,
        metavar="DIR",
    )
    format: Literal["onnx", "torch", "hf"] = option(
        "onnx", "onnx: an ONNX file; torch: PyTorch's .pt2; hf: a folder that transformers loads.", short="-f"
    )
    out: Path | None = option(
        None, "File, or folder for hf. [default: DIR/model.onnx, DIR/model.pt2 or DIR/hf]", metavar="PATH"
    )
    threads: int | None = option(None, "CPU threads. [default: PyTorch's choice]", ge=1)


class PublishRequest(Show):
    """Upload a trained model and its card to the Hugging Face hub.

    The card has the hub's metadata: library, task, and what was measured on the test images. Nothing else of DIR is
    uploaded, and other files on the hub are kept. It needs `pip install 'linvit[hf]'` and `hf auth login`.
    `linvit.load`, `evaluate`, `predict`, `convert` and `--from` then take the name instead of a folder.

    Examples:

        linvit publish runs/photos me/photos
        linvit publish runs/photos me/photos --private --license mit
        linvit publish runs/photos me/photos --dry-run
    """

    verb = "publish"

    model: Text = option(..., "The folder of a run or of a model (…/best).", argument=True, metavar="DIR")
    name: str = option(..., "Its name on the hub, org/name.", argument=True, metavar="ORG/NAME")
    private: bool = option(False, "Create the model as private, if it does not exist yet.")
    license: str | None = option(None, "License identifier of the hub, e.g. apache-2.0 or mit.", metavar="NAME")
    page: bool = option(
        False, "Upload report.html too, of the run or its study. It contains example images and local paths."
    )
    dry_run: bool = option(False, "Show the card and what would be uploaded; nothing is sent.", transient=True)


class ReportRequest(Show):
    """Rebuild the report of a study, a conversion or a search from its records, or merge studies of the same data.

    A study whose jobs are run by a scheduler shows those that are finished.

    Examples:

        linvit report runs/mine
        linvit report runs/mine --margin 0.5%
        linvit report runs/monday runs/tuesday --out runs/both
    """

    verb = "report"

    folders: tuple[Path, ...] = option(
        ..., "Folders of studies, or of one conversion or search.", argument=True, metavar="DIR", min_length=1
    )
    out: Path | None = option(None, "Folder for the report. [default: DIR; needed for several]", metavar="DIR")
    margin: Share | None = option(
        None, "Accuracy that a faster variant may lose, e.g. 1%. [default: the study's]", metavar="SHARE", gt=0
    )


class JobRequest(Planned):
    """Run one training of a study, for job arrays of a scheduler.

    The same command resumes an interrupted training. `linvit report DIR` shows what is finished; the study's own
    command without --jobs-file then measures speeds where it runs and writes the whole page.

    Examples:

        linvit compare cifar10 --epochs 10 --out runs/c10 --jobs-file
        linvit job runs/c10 3
        linvit report runs/c10
    """

    verb = "job"

    folder: Path = option(
        ...,
        "A study's folder with the jobs.jsonl that `linvit compare --jobs-file` wrote.",
        argument=True,
        metavar="DIR",
    )
    number: int | None = option(
        None, "Number of the job, from 1. [default: $SLURM_ARRAY_TASK_ID]", argument=True, metavar="N"
    )
    threads: int | None = option(None, "CPU threads. [default: the study's, or 1]", ge=1)
    device: str | None = option(None, "cpu, cuda or cuda:1. [default: the study's]", metavar="DEVICE")
    quiet: bool = option(False, "Print only the result.", short="-q", transient=True)


class ListRequest(Request):
    """List attentions, kernels, datasets, formats, sizes, spaces or metrics.

    Examples:

        linvit list attentions
        linvit list kernels --json
        linvit list datasets
    """

    verb = "list"

    what: str = option(
        ..., "attentions, kernels, datasets, formats, sizes, spaces or metrics.", argument=True, metavar="WHAT"
    )
    as_json: bool = option(False, "Print JSON instead of tables.", flag="--json", transient=True)


class ReproduceRequest(Show, Jobs, NamedData):
    """Reproduce published studies: printed numbers, the report's own recipe, and the fair protocol.

    Without a name, studies are listed. The same command resumes an interrupted study. A missing data set is named, and
    the other studies run.

    Examples:

        linvit reproduce
        linvit reproduce 000-mnist
        linvit reproduce 001-I 001-V --scale smoke
        linvit reproduce 001-I --seeds 5
        linvit reproduce --all --threads 1
        linvit reproduce --report
        linvit reproduce --publish docs/results
        linvit reproduce 001-I --restore docs/results
    """

    verb = "reproduce"
    resumes = True

    names: tuple[str, ...] = option((), "Studies to run.", argument=True, metavar="NAME")
    scale: Literal["full", "cpu", "smoke"] = option(
        "cpu",
        "full: the report's recipe, for a GPU; cpu: real data, no training over an hour; smoke: one step, as a test.",
    )
    all: bool = option(False, "Run every study, starting with those that decide most per hour.")
    report: bool = option(False, "Write one page of all studies that were run.")
    publish: Path | None = option(
        None,
        "Add all records, including those of unfinished studies, to DIR/records, and write DIR/reports.html with its "
        "tables from them.",
        metavar="DIR",
    )
    restore: Path | None = option(
        None, "Take over the finished runs of these studies from DIR/records, and train the others.", metavar="DIR"
    )
    out: Path = option(Path("runs/reproduce"), "Folder for the results: DIR/NAME/SCALE.", metavar="DIR")
    seeds: int | None = option(None, "Seeds of each row, instead of the scale's.", ge=1)


class AdviseRequest(Show, Compute, NamedData):
    """Show from how many tokens linear attention is faster on this machine, and which one to try, without training.

    It measures for half a minute, caches the measurements, and shows the break-even of each attention, attention's
    share of the model's time, and the number of features for a target error. Earlier studies below --runs supply
    accuracies. Where evidence is missing, it prints the command that would supply it.

    --for DEVICE forecasts from the data sheet of another device; nothing is measured.

    Examples:

        linvit advise 1024
        linvit advise 1024 --for h100
        linvit advise path/to/images --image-size 128 --patch 8
        linvit advise runs/model --data path/to/images --error 0.1
        linvit advise path/to/huggingface-vit --image-size 512 --for latency --out runs/advice
    """

    verb = "advise"

    about: Text = option(
        ...,
        "A data set's name or path, a number of tokens, or a trained model's folder.",
        argument=True,
        metavar="DATA|N|MODEL",
    )
    image_size: ImageSize | None = option(None, "Side of the images, or HEIGHTxWIDTH.", metavar="PIXELS")
    patch: int | None = option(None, "Side of a patch.", metavar="PIXELS", ge=1)
    size: str | None = option(None, "A model size by name; see `linvit list sizes`.", metavar="NAME")
    attentions: tuple[str, ...] = specs("Attentions to compare with softmax; repeatable. [default: those of compare]")
    data: Text | None = option(None, "With MODEL: images from which q and k are computed.", metavar="DATA")
    purposes: tuple[str, ...] = option(
        (),
        "What counts: latency (one image at a time), inference (batches; the default) or training. Or the device of a "
        "forecast: a100, h100, l4, t4, 4090 or m3. Repeatable: --for training --for h100.",
        flag="--for",
        metavar="TASK|DEVICE",
    )
    task: Task = option("inference", "One of the purposes.", flag="--for", hidden=True)
    hardware: Device | None = option(None, "One of the purposes.", flag="--for", hidden=True)
    batch: int | None = option(None, "Images per batch. [default: chosen by model size]", ge=1)
    target: float = option(
        0.2,
        "Target distance from softmax (total variation) for the number of features.",
        flag="--error",
        gt=0,
        lt=1,
    )
    sigma: float = option(1.0, "Standard deviation of q and k without a model.", gt=0)
    runs: Path | None = option(None, "Folder of earlier studies. [default: runs, if it exists]", metavar="DIR")
    fresh: bool = option(False, "Repeat cached measurements.")
    out: Path | None = option(None, "Folder for the results.", metavar="DIR")

    @model_validator(mode="before")
    @classmethod
    def _sort_purposes(cls, values: Any) -> Any:
        """Each of `purposes` is a task or a device; in Python they may be given as such."""
        if not isinstance(values, Mapping):
            return values
        found = {name: values[name] for name in ("task", "hardware") if values.get(name) is not None}
        for word in values.get("purposes", ()):
            if word not in (*get_args(Task), *get_args(Device)):
                raise ValueError(f"--for {word}" + choices(str(word), (*get_args(Task), *get_args(Device))))
            name = "task" if word in get_args(Task) else "hardware"
            if found.setdefault(name, word) != word:
                raise ValueError(f"--for {found[name]} and --for {word}: give one of them")
        return {**values, **found, "purposes": tuple(map(str, found.values()))}

    @model_validator(mode="after")
    def _check_forecast(self) -> Self:
        for name in ("device", "target", "sigma", "fresh") if self.hardware else ():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                given = name if value is True else f"{name}={value}"
                raise ValueError(f"{given} has no effect with --for {self.hardware}: nothing is measured")
        return self
