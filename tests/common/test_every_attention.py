"""What every attention must do, whatever it is: run on all that is registered and on each choice of its options."""

from __future__ import annotations

from functools import partial

import cases
import pytest
import torch
from cases import build, inputs, is_rms, modes, ragged, rounding, site_of
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from linvit.attention import (
    BASELINE,
    CONTROL,
    LIMIT,
    attention_cost,
    attention_names,
    break_even,
    has_random_features,
    is_linear,
    regridded,
    resolve,
    role_of,
    size_option,
    with_size,
)
from linvit.attention.base import Attention
from linvit.attention.causal import CHUNK
from linvit.attention.measured import measured_cost
from linvit.attention.performer import Performer
from linvit.registry import parse
from linvit.site import Site

MODES = modes()
BIDIRECTIONAL = [spec for spec, causal in MODES if not causal]
CAUSAL = [spec for spec, causal in MODES if causal]
PLAIN = [(spec, causal) for spec, causal in MODES if spec in cases.defaults()]
every_mode = pytest.mark.parametrize(("spec", "causal"), MODES)
every_spec = pytest.mark.parametrize("spec", BIDIRECTIONAL)
every_causal = pytest.mark.parametrize("spec", CAUSAL)
GRIDS = [
    {"tokens": 1 + rows * columns, "grid": (rows, columns), "prefix": 1} for rows, columns in ((3, 5), (5, 7), (2, 3))
]
every_default = pytest.mark.parametrize(("spec", "causal"), PLAIN)  # where no option could make a difference


def test_the_list_is_everything():
    assert {parse(spec).name for spec in BIDIRECTIONAL} == set(attention_names())
    assert len(BIDIRECTIONAL) > 1.5 * len(attention_names())


def test_roles():
    assert [role_of(name) for name in (BASELINE, LIMIT, CONTROL)] == ["baseline", "limit", "control"]
    assert {name for name in attention_names() if role_of(name) != "candidate"} >= {BASELINE, LIMIT, CONTROL}
    assert attention_names("baseline") == [BASELINE]
    assert role_of("softmax@2+softmax:dwc=3@4") == "baseline"
    assert role_of("softmax@2+performer-relu:m=32@4") == "candidate"
    assert not is_linear("softmax@1+performer-relu@1")
    assert is_linear("performer-relu@1+uniform@2")


@every_spec
def test_what_it_states_is_what_is_built(spec):
    """Its documentation; and, without building it, its parameters, multiply–accumulates and random features."""
    attention, site = build(spec), site_of(spec)
    thing = attention.kernel if isinstance(attention, Performer) and not attention.formula else attention
    assert thing.formula
    assert thing.estimates
    cost = attention_cost(spec, site)
    assert cost.parameters == sum(p.numel() for p in attention.parameters())
    before = {name: value.clone() for name, value in attention.state_dict().items()}
    attention.redraw(-1)
    changed = [name for name, value in attention.state_dict().items() if not torch.equal(value, before[name])]
    assert cost.drawn == sum(before[name].numel() for name in changed)
    assert has_random_features(spec) is bool(changed)
    if isinstance(attention, Performer):
        assert cost.features == attention.kernel.width == attention.kernel.phi(torch.zeros(5, 7)).shape[-1]
    if (option := size_option(spec)) is not None:
        assert parse(with_size(parse(spec).name, 3)).options[option] == 3


@pytest.mark.parametrize("spec", cases.defaults())
def test_macs_are_the_products(spec):
    """Counted while it runs, but for the denominators and other products that are a head_dim-th of these; a convolution
    by a product of matrices takes more."""
    site = site_of(spec, tokens=257, head_dim=61, prefix=1, grid=(16, 16))
    q, k, v = inputs(dtype=torch.float32, batch=1, tokens=257, head_dim=61)
    attention = build(spec, tokens=257, head_dim=61, prefix=1, grid=(16, 16))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        attention(q, k, v)
    counted, stated = counter.get_total_flops() / 2, attention_cost(spec, site).macs
    if not counted:
        assert stated <= q.numel()
        return
    assert stated == pytest.approx(counted, rel=0.07)
    kind, _, options = resolve(spec)
    found = measured_cost(kind, site, **options)  # what an attention is taken to cost that does not say
    assert found.macs == counted
    assert found.parameters == attention_cost(spec, site).parameters
    assert found.drawn == attention_cost(spec, site).drawn


@every_spec
def test_macs_grow_with_tokens_and_break_even_is_where_they_meet(spec):
    def macs(name: str, tokens: int) -> int:
        return attention_cost(name, Site(3, 7, tokens)).macs

    few, many = macs(spec, 1009), macs(spec, 3027)
    if is_linear(spec) or role_of(spec) == "baseline":
        assert many == few * (3 if is_linear(spec) else 9)
    else:
        assert 3 * few < many < 9.2 * few  # the grid of 3,027 tokens is not three times that of 1,009
    edge = break_even(spec, Site(3, 7, 13))
    if role_of(spec) == "baseline":
        assert edge is None
        return
    assert edge is not None
    assert macs(spec, edge + 1) < macs(BASELINE, edge + 1)
    assert edge == 1 or macs(spec, edge) >= macs(BASELINE, edge)


