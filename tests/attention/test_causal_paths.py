"""Causal attention hands over from its fast path to its careful one at the first key that is out of range."""

from __future__ import annotations

import pytest
import torch

from linvit import create_attention
from linvit.attention.causal import CHUNK, in_range
from linvit.attention.performer import Performer
from linvit.attention.reference import reference_attention

TOKENS = CHUNK + 5


@pytest.mark.parametrize(
    "spec", ["performer-exp:m=11", "performer-hyp:m=7", "performer-theta:m=7", "performer-oprf:m=11"]
)
def test_a_sequence_that_starts_in_range_and_leaves_it(spec: str) -> None:
    attention = create_attention(spec, heads=2, head_dim=3, tokens=TOKENS, causal=True).double()
    assert isinstance(attention, Performer)
    torch.manual_seed(0)
    q, k, v, gradient = torch.randn(4, 1, 2, TOKENS, 3, dtype=torch.float64)
    k[:, :, CHUNK + 1 :] *= 30.0
    assert in_range(attention.prepare(q, k), CHUNK) == CHUNK
    inputs = [x.requires_grad_() for x in (q, k, v)]
    weights = [p for p in attention.parameters() if p.requires_grad]
    out = attention(*inputs)
    expected = reference_attention(attention.prepare(q, k), v.flatten(0, 1), causal=True).view_as(v)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    found = torch.autograd.grad(out, [*inputs, *weights], gradient, allow_unused=True)
    wanted = torch.autograd.grad(expected, [*inputs, *weights], gradient, allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)
