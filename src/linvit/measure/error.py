"""How far an attention is from exact softmax, on the same queries and keys: random ones (`measure`), also with more and
more features (`over_features`). `measure.trained` has those of a trained model.

Every comparison needs two controls: `uniform`, which ignores q and k, and softmax's own entropy. With sharp or long
queries a random-feature estimate can be further from softmax than uniform attention is, which an error of the output
alone would hide.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.attention import Attention, Site
from linvit.attention.base import precise
from linvit.attention.performer import Performer
from linvit.measure.cost import squarest
from linvit.measure.gate import wrong
from linvit.measure.memory import free_memory
from linvit.measure.peers import Peer, create
from linvit.measure.provenance import Provenance, provenance
from linvit.metrics import size
from linvit.progress import Progress, ignore
from linvit.randomness import generator
from linvit.records import Record, Tag
from linvit.registry import Spec, parse

CONTROL = "uniform"
CPU = torch.device("cpu")
MATRICES = 8  # of tokens × tokens that an error takes at once
UNITS = {"attention_entropy": "nat", "output_mse": ""}  # of all else: fraction
FAMILIES = ("performer-exp", "performer-exp:projection=iid", "performer-trig", "performer-trig:projection=iid",
            "performer-hyp")  # fmt: skip


@torch.no_grad()
def attention_error(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, float]:  # fmt: skip
    """Means over rows (B, H, N) of what tells `attention` from softmax for these q, k, v (normalised, if it has
    qk_norm). It is given them in `dtype`; softmax of what they then are is computed in float64, on the CPU.

    attention_error: total variation ½ Σ_j |A_ij − softmax_ij|; 0 is equal, 1 is no overlap.
    attention_entropy: of the row |A_i| divided by its sum, in nats; log N is uniform.
    output_error: ‖A v − softmax v‖ / ‖softmax v‖.
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    queries, keys = (x.cpu().double() for x in attention.normalised(*precise(q, k)))  # as the attention itself does
    matrix, out = attention.attention_matrix(q, k, mask).cpu().double(), None
    if dtype is not torch.float64:  # what rounding adds shows in the output that it really has
        out = attention(q, k, v, mask).cpu().double()
        if attention.dwc is not None:  # what it adds is no attention
            out = out - attention.dwc(*precise(v)).cpu().double()
    v, mask = v.cpu().double(), mask if mask is None else mask.cpu()
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
    if attention.site.causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    exact = torch.softmax(scores, -1)
    out = matrix @ v if out is None else out
    rows = torch.ones_like(exact[..., 0], dtype=torch.bool) if mask is None else mask[:, None].expand(exact.shape[:-1])
    weights = matrix.abs() / matrix.abs().sum(-1, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
    wanted = (exact @ v)[rows]
    return {
        "attention_error": (0.5 * (matrix - exact).abs().sum(-1))[rows].mean().item(),
        "attention_entropy": torch.special.entr(weights).sum(-1)[rows].mean().item(),
        "output_error": ((out[rows] - wanted).norm() / wanted.norm()).item(),
    }


def measure(
    specs: Iterable[str], *, sigmas: Sequence[float] = (0.5, 1.0, 2.0), tokens: int = 256, heads: int = 4,
    head_dim: int = 64, draws: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64,
    device: torch.device = CPU, progress: Progress = ignore,
) -> Iterator[Record]:  # fmt: skip
    """Errors for q, k ~ N(0, σ²) and v ~ N(0, 1), the same for all; a draw is a new attention with seed + 1.

    A record's value is the mean over draws, `low` and `high` its extremes. The control is measured always.
    """
    _check(sigmas, tokens=(tokens, 1), heads=(heads, 1), head_dim=(head_dim, 1), draws=(draws, 1))
    taken, free = MATRICES * 8 * heads * tokens**2, free_memory(torch.device("cpu"))
    if taken > free // 2:
        raise ValueError(
            f"tokens={tokens}: matrices of all pairs would take {size(taken)}, of {size(free)} that are free"
        )
    specs = list(dict.fromkeys([*specs, CONTROL]))
    site = {"heads": heads, "head_dim": head_dim, "tokens": tokens, "grid": squarest(tokens)}
    common = provenance(device, dtype)
    tags: dict[str, Tag] = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "seed": seed}
    wrong_ones = refusals(specs, seed, site)
    for spec, why in wrong_ones.items():
        yield refused(spec, why, common, tags)
    specs = [spec for spec in specs if spec not in wrong_ones]
    q, k, v = torch.randn(3, 1, heads, tokens, head_dim, generator=generator("error", seed), dtype=torch.float64)
    total = len(sigmas) * len(specs)
    for i, (sigma, spec) in enumerate(itertools.product(sigmas, specs)):
        progress(i, total, f"{spec} at σ = {sigma:g}")
        inputs = [x.to(device, dtype) for x in (sigma * q, sigma * k, v)]
        found = [attention_error(drawn(spec, seed + draw, site, dtype, device), *inputs, dtype=dtype)
                 for draw in range(draws)]  # fmt: skip
        for metric in found[0]:
            own: dict[str, Tag] = {"attention": spec, "sigma": sigma}
            yield over_draws(metric, [one[metric] for one in found], common, own | tags)
    progress(total, total, "done")


