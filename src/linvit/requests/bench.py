"""What can be asked of `linvit bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from linvit.requests.base import Text, option
from linvit.requests.groups import NamedData, Seeded, Show, specs


class BenchRequest(Show, Seeded):
    """What all benchmarks have in common."""

    threads: int | None = option(None, "CPU threads. [default: PyTorch's choice]", ge=1)
    out: Path | None = option(None, "Folder for records and chart.", metavar="DIR")


class AttentionBenchRequest(BenchRequest):
    """A benchmark of several attentions."""

    attentions: tuple[str, ...] = specs("An attention; repeatable. [default: all, or those of the paper's figure]")
    against: str | None = option(
        None,
        "Other packages, separated by commas: performer-pytorch, linformer, transformers. Without options, they "
        "get the kernels and numbers of features of the given attentions.",
        metavar="PEERS",
    )


class ModelBenchRequest(AttentionBenchRequest, NamedData):
    """A benchmark on random inputs, or on those of a trained model."""

    model: Path | None = option(None, "A trained model: its q and k are used, for --images of --data.", metavar="DIR")
    data: Text | None = option(None, "The data set of --model's images.", metavar="DATA")
    images: int | None = option(None, "Number of test images that --model sees. [default: 32]", ge=1)
    tokens: int | None = option(None, "Sequence length N. [default: 256; features: 4096]", ge=2)
    heads: int | None = option(None, "Attention heads. [default: 4; features: 1]", ge=1)
    head_dim: int | None = option(None, "Width of a head. [default: 64; features: 16, depth: 32]", ge=1)
    draws: int | None = option(None, "Draws of random features. [default: 4; features without --model: 15]", ge=1)

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if (self.model is None) != (self.data is None):
            raise ValueError("--model and --data are used together: a trained model, and the data set of its images")
        unused = ("sigma", "tokens", "heads", "head_dim", "layers") if self.model is not None else ("images",)
        for name in unused:
            if value := getattr(self, name, None):
                how = "with" if self.model is not None else "without"
                raise ValueError(f"{name}={value} has no effect {how} --model")
        return self


class ErrorRequest(ModelBenchRequest):
    """Measure the distance from exact softmax, with uniform attention as the control.

    The tables show the total variation to softmax (0 equal, 1 disjoint) and the entropy of the attention matrix's rows,
    and the relative error of the output. An attention further from softmax than `uniform` does not estimate it. q and k
    are random, or with --model those of a trained model.

    Examples:

        linvit bench error
        linvit bench error -a performer-exp:m=64 -a performer-exp:m=256 -a performer-hyp --sigma 1 --out runs/error
        linvit bench error --model runs/photos --data photos/ -a performer-hyp:m=32 --against performer-pytorch
        linvit bench error --dtype float16 -a performer-exp -a performer-hyp --sigma 4
    """

    verb = "bench error"

    sigma: tuple[float, ...] = option((), "Standard deviation of random q and k; repeatable. [default: 0.5 1 2]")
    device: str = option("cpu", "Where attentions are computed: auto, cpu, cuda, cuda:1 or mps.", metavar="DEVICE")
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = option(
        "float64", "Of q, k and v; the softmax reference is always float64."
    )


class FeaturesRequest(ErrorRequest):
    """Measure the distance from exact softmax by the number of features (figure 4 of the Performer paper).

    Examples:

        linvit bench features --out runs/fig4
        linvit bench features -a performer-hyp --features 64 --features 256 --tokens 256
        linvit bench features --model runs/photos --data photos/ -a performer-exp -a performer-hyp
    """

    verb = "bench features"

    sigma: tuple[float, ...] = option((), "Standard deviation of random q and k; repeatable. [default: 0.5 1]")
    features: tuple[int, ...] = option(
        (), "Number of features; repeatable. [default: 16 32 64 128 256; with --model up to 64]"
    )


class DepthRequest(ModelBenchRequest):
    """Measure how the error grows over layers if an attention replaces softmax (figure 14 of the Performer paper).

    Examples:

        linvit bench depth
        linvit bench depth -a performer-hyp:m=32 -a performer-hyp:m=128 --layers 6
        linvit bench depth --model runs/photos --data photos/ -a performer-hyp:m=64
    """

    verb = "bench depth"

    layers: int | None = option(None, "Layers of the untrained model. [default: 12]", ge=1)


class AngleRequest(BenchRequest):
    """Compare trigonometric and positive features by the angle between two vectors (figure 2 of the Performer paper).

    Examples:

        linvit bench angle --out runs/fig2
    """

    verb = "bench angle"


class MapsRequest(AttentionBenchRequest, NamedData):
    """Show the attention matrices of a trained model, for every layer and head and one image.

    Other attentions are given the same q and k. --out gets the picture, and the matrices as an .npz file for each
    attention. These are figures 10 and 11 of the Performer paper.

    Examples:

        linvit bench maps runs/photos photos/ --out runs/maps
        linvit bench maps runs/photos photos/ -a performer-hyp:m=64 -a uniform --image 7 --out runs/maps
    """

    verb = "bench maps"

    model: Path = option(..., "The folder of a run, or of a model.", argument=True, metavar="DIR")
    data: Text = option(..., "A data set's name or a path.", argument=True, metavar="DATA")
    attentions: tuple[str, ...] = specs("Another attention, on the same q and k; repeatable.")
    image: int = option(0, "Index of the test image.", ge=0)


class MemoryRequest(AttentionBenchRequest):
    """Measure the peak memory of one call relative to fused softmax, and how many tokens would fit.

    Each attention and length runs in its own process, which takes seconds to start. q, k and v are not counted, but
    must fit within the limit too.

    Examples:

        linvit bench memory -a performer-relu:m=64 -a linformer:k=64 --tokens 1024 --tokens 4096
        linvit bench memory --tokens 1024 --until-limit --most-memory 2GB -a performer-exp --against transformers
    """

    verb = "bench memory"

    tokens: tuple[int, ...] = option((256, 1024, 4096), "Sequence length N; repeatable. [default: 256 1024 4096]")
    until_limit: bool = option(False, "Double the length until every attention has reached a limit.")
    most_memory: str | None = option(
        None, "Skip measurements that need more memory, e.g. 4GB. [default: half of the free memory]", metavar="SIZE"
    )
    most_seconds: float = option(20.0, "Skip measurements that take longer.", metavar="SECONDS", gt=0)
    heads: int = option(8, "Attention heads.", ge=1)
    head_dim: int = option(64, "Width of a head.", ge=1)
    prefix: int = option(0, "Prefix tokens (CLS) among the N tokens.", ge=0)
    batch: int = option(1, "Sequences per call.", ge=1)
    device: str = option("cpu", "auto, cpu, cuda, cuda:1 or mps.", metavar="DEVICE")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "Of q, k and v.")


class SpeedRequest(MemoryRequest):
    """Time forward and forward+backward, as ratios to PyTorch's fused softmax in the same run.

    An attention whose output or gradients are wrong is not timed, nor one that would exceed the limits. softmax and
    identity (returns v, the speed limit) are always measured. The image tokens (N minus --prefix) form
    a grid for `dwc`, as square as possible. --until-limit makes figure 3 of the Performer paper.

    Examples:

        linvit bench speed --threads 2 --out runs/speed
        linvit bench speed --tokens 1024 --rounds 10 -a performer-relu:m=64 -a efficient
        linvit bench speed --tokens 256 --until-limit --most-memory 4GB --most-seconds 10 --out runs/fig3
        linvit bench speed --tokens 1024 -a performer-exp:m=64 -a linformer:k=64 --against performer-pytorch,linformer
    """

    verb = "bench speed"

    tokens: tuple[int, ...] = option(
        (64, 256, 1024, 4096), "Sequence length N; repeatable. [default: 64 256 1024 4096]"
    )
    rounds: int = option(30, "Interleaved rounds; each times everything once.", ge=1)
