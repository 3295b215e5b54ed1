"""Attentions made for vision, against their published formulas as N × N matrices in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from cases import build, inputs, ragged
from torch import Tensor

from linvit.attention import Attention, attention_cost, regridded
from linvit.attention.agent import Agent
from linvit.attention.pola import Pola

D = 7  # cases.SITE's head_dim


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def elu1(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def kept_pairs(n: int, mask: Tensor | None, causal: bool) -> Tensor:
    """(B, 1, N, N): one where query i sees key j."""
    seen = torch.ones(1, 1, n, n, dtype=torch.float64)
    seen = seen if mask is None else seen * mask[:, None, None].double()
    return seen.tril() if causal else seen


# Published forms, with N and every mean over the keys that a query sees.


def inline_matrix(_, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores, n = q @ k.mT / math.sqrt(q.shape[-1]), seen.sum(-1, keepdim=True).clamp_min(1)
    return seen * (scores - (scores * seen).sum(-1, keepdim=True) / n + 1) / n


def mala_matrix(_, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores, n = elu1(q) @ elu1(k).mT / math.sqrt(q.shape[-1]), seen.sum(-1, keepdim=True).clamp_min(1)
    z = (scores * seen).sum(-1, keepdim=True) / n
    return seen * (scores / n * (1 + 1 / z.where(z > 0, 1.0)) - z / n)


def normalised(scores: Tensor, seen: Tensor) -> Tensor:
    total = (scores * seen).sum(-1, keepdim=True)
    return scores * seen / total.where(total > 0, 1.0)


def signs(x: Tensor, p: Tensor | float) -> Tensor:
    """Powers of both parts; 10⁻¹⁵ is where a published ε in the denominator would be."""
    return torch.cat([x.relu() ** p, (-x).relu() ** p], -1).clamp_min(1e-15)


def focused_matrix(attention: Attention, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """All heads' channels side by side, (B, N, C), until norms are taken."""
    t = attention.get_parameter("kernel.temperature").flatten()

    def features(x: Tensor) -> Tensor:
        r = (x.transpose(1, 2).flatten(2).relu() + 1e-6) / F.softplus(t)
        focused = r**3 * r.norm(dim=-1, keepdim=True) / (r**3).norm(dim=-1, keepdim=True)
        return focused.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)

    return normalised(features(q) @ features(k).mT, seen)


