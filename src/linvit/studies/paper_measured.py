"""The paper's figures that need no training: costs, errors, times and maps; and those that cannot be made here."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import torch

from linvit.attention import attention_cost, create_attention
from linvit.attention.performer import Performer
from linvit.data import load_data, normalise
from linvit.devices import pick_device
from linvit.files import write_atomically
from linvit.measure.angle import mse_ratios
from linvit.measure.depth import depth_errors
from linvit.measure.error import Draws, feature_errors
from linvit.measure.maps import model_maps, store_maps
from linvit.measure.memory import Limits
from linvit.measure.models import side_by_side
from linvit.measure.provenance import provenance
from linvit.measure.race import ROUNDS
from linvit.measure.speed import attention_speed
from linvit.measure.timing import Timing
from linvit.measure.trained import Subject
from linvit.models import model_config
from linvit.pipeline.train import train
from linvit.randomness import generator
from linvit.records import Record
from linvit.report import benchmarks
from linvit.schemas.experiment import BACKBONES
from linvit.site import Site
from linvit.studies import paper_charts
from linvit.studies.declaration import MINUTES, Figure, NotReproducible, Options, register
from linvit.studies.run import Reproduction
from linvit.training.checkpoint import load

RELU_FEATURES = tuple(f"performer-relu:m={m}" for m in (16, 64, 256))
COUNTED = ("softmax", *RELU_FEATURES, "performer-relu:projection=none")
TIMED = ("performer-exp:m=64", "performer-relu:m=64", "performer-relu:projection=none", "linformer:k=64")


LENGTHS = (64, 256, 1024, 4096, 16384, 65536)
PHOTO = {"data": "tiny-imagenet", "image": 0}


def save_arrays(file: Path, **arrays: Any) -> str:
    """The name of the file, for a record's `artefact`."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(file, content.getvalue())
    return file.name


def measure_costs(size: Options, folder: Path, run: Reproduction) -> Iterator[Record]:
    common = provenance(torch.device("cpu"), torch.float32)
    for tokens, spec in itertools.product(size["lengths"], COUNTED):
        macs = attention_cost(spec, Site(heads=8, head_dim=64, tokens=tokens)).macs
        tags = {"attention": spec, "tokens": tokens, "heads": 8, "head_dim": 64}
        yield Record("attention_macs", macs, "MAC", **common, tags=tags)


COSTS = Figure(
    "paper-fig1",
    title="Multiply–accumulates by length",
    about="""What attention costs, and how linear attention changes the order of products. Expected: softmax grows with
    N², the others with N; they meet at N = 2m, or N = d without a projection.""",
    measure=measure_costs,
    draw=lambda records, folder: paper_charts.costs(records),
    scales={"full": {"lengths": LENGTHS}, "cpu": {"lengths": LENGTHS}, "smoke": {"lengths": LENGTHS[:2]}},
    reduced={"smoke": "64 and 256 tokens"},
)

ANGLES = Figure(
    "paper-fig2",
    title="Trigonometric against positive features, by angle and length",
    about="""The error of trigonometric features relative to positive ones, by angle and length: the closed form, and
    sampled. Expected: equal at 1.74 rad for unit length, and unbounded beyond; samples agree with the closed form.""",
    measure=lambda size, folder, run: mse_ratios(**size, progress=run.progress),
    draw=lambda records, folder: benchmarks.angle(records),
    scales={"full": {}, "cpu": {}, "smoke": {"angles": 8, "lengths": (0.5, 1.0), "slices": (1.0,), "rows": 4096}},
    reduced={"smoke": "8 angles, 2 lengths and 4,096 rows"},
)


def measure_speed(size: Options, folder: Path, run: Reproduction) -> Iterator[Record]:
    timing = Timing(rounds=size["rounds"], device=pick_device(size["device"] or run.request.device))
    kept = {"tokens": size["tokens"], "limits": size["limits"]}
    return attention_speed(TIMED, size["site"], **kept, timing=timing, progress=run.progress)


LONG = {"site": Site(8, 64, 1), "tokens": (256, 1024, 4096)}
SPEEDS = Figure(
    "paper-fig3",
    title="Speed up to the limit of memory",
    about="""Time of attention, forward and backward, up to a limit of time or memory, with v itself as the lower bound.
    Expected: linear attentions overtake fused softmax at some hundreds of tokens and reach far greater lengths; the
    paper's V100 times cannot be compared.""",
    durations={"full": "an hour on a GPU", "cpu": "20 min", "smoke": "seconds"},
    measure=measure_speed,
    draw=lambda records, folder: benchmarks.speed_to_the_limit(records),
    scales={
        "full": LONG | {"limits": Limits(double=True), "rounds": ROUNDS, "device": None},
        "cpu": LONG | {"limits": Limits(4 * 2**30, 20.0, double=True), "rounds": 5, "device": "cpu"},
        "smoke": {"site": Site(2, 16, 1), "tokens": (16, 64), "limits": Limits(), "rounds": 2, "device": "cpu"},
    },
    reduced={"cpu": "a processor, with limits of 20 seconds and 4 GiB", "smoke": "16 and 64 tokens"},
)

