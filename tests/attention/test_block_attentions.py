"""`rala`, `mhla` and `vit3` against their definitions, written out token by token in float64."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import cases
import pytest
import torch
from cases import build, inputs, rounding
from torch import Tensor
from torch.func import functional_call

from linvit.attention import attention_cost, regridded
from linvit.attention.accelerated import accelerated_attention
from linvit.attention.base import Attention
from linvit.attention.measured import measured_cost
from linvit.attention.mhla import Mhla
from linvit.attention.performer import Performer
from linvit.conversion.kernels import fit_kernels
from linvit.conversion.linearize import linearize
from linvit.measure.error import Draws, attention_error, oddities, random_errors
from linvit.measure.maps import model_maps
from linvit.measure.trained import Subject, attention_maps, layer_errors, trained_error
from linvit.models import VisionTransformer, create_model
from linvit.progress import ignore
from linvit.site import Site

HEADS, HEAD_DIM = cases.SITE["heads"], cases.SITE["head_dim"]


def made(spec: str, grid: tuple[int, int], prefix: int = 0, **site: int) -> Attention:
    return build(spec, tokens=prefix + grid[0] * grid[1], grid=grid, prefix=prefix, **site)


def holes(tokens: int) -> Tensor:
    """A mask with scattered tokens missing, and in one sequence all of the first half."""
    mask = torch.rand(cases.BATCH, tokens, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[1, : tokens // 2] = False
    mask[:, -1] = True
    return mask


# rala


def rala(attention: Attention, head: int, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """One sequence of one head: (N, d), keep (N)."""
    f_q, f_k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    mean = f_q[keep].mean(0)
    scores = (f_k @ mean / HEAD_DIM**0.5).masked_fill(~keep, -torch.inf)
    alpha = keep.sum() * scores.softmax(0)
    weights = f_q @ (alpha[:, None] * f_k).T
    return weights / weights.sum(-1, keepdim=True) @ v


def test_rala_rows_are_averages_of_rank_d():
    attention, (q, k, _) = made("rala", (7, 5), 2), inputs(tokens=37)
    matrix = attention.attention_matrix(q, k)
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]), rtol=0, atol=1e-12)
    assert (torch.linalg.matrix_rank(matrix, rtol=1e-10) == HEAD_DIM).all()


def test_rala_weights_keys_by_the_mean_query():
    """q = 0 has φ = 1 in every feature: a key counts Σφ(k), and α is e to the power of that over √d."""
    attention, (q, k, v) = build("rala"), inputs()
    f_k = torch.where(k > 0, k + 1, k.exp())
    weights = f_k.sum(-1) * (f_k.sum(-1) / HEAD_DIM**0.5).exp()
    expected = (weights / weights.sum(-1, keepdim=True))[:, :, None] @ v
    torch.testing.assert_close(attention(torch.zeros_like(q), k, v), expected.expand_as(v), rtol=1e-12, atol=1e-12)


# mhla


def places(attention: Attention, tokens: int) -> tuple[Tensor, Tensor]:
    """The block of each token and its place there; those of the prefix are in block 0, and nowhere."""
    assert isinstance(attention, Mhla)
    grid, first = attention.site.grid, attention.site.prefix
    assert grid is not None
    tall, wide = (math.ceil(side / round(side**0.5)) for side in grid)
    token = torch.arange(tokens - first)
    row, column = token // grid[1], token % grid[1]
    block = min(1, first) + row // tall * math.ceil(grid[1] / wide) + column // wide
    place = row % tall * wide + column % wide
    return torch.cat([torch.zeros(first, dtype=torch.long), block]), torch.cat([torch.full((first,), -1), place])


def mhla(attention: Attention, head: int, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    assert isinstance(attention, Mhla)
    block, place = places(attention, len(q))
    f_q, f_k = q.relu() + 1e-6, (k.relu() + 1e-6) * keep[:, None]
    m = (1 + attention.get_parameter("mix").exp()).log()
    weights = m[block][:, block] * (f_q @ f_k.T)  # of each pair
    if not attention.released:
        return weights / weights.sum(-1, keepdim=True) @ v
    rows = []
    for i, row in enumerate(weights):
        if place[i] < 0:
            rows.append(row / row.sum())
            continue
        others = [t for t in range(len(q)) if place[t] == place[i] and keep[t]]
        total = sum(m[block[i], block[t]] * (f_q[t] @ f_k[block == block[t]].sum(0)) for t in others)
        total = total + row[place < 0].sum()
        rows.append(row / total if others else torch.zeros_like(row))
    return torch.stack(rows) @ v


def with_weights(spec: str, m: Tensor | float, grid: tuple[int, int], prefix: int) -> Mhla:
    attention = made(spec, grid, prefix).double()
    assert isinstance(attention, Mhla)
    with torch.no_grad():
        attention.get_parameter("mix").copy_(torch.as_tensor(m, dtype=torch.float64).expm1().log())
    return attention


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q.relu() + 1e-6) @ (k.relu() + 1e-6).transpose(-1, -2)
    return weights / weights.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize(("grid", "prefix"), [((8, 12), 0), ((7, 5), 2)])
def test_mhla_with_equal_weights_is_linear_attention(grid, prefix):
    tensors = inputs(tokens=prefix + grid[0] * grid[1])
    attention = with_weights("mhla", 1.0, grid, prefix)
    torch.testing.assert_close(attention(*tensors), linear_attention(*tensors), rtol=0, atol=1e-12)
    one = made("mhla:blocks=1,init=exp", grid, prefix).double()
    torch.testing.assert_close(one(*tensors), linear_attention(*tensors), rtol=0, atol=1e-7)  # M = 1 in float32


@pytest.mark.parametrize("normaliser", ["paper", "released"])
def test_mhla_with_the_identity_is_linear_attention_inside_blocks(normaliser):
    """Both normalisers agree there."""
    tensors = inputs(tokens=2 + 7 * 5)
    attention = made(f"mhla:normaliser={normaliser}", (7, 5), 2).double()
    attention = with_weights(f"mhla:normaliser={normaliser}", torch.eye(len(attention.get_parameter("mix"))), (7, 5), 2)  # type: ignore[arg-type]
    block, _ = places(attention, 37)
    out = attention(*tensors)
    assert len(block.unique()) == 1 + 3 * 2
    for b in block.unique():
        inside = linear_attention(*(x[:, :, block == b] for x in tensors))
        torch.testing.assert_close(out[:, :, block == b], inside, rtol=0, atol=1e-12)


def test_mhla_rows_and_rank():
    """The paper's rows sum to one, the released code's do not; the rank is above that of linear attention."""
    q, k, _ = inputs(tokens=65)
    paper, released = (
        made(f"mhla:normaliser={n},init=linear", (8, 8), 1).attention_matrix(q, k) for n in ("paper", "released")
    )
    assert (paper >= 0).all()
    torch.testing.assert_close(paper.sum(-1), torch.ones_like(paper[..., 0]), rtol=0, atol=1e-6)
    sums = released.sum(-1)[:, :, 1:]
    assert sums.min() < 0.9
    assert sums.max() > 1.1
    torch.testing.assert_close(released[:, :, :1], paper[:, :, :1])
    assert (torch.linalg.matrix_rank(paper.double(), rtol=1e-6) > 3 * HEAD_DIM).all()


def test_mhla_cuts_the_grid():
    """√side blocks of each side, as published for 16 × 16 tokens; at most so many where a number is given."""
    for spec, grid, cut in [
        ("mhla", (16, 16), (4, 4, 4, 4)),
        ("mhla", (14, 14), (4, 4, 4, 4)),
        ("mhla", (56, 9), (7, 3, 8, 3)),
        ("mhla", (1, 1), (1, 1, 1, 1)),
        ("mhla:blocks=4", (56, 5), (4, 3, 14, 2)),
        ("mhla:blocks=1", (3, 5), (1, 1, 3, 5)),
        ("mhla:blocks=99", (3, 5), (3, 5, 1, 1)),
    ]:
        attention = made(spec, grid)
        assert isinstance(attention, Mhla)
        assert attention.cut == cut
    assert attention_cost("mhla", Site(1, 8, 256, (16, 16))).macs == 3 * 256 * 8 * 8


def test_mhla_starts_from_distances():
    for init, far in (("cos", math.cos(math.pi / 4)), ("linear", 0.0), ("exp", math.exp(-(18**0.5) / 3))):
        attention = made(f"mhla:init={init}", (16, 16), 1)
        assert isinstance(attention, Mhla)
        m = torch.nn.functional.softplus(attention.get_parameter("mix").detach())
        assert torch.allclose(m[0], torch.ones(17))
        assert torch.allclose(m[:, 0], torch.ones(17))
        image = m[1:, 1:]
        torch.testing.assert_close(image.mean(0), torch.ones(16), rtol=0, atol=2e-3)
        ratio = image[15, 0] / image[0, 0]  # of opposite corners, in one column
        assert ratio == pytest.approx(far, abs=1e-2)


def test_mhla_on_another_grid():
    """Weights of pairs of blocks are a picture of a picture: what is constant or linear in places stays so."""
    old, new = made("mhla", (9, 16), 1).site, made("mhla", (25, 36), 1).site
    assert regridded("mhla", {"mix": torch.ones(13, 13)}, old, old)["mix"].shape == (13, 13)
    same = regridded("mhla", {"mix": torch.full((13, 13), 0.7)}, old, new)["mix"]
    torch.testing.assert_close(same, torch.full((31, 31), 0.7))
    mix = torch.zeros(13, 13)
    mix[0, 0], mix[0, 1:], mix[1:, 0] = 5.0, 2.0, 3.0
    mix[1:, 1:] = torch.arange(3.0).repeat_interleave(4)[:, None]  # by the row of the query's block
    moved = regridded("mhla", {"mix": mix, "other": mix}, old, new)
    assert moved["other"] is mix
    assert moved["mix"][0, 0] == 5
    torch.testing.assert_close(moved["mix"][0, 1:], torch.full((30,), 2.0))
    torch.testing.assert_close(moved["mix"][1:, 0], torch.full((30,), 3.0))
    image = moved["mix"][1:, 1:].unflatten(0, (5, 6))
    at = ((torch.arange(5) + 0.5) * 3 / 5 - 0.5).clamp(0, 2)
    torch.testing.assert_close(image, at[:, None, None].expand_as(image), rtol=0, atol=1e-5)
    made("mhla", (25, 36), 1).load_state_dict({"mix": moved["mix"]})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mhla:blocks=0", "blocks=0 must be at least 1"),
        ("mhla:normaliser=other", "normaliser"),
        ("mhla:init=other", "init"),
    ],
)
def test_impossible_mhla(spec, message):
    with pytest.raises(ValueError, match=message):
        build(spec)
    with pytest.raises(ValueError, match=r"17 tokens do not fit grid=\(3, 5\) with prefix=1"):
        made("mhla", (3, 5), 1)(*inputs(tokens=17))


def test_mhla_without_a_grid_has_runs_of_tokens():
    tensors = inputs(tokens=29)
    row, none = made("mhla", (1, 29)), build("mhla", tokens=29)
    assert torch.equal(row(*tensors), none(*tensors))


# vit3


def vit3(attention: Attention, head: int, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """One step of gradient descent, with the gradient that autograd finds."""
    weights = dict(attention.named_parameters())
    if head == len(weights["inner"]):
        inner, w = [weights["filters"]], partial(convolved, attention)
    else:
        inner, w = list(weights["inner"][head].chunk(2, -1)), inner_model
    loss = -(w(k, *inner) * v)[keep].sum() / keep.sum() / 3
    gradients = torch.autograd.grad(loss, inner, create_graph=True)
    axes = [(1, 2) if g.ndim == 3 else 0 for g in gradients]
    steps = [g / (g.norm(dim=axis, keepdim=True) + 1) for g, axis in zip(gradients, axes, strict=True)]
    return w(q, *(old - step for old, step in zip(inner, steps, strict=True)))


def inner_model(x: Tensor, w_1: Tensor, w_2: Tensor) -> Tensor:
    return (x @ w_1) * torch.nn.functional.silu(x @ w_2)


def convolved(attention: Attention, x: Tensor, filters: Tensor) -> Tensor:
    """Token by token: each of the image sees the 3 × 3 around it, one of the prefix itself."""
    grid, first = attention.site.grid, attention.site.prefix
    assert grid is not None
    out = []
    for token in range(len(x)):
        if token < first:
            out.append(filters[:, 1, 1] * x[token])
            continue
        row, column = divmod(token - first, grid[1])
        total = torch.zeros_like(x[0])
        for i, j in product((-1, 0, 1), repeat=2):
            other = first + (row + i) * grid[1] + column + j
            if row + i >= 0 and 0 <= column + j < grid[1] and other < len(x):
                total = total + filters[:, 1 + i, 1 + j] * x[other]
        out.append(total)
    return torch.stack(out)


def test_vit3_without_values_is_the_inner_model():
    attention, (q, k, v) = made("vit3", (3, 4), 1).double(), inputs()
    w_1, w_2 = attention.get_parameter("inner").chunk(2, -1)
    torch.testing.assert_close(attention(q, k, 0 * v), inner_model(q, w_1, w_2), rtol=0, atol=1e-14)
    assert not torch.allclose(attention(q, k, v), inner_model(q, w_1, w_2), atol=1e-4)


@pytest.mark.parametrize("times", [2, 5])
def test_vit3_neither_order_nor_number_of_tokens_matters(times):
    q, k, v = inputs()
    attention, longer = build("vit3").double(), build("vit3", tokens=13 * times).double()
    out = attention(q, k, v)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(attention(q, k[:, :, order], v[:, :, order]), out, rtol=0, atol=1e-13)
    repeated = longer(*(x.repeat(1, 1, times, 1) for x in (q, k, v)))
    torch.testing.assert_close(repeated, out.repeat(1, 1, times, 1), rtol=0, atol=1e-13)


def test_vit3_is_not_linear_in_v():
    attention, (q, k, v) = build("vit3").double(), inputs()
    base, once, twice = (attention(q, k, factor * v) for factor in (0, 1, 2))
    assert not torch.allclose(twice - base, 2 * (once - base), rtol=1e-2)


def test_vit3_with_a_convolution_is_the_other_heads_and_one_more():
    """The published model: one head more than its inner models of products."""
    tensors, site = inputs(tokens=13, heads=4), {"grid": (3, 4), "prefix": 1, "tokens": 13}
    plain, both = build("vit3", **site).double(), build("vit3:conv=true", heads=4, **site).double()
    shapes = {name: tuple(p.shape) for name, p in both.named_parameters()}
    assert shapes == {"inner": (3, 7, 14), "filters": (7, 3, 3)}
    assert torch.equal(plain.get_parameter("inner"), both.get_parameter("inner"))
    out = both(*tensors)
    torch.testing.assert_close(out[:, :3], plain(*(x[:, :3] for x in tensors)), rtol=0, atol=1e-14)
    q, k, v = tensors
    untrained = convolved(both, q[1, 3], both.get_parameter("filters"))
    torch.testing.assert_close(both(q, k, 0 * v)[1, 3], untrained, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("site", "message"),
    [({}, "conv=true .* give grid="), ({"heads": 1, "grid": (3, 4), "prefix": 1}, "last of several heads")],
)
def test_impossible_vit3(site, message):
    with pytest.raises(ValueError, match=message):
        build("vit3:conv=true", **site)
    with pytest.raises(ValueError, match=r"16 image tokens do not fit grid=\(3, 5\)"):
        made("vit3:conv=true", (3, 5), 1)(*inputs(tokens=17))


def test_vit3_starts_small_and_differs_by_layer_and_seed():
    large = build("vit3", head_dim=61).get_parameter("inner")
    assert large.std().item() == pytest.approx(0.02, rel=0.05)
    for other in ({"layer": 1}, {"seed": 1}):
        assert not torch.equal(build("vit3", head_dim=61, **other).get_parameter("inner"), large)


# all of them

ORACLES = {"rala": rala, "mhla": mhla, "vit3": vit3}
SPECS = ["rala", "mhla", "mhla:normaliser=released", "vit3", "vit3:conv=true"]
# blocks that divide the grid, that do not, an odd grid, one row, one token of the image
PLACES = [((4, 6), 0), ((5, 7), 1), ((7, 3), 2), ((1, 11), 1), ((1, 1), 2)]
every_spec = pytest.mark.parametrize("spec", SPECS)


def oracle(spec: str, attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Sequence by sequence and head by head."""
    keep = torch.ones(len(q), q.shape[2], dtype=torch.bool) if mask is None else mask
    q, k, v = (x.masked_fill(~keep[:, None, :, None], 0.0) for x in (q, k, v))
    each = ORACLES[spec.partition(":")[0]]
    rows = []
    for b in range(len(q)):
        rows.append(torch.stack([each(attention, h, q[b, h], k[b, h], v[b, h], keep[b]) for h in range(HEADS)]))
    return torch.stack(rows)


