"""Report 002's attention as it wrote it: against its Algorithm 2 by einsum, and float16 against real float16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import inputs

from linvit.attention import create_attention
from linvit.kernels.learned import ThetaMixture, ThetaMlp
from linvit.site import Site

SITE = {"heads": 3, "head_dim": 7, "tokens": 13}
FUNCTIONS = {
    "f=relu": F.relu,
    "f=elu,alpha=0.3": lambda u: F.elu(u, 0.3),
    "f=gelu": F.gelu,
    "f=exp": torch.exp,
    "f=exp,clamp=0.1": lambda u: u.clamp(-0.1, 0.1).exp(),
}


@pytest.mark.parametrize("options", FUNCTIONS)
def test_it_is_the_algorithm_as_printed(options):
    attention = create_attention(f"literal:m=11,{options}", **SITE).double()
    q, k, v = inputs()
    matrix = attention.omega.rows
    eps = 0.0 if options.startswith("f=exp") else 1e-6  # Algorithm 4 adds it to the denominator alone
    q_, k_ = (FUNCTIONS[options](torch.einsum("bhsd,fd->bhsf", x / 7**0.5, matrix)) + eps for x in (q, k))
    z = 1 / (torch.einsum("bhsf,bhf->bhs", q_, k_.sum(2)) + 1e-6)
    out = torch.einsum("bhsf,bhfd->bhsd", q_, torch.einsum("bhsf,bhsd->bhfd", k_, v)) * z[..., None]
    torch.testing.assert_close(attention(q, k, v), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(matrix.t() @ matrix, torch.eye(7, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("f", ["relu", "elu", "gelu"])
def test_rounded_everywhere_it_is_float16(f):
    """Step by step in real float16, whose products are summed in float32 by the CPU."""
    attention = create_attention(f"literal:f={f},m=11,half=everywhere", **SITE)
    q, k, v = (x.float() for x in inputs())
    matrix = attention.omega.rows.half()
    half = [FUNCTIONS.get(f"f={f}", F.elu)((x.half() / 7**0.5) @ matrix.t()) + 1e-6 for x in (q, k)]
    total = half[1].float().sum(2, keepdim=True).half()
    z = 1 / (half[0] @ total.mT + 1e-6)
    out = (half[0] @ (half[1].mT @ v.half())) * z
    assert out.dtype == torch.float16
    torch.testing.assert_close(attention(q, k, v), out.float(), rtol=1e-2, atol=1e-3)


def test_one_token_is_v_but_for_epsilon_where_d_is_large_and_anything_where_it_is_small():
    q, k, v = torch.randn(3, 5_000, 3, 1, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    site = SITE | {"tokens": 1}
    relu, gelu = (
        create_attention(f"literal:f={f},m=11", **site).double()(q / 9, k / 9, v) / v for f in ("relu", "gelu")
    )
    assert (relu < 1).all()
    assert (relu > 1 - 1e-2).float().mean() > 0.8
    assert (gelu > 1).float().mean() > 0.1  # a negative D


@pytest.mark.parametrize(("half", "draws"), [("autocast", 40_000), ("everywhere", 4_000)])
def test_in_float16_gelu_fails_more_often_than_elu_and_relu_never(half, draws):
    def failures(options: str) -> int:
        attention = create_attention(f"literal:{options},half={half}", heads=1, head_dim=48, tokens=1)
        q, k, v = torch.randn(3, draws, 1, 1, 48, generator=torch.Generator().manual_seed(0))
        q, k = (0.03 * x for x in (q, k))
        return int((~attention(q, k, v).isfinite()).any(-1).sum())

    found = [failures(options) for options in ("f=gelu", "f=elu", "f=elu,alpha=0.25,m=256", "f=relu")]
    assert found[0] > found[1] > found[2] > found[3] == 0


@pytest.mark.parametrize(("clamp", "finite"), [("", False), (",clamp=10", True)])
def test_the_clamp_keeps_an_exponential_finite(clamp, finite):
    q, k, v = (30 * x.float() for x in inputs(head_dim=36))
    out = create_attention(f"literal:f=exp,m=64{clamp}", heads=3, head_dim=36, tokens=13)(10 * q, 10 * k, v)
    assert bool(out.isfinite().all()) is finite


def test_the_mixture_clamps_the_argument_of_exp_alone():
    mixture = ThetaMixture(Site(1, 7, 13), clamp=5.0, alpha=0.4, eps=0.0).double()
    mixture.mlp[3].weight.data *= 30
    x = inputs(heads=1)[0]
    u = mixture.mlp(x)
    assert (u > 5).any()
    torch.testing.assert_close(mixture.phi(x), 0.4 * u.clamp(-5, 5).exp() + 0.6 * u.relu())


def test_epsilon_gives_the_parameters_of_a_kernel_a_gradient_although_there_is_one_token():
    """φ(q)·φ(k) v / φ(q)·φ(k) has none; with ε in the denominator it is small, and Adam does not look at its size."""
    attention = create_attention("literal:f=mixture", **SITE | {"tokens": 1}).double()
    out = attention(*inputs(tokens=1))
    (gradient,) = torch.autograd.grad(out.sum(), [attention.kernel.alpha])
    assert 1e-12 < abs(float(gradient)) < 1e-3


def test_learned_maps_are_those_of_the_kernels_without_a_bound_on_the_denominator():
    attention = create_attention("literal:f=mlp,m=11", **SITE).double()
    assert isinstance(attention.kernel, ThetaMlp)
    q, k, v = inputs()
    a, b = (attention.kernel.mlp(x / 7**0.5) for x in (q, k))
    d = a @ b.sum(2, keepdim=True).mT + 1e-6
    torch.testing.assert_close(attention(q, k, v), a @ (b.mT @ v) / d, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("f=relu,alpha=0.5", "alpha=0.5 has no effect: only f=elu has it"),
        ("f=gelu,clamp=3", "clamp=3 has no effect: only f=exp has it"),
        ("f=mixture,m=3", "m=3 has no effect"),
        ("m=0", "m=0 must be at least 1"),
    ],
)
def test_options_without_effect_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        create_attention(f"literal:{options}", **SITE)
