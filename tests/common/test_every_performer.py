"""Every kernel, with each choice of its options: the fast paths against the oracle, and the oracle against φ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import cases
import pytest
import torch
import torch.nn.functional as F
from cases import build, inputs, performers, ragged, rounding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from linvit.attention import causal as causal_module
from linvit.attention import linear, pieces
from linvit.attention.causal import causal_attention
from linvit.attention.linear import linear_attention
from linvit.attention.performer import Performer
from linvit.attention.reference import reference_attention
from linvit.registry import parse

MODES = performers()
every_mode = pytest.mark.parametrize(("spec", "causal"), MODES)
every_causal = pytest.mark.parametrize("spec", [spec for spec, causal in MODES if causal])

# Elements of a block, and widths and sizes up to which features are kept for the backward pass; and whether in plain
# operations instead of the fast paths.
SETTINGS = {
    "whole, kept": (1 << 20, 64, 1 << 22, False),
    "blocks, kept": (97, 64, 1 << 22, False),
    "blocks, again": (97, 0, 0, False),
    "plain": (1 << 20, 64, 1 << 22, True),
}


def performer(spec: str, **site: object) -> Performer:
    attention = build(spec, **site)
    assert isinstance(attention, Performer)
    return attention.double()


def oracle(attention: Performer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    if mask is not None:
        q, k, v = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (q, k, v))
    prepared = attention.prepare(*attention.normalised(q, k), mask)
    out = reference_attention(prepared, v.flatten(0, 1), attention.site.causal).view_as(v)
    return out if prepared.features.divide else F.rms_norm(out, out.shape[-1:])


@contextmanager
def using(setting: str, attention: Performer) -> Iterator[None]:
    size, width, total, attention.plain = SETTINGS[setting]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pieces.BLOCK, "cpu", size)
        patch.setattr(linear, "KEEP_WIDTH", width)
        patch.setattr(linear, "KEEP_SIZE", total)
        if not width:  # then also the causal path for features out of range, which no float64 input here would take
            patch.setattr(causal_module, "in_range", lambda prepared, chunk: 0)
        yield
    attention.plain = False


@every_mode
def test_outputs_and_gradients_equal_the_oracle(spec, causal):
    """Odd lengths, masks, a row without keys, by every way to compute it; in plain operations also at σ = 40, beyond
    the range of float64 exponentials."""
    attention, weights, none_left = performer(spec, causal=causal), inputs(5)[2], ragged()
    none_left[0] = False
    parameters = [p for p in attention.parameters() if p.requires_grad]
    large = (
        [(40.0, mask) for mask in (None, none_left)] if attention.prepare(*inputs()[:2]).features.exponential else []
    )
    for sigma, mask in [(1.0, None), (1.0, ragged()), (1.0, none_left), *large]:
        tensors = inputs(2, sigma=sigma, grad=True)
        expected = oracle(attention, *tensors, mask=mask)
        theirs = torch.autograd.grad((expected * weights).sum(), [*tensors, *parameters], allow_unused=True)
        tolerance = rounding(attention, *(x.detach() for x in tensors), mask=mask)
        for setting in SETTINGS if sigma == 1.0 else ["plain"]:
            with using(setting, attention):
                out = attention(*tensors, mask=mask)
                ours = torch.autograd.grad((out * weights).sum(), [*tensors, *parameters], allow_unused=True)
            assert (out - expected).abs().max() <= tolerance, setting
            for a, b in zip(ours, theirs, strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert a.isfinite().all()
                    # a derivative of a quotient is as ill-conditioned as the quotient, once more
                    scale = max(1.0, float(b.abs().max()))
                    assert (a - b).abs().max() <= 100 * tolerance * scale, setting


@every_mode
def test_the_matrix_is_the_normalised_product_of_features(spec, causal):
    """The oracle shares `prepare` with the fast path; φ as written in the formula does not."""
    if not causal or "stabilizer=reference" in spec or "negative=rms" in spec:
        pytest.skip("only a causal attention uses x as it is: no mean, no measured spread")
    allowed = cases.attention_options(parse(spec).name)
    options = dict(parse(spec).options)
    signed = getattr(performer(spec).kernel, "minimum", 0.0) != 0.0
    if "negative" in allowed and options.get("negative") != "shift" and signed:
        options["negative"] = "literal"
    attention = performer(cases.spec_of(parse(spec).name, **options), causal=True)
    q, k, _ = inputs()
    phi_q, phi_k = (attention.kernel.phi(x * 7**-0.25) for x in attention.normalised(q, k))
    scores = (phi_q @ phi_k.transpose(2, 3)).tril()
    total = scores.sum(-1, keepdim=True)
    keep = total.abs() > 1e-3 * scores.abs().sum(-1, keepdim=True)  # the rest is ill-conditioned
    least = attention.prepare(q, k).features.least * phi_k.shape[-1]
    keep = (keep & (total.abs() > least * torch.arange(1, 14)[:, None])).expand_as(scores)
    assert keep.float().mean() > 0.9
    matrix = attention.attention_matrix(q, k)
    torch.testing.assert_close(matrix[keep], (scores / total)[keep], rtol=1e-9, atol=1e-9)


@every_causal
def test_chunks_steps_and_the_whole_agree(spec):
    """T9."""
    attention, (q, k, v) = performer(spec, causal=True), inputs()
    prepared, flat = attention.prepare(*attention.normalised(q, k)), v.flatten(0, 1)
    whole, tolerance = attention(q, k, v), rounding(attention, q, k, v)

    def finish(out: Tensor) -> Tensor:
        return (out if prepared.features.divide else F.rms_norm(out, out.shape[-1:])).view_as(v)

    for chunk in (1, 2, 5, 13, 1000):
        assert (finish(causal_attention(prepared, flat, chunk)) - whole).abs().max() <= tolerance
    for size in (1, 3):
        state, outs = None, []
        for t in range(0, 13, size):
            out, state = attention.step(*(x[:, :, t : t + size] for x in (q, k, v)), state=state)
            outs.append(out)
        assert (torch.cat(outs, 2) - whole).abs().max() <= tolerance


@every_causal
def test_a_state_does_not_grow_and_keeps_its_precision(spec):
    attention, state, sizes = performer(spec, causal=True), None, []
    for t in range(3):
        _, state = attention.step(*(x[:, :, t : t + 1] for x in inputs()), state=state)
        sizes.append([part.numel() for part in state])
    assert all(size == sizes[0] for size in sizes)
    attention, tensors = attention.float(), inputs(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out, state = attention.step(*tensors)
    assert out.dtype == torch.bfloat16
    assert state.s.dtype == torch.float32
    assert torch.equal(out, attention.step(*tensors)[0])


NAMES = sorted({parse(spec).name for spec, _ in MODES})


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_shape_and_size_of_numbers(data):
    """Fast path against oracle in float64: shapes, norms, masks, block sizes and kernels as they come."""
    name = data.draw(st.sampled_from(NAMES))
    causal = data.draw(st.booleans())
    tops = {"batch": 3, "heads": 3, "tokens": 40, "head_dim": 9}
    sizes = {key: data.draw(st.integers(1, top), label=key) for key, top in tops.items()}
    m, sigma = data.draw(st.integers(1, 70)), data.draw(st.sampled_from([0.0, 0.1, 1.0, 5.0]))
    count = sizes["batch"] * sizes["tokens"]
    keep = data.draw(st.none() | st.lists(st.booleans(), min_size=count, max_size=count))
    mask = None if keep is None else torch.tensor(keep).view(sizes["batch"], sizes["tokens"])
    block = data.draw(st.sampled_from([1, 7, 64, 1 << 20]))
    spec = f"{name}:m={m}" if "m" in cases.attention_options(name) else name
    attention = performer(spec, causal=causal, tokens=sizes["tokens"], heads=sizes["heads"], head_dim=sizes["head_dim"])
    q, k, v = inputs(data.draw(st.integers(0, 99)), sigma=sigma, **sizes)
    before = pieces.BLOCK["cpu"]
    pieces.BLOCK["cpu"] = block
    try:
        out = attention(q, k, v, mask)
        tolerance = rounding(attention, q, k, v, mask)
    finally:
        pieces.BLOCK["cpu"] = before
    assert out.isfinite().all()
    assert (out - oracle(attention, q, k, v, mask)).abs().max() <= tolerance + 1e-12


def test_column_maxima():
    """Primes alone would never take several tokens at a time."""
    for tokens, width in itertools.product([1, 2, 3, 4, 6, 8, 12, 24, 31, 96, 130], [1, 3, 11, 64, 100, 255, 257]):
        u = torch.randn(2, tokens, width, generator=torch.Generator().manual_seed(tokens))
        assert torch.equal(linear.column_max(u), u.amax(1, keepdim=True)), (tokens, width)


@pytest.mark.parametrize("name", ["exp", "hyp", "relu", "trig", "theta"])
def test_sizes_that_are_no_primes(name):
    """What is cut into powers of two, or into whole blocks without a rest."""
    for (tokens, m), setting in itertools.product([(16, 18), (64, 16), (24, 80), (12, 64)], SETTINGS):
        attention = performer(f"performer-{name}:m={m}", tokens=tokens, head_dim=8)
        q, k, v = inputs(tokens=tokens, head_dim=8)
        with using(setting, attention):
            error = (attention(q, k, v) - oracle(attention, q, k, v)).abs().max()
        assert error <= rounding(attention, q, k, v), (tokens, m, setting)


def test_the_oracle_can_fail():
    """A wrong sign of the norm term is seen."""
    attention, (q, k, v) = performer("performer-exp:m=11"), inputs()
    prepared = attention.prepare(q, k)
    wrong = prepared._replace(features=linear.Features(prepared.features.omega, norm=-prepared.features.norm))
    error = (linear_attention(wrong, v.flatten(0, 1)) - reference_attention(prepared, v.flatten(0, 1))).abs().max()
    assert error > 1000 * rounding(attention, q, k, v)