@pytest.mark.parametrize("spec", cases.defaults())
def test_switches_add_their_cost(spec):
    site = Site(3, 7, 13, (3, 4), 1)
    plain = attention_cost(spec, site)
    with_dwc = attention_cost(f"{spec}{',' if ':' in spec else ':'}dwc=3", site)
    assert with_dwc.parameters - plain.parameters == 3 * 7 * 9
    assert with_dwc.macs - plain.macs == 3 * 7 * 9 * 12  # image tokens


@every_mode
def test_finite_at_large_norms(spec, causal):
    """T6: σ = 6, where unstabilised exponentials are far out of range, in every dtype; and the gradients at σ = 12,
    beyond float32's range for every exponential, chunk and row."""
    attention = build(spec, causal=causal, tokens=149, head_dim=61)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q, k, v = inputs(sigma=6, dtype=dtype, tokens=149, head_dim=61, batch=1)
        out = attention(q, k, v)
        assert (out.dtype, out.shape) == (dtype, v.shape)
        assert out.isfinite().all(), dtype
    q, k, v = inputs(sigma=12, dtype=torch.float32, tokens=37, head_dim=61, grad=True)
    attention(q, k, v).square().sum().backward()
    for name, x in (("q", q), ("k", k), ("v", v), *attention.named_parameters()):
        assert x.grad is None or x.grad.isfinite().all(), name


@every_mode
def test_any_dtype_batch_stride_and_value(spec, causal):
    attention, (q, k, v) = build(spec, causal=causal), inputs()
    out, tolerance = attention(q, k, v), rounding(attention, q, k, v)
    assert out.dtype == attention(q.float(), k, v).dtype == torch.float64
    assert torch.equal(attention(q, k, v.float()), attention(q, k, v.float().double()).float())
    assert attention(q[:0], k[:0], v[:0]).shape == (0, *v.shape[1:])
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not turned[0].is_contiguous()
    assert (attention(*turned) - out).abs().max() <= tolerance
    # linear in v: one scale for all of it is a scale of the output (an RMS norm takes it out)
    expected = out if is_rms(attention) else 1024 * out
    rtol = 1e-6 if is_rms(attention) else 1e-15
    if not attention.no_matrix:
        torch.testing.assert_close(attention(q, k, 1024 * v), expected, rtol=rtol, atol=1e-12)
    zero = torch.zeros(cases.BATCH, 3, 13, 7)
    assert attention(zero, zero, v.float()).isfinite().all()


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
    """T8: any token, in float64; and the last sees what a bidirectional one sees."""
    attention, (q, k, v) = build(spec, causal=True), inputs()
    before, tolerance = attention(q, k, v), rounding(attention, q, k, v)
    for t in (1, 5, 12):
        changed = (torch.cat([x[:, :, :t], 100 * y[:, :, t:]], 2) for x, y in zip((q, k, v), inputs(9), strict=True))
        change = (attention(*changed)[:, :, :t] - before[:, :, :t]).abs().max()
        assert change <= min(1e-6, tolerance)
    if "center" in spec or parse(spec).name in ("performer-hyp", "performer-theta", "performer-oprf"):
        return  # means over all tokens are used bidirectionally only
    both = build(spec)
    assert (before[:, :, -1] - both(q, k, v)[:, :, -1]).abs().max() <= rounding(both, q, k, v) + tolerance


@every_causal
def test_later_chunks_do_not_touch_earlier_ones(spec):
    """T8: within 1e-6, since some processors' products depend on how memory is aligned (AVX2), by a last bit."""
    tokens = CHUNK + 3
    assert tokens == 131
    attention, (q, k, v) = build(spec, causal=True, tokens=tokens), inputs(tokens=tokens, batch=1)
    before = attention(q, k, v)[:, :, :CHUNK]
    for x in (q, k, v):
        x[:, :, CHUNK:] = 50.0
    after = attention(q, k, v)[:, :, :CHUNK]
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)


@every_mode
def test_masking_equals_leaving_out(spec, causal):
    """T11: whatever the padding holds, in outputs and gradients."""
    attention, mask = build(spec, causal=causal).double(), ragged()
    if parse(spec).name in cases.ORDERED:
        mask = torch.arange(13) < torch.tensor([[11], [7]])
    full, weights = inputs(grad=True), inputs(5)[2]
    padded = (x.masked_fill(~mask[:, None, :, None], float("nan")) for x in full)
    out = attention(*padded, mask)
    assert out.isfinite().all()
    (out * weights * mask[:, None, :, None]).sum().backward()
    for row, keep in enumerate(mask):
        short = [x.detach()[row : row + 1, :, keep].requires_grad_() for x in full]
        alone = attention(*short)
        condition = rounding(attention, *(x.detach() for x in short))
        assert (out[row : row + 1, :, keep] - alone).abs().max() <= condition
        (alone * weights[row : row + 1, :, keep]).sum().backward()
        for x, y in zip(full, short, strict=True):
            if y.grad is None:
                assert x.grad is None or not x.grad.any()
                continue
            assert x.grad is not None
            scale = max(1.0, float(y.grad.abs().max()))
            assert (x.grad[row : row + 1, :, keep] - y.grad).abs().max() <= 100 * condition * scale
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
    if not attention.no_matrix:
        assert not attention.attention_matrix(q, k, mask)[0].any() or parse(spec).name == LIMIT


