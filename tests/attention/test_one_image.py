"""Of small inputs and without gradients, linear attention takes a path of its own: as exact as the others."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from cases import build, inputs, performers, ragged, rounding

from linvit.attention import create_attention, linear
from linvit.attention.multihead import MultiHead
from linvit.attention.performer import Performer
from linvit.attention.reference import reference_attention


@pytest.mark.parametrize("sigma", [1.0, 40.0])
@pytest.mark.parametrize("spec", [spec for spec, causal in performers() if not causal])
def test_outputs_equal_the_oracle(spec, sigma, monkeypatch):
    """Odd lengths, masks, a row without keys; σ = 40 is beyond the range of float64 exponentials."""
    attention = build(spec).double()
    assert isinstance(attention, Performer)
    none_left = ragged()
    none_left[0] = False
    tensors = inputs(2, sigma=sigma)
    for mask in (None, ragged(), none_left):
        q, k, v = tensors if mask is None else (x.masked_fill(~mask[:, None, :, None], 0.0) for x in tensors)
        with torch.no_grad():
            prepared = attention.prepare(*attention.normalised(q, k), mask)
            if sigma > 1 and not prepared.features.exponential:
                continue  # nothing to keep in range
            expected = reference_attention(prepared, v.flatten(0, 1)).view_as(v)
            expected = expected if prepared.features.divide else F.rms_norm(expected, expected.shape[-1:])
            tolerance = rounding(attention, *tensors, mask=mask)
        with monkeypatch.context() as without, torch.inference_mode():
            without.setattr(linear, "_Linear", None)  # the path with gradients is not taken
            assert (attention(*tensors, mask=mask) - expected).abs().max() <= tolerance
            one = attention(*(x[:1] for x in tensors), mask=None if mask is None else mask[:1])
            assert (one - expected[:1]).abs().max() <= tolerance


@pytest.mark.parametrize("spec", ["performer-exp:m=11", "performer-relu:m=11", "softmax"])
def test_views_of_one_projection(spec):
    """q, k and v as slices of one tensor, as a model hands them over, give what their copies give."""
    layer = MultiHead(21, heads=3, tokens=13, attention=spec).eval()
    with torch.inference_mode():
        q, k, v = layer.split(torch.randn(1, 13, 21, generator=torch.Generator().manual_seed(0)))
        assert not q.is_contiguous()
        copies = layer.attention(q.contiguous(), k.contiguous(), v.contiguous())
        torch.testing.assert_close(layer.attention(q, k, v), copies, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["performer-relu", "performer-exp", "performer-hyp"])
def test_what_is_made_of_omega_follows_it(name):
    """Ω is scaled once for many calls: every way to change it, its precision or the mode must be seen."""
    attention = create_attention(f"{name}:m=8", heads=2, head_dim=4, tokens=6)
    other = create_attention(f"{name}:m=8", heads=2, head_dim=4, tokens=6, seed=1)
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(0)).unbind()

    def agrees() -> None:
        with torch.inference_mode():
            fresh = copy.deepcopy(attention)(q, k, v)
            assert torch.equal(attention(q, k, v), fresh)
            assert torch.equal(attention(q, k, v), fresh)

    agrees()
    before = attention(q, k, v)
    attention.redraw(1)
    agrees()
    assert not torch.equal(attention(q, k, v), before)
    attention.load_state_dict(other.state_dict())
    agrees()
    assert torch.equal(attention(q, k, v), other(q, k, v))
    wide = attention(q.double(), k.double(), v.double())  # with no call of the kind in between
    torch.testing.assert_close(wide.float(), attention(q, k, v))
    attention.double()
    agrees()
    x = q.clone().requires_grad_()  # what inference mode left behind may not reach a gradient
    attention(x, k, v).sum().backward()
    assert x.grad is not None
    pickle.loads(pickle.dumps(attention))
