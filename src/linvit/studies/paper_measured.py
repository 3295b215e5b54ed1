"""The paper's figures that need no training: costs, errors, times and maps; and those that cannot be made here."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import torch

from linvit.attention import attention_cost, create_attention
from linvit.attention.performer import Performer
from linvit.devices import pick_device
from linvit.files import write_atomically
from linvit.measure.angle import mse_ratios
from linvit.measure.error import Draws, feature_errors
from linvit.measure.memory import Limits
from linvit.measure.provenance import provenance
from linvit.measure.race import ROUNDS
from linvit.measure.speed import attention_speed
from linvit.measure.timing import Timing
from linvit.randomness import generator
from linvit.records import Record
from linvit.report import benchmarks
from linvit.site import Site
from linvit.studies import paper_charts
from linvit.studies.declaration import MINUTES, Figure, NotReproducible, Options, register
from linvit.studies.run import Reproduction

RELU_FEATURES = tuple(f"performer-relu:m={m}" for m in (16, 64, 256))
COUNTED = ("softmax", *RELU_FEATURES, "performer-relu:projection=none")
TIMED = ("performer-exp:m=64", "performer-relu:m=64", "performer-relu:projection=none", "linformer:k=64")


LENGTHS = (64, 256, 1024, 4096, 16384, 65536)


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


PROTEINS = NotReproducible(
    "paper-fig6-proteins",
    title="TrEMBL and ImageNet64 at the paper's own size",
    about="36 layers of width 512 on proteins took 16 × 16 TPUs; the image analogues are paper-fig6-7 and paper-fig18",
)

register(COSTS, ANGLES, SPEEDS, ERRORS, PREFIX_SUMS, PROTEINS)
