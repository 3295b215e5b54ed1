"""Of small inputs and without gradients, linear attention takes a path of its own: as exact as the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import build, inputs, performers, ragged, rounding

from linvit.attention import linear
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
            prepared = attention.prepare(q, k, mask)
            if sigma > 1 and not prepared.features.exponential:
                continue  # nothing to keep in range
            expected = reference_attention(prepared, v.flatten(0, 1)).view_as(v)
            expected = expected if prepared.features.divide else F.rms_norm(expected, expected.shape[-1:])
            tolerance = rounding(attention, *tensors, mask=mask)
        with monkeypatch.context() as without, torch.inference_mode():
            without.setattr(linear, "_Linear", None)  # the path with gradients is not taken
            assert (attention(*tensors, mask=mask) - expected).abs().max() <= tolerance


@pytest.mark.parametrize("spec", ["performer-exp:m=11", "performer-relu:m=11", "softmax"])
def test_views_of_one_projection(spec):
    """q, k and v as slices of one tensor, as a model hands them over, give what their copies give."""
    layer = MultiHead(21, heads=3, tokens=13, attention=spec).eval()
    with torch.inference_mode():
        q, k, v = layer.split(torch.randn(1, 13, 21, generator=torch.Generator().manual_seed(0)))
        assert not q.is_contiguous()
        copies = layer.attention(q.contiguous(), k.contiguous(), v.contiguous())
        torch.testing.assert_close(layer.attention(q, k, v), copies, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", ["performer-exp:m=11", "performer-relu:m=11"])
def test_new_features_are_seen(spec):
    """Nothing made of Ω outlives it: a redraw and loaded weights show in the next call."""
    attention, q = build(spec), inputs(dtype=torch.float32)
    with torch.inference_mode():
        before = attention(*q)
    state = {name: value.clone() for name, value in attention.state_dict().items()}
    attention.redraw(1)
    with torch.inference_mode():
        assert not torch.equal(attention(*q), before)
    attention.load_state_dict(state)
    with torch.inference_mode():
        assert torch.equal(attention(*q), before)