ERRORS = Figure(
    "paper-fig4",
    title="Error by the number of features",
    about="""Mean squared error of attention's output by the number of features: orthogonal against independent rows,
    trigonometric against positive features; L = 4,096, d = 16, 15 draws, with uniform attention for reference.
    Expected: orthogonal below independent, positive below trigonometric; with few features all may exceed uniform.""",
    durations=MINUTES | {"full": "10 min", "cpu": "10 min"},
    measure=lambda size, folder, run: feature_errors(**size, progress=run.progress),
    draw=lambda records, folder: benchmarks.features(records),
    scales={
        "full": {},
        "cpu": {},
        "smoke": {"site": Site(1, 16, 64), "draws": Draws(2), "features": (8, 16), "sigmas": (1.0,)},
    },
    reduced={"smoke": "64 tokens, 2 draws"},
)


@torch.no_grad()
def measure_prefix_sums(size: Options, folder: Path, run: Reproduction) -> list[Record]:
    n, d, spec = size["tokens"], 4, "performer-relu:m=6"
    q, k, v = torch.randn(3, 1, 1, n, d, generator=generator("prefix-sums"), dtype=torch.float64)
    attention = create_attention(spec, heads=1, head_dim=d, tokens=n, causal=True).double()
    assert isinstance(attention, Performer)
    φ_q, φ_k = (attention.kernel.phi(x[0, 0] * attention.kernel.scale) for x in (q, k))
    sums, z = (φ_k[:, :, None] * v[0, 0, :, None]).cumsum(0), φ_k.cumsum(0)
    outputs = torch.einsum("nf,nfe->ne", φ_q, sums) / (φ_q * z).sum(-1, keepdim=True)
    exact = attention(q, k, v)[0, 0]
    artefact = save_arrays(folder / "prefix-sums.npz", sums=sums.numpy(), outputs=outputs.numpy(), exact=exact.numpy())
    difference = float((outputs - exact).abs().max() / exact.abs().max())
    common = provenance(torch.device("cpu"), torch.float64)
    tags = {"attention": spec, "tokens": n, "head_dim": d}
    return [Record("prefix_sums", difference, "fraction", n, **common, artefact=artefact, tags=tags)]


def draw_prefix_sums(records: Sequence[Record], folder: Path) -> alt.VConcatChart:
    with np.load(folder / records[0].artefact) as stored:
        return paper_charts.prefix_sums(stored["sums"], stored["outputs"], records[0])


PREFIX_SUMS = Figure(
    "paper-fig8",
    title="Prefix sums of unidirectional attention",
    about="""Unidirectional attention as the paper pictures it: the running sum of φ(k)vᵀ, and what each query reads
    from it. Expected: equal to the masked quadratic form up to rounding.""",
    durations=dict.fromkeys(MINUTES, "seconds"),
    measure=measure_prefix_sums,
    draw=draw_prefix_sums,
    scales={"full": {"tokens": 8}, "cpu": {"tokens": 8}, "smoke": {"tokens": 4}},
    reduced={"smoke": "4 tokens"},
)


def measure_maps(size: Options, folder: Path, run: Reproduction) -> Iterator[Record]:
    model = load(BACKBONES / "softmax")
    data = load_data(size["data"], root=run.request.data_root, image_size=model.config.image_size, channels=3)
    pixels, _ = data.test.batch(slice(0, size["image"] + 1))
    images = normalise(pixels, tuple(model.about["mean"]), tuple(model.about["std"]))
    subject, others = Subject(model, images, "the backbone that ships"), ["performer-hyp:m=64", "performer-relu:m=64"]
    for found in model_maps(subject, others, image=size["image"], progress=run.progress):
        yield from found.records
        yield store_maps(found, folder)


def draw_maps(records: Sequence[Record], folder: Path) -> alt.ConcatChart:
    weights = {}
    for record in records:
        if record.artefact:
            with np.load(folder / record.artefact) as stored:
                weights[str(record.tags["attention"])] = stored["maps"]
    return benchmarks.maps(weights, records)


MAPS = Figure(
    "paper-fig10-11",
    title="Attention maps of a trained model",
    about="""Where a trained model looks: the matrices of every layer and head for one photo, by softmax and by its
    estimates on the same q and k. Expected: some heads look nearby, some at fixed places; `hyp` resembles softmax, ReLU
    is flat.""",
    measure=measure_maps,
    draw=draw_maps,
    scales={"full": PHOTO, "cpu": PHOTO, "smoke": {"data": "digits", "image": 0}},
    reduced={"full": "photos in place of proteins", "cpu": "photos in place of proteins", "smoke": "a digit"},
)