def over_draws(metric: str, values: Sequence[float], common: Provenance, tags: dict[str, Tag]) -> Record:
    """A record of the mean, with the extremes as tags if they are numbers."""
    finite = all(map(math.isfinite, values))
    spread = {"low": min(values), "high": max(values)} if finite else {"low": None, "high": None}
    return Record(metric, statistics.fmean(values), UNITS.get(metric, "fraction"), len(values), **common,
                  tags=tags | spread)  # fmt: skip


def _check(sigmas: Sequence[float] = (), **sizes: tuple[int, int]) -> None:
    for name, (value, least) in sizes.items():
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    if bad := [sigma for sigma in sigmas if not (math.isfinite(sigma) and sigma > 0)]:
        raise ValueError(f"sigma={bad[0]} must be a positive number")


def drawn(
    spec: str, seed: int, site: dict[str, Any], dtype: torch.dtype = torch.float64, device: torch.device = CPU
) -> Attention:
    """The attention for inputs of this dtype, its random features by the seed; parameters are float32 or better."""
    made = create(spec, **{**site, "seed": seed}).eval()
    return (made.double() if dtype is torch.float64 else made).to(device)


def refusals(specs: Iterable[str], seed: int, site: dict[str, Any]) -> dict[str, str]:
    """The peers that do not compute what they say, and why. A bad spec is an error."""
    found = {}
    for spec in specs:
        attention = drawn(spec, seed, site)
        shape = 4, 1, site["heads"], min(64, site["tokens"]), site["head_dim"]
        inputs = torch.randn(shape, generator=generator("gate", seed), dtype=torch.float64)
        if isinstance(attention, Peer) and (why := wrong(attention, *inputs)):
            found[spec] = why
    return found


def oddities(spec: str, head_dim: int) -> tuple[bool, bool]:
    """Whether the rows of its matrix are signed or do not sum to one, so that half the absolute difference to softmax's
    is no total variation; and whether it has weights, which nobody has trained here. Looked up with a few tokens."""
    given = parse(spec)
    options = {name: value for name, value in given.options.items() if name not in ("dwc", "exact_cls")}
    tokens = max(64, int(options.get("k") or 0))
    site = {"heads": 1, "head_dim": head_dim, "tokens": tokens, "grid": squarest(tokens)}
    try:
        made = drawn(str(Spec(given.name, options)), 0, site)
    except ValueError:  # made for more tokens
        return False, False
    q, k = 2 * torch.randn(2, 1, 1, tokens, head_dim, generator=generator("odd", 0), dtype=torch.float64)
    with torch.no_grad():
        matrix = made.attention_matrix(q, k)
    odd = bool((matrix < -1e-9).any() or ((matrix.sum(-1) - 1).abs() > 1e-3).any())
    return odd, any(True for _ in made.parameters())


