"""Run by test_triton.py in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import pytest
import torch

from linvit.attention import build_attention
from linvit.attention.fused import projection, supports, supports_projection, triton_attention
from linvit.attention.performer import Performer
from linvit.attention.reference import reference_attention
from linvit.site import Site

CASES = [
    ("performer-exp:m=16", 37, 32),
    ("performer-relu:m=64", 65, 64),
    ("performer-sigmoid:m=24", 5, 32),
    ("performer-abs:m=16", 70, 48),
    ("performer-elu1:m=32", 33, 32),
]
LARGE = [(f"performer-{name}:m={m}", n, d) for name in ("exp", "relu") for m, n, d in ((256, 197, 64), (128, 129, 128))]


def check(spec: str, tokens: int, head_dim: int, masked: bool, dtype: torch.dtype) -> None:
    attention = build_attention(spec, Site(2, head_dim, tokens))
    assert isinstance(attention, Performer)
    source = torch.Generator().manual_seed(0)
    q, k, v, gradient = torch.randn(4, 2, 2, tokens, head_dim, generator=source).to(dtype)
    mask = None
    if masked:
        mask = torch.rand(2, tokens, generator=source) < 0.7
        mask[1] = False  # no key is left of this image
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    prepared = attention.prepare(leaves[0], leaves[1], mask)
    assert supports(prepared, v)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    double = attention.double()
    expected = reference_attention(double.prepare(exact[0], exact[1], mask), exact[2].flatten(0, 1))
    wanted = [expected, *torch.autograd.grad(expected, exact, gradient.flatten(0, 1).double())]
    attention.float()
    half = [x.detach().to(dtype).requires_grad_() for x in leaves]
    own = attention.prepare(half[0].float(), half[1].float(), mask)
    given = own._replace(q=half[0].flatten(0, 1), k=half[1].flatten(0, 1))
    out = triton_attention(given, half[2].flatten(0, 1))
    found = [out, *torch.autograd.grad(out, half, gradient.flatten(0, 1))]
    bound = {torch.float32: 2e-5, torch.float16: 0.01}[dtype]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        assert ours.isfinite().all()
        assert (ours.double() - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("spec", "tokens", "head_dim"), CASES)
def check_float32(spec: str, tokens: int, head_dim: int, masked: bool) -> None:
    check(spec, tokens, head_dim, masked, torch.float32)


@pytest.mark.parametrize(("spec", "tokens", "head_dim"), CASES[:2])
def check_float16(spec: str, tokens: int, head_dim: int) -> None:
    """The interpreter computes with NumPy, which has no bfloat16: that is only compiled."""
    check(spec, tokens, head_dim, True, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def check_slices_of_one_projection(dtype: torch.dtype) -> None:
    """q, k and v are read, and gradients written, wherever they are; in the output the heads are neighbours."""
    attention = build_attention("performer-relu:m=16", Site(3, 16, 37))
    assert isinstance(attention, Performer)
    projection = torch.randn(2, 37, 3, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    slices = [x.transpose(1, 2) for x in projection.unbind(2)]
    ways = []
    for q, k, v in (slices, [x.contiguous() for x in slices]):
        prepared = attention.prepare(q.float(), k.float())._replace(q=q, k=k)
        out = triton_attention(prepared, v)
        ways.append((out, *torch.autograd.grad(out.float().square().sum(), projection, retain_graph=True)))
    assert ways[0][0].transpose(1, 2).is_contiguous()
    for ours, theirs in zip(*ways, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tokens_last", [False, True])
@pytest.mark.parametrize(("features", "head_dim", "norm"), [(16, 64, 0.0), (67, 48, -0.5), (131, 16, -0.25)])
def check_projection(features: int, head_dim: int, norm: float, tokens_last: bool) -> None:
    """Of slices, in float16: as exact as the two parts of Ω, which are 2⁻²² of it off."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(2, 67, 3, 3, head_dim, generator=source).half().unbind(2)[1].transpose(1, 2)
    omega = torch.randn(features, head_dim, generator=source)
    assert supports_projection(x, omega)
    wide = x.double().flatten(0, 1)
    expected = wide @ omega.double().mT + norm * wide.square().sum(-1, keepdim=True)
    found = projection(x, omega, norm, tokens_last)
    assert found.is_contiguous()
    assert found.dtype == torch.float32
    torch.testing.assert_close((found.mT if tokens_last else found).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sigma", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("spec", ["performer-exp:m=64", "performer-relu:m=64"])
def check_half_precision_is_hardly_more_than_the_outputs_rounding(spec: str, sigma: float) -> None:
    """Products of parts leave little but the rounding of the output to float16, which every attention has."""
    attention = build_attention(spec, Site(2, 64, 129))
    assert isinstance(attention, Performer)
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 129, 64, generator=source) * s for s in (sigma, sigma, 1.0))
    q, k, v = (x.half() for x in (q, k, v))
    with torch.no_grad():
        out = triton_attention(attention.prepare(q.float(), k.float())._replace(q=q, k=k), v)
        exact = reference_attention(attention.double().prepare(q.double(), k.double()), v.double().flatten(0, 1))
        exact = exact.view_as(v)
    assert (out - exact).norm() <= 1.2 * (exact.half() - exact).norm()


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("spec", "tokens", "head_dim"), LARGE)
def check_large(spec: str, tokens: int, head_dim: int, masked: bool) -> None:
    check(spec, tokens, head_dim, masked, torch.float32)


@pytest.mark.parametrize("spec", ["performer-exp:m=8", "performer-tanh:m=32", "performer-relu:m=32,eps=0"])
def check_what_is_left_to_the_other_path(spec: str) -> None:
    attention = build_attention(spec, Site(2, 32, 9))
    assert isinstance(attention, Performer)
    q, k, v = torch.randn(3, 1, 2, 9, 32)
    assert not supports(attention.prepare(q, k), v)