def measure_depth(size: Options, folder: Path, run: Reproduction) -> Iterator[Record]:
    """In a model that is trained for it, whose queries and keys are not those of chance."""
    shape = {"stem": "patch", "patch_size": size["patch"], "dim": 64, "heads": 4, "mlp_dim": 128}
    shape |= {"depth": size["depth"]}
    options = {"device": run.request.device, "data_root": run.request.data_root, "out": folder / "model", "test": False}
    trained = train(size["data"], attention="softmax", epochs=size["epochs"], limit=size["limit"], **options, **shape)
    model = load(trained.folder / "best")
    data = load_data(size["data"], root=run.request.data_root)
    pixels, _ = data.test.batch(slice(0, 16))
    images = normalise(pixels, tuple(model.about["mean"]), tuple(model.about["std"]))
    subject = Subject(model.eval(), images, "trained")
    specs = [f"performer-{name}:m={m}" for m in (32, 128) for name in ("exp", "hyp", "trig")]
    return depth_errors(subject, specs, draws=Draws(size["draws"]), progress=run.progress)


DEPTH = Figure(
    "paper-fig14",
    title="Error through depth",
    about="""How the error of a softmax estimate accumulates through the layers of a model that was trained with
    softmax, with uniform attention for reference. Expected: the error grows with depth, falls with the number of
    features, and is smaller for `hyp` than for `exp`.""",
    durations=MINUTES | {"full": "an hour on a GPU", "cpu": "10 min"},
    measure=measure_depth,
    draw=lambda records, folder: benchmarks.depth(records),
    scales={
        "full": {"data": "cifar10", "limit": None, "epochs": 30, "depth": 12, "patch": 2, "draws": 15},
        "cpu": {"data": "cifar10", "limit": 10_000, "epochs": 4, "depth": 12, "patch": 4, "draws": 5},
        "smoke": {"data": "digits", "limit": 40, "epochs": 1, "depth": 2, "patch": 2, "draws": 2},
    },
    reduced={"cpu": "64 tokens, 10,000 images, 4 epochs, 5 draws", "smoke": "2 layers of 16 tokens, on digits"},
)

# variant of a record → its attention and number of layers
LAYERED: Mapping[str, tuple[str, int]] = {
    f"{spec}, {layers} layers": (spec, layers)
    for spec in ("softmax", "performer-exp:m=64", "performer-relu:m=64", "identity")
    for layers in (1, 2, 4, 8, 12)
}


def measure_layers(size: Options, folder: Path, run: Reproduction) -> Iterator[Record]:
    shape = {"image_size": size["side"], "patch_size": 4, "dim": size["dim"], "heads": 4, "mlp_dim": 2 * size["dim"]}
    configs = {
        name: model_config(**shape, depth=layers, attention=spec)
        for name, (spec, layers) in LAYERED.items()
        if layers in size["depths"]
    }
    return side_by_side(
        configs,
        baselines={},
        timing=Timing(batch=size["batch"], rounds=size["rounds"], device=pick_device(run.request.device)),
        progress=run.progress,
    )


LAYERS = Figure(
    "paper-fig20-21",
    title="Training steps by the number of layers",
    about="""Training steps of whole models by the number of layers, with v itself as the lower bound. Expected: lines
    whose slopes are the cost of a layer; at 1,024 tokens Performers are close to the bound. (The paper's captions refer
    to a list that is missing.)""",
    durations={"full": "minutes on a GPU", "cpu": "15 min", "smoke": "seconds"},
    measure=measure_layers,
    draw=lambda records, folder: paper_charts.layers(records, LAYERED),
    scales={
        "full": {"depths": (1, 2, 4, 8, 12), "side": 128, "dim": 512, "batch": 16, "rounds": 30},
        "cpu": {"depths": (1, 2, 4), "side": 128, "dim": 128, "batch": 4, "rounds": 15},
        "smoke": {"depths": (1, 2), "side": 16, "dim": 16, "batch": 2, "rounds": 2},
    },
    reduced={"cpu": "1,024 tokens, width 128, 1 to 4 layers", "smoke": "16 tokens, width 16"},
)

AMINO_ACIDS = NotReproducible(
    "paper-fig9",
    title="Frequencies of amino acids",
    about="it is a histogram of the tokens of TrEMBL, which holds proteins, not images",
)
SIMILARITY = NotReproducible(
    "paper-fig13",
    title="Similarity of amino acids, from attention",
    about="it needs a model trained on proteins (36 layers, 16 × 16 TPUs); paper-fig10-11 has maps of an image model",
)
PROTEINS = NotReproducible(
    "paper-fig6-proteins",
    title="TrEMBL and ImageNet64 at the paper's own size",
    about="36 layers of width 512 on proteins took 16 × 16 TPUs; the image analogues are paper-fig6-7 and paper-fig18",
)

register(COSTS, ANGLES, SPEEDS, ERRORS, PREFIX_SUMS, MAPS, DEPTH, LAYERS, AMINO_ACIDS, SIMILARITY, PROTEINS)