def must_be_right(specs: Iterable[str], seed: int, site: Site) -> None:
    """A peer that does not compute what it says is an error."""
    for spec, why in refusals(specs, seed, asdict(site)).items():
        raise ValueError(f"{spec} is not measured: {why}")


def refused(spec: str, why: str, common: Provenance, tags: dict[str, Tag]) -> Record:
    """A record that says so."""
    told: dict[str, Tag] = {"attention": spec, "refused": why}
    return Record("attention_error", None, "fraction", 0, **common, tags=tags | told)


def with_features(spec: str, features: int, **site: Any) -> str:
    """The spec with so many features: m where a row of Ω makes one, half as many where it makes two (hyp, trig)."""
    given = parse(spec)
    for option in ("m", "k"):
        try:
            probe = create(Spec(given.name, {**given.options, option: 2}), **site)
        except ValueError as error:
            if f"has no option '{option}'" not in str(error):
                raise
            continue
        each = probe.kernel.width // 2 if isinstance(probe, Performer) else 1
        if features % each:
            raise ValueError(f"features={features} is not a multiple of {each}, which a row of {spec} makes")
        return str(Spec(given.name, {**given.options, option: features // each}))
    raise ValueError(f"'{spec}' has no number of features: neither m nor k is an option of it")


@torch.no_grad()
def over_features(
    specs: Iterable[str] = FAMILIES, *, features: Sequence[int] = (16, 32, 64, 128, 256),
    sigmas: Sequence[float] = (0.5, 1.0), tokens: int = 4096, heads: int = 1, head_dim: int = 16, draws: int = 15,
    seed: int = 0, dtype: torch.dtype = torch.float64, device: torch.device = CPU, progress: Progress = ignore,
) -> Iterator[Record]:  # fmt: skip
    """`output_mse`, the mean of (Av − softmax v)² over the output, and `output_error`, against the number of features.

    Each draw is a new q, k ~ N(0, σ²), v ~ N(0, 1) and a new Ω, the same inputs for all. The control has no features,
    and one record a σ. The paper's figure 4 is this with its sizes, which are the defaults.
    """
    _check(sigmas, tokens=(tokens, 2), heads=(heads, 1), head_dim=(head_dim, 1), draws=(draws, 1))
    _check(features=(min(features, default=0), 1))
    site = {"heads": heads, "head_dim": head_dim, "tokens": tokens, "grid": squarest(tokens)}
    rows: list[tuple[str, str, int | None]] = [(CONTROL, CONTROL, None)]  # family, spec, features
    rows += [(family, with_features(family, count, **site), count) for family in specs for count in features]
    common = provenance(device, dtype)
    tags: dict[str, Tag] = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "seed": seed}
    wrong_ones = refusals([spec for _, spec, _ in rows], seed, site)
    for spec, why in wrong_ones.items():
        yield refused(spec, why, common, tags)
    rows = [row for row in rows if row[1] not in wrong_ones]
    found: dict[tuple[str, float, str], list[float]] = {}
    for i, (sigma, draw) in enumerate(itertools.product(sigmas, range(draws))):
        source = generator("features", seed, draw)
        q, k, v = torch.randn(3, 1, heads, tokens, head_dim, generator=source, dtype=torch.float64)
        q, k, v = (x.to(dtype) for x in (sigma * q, sigma * k, v))
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        q, k, v = (x.to(device) for x in (q, k, v))
        for j, (_, spec, _) in enumerate(rows):
            progress(i * len(rows) + j, len(sigmas) * draws * len(rows), f"{spec} at σ = {sigma:g}, draw {draw + 1}")
            off = drawn(spec, seed + draw, site, dtype, device)(q, k, v).cpu().double() - exact
            found.setdefault((spec, sigma, "output_mse"), []).append(off.square().mean().item())
            found.setdefault((spec, sigma, "output_error"), []).append((off.norm() / exact.norm()).item())
    for sigma, (family, spec, count), metric in itertools.product(sigmas, rows, ("output_mse", "output_error")):
        own: dict[str, Tag] = {"attention": spec, "family": family, "features": count, "sigma": sigma}
        yield over_draws(metric, found[spec, sigma, metric], common, own | tags)
    progress(1, 1, "done")
