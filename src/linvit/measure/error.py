"""How far an attention is from exact softmax, on the same queries and keys.

Every comparison needs two controls: `uniform`, which ignores q and k, and softmax's own entropy. With sharp or long
queries a random-feature estimate can be further from softmax than uniform attention is, which an error of the output
alone would hide.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from linvit.attention import Attention, create_attention
from linvit.measure.cost import squarest
from linvit.measure.provenance import provenance
from linvit.progress import Progress, ignore
from linvit.randomness import generator
from linvit.records import Record

CONTROL = "uniform"


@torch.no_grad()
def attention_error(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> dict[str, float]:
    """Means over rows (B, H, N) of what tells `attention` from softmax for these q, k, v (normalised, if it has
    qk_norm); in float64.

    attention_error: total variation ½ Σ_j |A_ij − softmax_ij|; 0 is equal, 1 is no overlap.
    attention_entropy: of the row |A_i| divided by its sum, in nats; log N is uniform.
    output_error: ‖A v − softmax v‖ / ‖softmax v‖.
    """
    q, k, v = q.double(), k.double(), v.double()
    queries, keys = attention.normalised(q, k)  # as the attention itself does
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
    if attention.site.causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    exact = torch.softmax(scores, -1)
    matrix = attention.attention_matrix(q, k, mask)
    rows = torch.ones_like(exact[..., 0], dtype=torch.bool) if mask is None else mask[:, None].expand(exact.shape[:-1])
    weights = matrix.abs() / matrix.abs().sum(-1, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
    wanted = (exact @ v)[rows]
    return {
        "attention_error": (0.5 * (matrix - exact).abs().sum(-1))[rows].mean().item(),
        "attention_entropy": torch.special.entr(weights).sum(-1)[rows].mean().item(),
        "output_error": (((matrix @ v)[rows] - wanted).norm() / wanted.norm()).item(),
    }


def measure(
    specs: Iterable[str], *, sigmas: Sequence[float] = (0.5, 1.0, 2.0), tokens: int = 256, heads: int = 4,
    head_dim: int = 64, draws: int = 4, seed: int = 0, progress: Progress = ignore,
) -> Iterator[Record]:  # fmt: skip
    """Errors for q, k ~ N(0, σ²) and v ~ N(0, 1), the same for all; a draw is a new attention with seed + 1.

    A record's value is the mean over draws, `low` and `high` its extremes. The control is measured always.
    """
    if tokens < 2 or draws < 1:
        raise ValueError(f"tokens={tokens} must be at least 2, and draws={draws} at least 1")
    if bad := [sigma for sigma in sigmas if not (math.isfinite(sigma) and sigma > 0)]:
        raise ValueError(f"sigma={bad[0]} must be a positive number")
    specs = list(dict.fromkeys([*specs, CONTROL]))

    def build(spec: str, draw: int) -> Attention:
        grid = squarest(tokens)
        return create_attention(spec, heads=heads, head_dim=head_dim, tokens=tokens, grid=grid, seed=seed + draw).eval()

    for spec in specs:
        build(spec, 0)  # a bad spec is an error before anything is measured
    q, k, v = torch.randn(3, 1, heads, tokens, head_dim, generator=generator("error", seed), dtype=torch.float64)
    common = provenance(q.device, q.dtype)
    total = len(sigmas) * len(specs)
    for i, (sigma, spec) in enumerate(itertools.product(sigmas, specs)):
        progress(i, total, f"{spec} at σ = {sigma:g}")
        found = [attention_error(build(spec, draw), sigma * q, sigma * k, v) for draw in range(draws)]
        for metric in found[0]:
            values = [one[metric] for one in found]
            unit = "nat" if metric == "attention_entropy" else "fraction"
            yield Record(
                metric, statistics.fmean(values), unit, n=draws, **common,
                tags={"attention": spec, "sigma": sigma, "tokens": tokens, "heads": heads, "head_dim": head_dim,
                      "seed": seed, "low": min(values), "high": max(values)},
            )  # fmt: skip
    progress(total, total, "done")
