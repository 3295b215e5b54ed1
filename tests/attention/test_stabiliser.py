"""T6: exponentials in float32 against float64 log-space, at norms where others' attention has become uniform."""

from __future__ import annotations

import math

import pytest
import torch
from cases import build, inputs
from torch.func import functional_call

from linvit.attention.causal import causal_attention
from linvit.attention.performer import Performer
from linvit.attention.reference import reference_attention
from linvit.kernels import KERNELS, Features, Prepared, create_kernel

HEADS, TOKENS, D = 2, 139, 61  # more than one chunk


def exponential() -> list[str]:
    """Every registered kernel whose features are exponentials, and φ = exp(x)."""
    found = []
    for name in KERNELS.names():
        x = torch.ones(1, 2, 5)
        if create_kernel(name, head_dim=5).prepare(x, x, None).features.exponential:
            found.append(name)
    return [*found, "exp:projection=none", "gexp:eps=0", "exp:center=true", "oprf:center=true"]


def performer(spec: str, causal: bool) -> Performer:
    attention = build("performer-" + spec, heads=HEADS, tokens=TOKENS, head_dim=D, causal=causal)
    assert isinstance(attention, Performer)
    return attention


@pytest.mark.parametrize("sigma", [1, 6])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", exponential())
def test_float32_equals_log_space(spec, causal, sigma):
    if causal and "center=true" in spec:
        pytest.skip("centring is bidirectional")
    attention = performer(spec, causal)
    q, k, v = inputs(sigma=sigma, dtype=torch.float32, batch=1, heads=HEADS, tokens=TOKENS, head_dim=D)
    prepared = attention.prepare(q.double(), k.double())
    expected = reference_attention(prepared, v.double().flatten(0, 1), causal).view_as(v)
    assert (attention(q, k, v) - expected).abs().max() <= 1e-4
    if sigma == 6:  # and the test is about something: attention is far from uniform
        assert expected.std() > 2 / math.sqrt(TOKENS)


@pytest.mark.parametrize("sigma", [1, 6, 20])
@pytest.mark.parametrize("spec", exponential())
def test_no_row_is_lost(spec, sigma):
    """A denominator of at least one: every row is a distribution, to the rounding of its sums."""
    q, k, _ = inputs(sigma=sigma, dtype=torch.float32, batch=1, heads=HEADS, tokens=TOKENS, head_dim=D)
    attention = performer(spec, False)
    matrix = attention.attention_matrix(q, k).detach()
    assert matrix.min() >= 0
    terms = TOKENS + attention.kernel.width
    assert (matrix.double().sum(-1) - 1).abs().max() <= terms * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("spec", ["exp", "hyp", "oprf"])
@pytest.mark.parametrize("sigma", [1, 12, 30])
def test_causal_rows_beyond_the_range_of_floats(spec, sigma):
    """Within a chunk no shared reference serves all rows once features span more than float32's exponents."""
    attention = performer(spec, True)
    q, k, v = inputs(sigma=sigma, dtype=torch.float32, batch=1, heads=HEADS, tokens=TOKENS, head_dim=D)
    prepared = attention.prepare(q.double(), k.double())
    expected = reference_attention(prepared, v.double().flatten(0, 1), causal=True).view_as(v)
    # the exponents' own rounding: their size times float32's epsilon, several terms of them
    size = float(k.double().square().sum(-1).max()) * D**-0.5
    tolerance = max(1e-4, 10 * size * torch.finfo(torch.float32).eps)
    assert (attention(q, k, v) - expected).abs().max() <= tolerance


def test_a_causal_row_whose_largest_term_underflows():
    """A later key sets the features' range, and what an earlier row needs most is below it: e^{−106}·e^{60}."""
    keys = torch.tensor([[[-60.0, 60.0], [-58.0, 20.0], [60.0, -60.0]]])
    queries = torch.tensor([[[0.0, -106.0]]]).expand(1, 3, 2)
    prepared, v = Prepared(queries, keys, Features()), torch.eye(3)[None]
    exact = Prepared(queries.double(), keys.double(), Features())
    expected = reference_attention(exact, v.double(), causal=True)
    assert expected[0, 1, 0] > 0.99
    torch.testing.assert_close(causal_attention(prepared, v).double(), expected, rtol=0, atol=1e-5)


def test_causal_gradients_beyond_the_range_of_floats():
    attention = performer("exp", True)
    tensors = [
        x.detach().requires_grad_() for x in inputs(sigma=9, dtype=torch.float32, heads=HEADS, tokens=37, head_dim=D)
    ]
    out = attention(*tensors)
    ours = torch.autograd.grad((out * torch.linspace(-1, 1, D)).sum(), tensors)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    prepared = attention.prepare(exact[0], exact[1])
    slow = reference_attention(prepared, exact[2].flatten(0, 1), causal=True).view_as(exact[2])
    theirs = torch.autograd.grad((slow * torch.linspace(-1, 1, D, dtype=torch.float64)).sum(), exact)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-3 * b.abs().max()


def test_the_reference_stabiliser_becomes_uniform():
    """What other packages compute: as norms grow, ε is all that is left."""
    q, k, v = inputs(sigma=4, dtype=torch.float32, heads=HEADS, tokens=TOKENS, head_dim=D)
    reference, exact = performer("exp:stabilizer=reference", False), performer("exp", False)
    uniform = v.mean(2, keepdim=True)
    assert (reference(q, k, v) - uniform).abs().max() < 0.1
    assert (exact(q, k, v) - uniform).abs().max() > 1


def test_a_clamp_that_never_acts_changes_nothing():
    q, k, v = inputs()
    plain, clamped = (build("performer-exp:m=11" + text) for text in ("", ",clamp=1000"))
    torch.testing.assert_close(plain(q, k, v), clamped(q, k, v), rtol=1e-10, atol=1e-10)


def test_parameters_in_another_precision():
    """A float64 input is computed in float64 even with float32 parameters."""
    attention = build("performer-theta:m=11")
    q, k, v = inputs()
    wide = {name: value.double() for name, value in attention.state_dict().items()}
    # τ is made from its parameter in the parameter's own precision
    torch.testing.assert_close(functional_call(attention, wide, (q, k, v)), attention(q, k, v), rtol=1e-6, atol=1e-6)
