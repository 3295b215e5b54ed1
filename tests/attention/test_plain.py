"""Linear attention in plain operations: as exact as the fast paths, and what export and compile see."""

from __future__ import annotations

import cases
import pytest
import torch
from cases import build, defaults, inputs, ragged, rounding

from linvit.attention.multihead import MultiHead
from linvit.attention.performer import Performer
from linvit.attention.plain import CHUNK, plain_attention, plain_causal
from linvit.attention.reference import reference_attention
from linvit.registry import parse

MODES = [(spec, causal) for spec, causal in cases.modes() if spec in defaults()]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, CHUNK - 1, CHUNK + 3])
@pytest.mark.parametrize("spec", ["performer-exp:m=11", "performer-gelu:m=11", "performer-trig:m=11"])
def test_any_number_of_tokens_in_chunks(spec, tokens):
    attention = build(spec, tokens=tokens, causal=True)
    assert isinstance(attention, Performer)
    q, k, v = inputs(tokens=tokens, sigma=3)
    prepared = attention.prepare(q, k)
    expected = reference_attention(prepared, v.flatten(0, 1), causal=True)
    for chunk in (CHUNK, 7):
        out, _ = plain_causal(prepared, v.flatten(0, 1), chunk=chunk)
        assert (out.view_as(v) - expected.view_as(v)).abs().max() <= rounding(attention, q, k, v)


def test_denominators_of_at_least_one():
    """T6: the scheme's own promise, at norms where every exponential alone is out of range."""
    attention = build("performer-exp:m=61", head_dim=61, tokens=211)
    assert isinstance(attention, Performer)
    q, k, v = inputs(sigma=30, dtype=torch.float32, head_dim=61, tokens=211)
    out = plain_attention(attention.prepare(q, k), torch.ones_like(v).flatten(0, 1))
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-4)


# one of each way to compute: exponential, pointwise, signed with a norm, learned, and those that are no performers
WAYS = ("performer-exp", "performer-gelu", "performer-trig", "performer-theta-mlp", "softmax", "linformer", "window")


@pytest.mark.parametrize(
    ("spec", "causal"), [(spec, causal) for spec, causal in MODES if parse(spec).name in WAYS[: 3 if causal else None]]
)
def test_export(spec, causal):
    """torch.export with any batch, masked, equal to the fast path; checks that look at numbers are left out."""
    attention = build(f"{spec}{',' if ':' in spec else ':'}debug=true", causal=causal)
    batch = torch.export.Dim("batch", min=1, max=1024)
    shapes = {name: {0: batch} for name in ("q", "k", "v", "mask")}
    program = torch.export.export(attention, (*inputs(), ragged()), dynamic_shapes=shapes).module()
    for size in (2, 5):
        tensors = *inputs(7, batch=size), ragged(size)
        torch.testing.assert_close(program(*tensors), attention(*tensors), rtol=1e-5, atol=1e-5)


def test_an_exported_graph_has_ordinary_operations_only():
    layer = MultiHead(21, heads=3, tokens=13, attention="performer-hyp:m=11", grid=(3, 4), prefix=1)
    program = torch.export.export(layer.eval(), (torch.randn(2, 13, 21),))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {name.split(".")[0] for name in called} <= {"aten", "<built-in function getitem>"}


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_compile(causal):
    attention = build("performer-hyp:m=11", causal=causal)
    tensors, again = inputs(dtype=torch.float32, grad=True), inputs(dtype=torch.float32, grad=True)
    out, expected = torch.compile(attention)(*tensors), attention(*again)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(out.square().sum(), tensors)
    for a, b in zip(ours, torch.autograd.grad(expected.square().sum(), again), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