def nala_matrix(_, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    length = q.norm(dim=-1, keepdim=True)
    features = signs(q / length.where(length > 0, 1.0), 3 * (0.5 + length.tanh()))
    return normalised(features @ signs(k, 3.0).mT, seen)


def pola_matrices(attention: Attention, q: Tensor, k: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    t, π = (attention.get_parameter(f"kernel.{name}") for name in ("temperature", "power"))
    features = [signs(x / F.softplus(t), 1 + 4 * π.sigmoid()) for x in (q, k)]
    opposite = torch.cat(features[0].chunk(2, -1)[::-1], -1)
    return normalised(features[0] @ features[1].mT, seen), normalised(opposite @ features[1].mT, seen)


MATRICES = {"inline": inline_matrix, "mala": mala_matrix, "focused": focused_matrix, "nala": nala_matrix}
TOLERANCE = {"inline": 1e-12, "mala": 1e-5, "focused": 1e-9, "nala": 1e-9}  # mala has an ε in 1/z
SIGNED = {"inline", "mala"}
NAMES = [*MATRICES, "pola"]


def modes(names: Iterable[str]) -> list[tuple[str, bool]]:
    return [(name, causal) for name in names for causal in (False, True)]


every_mode = pytest.mark.parametrize(("name", "causal"), modes(NAMES))
every_name = pytest.mark.parametrize("name", NAMES)


def trained(spec: str, **site: object) -> Attention:
    """Built for float64, with parameters that differ from where they start."""
    attention, source = build(spec, **site).double(), torch.Generator().manual_seed(11)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.7, generator=source)
    return attention


def zeroed(mask: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    return [x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0) for x in tensors]


@pytest.mark.parametrize(("name", "causal"), modes(MATRICES))
@pytest.mark.parametrize("masked", [False, True])
def test_published_matrix(name, causal, masked):
    """Outputs, matrices and gradients, for all queries that are no padding."""
    attention, mask = trained(name, causal=causal), ragged() if masked else None
    fast, slow = inputs(grad=True), inputs(grad=True)
    kept = torch.ones(2, 13, dtype=torch.bool) if mask is None else mask
    q, k, v = zeroed(mask, *slow)
    expected = MATRICES[name](attention, q, k, kept_pairs(13, mask, causal))
    matrix = attention.attention_matrix(*fast[:2], mask)
    out = attention(*fast, mask)
    for found, wanted in ((matrix, expected), (out, expected @ v)):
        close(found.transpose(1, 2)[kept], wanted.transpose(1, 2)[kept], TOLERANCE[name])
    same_gradients(attention, kept, (out, fast), (expected @ v, slow), 10 * TOLERANCE[name])


def same_gradients(attention: Attention, kept: Tensor, one: tuple, other: tuple, tolerance: float) -> None:
    """Of (output, inputs), with respect to the inputs and all parameters, for the queries that are kept."""
    weights = torch.randn(int(kept.sum()), 3, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((out.transpose(1, 2)[kept] * weights).sum(), (*tensors, *attention.parameters()))
        for out, tensors in (one, other)
    )
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_published_matrices_of_pola(causal, masked):
    attention, mask = trained("pola", causal=causal), ragged() if masked else None
    assert isinstance(attention, Pola)
    fast, slow = inputs(grad=True), inputs(grad=True)
    kept = torch.ones(2, 13, dtype=torch.bool) if mask is None else mask
    q, k, v = zeroed(mask, *slow)
    equal, opposite = pola_matrices(attention, q, k, kept_pairs(13, mask, causal))
    expected, out = torch.cat([equal @ v[..., :4], opposite @ v[..., 4:]], -1), attention(*fast, mask)
    matrices = attention.attention_matrices(*fast[:2], mask)
    mean = attention.attention_matrix(*fast[:2], mask)
    wanted = (equal, opposite, (equal + opposite) / 2, expected)
    for found, one in zip((*matrices, mean, out), wanted, strict=True):
        close(found.transpose(1, 2)[kept], one.transpose(1, 2)[kept], 1e-9)
    same_gradients(attention, kept, (out, fast), (expected, slow), 1e-8)


@every_mode
def test_rows_sum_to_one(name, causal):
    matrix = trained(name, causal=causal).attention_matrix(*inputs(sigma=2)[:2])
    close(matrix.sum(-1), torch.ones(2, 3, 13, dtype=torch.float64))
    assert bool(matrix.min() < 0) is (name in SIGNED)


RANKS = {"inline": D + 1, "mala": D + 1, "focused": D, "nala": 2 * D, "pola": 2 * D}


@pytest.mark.parametrize(("name", "rank"), RANKS.items())
def test_rank(name, rank):
    q, k, _ = inputs(tokens=31)
    attention = build(name, tokens=31).double()
    matrices = attention.attention_matrices(q, k) if isinstance(attention, Pola) else [attention.attention_matrix(q, k)]
    for matrix in matrices:
        assert set(torch.linalg.matrix_rank(matrix, rtol=1e-9).flatten().tolist()) == {rank}


@every_mode
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sigma", [1e-3, 1.0, 50.0])
def test_half_precision(name, causal, dtype, sigma):
    """Finite, and what float32 makes of the same inputs: also where a power of them is out of half's range."""
    attention = build(name, causal=causal)
    q, k, v = inputs(sigma=sigma, dtype=dtype)
    out = attention(q, k, v)
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert torch.equal(out, attention(q.float(), k.float(), v.float()).to(dtype))


@every_mode
def test_any_number_of_tokens(name, causal):
    """More and fewer than the site has; a grid does not matter."""
    gridded = build(name, causal=causal, grid=(3, 4), prefix=1).double()
    for tokens in (1, 5, 13, 149):
        tensors = inputs(tokens=tokens)
        expected = build(name, causal=causal, tokens=tokens).double()(*tensors)
        close(gridded(*tensors), expected, 0)


@every_name
@pytest.mark.parametrize("head_dim", [1, 3])
def test_gradcheck(name, head_dim):
    attention = trained(name, heads=2, head_dim=head_dim, tokens=5)
    tensors = inputs(3, heads=2, head_dim=head_dim, tokens=5, batch=1, grad=True)
    mask = torch.tensor([[True, True, False, True, True]])
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, mask), tensors, atol=1e-6)


