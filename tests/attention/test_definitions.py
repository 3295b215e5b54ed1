"""Attentions that are defined by a line, and parity with performer-pytorch."""

from __future__ import annotations

import math

import pytest
import torch
from cases import build, inputs, ragged

from linvit.attention.performer import Performer


@pytest.mark.parametrize("causal", [False, True])
def test_softmax(causal):
    q, k, v = inputs()
    for mask in (None, ragged()):
        scores = q @ k.transpose(2, 3) / math.sqrt(7)
        if causal:
            scores = scores.masked_fill(torch.ones(13, 13, dtype=torch.bool).triu(1), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
        expected = torch.softmax(scores, -1).nan_to_num(0.0)
        attention = build("softmax", causal=causal)
        matrix, out = attention.attention_matrix(q, k, mask), attention(q, k, v, mask)
        kept = torch.ones(2, 13, dtype=torch.bool) if mask is None else mask  # queries of padding are anyone's
        for found, wanted in ((out, expected @ v), (matrix, expected)):
            torch.testing.assert_close(
                found.transpose(1, 2)[kept], wanted.transpose(1, 2)[kept], rtol=1e-12, atol=1e-12
            )


def test_identity():
    q, k, v = inputs()
    assert torch.equal(build("identity")(q, k, v), v)
    matrix = build("identity").attention_matrix(q, k)
    assert torch.equal(matrix, torch.eye(13, dtype=q.dtype).expand(2, 3, 13, 13))


def test_uniform():
    q, k, v = inputs()
    torch.testing.assert_close(build("uniform")(q, k, v), v.mean(2, keepdim=True).expand_as(v))
    running = torch.stack([v[:, :, : t + 1].mean(2) for t in range(13)], 2)
    torch.testing.assert_close(build("uniform", causal=True)(q, k, v), running)
    mask = ragged()
    kept = torch.stack([v[row][:, mask[row]].mean(1, keepdim=True).expand(3, 13, 7) for row in range(2)])
    torch.testing.assert_close(build("uniform")(q, k, v, mask), kept)


def test_efficient():
    q, k, v = inputs()
    expected = torch.einsum("bhnd,bhmd,bhme->bhne", q.softmax(-1), k.softmax(2), v)
    torch.testing.assert_close(build("efficient")(q, k, v), expected, rtol=1e-12, atol=1e-12)


def performer(spec: str) -> Performer:
    attention = build("performer-" + spec)
    assert isinstance(attention, Performer)
    return attention


def test_performer_by_its_formula():
    """exp: m^-½ exp(Ωx − ‖x‖²/2), bidirectional, without any of the library's machinery."""
    attention, (q, k, v) = build("performer-exp:m=11").double(), inputs()
    omega = dict(attention.named_buffers())["kernel.omega.rows"]
    phi = [torch.exp(x @ omega.t() - x.square().sum(-1, keepdim=True) / 2) for x in (q * 7**-0.25, k * 7**-0.25)]
    scores = phi[0] @ phi[1].transpose(2, 3)
    torch.testing.assert_close(attention(q, k, v), scores / scores.sum(-1, keepdim=True) @ v, rtol=1e-11, atol=1e-11)


def peer(**options):
    performer_pytorch = pytest.importorskip("performer_pytorch")
    torch.manual_seed(0)
    return performer_pytorch.FastAttention(7, 11, **options).double()


def test_parity_of_softmax_features_with_performer_pytorch():
    """The same Ω in both: theirs is stabilizer=reference (its maximum is over a head's keys)."""
    theirs, ours = peer(), build("performer-exp:m=11,stabilizer=reference").double()
    dict(ours.named_buffers())["kernel.omega.rows"].copy_(theirs.projection_matrix)
    q, k, v = inputs()
    torch.testing.assert_close(ours(q, k, v), theirs(q, k, v), rtol=1e-12, atol=1e-12)
    exact = build("performer-exp:m=11").double()
    dict(exact.named_buffers())["kernel.omega.rows"].copy_(theirs.projection_matrix)
    difference = (exact(q, k, v) - theirs(q, k, v)).abs().max()
    assert 1e-6 < difference < 0.1  # their ε


@pytest.mark.parametrize(("name", "f"), [("relu", torch.relu), ("sigmoid", torch.sigmoid), ("gexp", torch.exp)])
def test_parity_of_generalised_features_with_performer_pytorch(name, f):
    theirs, ours = peer(generalized_attention=True, kernel_fn=f), build(f"performer-{name}:m=11").double()
    dict(ours.named_buffers())["kernel.omega.rows"].copy_(theirs.projection_matrix)
    q, k, v = inputs()
    torch.testing.assert_close(ours(q, k, v), theirs(q, k, v), rtol=1e-11, atol=1e-11)


def test_parity_of_efficient_attention_with_performer_pytorch():
    q, k, v = inputs()
    torch.testing.assert_close(build("efficient")(q, k, v), peer(no_projection=True)(q, k, v), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("spec", "f"),
    [
        ("theta-linear:m=11", lambda a, x: (x @ a.omega.rows.double().t() @ a.weight.double().t()).relu() + 1e-3),
        ("theta-linear:projection=none", lambda a, x: (x @ a.weight.double().t()).relu() + 1e-3),
        ("theta-mlp:m=11", lambda a, x: a.mlp.double()(x)),
        (
            "theta-mixture:alpha=0.3,tau=2",
            lambda a, x: (
                0.3 * (a.mlp.double()(x) / 2).clamp(-5, 5).exp()
                + 0.7 * (a.mlp.double()(x) / 2).clamp(-5, 5).relu()
                + 1e-3
            ),
        ),
    ],
)
def test_learnable_kernels_as_reported(spec, f):
    kernel = performer(spec).kernel
    x = inputs()[0]
    torch.testing.assert_close(kernel.phi(x), f(kernel, x), rtol=1e-6, atol=1e-6)


def test_hedgehog_has_a_matrix_for_each_head():
    """Exponentials of ±Wx as they are written, each head with a W of its own; at the start 2 Σ cosh(x + y)."""
    q, k, v = inputs()
    attention = performer("hedgehog").double()
    x, y = q * 7**-0.25, k * 7**-0.25
    start = 2 * torch.cosh(x[:, :, :, None] + y[:, :, None]).sum(-1)
    torch.testing.assert_close(attention(q, k, v), start / start.sum(-1, keepdim=True) @ v, rtol=1e-11, atol=1e-11)
    weight = torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    attention.load_state_dict({"kernel.weight": weight})
    for head, w in enumerate(weight):
        phi_q, phi_k = (torch.cat([(z[:, head] @ w.T).exp(), (-z[:, head] @ w.T).exp()], -1) for z in (x, y))
        scores = phi_q @ phi_k.transpose(1, 2)
        expected = scores / scores.sum(-1, keepdim=True) @ v[:, head]
        torch.testing.assert_close(attention(q, k, v)[:, head], expected, rtol=1e-11, atol=1e-11)


def test_modes_of_sign_indefinite_features():
    """gelu: shift is positive; rms divides by nothing; clamp keeps |D| at a least; literal does neither."""
    q, k, v = inputs(sigma=0.3)
    rows = dict(build("performer-gelu:m=11").named_buffers())["kernel.omega.rows"].double()
    u_q, u_k = ((x * 7**-0.25) @ rows.t() for x in (q, k))
    gelu = torch.nn.functional.gelu
    scores = (gelu(u_q) + 1e-3) @ (gelu(u_k) + 1e-3).transpose(2, 3)
    denominator = scores.sum(-1, keepdim=True)
    assert denominator.min() < 0 < denominator.max()
    literal = scores @ v / denominator
    torch.testing.assert_close(build("performer-gelu:m=11,negative=literal")(q, k, v), literal, rtol=1e-8, atol=1e-8)
    least = 1e-3 * 11 * 13
    moved = denominator.sign() * denominator.abs().clamp_min(least)
    assert (denominator.abs() < least).any()
    clamp = build("performer-gelu:m=11,negative=clamp")(q, k, v)
    torch.testing.assert_close(clamp, scores @ v / moved, rtol=1e-9, atol=1e-9)
    rms = torch.nn.functional.rms_norm(scores @ v, (7,))
    torch.testing.assert_close(build("performer-gelu:m=11,negative=rms")(q, k, v), rms, rtol=1e-9, atol=1e-9)
    shift = build("performer-gelu:m=11,negative=shift").attention_matrix(q, k)
    assert shift.min() > 0
    assert torch.equal(shift, build("performer-gelu:m=11").attention_matrix(q, k))


def test_clamp_bounds_the_projections():
    q, k, v = inputs(sigma=20)
    attention = build("performer-gexp:m=11,clamp=2,eps=0")
    rows = dict(attention.named_buffers())["kernel.omega.rows"].double()
    phi = [((x * 7**-0.25) @ rows.t()).clamp(-2, 2).exp() for x in (q, k)]
    scores = phi[0] @ phi[1].transpose(2, 3)
    torch.testing.assert_close(attention(q, k, v), scores / scores.sum(-1, keepdim=True) @ v, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["exp", "relu", "trig", "theta-mlp"])
def test_scale(name):
    q, k, v = inputs()
    torch.testing.assert_close(
        build(f"performer-{name}:m=11,scale=0.25")(q, k, v),
        build(f"performer-{name}:m=11")(q * 0.25 * 7**0.25, k * 0.25 * 7**0.25, v),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "spec", ["relu:projection=none,eps=0", "relu:m=11,eps=0", "identity:m=11,eps=0,negative=literal"]
)
def test_features_that_are_all_zero_give_zero(spec, causal):
    """Nothing to divide, nothing to divide by: zero, as for a row without keys, forwards and backwards."""
    attention = build("performer-" + spec, causal=causal)
    q, k, v = inputs(dtype=torch.float32, grad=True)
    for mask in (None, ragged()):
        out = attention(-q.abs() if "none" in spec else 0 * q, k, v, mask)
        assert not out.any()
        for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
            assert gradient.isfinite().all()