@every_default
@pytest.mark.parametrize("tokens", [slice(3, 4), slice(None)], ids=["one token", "all"])
def test_zeros_have_gradients(spec, causal, tokens):
    """Where q, k or both are zero there is no direction, no length and no logarithm."""
    attention = build(spec, causal=causal)
    for which in ("q", "k", "qk"):
        named = dict(zip("qkv", inputs(dtype=torch.float32), strict=True))
        for name in which:
            named[name][:, :, tokens] = 0
        tensors = [x.requires_grad_() for x in named.values()]
        out = attention(*tensors)
        assert out.isfinite().all()
        wanted = *tensors, *attention.parameters()
        gradients = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True, materialize_grads=True)
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", attention_names())
def test_weights_move_to_any_grid(name):
    """With the options that have weights. What does not depend on the grid stays as it is."""
    options = {"dwc": 3} if "qk_norm" in build(name, **GRIDS[0]).without_effect else {"dwc": 3, "qk_norm": "all"}
    spec = cases.spec_of(name, **options)
    old, fresh = build(spec, **GRIDS[0]), build(spec, **GRIDS[0], seed=3)
    for site in GRIDS:
        new = build(spec, **site)
        moved = regridded(spec, old.state_dict(), old.site, new.site)
        new.load_state_dict(moved)
        assert new(*inputs(tokens=site["tokens"], dtype=torch.float32)).isfinite().all()
    fresh.load_state_dict(regridded(spec, old.state_dict(), old.site, old.site))
    assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in old.state_dict().items())


@every_mode
def test_matrix_times_v_is_the_output(spec, causal):
    """T12."""
    attention, (q, k, v) = build(spec, causal=causal), inputs()
    if attention.no_matrix:
        with pytest.raises(ValueError, match=f"{parse(spec).name} has no attention matrix: {attention.no_matrix}"):
            attention.attention_matrix(q, k)
        return
    for mask in (None, ragged()):
        matrix = attention.attention_matrix(q, k, mask)
        assert matrix.shape == (2, 3, 13, 13)
        if causal:
            assert not matrix.triu(1).any()
        if mask is not None and parse(spec).name != LIMIT:
            assert not matrix.transpose(2, 3)[~mask[:, None].expand(2, 3, 13)].any()
        if is_rms(attention) or not cases.is_average(spec) or parse(spec).name in cases.HALVED:
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
    if not cases.is_average(spec):
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
    """T10: float64 against differences, for q, k, v and every parameter, which all get one."""
    attention = build(spec, causal=causal).double()
    names, parameters = zip(*attention.named_parameters(), strict=True) if list(attention.parameters()) else ((), ())
    tensors = *inputs(3, grad=True), *(p.detach().clone().requires_grad_() for p in parameters)

    def run(q, k, v, *values):
        return functional_call(attention, dict(zip(names, values, strict=True)), (q, k, v))

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True, atol=1e-4, rtol=1e-3)
    out = (run(*tensors) * inputs(5)[2]).sum()
    found = torch.autograd.grad(out, [tensors[2], *tensors[3:]], allow_unused=True)
    assert all(gradient is not None for gradient in found)
    assert found[0] is not None
    assert found[0].any()


@every_default
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


@every_default
def test_inputs_and_global_randomness_are_left_alone(spec, causal):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    attention = build(spec, causal=causal)
    attention.redraw(7)
    tensors, copies = inputs(dtype=torch.float32), inputs(dtype=torch.float32)
    mask, same = ragged(), ragged()
    attention(*tensors)
    attention(*tensors, mask)
    if not attention.no_matrix:
        attention.attention_matrix(*tensors[:2], mask)
    assert all(torch.equal(x, y) for x, y in zip((*tensors, mask), (*copies, same), strict=True))
    assert torch.equal(before, torch.get_rng_state())


@every_spec
def test_same_seed_same_bits_and_state_dicts_round_trip(spec):
    """T13, T17."""
    first, second, other = (build(spec, seed=seed, layer=2) for seed in (5, 5, 17))
    state = first.state_dict()
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in state.items())
    q, k, v = inputs(dtype=torch.float32)
    other.load_state_dict(state)
    for made in (second, other, first.eval()):
        assert torch.equal(first(q, k, v), made(q, k, v))


@pytest.mark.parametrize("spec", [*BIDIRECTIONAL, *(f"performer-exp:m=11,projection={p}" for p in ("iid", "hadamard"))])
def test_redraw_is_in_place_and_seeded(spec):
    """T13: the same (seed, layer, step) on every rank and after every restart; other layers and steps differ."""
    attention = build(spec)
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
    for other in (build(spec, layer=1), build(spec, seed=1)):
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
