"""What every attention must do, whatever it is: run on all that is registered and on each choice of its options."""

from __future__ import annotations

from functools import partial

import cases
import pytest
import torch
from cases import build, inputs, is_rms, modes, ragged, rounding
from torch.func import functional_call

from linvit.attention import attention_names
from linvit.attention.base import Attention
from linvit.attention.causal import CHUNK
from linvit.attention.performer import Performer
from linvit.registry import parse

MODES = modes()
BIDIRECTIONAL = [spec for spec, causal in MODES if not causal]
CAUSAL = [spec for spec, causal in MODES if causal]
every_mode = pytest.mark.parametrize(("spec", "causal"), MODES)
every_spec = pytest.mark.parametrize("spec", BIDIRECTIONAL)
every_causal = pytest.mark.parametrize("spec", CAUSAL)


def test_the_list_is_everything():
    assert {parse(spec).name for spec in BIDIRECTIONAL} == set(attention_names())
    assert len(BIDIRECTIONAL) > 2 * len(attention_names())


@every_spec
def test_documented(spec):
    attention = build(spec)
    thing = attention.kernel if isinstance(attention, Performer) else attention
    assert thing.formula
    assert thing.estimates
    assert attention.macs(101) >= 0


@every_spec
def test_macs_grow_with_tokens(spec):
    once, thrice = (build(spec).macs(1009 * factor) for factor in (1, 3))
    assert thrice == once * (9 if parse(spec).name == "softmax" else 3)


@every_spec
def test_break_even_is_where_the_macs_meet(spec):
    attention = build(spec)
    edge = attention.break_even()
    if parse(spec).name == "softmax":
        assert edge is None
        return
    assert edge is not None
    softmax = build("softmax")
    assert attention.macs(edge + 1) < softmax.macs(edge + 1)
    if edge > 1:
        assert attention.macs(edge) >= softmax.macs(edge)


@every_mode
def test_finite_and_in_the_dtype_of_v(spec, causal):
    """T6: σ = 6, where unstabilised exponentials are far out of range."""
    attention = build(spec, causal=causal, tokens=149, head_dim=61)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q, k, v = inputs(sigma=6, dtype=dtype, tokens=149, head_dim=61)
        out = attention(q, k, v)
        assert out.dtype == dtype
        assert out.shape == v.shape
        assert out.isfinite().all(), dtype


@every_mode
def test_gradients_are_finite_at_large_norms(spec, causal):
    """σ = 12: beyond float32's range for every exponential, chunk and row."""
    attention = build(spec, causal=causal, tokens=37, head_dim=61)
    q, k, v = inputs(sigma=12, dtype=torch.float32, tokens=37, head_dim=61, grad=True)
    attention(q, k, v).square().sum().backward()
    for name, x in (("q", q), ("k", k), ("v", v), *attention.named_parameters()):
        assert x.grad is None or x.grad.isfinite().all(), name


@every_mode
def test_mixed_dtypes_and_an_empty_batch(spec, causal):
    attention = build(spec, causal=causal)
    q, k, v = inputs()
    expected = attention(q, k, v)
    assert torch.equal(attention(q, k, v.float()), attention(q, k, v.float().double()).float())
    assert attention(q.float(), k, v).dtype == torch.float64
    assert expected.dtype == torch.float64
    assert attention(q[:0], k[:0], v[:0]).shape == (0, *v.shape[1:])


@every_mode
def test_values_may_be_anything(spec, causal):
    """Linear in v: one scale for all of it is a scale of the output (an RMS norm takes it out)."""
    attention = build(spec, causal=causal)
    q, k, v = inputs()
    out, scaled = attention(q, k, v), attention(q, k, 1024 * v)
    expected = out if is_rms(attention) else 1024 * out
    torch.testing.assert_close(scaled, expected, rtol=1e-6 if is_rms(attention) else 1e-15, atol=1e-12)


@every_mode
def test_zero_queries_and_keys(spec, causal):
    attention = build(spec, causal=causal)
    x = torch.zeros(cases.BATCH, 3, 13, 7)
    assert attention(x, x, inputs(dtype=torch.float32)[2]).isfinite().all()


