"""How far an attention is from exact softmax, on the same queries and keys: random ones by their deviation
(`random_errors`) and by the number of features (`feature_errors`). `measure.trained` has those of a trained model.

Every comparison needs two controls: `uniform`, which ignores q and k, and softmax's own entropy. With sharp or long
queries a random-feature estimate can be further from softmax than uniform attention is, which an error of the output
alone would hide.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.attention import CONTROL, Attention, attention_cost, size_option
from linvit.attention.base import precise
from linvit.measure.gate import wrong
from linvit.measure.memory import free_memory
from linvit.measure.peers import PIN, Peer, create
from linvit.measure.provenance import Provenance, provenance
from linvit.measure.timing import CPU
from linvit.metrics import size
from linvit.progress import Progress, ignore
from linvit.randomness import generator
from linvit.records import Record, Tag
from linvit.registry import Spec, parse
from linvit.site import Site, squarest

MATRICES = 8  # of tokens × tokens that an error takes at once
UNITS = {"attention_entropy": "nat", "output_mse": ""}  # of all else: fraction
FAMILIES = (
    "performer-exp",
    "performer-exp:projection=iid",
    "performer-trig",
    "performer-trig:projection=iid",
    "performer-hyp",
)


@dataclass(frozen=True)
class Draws:
    """How often random features are drawn, and where attentions are computed. A draw is an attention of its own, with
    the next seed."""

    count: int = 4
    seed: int = 0
    dtype: torch.dtype = torch.float64
    device: torch.device = CPU

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"draws={self.count} must be at least 1")
        if self.device.type == "mps" and self.dtype is torch.float64:
            raise ValueError("dtype=float64: this device has none: choose float32, or device=cpu")

    def attention(self, spec: str, site: Site, draw: int = 0) -> Attention:
        """For inputs of this dtype; parameters are float32 or better."""
        made = create(spec, replace(site, seed=self.seed + draw)).eval()
        return (made.double() if self.dtype is torch.float64 else made).to(self.device)

    @property
    def where(self) -> Provenance:
        return provenance(self.device, self.dtype)

    def tags(self, site: Site) -> dict[str, Tag]:
        return {"tokens": site.tokens, "heads": site.heads, "head_dim": site.head_dim, "seed": self.seed}


@torch.no_grad()
def attention_error(
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, float]:
    """Means over rows (B, H, N) of what tells `attention` from softmax for these q, k, v (normalised, if it has
    qk_norm). It is given them in `dtype`; softmax of what they then are is computed in float64, on the CPU.

    attention_error: total variation ½ Σ_j |A_ij − softmax_ij|; 0 is equal, 1 is no overlap.
    attention_entropy: of the row |A_i| divided by its sum, in nats; log N is uniform.
    output_error: ‖A v − softmax v‖ / ‖softmax v‖. It is all there is of an attention without a matrix.
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    queries, keys = (x.cpu().double() for x in attention.normalised(*precise(q, k)))  # as the attention itself does
    matrix = None if attention.no_matrix else attention.attention_matrix(q, k, mask).cpu().double()
    out = None
    if matrix is None or dtype is not torch.float64:  # what rounding adds shows in the output that it really has
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
    out = matrix @ v if out is None and matrix is not None else out
    assert out is not None
    rows = torch.ones_like(exact[..., 0], dtype=torch.bool) if mask is None else mask[:, None].expand(exact.shape[:-1])
    wanted = (exact @ v)[rows]
    error = {"output_error": ((out[rows] - wanted).norm() / wanted.norm()).item()}
    if matrix is None:
        return error
    return {
        "attention_error": variation(matrix, exact)[rows].mean().item(),
        "attention_entropy": entropy(matrix)[rows].mean().item(),
        **error,
    }


def variation(a: Tensor, b: Tensor) -> Tensor:
    """The total variation between the rows of two matrices."""
    return 0.5 * (a - b).abs().sum(-1)


