"""`rala` against their definitions, written out token by token in float64."""

from __future__ import annotations

import cases
import pytest
import torch
from cases import build, inputs, rounding
from torch import Tensor

from linvit.attention import attention_cost
from linvit.attention.accelerated import accelerated_attention
from linvit.attention.base import Attention
from linvit.attention.measured import measured_cost
from linvit.attention.performer import Performer

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


def rala(attention: Attention, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
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


# all of them

ORACLES = {"rala": rala}
SPECS = ["rala"]
# blocks that divide the grid, that do not, an odd grid, one row, one token of the image
PLACES = [((4, 6), 0), ((5, 7), 1), ((7, 3), 2), ((1, 11), 1), ((1, 1), 2)]
every_spec = pytest.mark.parametrize("spec", SPECS)


def oracle(spec: str, attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Sequence by sequence and head by head."""
    keep = torch.ones(len(q), q.shape[2], dtype=torch.bool) if mask is None else mask
    q, k, v = (x.masked_fill(~keep[:, None, :, None], 0.0) for x in (q, k, v))
    each = ORACLES[spec.partition(":")[0]]
    rows = [
        torch.stack([each(attention, q[b, h], k[b, h], v[b, h], keep[b]) for h in range(HEADS)]) for b in range(len(q))
    ]
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
        out = attention.attend(q, k, v, some)
        assert out.dtype == v.dtype
        exact = attention.attend(q.double(), k.double(), v.double(), some)
        unit = torch.finfo(dtype).eps
        kept = torch.ones_like(mask) if some is None else mask
        off = (out.double() - exact).abs().transpose(1, 2)[kept].max()
        assert off <= 4 * unit * max(1.0, float(exact.detach().abs().max()))
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.float().square().sum(), (q, k, v)))


@every_spec
def test_half_precision_stays_finite_while_it_is_trained(spec):
    """100 steps of float16 and bfloat16 inputs, which grow to what attention logits of diverging models are."""
    for dtype in (torch.float16, torch.bfloat16):
        attention = made(spec, (5, 7), 1)
        leaves = [x.to(dtype).float().requires_grad_() for x in inputs(sigma=3, tokens=36, dtype=torch.float32)]
        target = inputs(7, tokens=36, dtype=torch.float32)[2]
        optimizer = torch.optim.SGD([*leaves, *attention.parameters()], 0.5)
        for _ in range(100):
            optimizer.zero_grad()
            loss = (attention(*(x.to(dtype) for x in leaves)).float() - target).square().mean()
            loss.backward()
            optimizer.step()
        assert loss.isfinite()
        assert all(x.isfinite().all() for x in (*leaves, *attention.parameters()))


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