@pytest.mark.parametrize(("name", "causal"), [*modes(NAMES), ("agent:n=4", False), ("agent:n=4,bias=learned", False)])
@pytest.mark.parametrize("masked", [False, True])
def test_exported_for_any_batch(name, causal, masked):
    """No branch depends on numbers; and there is an answer on a device that has none."""
    attention = build(name, causal=causal, prefix=1, grid=(3, 4))
    tensors, more = (inputs(dtype=torch.float32, batch=batch) for batch in (2, 5))
    if masked:
        tensors, more = (*tensors, ragged()), (*more, ragged(5))
    shapes = ({0: torch.export.Dim("batch", min=1)},) * len(tensors)
    program = torch.export.export(attention, tensors, dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(*more), attention(*more), rtol=1e-4, atol=1e-5)
    assert attention.to("meta")(*(x.to("meta") for x in more)).shape == more[2].shape


# inline


def test_inline_is_the_first_order_of_softmax():
    """A − softmax is O(scores²): a tenth of the queries, a hundredth of the difference."""
    (q, k, _), inline, softmax = inputs(), build("inline"), build("softmax")
    far, near = (
        float((inline.attention_matrix(size * q, k) - softmax.attention_matrix(size * q, k)).abs().max())
        for size in (1e-2, 1e-3)
    )
    assert near == pytest.approx(far / 100, rel=0.1)


@pytest.mark.parametrize("causal", [False, True])
def test_inline_does_not_see_what_all_keys_share(causal):
    (q, k, v), attention = inputs(), build("inline", causal=causal)
    close(attention(q, k + 3 * q[:, :, :1], v), attention(q, k, v))
    uniform = build("uniform", causal=causal)(q, k, v)
    close(attention(q, k[:, :, :1].expand_as(k), v), uniform)
    close(attention(0 * q, k, v), uniform)
    both = attention(2 * q, k, v) - uniform
    close(both, 2 * (attention(q, k, v) - uniform))


def test_inline_keeps_its_digits_beside_a_large_mean_of_keys():
    q, k, v = inputs()
    expected = build("inline")(q, k, v)
    out = build("inline")(q.float(), k.float() + 1000, v.float())
    assert (out - expected).abs().max() < 1e-3  # k + 1000 itself is rounded to 6e-5


# mala


@pytest.mark.parametrize("causal", [False, True])
def test_mala_is_linear_attention_plus_centred_scores(causal):
    q, k, v = inputs()
    linear = build("performer-elu1:projection=none,eps=0,scale=1", causal=causal)(q, k, v)
    centred = build("inline", causal=causal)(elu1(q), elu1(k), v) - build("uniform", causal=causal)(q, k, v)
    close(build("mala", causal=causal)(q, k, v), linear + centred, 1e-5)


def test_mala_is_sharper_for_larger_queries():
    """Scaling φ(q) leaves linear attention as it is, and the departure from it grows in proportion."""
    q, k, _ = (x.abs() + 1 for x in inputs())  # φ(q) = q + 1
    linear = build("performer-elu1:projection=none,eps=0,scale=1").attention_matrix(q, k)
    one, ten = (build("mala").attention_matrix(size * (q + 1) - 1, k) - linear for size in (1, 10))
    close(ten, 10 * one, 1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_mala_where_every_key_is_far_below_zero(causal):
    """z underflows: the mean of v is left, and gradients are finite."""
    q, k, v = inputs(dtype=torch.float32, grad=True)
    out = build("mala", causal=causal)(q, k - 300, v)
    torch.testing.assert_close(out, build("uniform", causal=causal)(q, k, v))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)))


# focused


def test_focused_to_the_power_of_one_is_linear_attention_with_relu():
    tensors = inputs()
    close(build("focused:p=1")(*tensors), build("performer-relu:projection=none,eps=1e-6,scale=1")(*tensors))


def test_focusing_keeps_lengths_over_all_heads():
    x = inputs()[0]
    kernel = trained("focused").kernel
    r = (x.relu() + 1e-6) / F.softplus(kernel.temperature)
    close(kernel.phi(x).square().sum((1, 3)), r.square().sum((1, 3)))
    directions = [F.normalize(y, dim=-1) for y in (r, kernel.phi(x))]
    spread = [(one @ one.mT).mean() for one in directions]
    assert spread[1] < spread[0]  # a power moves directions apart


def test_heads_weigh_keys_together_and_queries_alone():
    attention, (q, k, v) = trained("focused"), inputs()
    changed = inputs(9)[0]
    changed[:, 0] = 0
    out = attention(q, k, v)
    close(attention(q + changed, k, v)[:, 0], out[:, 0])
    assert (attention(q, k + changed, v)[:, 0] - out[:, 0]).abs().max() > 1e-2
    close(attention(100 * q, k, v), out, 1e-4)  # the size of a query matters by ε alone