def entropy(matrix: Tensor) -> Tensor:
    """Of the rows of |A|, scaled to sum to one, in nats."""
    weights = matrix.abs() / matrix.abs().sum(-1, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
    return torch.special.entr(weights).sum(-1)


def random_errors(
    specs: Iterable[str],
    site: Site,
    *,
    sigmas: Sequence[float] = (0.5, 1.0, 2.0),
    draws: Draws = Draws(),
    progress: Progress = ignore,
) -> Iterator[Record]:
    """Errors for q, k ~ N(0, σ²) and v ~ N(0, 1), the same for all. A record's value is the mean over draws, `low` and
    `high` its extremes. The control is measured always."""
    _check(sigmas)
    taken, free = MATRICES * 8 * site.heads * site.tokens**2, free_memory()
    if taken > free // 2:
        raise ValueError(
            f"tokens={site.tokens}: matrices of all pairs would take {size(taken)}, of {size(free)} that are free"
        )
    site, common, tags = _with_grid(site), draws.where, draws.tags(site)
    specs, refused = passing([*specs, CONTROL], site, draws)
    yield from (refusal(spec, why, common, tags) for spec, why in refused.items())
    shape = 3, 1, site.heads, site.tokens, site.head_dim
    q, k, v = torch.randn(shape, generator=generator("error", draws.seed), dtype=torch.float64)
    total = len(sigmas) * len(specs)
    for i, (sigma, spec) in enumerate(itertools.product(sigmas, specs)):
        progress(i, total, f"{spec} at σ = {sigma:g}")
        inputs = [x.to(draws.device, draws.dtype) for x in (sigma * q, sigma * k, v)]
        made = (draws.attention(spec, site, draw) for draw in range(draws.count))
        found = [attention_error(one, *inputs, dtype=draws.dtype) for one in made]
        for metric in found[0]:
            own: dict[str, Tag] = {"attention": spec, "sigma": sigma}
            yield over_draws(metric, [one[metric] for one in found], common, own | tags)
    progress(total, total, "done")


@torch.no_grad()
def feature_errors(
    specs: Iterable[str] = FAMILIES,
    site: Site = Site(1, 16, 4096),  # noqa: B008 (frozen)
    *,
    features: Sequence[int] = (16, 32, 64, 128, 256),
    sigmas: Sequence[float] = (0.5, 1.0),
    draws: Draws = Draws(15),
    progress: Progress = ignore,
) -> Iterator[Record]:
    """`output_mse`, the mean of (Av − softmax v)² over the output, and `output_error`, against the number of features.

    Each draw is a new q, k ~ N(0, σ²), v ~ N(0, 1) and a new Ω, the same inputs for all. The control has no features,
    and one record a σ. The paper's figure 4 is this with its sizes, which are the defaults.
    """
    _check(sigmas, features)
    site, common, tags = _with_grid(site), draws.where, draws.tags(site)
    families: dict[str, tuple[str, int | None]] = {CONTROL: (CONTROL, None)}  # spec → family, features
    families |= {with_features(family, count, site): (family, count) for family in specs for count in features}
    rows, refused = passing(families, site, draws)
    yield from (refusal(spec, why, common, tags) for spec, why in refused.items())
    found: dict[tuple[str, float, str], list[float]] = {}
    for i, (sigma, draw) in enumerate(itertools.product(sigmas, range(draws.count))):
        shape, source = (3, 1, site.heads, site.tokens, site.head_dim), generator("features", draws.seed, draw)
        q, k, v = torch.randn(shape, generator=source, dtype=torch.float64)
        q, k, v = (x.to(draws.dtype) for x in (sigma * q, sigma * k, v))
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        q, k, v = (x.to(draws.device) for x in (q, k, v))
        for j, spec in enumerate(rows):
            done, total = i * len(rows) + j, len(sigmas) * draws.count * len(rows)
            progress(done, total, f"{spec} at σ = {sigma:g}, draw {draw + 1}")
            off = draws.attention(spec, site, draw)(q, k, v).cpu().double() - exact
            found.setdefault((spec, sigma, "output_mse"), []).append(off.square().mean().item())
            found.setdefault((spec, sigma, "output_error"), []).append((off.norm() / exact.norm()).item())
    for sigma, spec, metric in itertools.product(sigmas, rows, ("output_mse", "output_error")):
        family, count = families[spec]
        own: dict[str, Tag] = {"attention": spec, "family": family, "features": count, "sigma": sigma}
        yield over_draws(metric, found[spec, sigma, metric], common, own | tags)
    progress(1, 1, "done")


def over_draws(metric: str, values: Sequence[float], common: Provenance, tags: Mapping[str, Tag]) -> Record:
    """A record of the mean, with the extremes and the standard deviation as tags if they are numbers."""
    spread: dict[str, Tag] = {"low": None, "high": None}
    if all(map(math.isfinite, values)):
        spread = {"low": min(values), "high": max(values)}
        spread |= {"std": statistics.stdev(values)} if len(values) > 1 else {}
    unit = UNITS.get(metric, "fraction")
    return Record(metric, statistics.fmean(values), unit, len(values), **common, tags={**tags, **spread})


def _check(sigmas: Sequence[float], features: Sequence[int] = (1,)) -> None:
    if min(features, default=0) < 1:
        raise ValueError(f"features={min(features, default=0)} must be at least 1")
    if bad := [sigma for sigma in sigmas if not (math.isfinite(sigma) and sigma > 0)]:
        raise ValueError(f"sigma={bad[0]} must be a positive number")


def _with_grid(site: Site) -> Site:
    return site if site.grid is not None else replace(site, grid=squarest(site.tokens - site.prefix))


def passing(specs: Iterable[str], site: Site, draws: Draws) -> tuple[list[str], dict[str, str]]:
    """Those that may be measured, and the peers that do not compute what they say, with the reason. A bad spec is an
    error."""
    refused, every = {}, list(dict.fromkeys(specs))
    shape = 4, 1, site.heads, min(64, site.tokens), site.head_dim
    for spec in every:
        attention = Draws(seed=draws.seed).attention(spec, site)
        inputs = torch.randn(shape, generator=generator("gate", draws.seed), dtype=torch.float64)
        if isinstance(attention, Peer) and (why := wrong(attention, *inputs)):
            refused[spec] = why
    return [spec for spec in every if spec not in refused], refused


def must_pass(specs: Iterable[str], site: Site, seed: int) -> None:
    """A peer that does not compute what it says is an error."""
    for spec, why in passing(specs, site, Draws(seed=seed))[1].items():
        raise ValueError(f"{spec} is not measured: {why}")


def refusal(spec: str, why: str, common: Provenance, tags: Mapping[str, Tag]) -> Record:
    """A record that says so."""
    return Record("attention_error", None, "fraction", 0, **common, tags={**tags, "attention": spec, "refused": why})


def oddities(spec: str, head_dim: int) -> tuple[bool, bool]:
    """Whether the rows of its matrix are signed or do not sum to one, so that half the absolute difference to softmax's
    is no total variation; and whether it has weights, which are untrained here. Looked up with a few tokens."""
    given = parse(spec)
    options = {
        name: value for name, value in given.options.items() if name not in ("dwc", "exact_cls", "gate", "cpe", "rope")
    }
    tokens = max(64, int(options.get("k") or 0))
    site = Site(1, head_dim, tokens, squarest(tokens))
    try:
        made = Draws().attention(str(Spec(given.name, options)), site)
    except ValueError:  # made for more tokens
        return False, False
    q, k = 2 * torch.randn(2, 1, 1, tokens, head_dim, generator=generator("odd", 0), dtype=torch.float64)
    odd = False
    if not made.no_matrix:
        with torch.no_grad():
            matrix = made.attention_matrix(q, k)
        odd = bool((matrix < -1e-9).any() or ((matrix.sum(-1) - 1).abs() > 1e-3).any())
    return odd, any(True for _ in made.parameters())


def with_features(spec: str, features: int, site: Site) -> str:
    """The spec with this many features: m where a row of Ω makes one, half as many where it makes two (hyp, trig)."""
    given = parse(spec)
    peer = PIN in given.name
    if (option := create(spec, site).size_option if peer else size_option(spec)) is None:
        raise ValueError(f"'{spec}' has no number of features: neither m nor k is an option of it")
    two = Spec(given.name, {**given.options, option: 2})
    if features % (each := 1 if peer else attention_cost(two, site).features // 2):
        raise ValueError(f"features={features} is not a multiple of {each}, which a row of {spec} makes")
    return str(Spec(given.name, {**given.options, option: features // each}))