def compare(spec: str, attention: Attention, tokens: int, mask: Tensor | None) -> None:
    """Outputs and gradients of what is kept, for q, k, v and all weights."""
    source = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in attention.parameters():  # away from where they start
            p.add_(0.3 * torch.randn(p.shape, generator=source, dtype=p.dtype))
    weights, found = inputs(5, tokens=tokens)[2], []
    if mask is not None:
        weights = weights * mask[:, None, :, None]
    for way in (attention, lambda *tensors: oracle(spec, attention, *tensors)):
        tensors = inputs(tokens=tokens, grad=True)
        out = way(*tensors, mask)
        wanted = [*tensors, *attention.parameters()]
        gradients = torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True, materialize_grads=True)
        found.append((out * (weights != 0), *gradients))
    for ours, theirs in zip(*found, strict=True):
        scale = max(1.0, float(theirs.detach().abs().max()))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11 * scale)


@every_spec
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("grid", "prefix"), PLACES)
def test_outputs_and_gradients_equal_the_definition(spec, grid, prefix, masked):
    attention = made(spec, grid, prefix).double()
    tokens = attention.site.tokens
    compare(spec, attention, tokens, holes(tokens) if masked else None)


@every_spec
def test_gradients_equal_differences(spec):
    """Of q, k, v and all weights, with a mask, on a grid that blocks do not divide."""
    attention = made(spec, (1, 5), 1).double()
    mask = torch.tensor([[True, True, False, True, True, True]])
    names, weights = zip(*attention.named_parameters(), strict=True) if list(attention.parameters()) else ((), ())
    tensors = inputs(3, batch=1, tokens=6, grad=True)

    def run(q, k, v, *values):
        return functional_call(attention, dict(zip(names, values, strict=True)), (q, k, v, mask))

    assert torch.autograd.gradcheck(run, (*tensors, *weights), atol=1e-5, rtol=1e-4)