@pytest.mark.parametrize("p", [3, 5, 30])
@pytest.mark.parametrize("sigma", [1e-4, 1e4])
def test_powers_out_of_range(p, sigma):
    """In float32, forwards and backwards; as in float64."""
    attention, tensors = build(f"focused:p={p}"), inputs(sigma=sigma, dtype=torch.float32, grad=True)
    out = attention(*tensors)
    close(out.double(), attention(*(x.detach().double() for x in tensors)), 1e-3)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.square().sum(), tensors))


# pola and nala


def published(features: Tensor, keys: Tensor) -> Tensor:
    scores = features @ keys.mT / keys.shape[-2]
    return scores / (scores.sum(-1, keepdim=True) + 1e-6)


def test_a_floor_of_features_in_place_of_an_epsilon_in_the_denominator():
    """What the papers' ε changes, and no more."""
    q, k, _ = inputs(tokens=61, sigma=2)
    length = q.norm(dim=-1, keepdim=True)
    expected = published(signs(q / length, 1.5 + 3 * length.tanh()), signs(k, 3.0))
    close(build("nala").attention_matrix(q, k), expected, 1e-3)
    pola = build("pola")
    assert isinstance(pola, Pola)
    features = [signs(x / math.log(2), 3.0) for x in (q, k)]
    close(pola.attention_matrices(q, k)[0], published(*features), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["pola", "nala"])
def test_a_query_that_shares_no_sign_with_any_key(name, dtype):
    """Rows sum to one where a published one is zero, and gradients are finite."""
    q, k, v = inputs(dtype=dtype)
    q, k, v = (x.requires_grad_() for x in (q.abs(), -k.abs(), v))
    attention = build(name)
    matrices = attention.attention_matrices(q, k) if isinstance(attention, Pola) else [attention.attention_matrix(q, k)]
    for matrix in matrices:
        torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 3, 13, dtype=dtype))
    gradients = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v, *attention.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_turning_queries_around_swaps_the_matrices_of_pola():
    attention, (q, k, _) = trained("pola"), inputs()
    assert isinstance(attention, Pola)
    for found, expected in zip(
        attention.attention_matrices(-q, k), attention.attention_matrices(q, k)[::-1], strict=True
    ):
        assert torch.equal(found, expected)
    for matrix in attention.attention_matrices(q, k):
        assert matrix.min() >= 0
        close(matrix.sum(-1), torch.ones(2, 3, 13, dtype=torch.float64))


def test_pola_with_exact_cls_has_a_row_of_softmax_in_both_matrices():
    q, k, _ = inputs()
    attention = trained("pola:exact_cls=true", prefix=1, grid=(3, 4))
    assert isinstance(attention, Pola)
    for matrix in attention.attention_matrices(q, k):
        close(matrix[:, :, :1], build("softmax").attention_matrix(q, k)[:, :, :1])


def test_powers_of_pola_start_at_three_and_learn_at_zero():
    attention, (q, k, v) = build("pola").double(), inputs()
    q[:, :, :, 0] = 0
    gradient = torch.autograd.grad(attention(q, k, v).square().sum(), attention.kernel.power)[0]
    assert gradient.isfinite().all()
    assert gradient[:, :, 1:].abs().min() > 0
    cubes = [signs(x, 3.0) for x in (q, k)]
    close(attention(q, k, v)[..., :4], normalised(cubes[0] @ cubes[1].mT, torch.ones(())) @ v[..., :4], 1e-8)


def test_nala_is_sharper_for_longer_queries_until_its_power_saturates():
    (q, k, _), attention = inputs(), build("nala")
    sharpness = [float(attention.attention_matrix(size * q, k).amax(-1).mean()) for size in (0.01, 0.1, 1.0)]
    assert sharpness == sorted(sharpness)
    long = F.normalize(q, dim=-1)
    for size in (30.0, 1e4):
        expected = normalised(signs(long, 4.5) @ signs(k, 3.0).mT, torch.ones(()))
        close(attention.attention_matrix(size * long, k), expected, 1e-9)
    zero = attention.attention_matrix(0 * q, k)
    size = k.abs().pow(3).sum(-1)[:, :, None]
    close(zero, (size / size.sum(-1, keepdim=True)).expand_as(zero), 1e-9)
    close(attention.attention_matrix(-q, -k), attention.attention_matrix(q, k), 1e-12)


# agent