@every_spec
def test_permuting_tokens_permutes_outputs(spec):
    """T7."""
    if parse(spec).name in cases.ORDERED:
        pytest.skip("its tokens have places")
    attention, (q, k, v) = build(spec), inputs()
    order = torch.randperm(13, generator=torch.Generator().manual_seed(1))
    moved = attention(q[:, :, order], k[:, :, order], v[:, :, order])
    assert (moved - attention(q, k, v)[:, :, order]).abs().max() <= rounding(attention, q, k, v)


@every_causal
def test_later_tokens_do_not_matter(spec):
    """T8: any token, in float64."""
    attention, (q, k, v) = build(spec, causal=True), inputs()
    before = attention(q, k, v)
    for t in (1, 5, 12):
        changed = (torch.cat([x[:, :, :t], 100 * y[:, :, t:]], 2) for x, y in zip((q, k, v), inputs(9), strict=True))
        change = (attention(*changed)[:, :, :t] - before[:, :, :t]).abs().max()
        assert change <= min(1e-6, rounding(attention, q, k, v))


@every_causal
def test_later_chunks_do_not_touch_earlier_ones(spec):
    """T8: within 1e-6, since some processors' products depend on how memory is aligned (AVX2), by a last bit."""
    tokens = CHUNK + 3
    assert tokens == 131
    attention, (q, k, v) = build(spec, causal=True, tokens=tokens), inputs(tokens=tokens)
    before = attention(q, k, v)[:, :, :CHUNK]
    for x in (q, k, v):
        x[:, :, CHUNK:] = 50.0
    after = attention(q, k, v)[:, :, :CHUNK]
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)


@every_causal
def test_the_last_causal_token_sees_what_a_bidirectional_one_sees(spec):
    name = parse(spec).name
    if "center" in spec or name in ("performer-hyp", "performer-theta", "performer-oprf"):
        pytest.skip("means over all tokens are used bidirectionally only")
    causal, both, (q, k, v) = build(spec, causal=True), build(spec), inputs()
    tolerance = rounding(both, q, k, v) + rounding(causal, q, k, v)
    assert (causal(q, k, v)[:, :, -1] - both(q, k, v)[:, :, -1]).abs().max() <= tolerance


@every_mode
def test_masking_equals_leaving_out(spec, causal):
    """T11: whatever the padding holds."""
    attention, mask = build(spec, causal=causal), ragged()
    if parse(spec).name in cases.ORDERED:
        mask = torch.arange(13) < torch.tensor([[11], [7]])
    q, k, v = inputs()
    padded = (x.masked_fill(~mask[:, None, :, None], float("nan")) for x in (q, k, v))
    out = attention(*padded, mask)
    assert out.isfinite().all()
    for row, keep in enumerate(mask):
        short = [x[row : row + 1, :, keep] for x in (q, k, v)]
        error = (out[row : row + 1, :, keep] - attention(*short)).abs().max()
        assert error <= rounding(attention, *short)


@every_mode
def test_masked_gradients_equal_those_of_leaving_out(spec, causal):
    attention, mask = build(spec, causal=causal).double(), ragged()
    if parse(spec).name in cases.ORDERED:
        mask = torch.arange(13) < torch.tensor([[11], [7]])
    full, weights = inputs(grad=True), inputs(5)[2]
    (attention(*full, mask) * weights * mask[:, None, :, None]).sum().backward()
    for row, keep in enumerate(mask):
        short = [x.detach()[row : row + 1, :, keep].requires_grad_() for x in full]
        (attention(*short) * weights[row : row + 1, :, keep]).sum().backward()
        for x, y in zip(full, short, strict=True):
            if y.grad is None:
                assert x.grad is None
                continue
            assert x.grad is not None
            scale = max(1.0, float(y.grad.abs().max()))
            condition = rounding(attention, *(z.detach() for z in short)) * scale
            assert (x.grad[row : row + 1, :, keep] - y.grad).abs().max() <= 100 * condition
            assert not x.grad[row, :, ~keep].any()