@every_spec
def test_fewer_tokens_than_the_grid_has(spec):
    compare(spec, made(spec, (5, 7), 2).double(), 23, None)


@every_spec
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sigma", [0.0, 1.0, 20.0])
def test_half_precision_as_on_a_gpu(spec, dtype, sigma, monkeypatch):
    """Called as a GPU's inputs are: near what float64 makes of the same inputs, and finite with its gradients."""
    monkeypatch.setattr(Performer, "_path", lambda self, device: accelerated_attention)
    attention, tokens = made(spec, (9, 14), 1), 127
    q, k, v = inputs(sigma=sigma, dtype=dtype, tokens=tokens, grad=True)
    if attention.precision != "half":
        q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    mask = holes(tokens)
    for some in (None, mask):
        if some is not None:  # as `forward` does
            q, k, v = (x.detach().masked_fill(~mask[:, None, :, None], 0.0).requires_grad_() for x in (q, k, v))
        out = attention.attend(q, k, v, some)
        assert out.dtype == v.dtype
        exact = attention.attend(q.double(), k.double(), v.double(), some)
        unit = torch.finfo(dtype).eps
        kept = torch.ones_like(mask) if some is None else mask
        off = (out.double() - exact).abs().transpose(1, 2)[kept].max()
        assert off <= 4 * unit * max(1.0, float(exact.detach().abs().max()))
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.float().square().sum(), (q, k, v)))


