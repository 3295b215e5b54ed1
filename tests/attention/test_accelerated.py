"""Linear attention as a GPU computes it: equal to the oracle in float64, close to it in half precision, frugal."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import cases
import pytest
import torch
from cases import build, inputs, ragged, rounding

from linvit.attention.accelerated import accelerated_attention
from linvit.attention.performer import Performer
from linvit.attention.reference import reference_attention
from linvit.measure.advice import Workload
from linvit.site import Site

ROOT = Path(__file__).parents[2]
PERFORMERS = [spec for spec, causal in cases.performers() if not causal]


def unsigned() -> list[str]:
    return [spec for spec in PERFORMERS if spec in cases.defaults() and build(spec).precision == "half"]


def performer(spec: str, **site) -> Performer:
    attention = build(spec, **site)
    assert isinstance(attention, Performer)
    return attention


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", PERFORMERS)
def test_outputs_and_gradients_are_the_oracles(spec, masked):
    attention = performer(spec).double()
    mask = ragged() if masked else None
    ways = []
    for way in (accelerated_attention, reference_attention):
        q, k, v = inputs(grad=True)
        values = v if mask is None else v.masked_fill(~mask[:, None, :, None], 0.0)  # as `forward` hands them over
        out = way(attention.prepare(q, k, mask), values.flatten(0, 1))
        if cases.is_rms(attention):
            out = torch.nn.functional.rms_norm(out, out.shape[-1:])
        ways.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    bound = rounding(attention, *inputs(), mask)
    for ours, theirs in zip(*ways, strict=True):
        assert (ours - theirs).abs().max() <= bound * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("spec", ["performer-exp:m=11", "performer-relu:m=11"])
def test_where_every_key_is_masked_there_is_nothing(spec):
    q, k, v = inputs(grad=True)
    mask = torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool)
    out = accelerated_attention(performer(spec).double().prepare(q, k, mask), torch.ones_like(v).flatten(0, 1))
    assert not out.any()
    assert all(not gradient.any() for gradient in torch.autograd.grad(out.sum(), (q, k)))


@pytest.mark.parametrize("spec", ["performer-exp:m=11", "performer-relu:m=11"])
def test_gradients_of_a_scaled_loss_are_finite_where_every_key_of_an_image_is_masked(spec):
    q, k, v = inputs(dtype=torch.float16, grad=True)
    mask = ragged()
    mask[1] = False
    out = accelerated_attention(performer(spec).prepare(q, k, mask), v.flatten(0, 1))
    gradients = torch.autograd.grad(16 * out.float().sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not any(gradient[1].any() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", unsigned())
def test_half_precision_is_near_the_oracle(spec, dtype):
    """φ(k) and the output are rounded, by half a unit in the last place at most; the former moves weights from key to
    key, and so counts twice at most."""
    for sigma in (1, 4):
        attention = performer(spec, head_dim=31, tokens=127)
        q, k, v = inputs(sigma=sigma, dtype=dtype, head_dim=31, tokens=127, grad=True)
        out = accelerated_attention(attention.prepare(q, k), v.flatten(0, 1))
        gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        exact = attention.double().prepare(q.detach().double(), k.detach().double())
        expected = reference_attention(exact, v.detach().double().flatten(0, 1))
        assert out.dtype == dtype
        assert (out - expected).norm() <= 3 * torch.finfo(dtype).eps / 2 * expected.norm()
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_float16_stays_in_range_where_sums_would_not():
    """A sum over 8,209 tokens of values near 100 is beyond float16; a mean is not."""
    attention = performer("performer-relu:m=11", tokens=8209)
    q, k, v = inputs(dtype=torch.float16, tokens=8209, batch=1)
    out = accelerated_attention(attention.prepare(q, k), (v * 100).flatten(0, 1))
    assert out.isfinite().all()


@pytest.mark.parametrize("spec", ["performer-exp:m=64", "performer-relu:m=64"])
def test_little_is_kept_for_the_backward_pass(spec):
    """At most 600 bytes for each token and head of 64 channels: q, k and v are 384."""
    attention = performer(spec, heads=2, head_dim=64, tokens=101)
    q, k, v = inputs(dtype=torch.bfloat16, heads=2, head_dim=64, tokens=101, grad=True)
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        accelerated_attention(attention.prepare(q, k), v.flatten(0, 1))
    held = kept | {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (q, k, v)}
    assert sum(held.values()) / (q.shape[0] * 2 * 101) <= 600


@pytest.mark.parametrize("spec", ["performer-exp:m=64", pytest.param("performer-relu:m=64", marks=pytest.mark.slow)])
def test_compiled_too_little_is_kept(spec):
    """What the partitioner of torch.compile keeps, on the meta device, which takes the path of a GPU."""
    attention = performer(spec, heads=2, head_dim=64, tokens=101).to("meta")
    q, k, v = (torch.empty(2, 2, 101, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in "qkv")
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    compiled = torch.compile(attention, backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        compiled(q, k, v)
    for x in (q, k, v):
        keep(x)
    assert sum(kept.values()) / (2 * 2 * 101) <= 600


@pytest.mark.parametrize("spec", ["performer-exp:m=11", "performer-relu:m=11", "softmax"])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_func(spec, causal):
    """Transformations of torch.func see the same function."""
    attention = build(spec, causal=causal).double()
    q, k, v = inputs(grad=True)
    expected = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
    found = torch.func.grad(lambda *x: attention(*x).square().sum(), (0, 1, 2))(*(x.detach() for x in (q, k, v)))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["performer-exp:m=11", "performer-relu:m=11", "performer-hyp:m=11"])
def test_it_compiles_into_one_graph(spec):
    attention = performer(spec)
    compiled = torch.compile(
        lambda q, k, v: accelerated_attention(attention.prepare(q, k), v.flatten(0, 1)), fullgraph=True
    )
    tensors, again = inputs(dtype=torch.float32, grad=True), inputs(dtype=torch.float32, grad=True)
    out = compiled(*tensors)
    expected = accelerated_attention(attention.prepare(*again[:2]), again[2].flatten(0, 1))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(out.square().sum(), tensors)
    for a, b in zip(ours, torch.autograd.grad(expected.square().sum(), again), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["performer-relu:m=64", "performer-exp:m=64"])
def test_compiled_traffic(spec):
    """At most 10 kernels and 450 MB forward, for slices of one projection: 577 tokens, 6 heads of 64, 43 images."""
    pytest.importorskip("triton", reason="Triton is not installed (the extra `triton`)")
    found = importlib.util.spec_from_file_location("traffic", ROOT / "benchmarks/traffic.py")
    assert found is not None
    assert found.loader is not None
    traffic = importlib.util.module_from_spec(found)
    found.loader.exec_module(traffic)
    kernels = traffic.compiled_kernels(spec, Workload(Site(6, 64, 577), 43), slices=True)
    assert len(kernels) <= 10
    assert sum(kernel.bytes for kernel in kernels) <= 450e6