@every_mode
def test_a_row_without_keys_is_zero(spec, causal):
    """T11: fully masked, forwards and backwards."""
    attention = build(spec, causal=causal)
    q, k, v = inputs(dtype=torch.float32, grad=True)
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[0] = False
    out = attention(q, k, v, mask)
    assert not out[0].any()
    (1000 * out).sum().backward()
    for name, x in (("q", q), ("k", k), ("v", v), *attention.named_parameters()):
        assert x.grad is None or x.grad.isfinite().all(), name
    assert not attention.attention_matrix(q, k, mask)[0].any() or parse(spec).name == "identity"


@every_mode
def test_matrix_times_v_is_the_output(spec, causal):
    """T12."""
    attention, (q, k, v) = build(spec, causal=causal), inputs()
    for mask in (None, ragged()):
        matrix = attention.attention_matrix(q, k, mask)
        assert matrix.shape == (2, 3, 13, 13)
        if causal:
            assert not matrix.triu(1).any()
        if mask is not None and parse(spec).name != "identity":
            assert not matrix.transpose(2, 3)[~mask[:, None].expand(2, 3, 13)].any()
        if is_rms(attention) or parse(spec).name in cases.NOT_AVERAGES:
            continue
        clean = v if mask is None else v.masked_fill(~mask[:, None, :, None], 0.0)
        tolerance = rounding(attention, q, k, v, mask)
        assert (matrix @ clean - attention(q, k, v, mask)).abs().max() <= tolerance
        sums = matrix.sum(-1)
        if "literal" in spec or _signed(attention):  # a denominator that was moved away from zero is not the sum
            continue
        full = sums if mask is None else sums[:, :, -1] if causal else sums
        scale = float(matrix.detach().abs().sum(-1).max())
        torch.testing.assert_close(full, torch.ones_like(full), rtol=0, atol=tolerance * max(1.0, scale))


def _signed(attention) -> bool:
    return isinstance(attention, Performer) and bool(attention.prepare(*inputs()[:2]).features.least)


@every_spec
def test_one_token_attends_to_itself(spec):
    """T16: any kernel whose denominator is not zero returns v."""
    name = parse(spec).name
    if name in cases.NOT_AVERAGES:
        pytest.skip("its rows need not sum to one")
    attention, (q, k, v) = build(spec), inputs(tokens=1)
    out = attention(q, k, v)
    if is_rms(attention):
        expected = torch.nn.functional.rms_norm(v, v.shape[-1:])
        torch.testing.assert_close(out.abs(), expected.abs(), rtol=1e-6, atol=1e-6)
        return
    if _signed(attention):  # D may be below the least that is allowed; then the row is a fraction of v
        ratio = out / v
        assert (ratio.abs() <= 1 + 1e-9).all()
        keep = (ratio - 1).abs() < 1e-9
        assert keep.any()
        return
    torch.testing.assert_close(out, v, rtol=1e-9, atol=1e-9)


@every_mode
def test_gradients(spec, causal):
    """T10: float64 against differences, for q, k, v and every parameter."""
    attention = build(spec, causal=causal).double()
    names, parameters = zip(*attention.named_parameters(), strict=True) if list(attention.parameters()) else ((), ())
    tensors = *inputs(3, grad=True), *(p.detach().clone().requires_grad_() for p in parameters)

    def run(q, k, v, *values):
        return functional_call(attention, dict(zip(names, values, strict=True)), (q, k, v))

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True, atol=1e-4, rtol=1e-3)


@every_mode
def test_every_parameter_gets_a_gradient(spec, causal):
    attention = build(spec, causal=causal)
    q, k, v = inputs(dtype=torch.float32, grad=True)
    (attention(q, k, v) * inputs(5, dtype=torch.float32)[2]).sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
    assert v.grad is not None
    assert v.grad.any()


