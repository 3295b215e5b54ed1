"""Positive against trigonometric features, by the angle between two vectors and their length (the paper's figure 2).

For x and y of length l at an angle φ, both estimate softmax's kernel e^{x·y} with m independent rows. Their mean
squared errors have closed forms, and so has the ratio of them, which does not depend on m:

    r(φ, l) = MSE_trig / MSE_pos = ½ e^{−4l² cos φ} (1 − e^{−2l²(1−cos φ)})² / (1 − e^{−2l²(1+cos φ)})

Above one, positive features are the better ones. A row makes two trigonometric features and one positive one: for as
many features instead of rows, r is twice that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from linvit.kernels import create_kernel
from linvit.measure.provenance import provenance
from linvit.progress import Progress, ignore
from linvit.records import Record, Tag

MAX_SQUARE = 2.0  # of ‖x + y‖²: beyond, a few thousand draws do not tell a mean squared error, its tail is too heavy
LENGTHS = tuple(i / 10 for i in range(1, 21))
PARTS = 16  # of the draws, whose spread is the estimate's own


def ratio(angle: float, length: float) -> float:
    """The closed form."""
    square, cosine = length**2, math.cos(angle)
    close, far = -math.expm1(-2 * square * (1 + cosine)), -math.expm1(-2 * square * (1 - cosine))
    return 0.5 * math.exp(-4 * square * cosine) * far**2 / close if close > 0 else math.inf


def mse_ratios(
    *,
    lengths: Sequence[float] = LENGTHS,
    angles: int = 64,
    slices: Sequence[float] = (0.5, 1.0, 1.5, 2.0),
    rows: int = 2**18,
    seed: int = 0,
    progress: Progress = ignore,
) -> Iterator[Record]:
    """`mse_ratio` at so many angles from 0 to π (that one left out) and each length, by the closed form; and, of the
    lengths in `slices`, at about eight of these angles where it can be, by Monte Carlo over so many rows, through the
    kernels themselves.

    A Monte-Carlo record has the 95 % interval of its mean as `low` and `high`.
    """
    lengths = sorted({*lengths, *slices})
    if bad := [length for length in lengths if not (math.isfinite(length) and length > 0)]:
        raise ValueError(f"length={bad[0]} must be a positive number")
    for name, value, least in (("angles", angles, 2), ("rows", rows, 2 * PARTS)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    common, every = provenance(torch.device("cpu"), torch.float64), max(1, angles // 8)
    for i, length in enumerate(lengths):
        for j in range(angles):
            progress(i * angles + j, len(lengths) * angles, f"length {length:g}")
            angle = math.pi * j / angles
            tags: dict[str, Tag] = {"angle": angle, "length": length}
            yield Record("mse_ratio", ratio(angle, length), "×", **common, tags=tags | {"by": "closed form"})
            if length in slices and j and j % every == 0 and 2 * length**2 * (1 + math.cos(angle)) <= MAX_SQUARE:
                value, half = _estimate(angle, length, rows, seed + j)
                spread = {"low": value - half, "high": value + half, "seed": seed}
                yield Record("mse_ratio", value, "×", rows, **common, tags=tags | spread | {"by": "Monte Carlo"})
    progress(1, 1, "done")


def _estimate(angle: float, length: float, rows: int, seed: int) -> tuple[float, float]:
    """MSE_trig / MSE_pos over so many rows, each an estimate of its own, and half of its 95 % interval."""
    x, y = length * torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
    errors = [_square_errors(kernel, x, y, rows, seed).view(PARTS, -1).mean(1) for kernel in ("trig", "exp")]
    trig, positive = errors
    value = (trig.mean() / positive.mean()).item()
    # of a ratio of means, by the delta method, over parts of the draws
    residual = (trig - value * positive) / positive.mean()
    return value, 2.13 * (residual.std() / math.sqrt(PARTS)).item()  # Student's t of 15 degrees of freedom


def _square_errors(kernel: str, x: Tensor, y: Tensor, rows: int, seed: int) -> Tensor:
    """(φ(x)·φ(y) − e^{x·y})² of each row of Ω alone."""
    made = create_kernel(f"{kernel}:m={rows},projection=iid", head_dim=2, seed=seed).double()
    products = rows * made.phi(x) * made.phi(y)
    if kernel == "trig":  # a row's sine and cosine
        products = products.view(2, rows).sum(0)
    return (products[: rows - rows % PARTS] - (x @ y).exp()).square()