@pytest.mark.parametrize("steps", [30, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", [*SPECS, "inline", "mala", "focused", "pola", "nala", "agent:n=4,bias=learned"])
def test_half_precision_stays_finite_while_it_is_trained(spec, dtype, steps, monkeypatch):
    """Called as a GPU's inputs are, with q and k as long as those of models that diverge, and still trained."""
    monkeypatch.setattr(Performer, "_path", lambda self, device: accelerated_attention)
    attention = made(spec, (5, 7), 1)
    attend = attention if attention.precision == "float32" else lambda *tensors: attention.attend(*tensors, None)
    leaves = [x.to(dtype).float().requires_grad_() for x in inputs(sigma=3, tokens=36, dtype=torch.float32)]
    target = inputs(7, tokens=36, dtype=torch.float32)[2]
    optimizer, losses = torch.optim.Adam([*leaves, *attention.parameters()], 0.03), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (attend(*(x.to(dtype) for x in leaves)).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(x.isfinite().all() for x in (*leaves, *attention.parameters()))
    assert losses[-1] < 0.9 * losses[0]


@every_spec
def test_costs_are_those_counted(spec):
    """On a grid that blocks do not divide, and without one."""
    for grid, prefix in (((16, 16), 1), ((14, 14), 1), ((9, 23), 0)):
        attention = made(spec, grid, prefix, head_dim=61)
        kind = type(attention)
        options = {key: value for key, _, value in (p.partition("=") for p in spec.partition(":")[2].split(",")) if key}
        options = {key: True if value == "true" else value for key, value in options.items()}
        counted, stated = measured_cost(kind, attention.site, **options), attention_cost(spec, attention.site)
        assert stated.parameters == counted.parameters
        assert stated.kept == counted.kept
        assert stated.macs == pytest.approx(counted.macs, rel=0.05)


@every_spec
def test_a_device_without_numbers(spec):
    """Nothing looks at what tensors hold, and nothing stays on the CPU."""
    attention = made(spec, (5, 7), 1).to("meta")
    q, k, v = (x.to("meta", torch.float32) for x in inputs(tokens=36))
    mask = torch.ones(2, 36, dtype=torch.bool, device="meta")
    for some in (None, mask):
        assert attention(q, k, v, some).device.type == "meta"


@every_spec
def test_the_same_when_exported(spec):
    attention, tensors = made(spec, (5, 7), 1), inputs(tokens=36, dtype=torch.float32)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(attention, tensors, dynamic_shapes=[{0: batch}] * 3)
    for size in (1, 5):
        other = inputs(3, tokens=36, dtype=torch.float32, batch=size)
        torch.testing.assert_close(program.module()(*other), attention(*other), rtol=1e-4, atol=1e-5)


@every_spec
def test_only_bidirectional(spec):
    with pytest.raises(ValueError, match=f"{spec.partition(':')[0]} cannot be causal: "):
        build(spec, causal=True, grid=(3, 4), prefix=1)


@every_spec
def test_float32_is_near_float64(spec):
    for sigma in (0.1, 1.0, 5.0):
        attention, tensors = made(spec, (3, 4), 1), inputs(sigma=sigma)
        assert rounding(attention, *tensors) < 1e-11


# who looks at matrices does without where there is none

MODEL: dict[str, Any] = {
    "image_size": 12,
    "patch_size": 3,
    "channels": 1,
    "dim": 14,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 11,
    "classes": 3,
}


def model_of(attention: str) -> VisionTransformer:
    return create_model(**MODEL, attention=attention)


def test_errors_of_an_attention_without_a_matrix():
    attention, tensors = build("vit3").double(), inputs()
    found = attention_error(attention, *tensors)
    exact = build("softmax")(*tensors)
    assert found == {"output_error": pytest.approx(float((attention(*tensors) - exact).detach().norm() / exact.norm()))}
    assert oddities("vit3", 7) == (False, True)
    records = list(random_errors(["vit3"], Site(2, 7, 12), sigmas=[1.0], draws=Draws(1)))
    assert [r.metric for r in records if r.tags["attention"] == "vit3"] == ["output_error"]


def test_models_with_and_without_matrices():
    images = torch.randn(3, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    none, half = model_of("vit3"), model_of("softmax@1+vit3@1")
    assert trained_error(none, images) == {}
    assert trained_error(half, images)["attention_error"] == pytest.approx(0, abs=1e-6)  # of the layer that has one
    assert attention_maps(none, images) is None
    found = list(layer_errors(Subject(none, images, "it", "vit3"), [], draws=Draws(1)))
    mine = [(r.metric, r.tags.get("layer")) for r in found if r.tags["attention"] == "vit3"]
    assert mine == [("output_error", None), ("output_error", 1), ("output_error", 2)]
    with pytest.raises(ValueError, match="vit3 has no attention matrix: its output is not linear in v"):
        next(model_maps(Subject(none, images, "it", "vit3")))
    with pytest.raises(ValueError, match="vit3 has no attention matrix"):
        next(model_maps(Subject(model_of("softmax"), images, "it"), ["vit3"]))


def test_conversion_to_and_from_an_attention_without_a_matrix():
    images = torch.randn(3, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    _, report = linearize(model_of("softmax"), "vit3", images=images)
    assert [set(row) for row in report.distance.values()] == [{"output_error"}] * 2
    student = model_of("performer-theta:m=5")
    before = {name: p.clone() for name, p in student.named_parameters()}
    fit_kernels(student, model_of("vit3@1+softmax@1"), images, ignore)
    changed = {name for name, p in student.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all(name.startswith("blocks.1.attn.attention.kernel.") for name in changed)  # the first has no target
