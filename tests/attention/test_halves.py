"""What is computed in float32 from inputs in half precision, on the path that accelerators take."""

from __future__ import annotations

import pytest
import torch
from cases import build, inputs

from linvit.attention.halves import HALF, halves, softmax_over_computed

SPECS = ["efficient", "linformer:k=5", "agent:n=5", "mhla", "twoscale:cell=2", "uniform"]
every_spec = pytest.mark.parametrize("spec", SPECS)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.mT])
def test_two_parts_hold_twice_the_digits(dtype, layout):
    x = layout(torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)))
    high, low = halves(x, dtype)
    assert high.dtype == low.dtype == dtype
    assert (high.double() + low.double() - x).abs().max() <= torch.finfo(dtype).eps ** 2 * x.abs().max()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [7, 64, 256])
def test_softmax_over_computed_keys_rounds_its_weights_and_its_output(dtype, head_dim):
    """A key with all the weight gives its value; a mask leaves the keys out that it drops."""
    q = inputs(dtype=dtype, head_dim=head_dim)[0]
    _, k, v = inputs(dtype=torch.float32, head_dim=head_dim, tokens=5)
    mask = torch.tensor([[True, True, True, False, False], [False] * 5])
    eps = torch.finfo(dtype).eps
    for scale, keep, bound in ((1.0, None, 1.0), (1.0, mask, 1.0), (1e3, None, 0.75)):
        given = None if keep is None else keep[:, None, None, :]
        exact = torch.nn.functional.scaled_dot_product_attention(q.double(), scale * k.double(), v.double(), given)
        exact = exact.nan_to_num()
        out = softmax_over_computed(q, scale * k, v, keep)
        assert (out.double() - exact).abs().max() <= bound * eps * v.abs().max()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap has no rule for fused softmax on a CPU
@every_spec
def test_torch_func(spec):
    """Gradients and batches of transformations are those of autograd and of loops."""
    attention, given = build(spec), inputs(dtype=torch.bfloat16)

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return attention.attend(*tensors, None).float().square().sum()

    tensors = [x.clone().requires_grad_() for x in given]
    expected = torch.autograd.grad(loss(*tensors), tensors, materialize_grads=True)
    for ours, theirs in zip(torch.func.grad(loss, (0, 1, 2))(*given), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    each = torch.func.vmap(lambda *x: attention.attend(*x, None))(*(torch.stack([x, 2 * x]) for x in given))
    torch.testing.assert_close(each[1], attention.attend(*(2 * x for x in given), None), rtol=0.05, atol=0.05)


@every_spec
def test_it_compiles_into_one_graph(spec):
    """On the meta device, which takes the path of a GPU."""
    attention = build(spec).to("meta")
    given = [torch.empty_like(x, device="meta").requires_grad_() for x in inputs(dtype=torch.bfloat16)]
    out = torch.compile(attention, backend="aot_eager", fullgraph=True)(*given)
    assert (out.dtype, out.shape) == (torch.bfloat16, given[2].shape)
    out.sum().backward()
