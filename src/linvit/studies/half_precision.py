"""Report 002's attention in half precision: how often one token's output is not finite, by kernel; nothing is trained.

`linvit reproduce 002-non-finite`: a minute on one core. Expected: GELU first, then ELU, and ReLU never, the order of
the report's NaNs. With one token D = φ(q)·φ(k) + 1e-6, φ of ELU and GELU has both signs, and float16 rounds what is
left of D to a multiple of 6e-8: to zero, or to so little that 1/D is out of range. An exponential overflows without its
clamp, and in float16 with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import torch

from linvit.attention import create_attention
from linvit.attention.literal import AsReported
from linvit.measure.provenance import provenance
from linvit.randomness import generator
from linvit.records import Record
from linvit.registry import parse
from linvit.report.vega import Series, data, panels, tooltips, x_axis, y_names
from linvit.studies.declaration import Figure, Options, register
from linvit.studies.run import Reproduction

STUDY = "002-non-finite"
CHUNK = 20_000  # heads at a time
# as each was trained: GELU and trials 1 to 4 of ELU, ReLU; head_dim
SIGNED = {
    "literal:f=gelu,m=128": 48,
    "literal:f=elu,m=128,alpha=1.0": 48,
    "literal:f=elu,m=128,alpha=0.5": 48,
    "literal:f=elu,m=256,alpha=0.3": 48,
    "literal:f=elu,m=256,alpha=0.25": 96,
    "literal:f=relu,m=256": 60,
}
EXPONENTIAL = {"literal:f=exp,m=256": 36, "literal:f=exp,m=256,clamp=10": 36}
START = 0.577  # standard deviation of q and k in the report's model before training: PyTorch's initial weights
HALVES = ("autocast", "everywhere")


@torch.no_grad()
def non_finite(spec: str, head_dim: int, sigma: float, heads: int) -> Record:
    """Heads of one token with q and k ~ N(0, σ²), of which those are counted whose output is not finite."""
    attention: Any = create_attention(spec, heads=1, head_dim=head_dim, tokens=1)
    source, bad, negative = generator("non-finite", spec, str(sigma)), 0, 0
    for first in range(0, heads, CHUNK):
        q, k = (sigma * torch.randn(2, min(CHUNK, heads - first), 1, 1, head_dim, generator=source)).unbind()
        a, b = (attention.phi(attention.rounded(x)) for x in (q, k))
        d = attention.denominators(a, b)
        bad += int((~attention.mixed(a, b, torch.ones_like(d), d).isfinite()).sum())
        negative += int((d < 0).sum())
    common = provenance(torch.device("cpu"), torch.float32)
    tags = {"attention": spec, "sigma": sigma, "heads": 1, "head_dim": head_dim, "negative": negative / heads}
    return Record("non_finite", bad, "count", heads, **common, tags=tags)


def measure(size: Options, folder: Path, run: Reproduction) -> Iterator[Record]:
    for spec, head_dim in SIGNED.items():
        for half in HALVES:
            for sigma in size["sigmas"]:
                yield non_finite(f"{spec},half={half}", head_dim, sigma, size["heads"])
    for spec, head_dim in EXPONENTIAL.items():
        for ending in ("", ",half=autocast"):
            for sigma in size["large"]:
                yield non_finite(spec + ending, head_dim, sigma, size["heads"] // 10)


def options_of(spec: str) -> AsReported.Options:
    return AsReported.Options(**parse(spec).options)


def name(spec: str) -> str:
    """The kernel as the report calls it."""
    options = options_of(spec)
    ending = f", α = {options.alpha:g}" if options.f == "elu" else ""
    clamp = "" if options.f != "exp" else ", clamped" if options.clamp else ", not clamped"
    return options.f.upper() + ending + clamp


def rounding(spec: str) -> str:
    words = {None: "float32", "autocast": "float16, as autocast", "everywhere": "float16 everywhere"}
    return words[options_of(spec).half]


def draw(records: Sequence[Record], folder: Path) -> alt.HConcatChart:
    rows = [
        {
            "kernel": name(spec := str(record.tags["attention"])),
            "rounding": rounding(spec),
            "at": 1e6 * float(record.value or 0) / record.n,
            "sigma": f"σ = {record.tags['sigma']}",
            "shown": f"{record.value:,.0f} of {record.n:,}",
        }
        for record in records
    ]
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    series = Series(list(dict.fromkeys(row["rounding"] for row in rows)), "rounding")
    x = x_axis("at", "heads of a million", format="~s").scale(type="symlog")
    shown = tooltips("kernel", "rounding", "sigma", "shown")
    charts = {}
    for sigma in dict.fromkeys(row["sigma"] for row in rows):
        here = [row for row in rows if row["sigma"] == sigma]
        points = data(here).mark_point(size=90, filled=True, opacity=0.9)
        names = [kernel for kernel in kernels if any(row["kernel"] == kernel for row in here)]
        charts[sigma] = points.encode(
            x=x, y=y_names("kernel", names), tooltip=shown, **series("color"), **series("shape")
        )
    note = "One token, q and k ~ N(0, σ²); the denominator of GELU and ELU has both signs and may be rounded to zero."
    return panels(charts, "Outputs that are not finite", note, width=170, height=150)


register(
    Figure(
        STUDY,
        title="Outputs that are not finite, by kernel",
        about="""Report 002's attention as printed, with one token, in float16 as its GradScaler runs had it: how many
        heads give an output that is not finite, and an exponential with and without its clamp. Expected: GELU first,
        then ELU, ReLU never, as the report's NaNs; without the clamp an exponential overflows.""",
        durations={"full": "a minute", "cpu": "a minute", "smoke": "seconds"},
        mistakes=("M1",),
        measure=measure,
        draw=draw,
        scales={
            "full": {"sigmas": (0.03, 0.1, START), "large": (30.0, 300.0), "heads": 320_000},
            "cpu": {"sigmas": (0.03, 0.1, START), "large": (30.0, 300.0), "heads": 320_000},
            "smoke": {"sigmas": (0.03,), "large": (300.0,), "heads": 2_000},
        },
        reduced={"smoke": "2,000 heads, one deviation"},
    )
)