@every_mode
def test_backward_twice_and_under_autocast(spec, causal):
    attention = build(spec, causal=causal)
    q, k, v = inputs(dtype=torch.float32, grad=True)
    loss = attention(q, k, v).square().sum()
    first = torch.autograd.grad(loss, v, retain_graph=True)
    again = torch.autograd.grad(loss, v, retain_graph=True)
    assert torch.equal(first[0], again[0])
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v)
        unrecorded = attention(q.detach(), k.detach(), v.detach())  # may take fewer operations, which round otherwise
        assert out.dtype == torch.float32
        torch.autograd.grad(out.sum(), v)
    assert torch.equal(out, attention(q, k, v))
    assert torch.equal(unrecorded, attention(q.detach(), k.detach(), v.detach()))


@every_mode
def test_inputs_are_left_alone(spec, causal):
    attention = build(spec, causal=causal)
    tensors, copies = inputs(dtype=torch.float32), inputs(dtype=torch.float32)
    mask, same = ragged(), ragged()
    attention(*tensors)
    attention(*tensors, mask)
    attention.attention_matrix(*tensors[:2], mask)
    assert all(torch.equal(x, y) for x, y in zip((*tensors, mask), (*copies, same), strict=True))


@every_mode
def test_strides_do_not_matter(spec, causal):
    attention, (q, k, v) = build(spec, causal=causal), inputs()
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not turned[0].is_contiguous()
    assert (attention(*turned) - attention(q, k, v)).abs().max() <= rounding(attention, q, k, v)


@every_mode
def test_same_seed_same_bits_and_state_dicts_round_trip(spec, causal):
    """T13, T17."""
    first, second = (build(spec, causal=causal, seed=5, layer=2) for _ in range(2))
    state = first.state_dict()
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in state.items())
    q, k, v = inputs(dtype=torch.float32)
    assert torch.equal(first(q, k, v), second(q, k, v))
    other = build(spec, causal=causal, seed=17, layer=2)
    other.load_state_dict(state)
    assert torch.equal(first(q, k, v), other(q, k, v))
    assert torch.equal(first.eval()(q, k, v), first.train()(q, k, v))


@every_mode
def test_no_global_randomness(spec, causal):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    attention = build(spec, causal=causal)
    attention.redraw(7)
    attention(*inputs())
    assert torch.equal(before, torch.get_rng_state())


@every_mode
def test_redraw_is_in_place_and_seeded(spec, causal):
    """T13: the same (seed, layer, step) on every rank and after every restart; other layers and steps differ."""
    attention = build(spec, causal=causal)
    drawn = {name: buffer for name, buffer in attention.named_buffers() if "omega" in name}
    homes = {name: buffer.data_ptr() for name, buffer in drawn.items()}
    start = {name: buffer.clone() for name, buffer in drawn.items()}
    kept = {name: value.clone() for name, value in attention.state_dict().items() if name not in drawn}
    attention.redraw(41)
    later = {name: buffer.clone() for name, buffer in attention.named_buffers() if name in drawn}
    attention.redraw(43)
    attention.redraw(41)
    for name, buffer in attention.named_buffers():
        if name in drawn:
            assert buffer.data_ptr() == homes[name]
            assert torch.equal(buffer, later[name])
            assert not torch.equal(buffer, start[name])
    assert all(torch.equal(value, attention.state_dict()[name]) for name, value in kept.items())
    attention.redraw(0)
    assert all(torch.equal(buffer, start[name]) for name, buffer in attention.named_buffers() if name in drawn)
    for other in (build(spec, causal=causal, layer=1), build(spec, causal=causal, seed=1)):
        assert all(not torch.equal(b, start[n]) for n, b in other.named_buffers() if n in drawn)


@every_causal
def test_steps_give_what_the_whole_gives(spec):
    """T9, with an attention's own state and with the one that any attention can do with."""
    attention, (q, k, v) = build(spec, causal=True), inputs()
    whole, tolerance = attention(q, k, v), rounding(attention, q, k, v)
    for decode in (attention.decode, partial(Attention.decode, attention)):
        state, outs = None, []
        for t in range(0, q.shape[2], 3):
            out, state = decode(
                *attention.normalised(q[:, :, t : t + 3], k[:, :, t : t + 3]), v[:, :, t : t + 3], state
            )
            outs.append(out)
        assert (torch.cat(outs, 2) - whole).abs().max() <= tolerance