PLACES = [("n=4", (3, 5), 2), ("n=6", (7, 4), 0), ("n=9", (5, 5), 1), ("n=49", (11, 9), 1), ("n=15", (3, 5), 1)]


def agent(options: str, grid: tuple[int, int], prefix: int, **site: object) -> Agent:
    attention = build(f"agent:{options}", tokens=prefix + math.prod(grid), grid=grid, prefix=prefix, **site)
    assert isinstance(attention, Agent)
    return attention.double()


def agent_bias(attention: Agent) -> list[Tensor | float]:
    """B₁ and B₂ᵀ, element by element but for the interpolation."""
    if not attention.biases:
        return [0.0, 0.0]
    (rows, columns), first = attention.grid, attention.site.prefix
    named = {name: getattr(attention, name).flatten(2, 3) for name in attention.biases}
    bias = torch.zeros(*named["bias_row"].shape[:3], attention.site.tokens, dtype=torch.float64)
    table = F.interpolate(named["bias_table"].flatten(0, 1), (rows, columns), mode="bilinear")
    bias[..., :first] = named.get("bias_prefix", bias[..., :first])
    for row in range(rows):
        for column in range(columns):
            here = table[..., row, column].view(bias.shape[:3])
            place = first + row * columns + column
            bias[..., place] = here + named["bias_row"][..., row] + named["bias_column"][..., column]
    return [*bias]


def agent_oracle(attention: Agent, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """The matrix, by PyTorch's adaptive pooling of the grid; a mean over kept tokens is a quotient of two of them."""
    (b, h, n, d), first, grid = q.shape, attention.site.prefix, attention.grid
    keep = torch.ones(b, n, dtype=q.dtype) if mask is None else mask.to(q)
    cells = len(attention.rows), len(attention.columns)
    image = (q * keep[:, None, :, None])[:, :, first:].mT.reshape(b, h * d, *grid)
    mass = F.adaptive_avg_pool2d(keep[:, first:].view(b, 1, *grid), cells).view(b, 1, -1, 1)
    agents = F.adaptive_avg_pool2d(image, cells).view(b, h, d, -1).mT / mass.clamp_min(1e-9)
    ask, answer = agent_bias(attention)
    gather = agents @ k.mT / math.sqrt(d) + ask
    spread = q @ agents.mT / math.sqrt(d) + (answer.mT if isinstance(answer, Tensor) else 0.0)
    gather = gather.masked_fill(keep[:, None, None] == 0, -torch.inf).softmax(-1)
    return spread.masked_fill(mass.mT == 0, -torch.inf).softmax(-1) @ gather


@pytest.mark.parametrize(("options", "grid", "prefix"), PLACES)
@pytest.mark.parametrize("bias", ["none", "learned"])
@pytest.mark.parametrize("masked", [False, True])
def test_agents_by_their_definition(options, grid, prefix, bias, masked):
    attention = agent(f"{options},bias={bias}", grid, prefix)
    n = attention.site.tokens
    mask = torch.arange(n) < torch.tensor([[n], [prefix + grid[1] + 1]]) if masked else None  # cells are left empty
    fast, slow = inputs(tokens=n, grad=True), inputs(tokens=n, grad=True)
    kept = torch.ones(2, n, dtype=torch.bool) if mask is None else mask
    expected = agent_oracle(attention, *slow[:2], mask)
    matrix, out = attention.attention_matrix(*fast[:2], mask), attention(*fast, mask)
    for found, wanted in ((matrix, expected), (out, expected @ slow[2])):
        close(found.transpose(1, 2)[kept], wanted.transpose(1, 2)[kept])
    sums = matrix.sum(-1)
    close(sums, torch.ones_like(sums))
    assert matrix.min() >= 0
    parameters = [*attention.parameters()]
    ours, theirs = (
        torch.autograd.grad(y.transpose(1, 2)[kept].square().sum(), (*x, *parameters))
        for y, x in ((out, fast), (expected @ slow[2], slow))
    )
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


def test_an_agent_for_every_token_is_a_product_of_two_softmaxes():
    q, k, _ = inputs(tokens=15)
    attention = agent("n=15", (3, 5), 0)
    expected = (q @ q.mT / math.sqrt(D)).softmax(-1) @ (q @ k.mT / math.sqrt(D)).softmax(-1)
    close(attention.attention_matrix(q, k), expected)


@pytest.mark.parametrize(
    ("n", "grid", "cells"),
    [
        (49, (14, 14), (7, 7)),
        (49, (4, 16), (4, 12)),
        (49, (16, 4), (12, 4)),
        (11, (16, 16), (3, 3)),
        (1, (5, 7), (1, 1)),
    ]
    + [(3, (3, 5), (1, 3)), (900, (5, 7), (5, 7)), (49, None, (1, 13))],
)
def test_agents_stand_in_rows_and_columns(n, grid, cells):
    """At most n of them; the rank of attention is no larger."""
    tokens = 13 if grid is None else math.prod(grid)
    attention = build(f"agent:n={n}", tokens=tokens, grid=grid)
    assert isinstance(attention, Agent)
    assert (len(attention.rows), len(attention.columns)) == cells
    assert attention_cost(f"agent:n={n}", attention.site).features == math.prod(cells) <= n
    q, k, _ = inputs(tokens=tokens)
    rank = torch.linalg.matrix_rank(attention.attention_matrix(q, k), rtol=1e-12)
    assert rank.max() <= min(math.prod(cells), tokens)


@pytest.mark.parametrize("bias", ["none", "learned"])
def test_fewer_tokens_are_the_first_of_the_grid(bias):
    attention = agent(f"n=9,bias={bias}", (5, 7), 1)
    tensors, mask = inputs(tokens=36), torch.arange(36)[None].expand(2, -1) < 23
    short = attention(*(x[:, :, :23] for x in tensors))
    close(short, attention(*tensors, mask)[:, :, :23])
    alone = attention(*(x[:, :, :1] for x in tensors))  # CLS, without an image
    close(alone, tensors[2][:, :, :1])
    with pytest.raises(ValueError, match=r"37 tokens do not fit grid=\(5, 7\) with prefix=1"):
        attention(*inputs(tokens=37))


@pytest.mark.parametrize("grid", [(10, 14), (5, 7), (4, 2), (11, 3)])
def test_biases_move_to_another_grid(grid):
    """Everything that is learned per place is interpolated, agents too where the new grid has fewer rows."""
    old, spec = agent("n=9,bias=learned", (5, 7), 2), "agent:n=9,bias=learned"
    with torch.no_grad():
        for number, parameter in enumerate(old.parameters()):
            parameter.fill_(number + 1.0)
    new = agent("n=9,bias=learned", grid, 2)
    new.load_state_dict(regridded(spec, old.state_dict(), old.site, new.site))
    image = new._bias(99, inputs()[0])[..., 2:]
    torch.testing.assert_close(image, torch.full_like(image, 1 + 2 + 3))
    kept = regridded(spec, old.state_dict(), old.site, old.site)
    assert all(torch.equal(value, kept[name]) for name, value in old.state_dict().items())


def test_biases_do_not_lock_the_resolution():
    """A bias that is linear across the image stays so on a finer grid."""
    old, spec = agent("n=4,bias=learned", (5, 7), 0), "agent:n=4,bias=learned"
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.zero_()
        old.bias_column.copy_(torch.linspace(-3, 3, 7).expand_as(old.bias_column))  # type: ignore[operator, arg-type]
    new = agent("n=4,bias=learned", (5, 14), 0)
    new.load_state_dict(regridded(spec, old.state_dict(), old.site, new.site))
    column = new.bias_column[0, 0, 0, 0, 1:-1]  # type: ignore[index]
    torch.testing.assert_close(column, torch.linspace(-2.75, 2.75, 12, dtype=torch.float64))


def test_agents_near_softmax_have_no_bias():
    attention = agent("n=9,bias=learned", (5, 7), 2)
    attention.near_softmax()
    assert not any(parameter.any() for parameter in attention.parameters())


@pytest.mark.parametrize(
    ("spec", "site", "message"),
    [
        ("agent:n=0", {}, "n=0 must be at least 1"),
        ("agent:bias=some", {}, "bias=some must be one of none, learned"),
        ("agent", {"causal": True}, "agent cannot be causal: an agent is a mean of queries"),
        ("agent", {"prefix": 13}, "agents are means of image tokens, but all 13 tokens are prefix=13"),
        ("inline:p=3", {}, "'inline' has no option 'p'"),
        ("focused:p=0.5", {}, "p=0.5 must be at least 1"),
        ("focused:p=many", {}, "p=many must be a number"),
        ("pola:alpha=0", {}, "alpha=0 must be above 0"),
        ("pola:alpha=-1", {}, "alpha=-1 must be above 0"),
    ],
)
def test_impossible_options(spec, site, message):
    with pytest.raises(ValueError, match=message) as caught:
        build(spec, **site)
    assert "\n" not in str(caught.value)
