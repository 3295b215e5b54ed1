"""The options of every attention: qk_norm, rope, dwc, gate, cpe, exact_cls, debug; and MultiHead around them."""

from __future__ import annotations

import cases
import pytest
import torch
import torch.nn.functional as F
from cases import build, inputs, rounding
from torch import nn
from torch.func import functional_call

import linvit
from linvit.attention import ATTENTIONS, attention_names, attentions
from linvit.attention.grid import Rotation
from linvit.attention.multihead import MultiHead, fuse, separate
from linvit.models.cost import estimate
from linvit.models.resize import resized
from linvit.site import Site

GRID, PREFIX, TOKENS = (3, 5), 2, 17
ROPED = {"head_dim": 8, "grid": GRID, "prefix": PREFIX, "tokens": TOKENS}
every_name = pytest.mark.parametrize("name", attention_names())


def every_with(*switches: str):
    """All attentions that these switches change."""
    names = attention_names()
    return pytest.mark.parametrize(
        "name", [x for x in names if x not in ATTENTIONS or not set(switches) & set(ATTENTIONS[x].without_effect)]
    )


def switched(name: str, switch: str, **site: object):
    spec = cases.spec_of(name)
    return build(spec + ("," if ":" in spec else ":") + switch, grid=GRID, prefix=PREFIX, tokens=TOKENS, **site)


def plain(name: str):
    return build(cases.spec_of(name), grid=GRID, prefix=PREFIX, tokens=TOKENS)


@every_with("exact_cls")
def test_exact_cls(name):
    """Softmax for the prefix's queries, the attention's own for the rest."""
    q, k, v = inputs(tokens=TOKENS)
    attention = switched(name, "exact_cls=true")
    out = attention(q, k, v)
    torch.testing.assert_close(out[:, :, :PREFIX], build("softmax", tokens=TOKENS)(q, k, v)[:, :, :PREFIX])
    assert torch.equal(out[:, :, PREFIX:], plain(name)(q, k, v)[:, :, PREFIX:])
    if not attention.no_matrix:
        matrix = attention.attention_matrix(q, k)
        torch.testing.assert_close(matrix[:, :, :PREFIX].sum(-1), torch.ones(2, 3, PREFIX, dtype=q.dtype))


def test_exact_cls_needs_a_prefix():
    for site in ({"prefix": 0}, {"prefix": 1, "causal": True}):
        with pytest.raises(ValueError, match=r"exact_cls=true.*prefix"):
            build("performer-relu:exact_cls=true", **site)


@every_with("qk_norm")
def test_qk_norm(name):
    """RMS norms of q and k with gains; their size no longer matters."""
    q, k, v = inputs(tokens=TOKENS)
    attention = switched(name, "qk_norm=head").double()
    gains = {name: torch.linspace(0.5, 2, 7, dtype=torch.float64) * s for name, s in (("q_norm", 1), ("k_norm", 3))}
    out = functional_call(attention, gains, (q, k, v))
    inner = plain(name).double()
    expected = inner(F.rms_norm(q, (7,)) * gains["q_norm"], F.rms_norm(k, (7,)) * gains["k_norm"], v)
    tolerance = rounding(inner, F.rms_norm(q, (7,)) * gains["q_norm"], F.rms_norm(k, (7,)) * gains["k_norm"], v)
    assert (out - expected).abs().max() <= tolerance
    assert {"q_norm", "k_norm"} <= set(attention.state_dict())


@every_with("qk_norm")
def test_qk_norm_over_all_channels(name):
    q, k, v = inputs(tokens=TOKENS)
    attention = switched(name, "qk_norm=all").double()
    gain = torch.linspace(0.5, 2, 21, dtype=torch.float64)
    out = functional_call(attention, {"q_norm": gain}, (q, k, v))
    gain = gain.view(3, 1, 7)

    def normed(x):
        return F.rms_norm(x.transpose(1, 2), (3, 7)).transpose(1, 2)

    inner = plain(name).double()
    expected = inner(normed(q) * gain, normed(k), v)
    assert (out - expected).abs().max() <= rounding(inner, normed(q) * gain, normed(k), v)


@every_with("rope")
def test_rope_rotates_q_and_k_before_the_attention(name):
    attention, inner = (build(cases.spec_of(name, **more), **ROPED) for more in ({"rope": "2d"}, {}))
    q, k, v = inputs(tokens=TOKENS, head_dim=8)
    assert torch.equal(attention(q, k, v), inner(attention.rope(q), attention.rope(k), v))
    short = attention(*(x[:, :, :7] for x in (q, k, v)))  # the first places of the grid
    torch.testing.assert_close(short, inner(*(attention.rope(x)[:, :, :7] for x in (q, k)), v[:, :, :7]))


def test_rotations_are_products_of_complex_numbers():
    """Channel pairs times e^{i·place·frequency}, rows and columns; prefix tokens as they are."""
    rope, x = Rotation(Site(3, 8, TOKENS, GRID, PREFIX)), inputs(tokens=TOKENS, head_dim=8)[0]
    frequency = 100.0 ** -torch.tensor([0, 0.5], dtype=torch.float64)
    places = torch.cartesian_prod(*(torch.arange(side) for side in GRID)).double()
    parts = []
    for axis, (real, imaginary) in enumerate(zip(*[iter(x[:, :, PREFIX:].split(2, -1))] * 2, strict=True)):
        z = torch.complex(real, imaginary) * torch.exp(1j * places[:, axis, None] * frequency)
        parts += [z.real, z.imag]
    expected = torch.cat([x[:, :, :PREFIX], torch.cat(parts, -1)], 2)
    torch.testing.assert_close(rope(x), expected, rtol=1e-6, atol=1e-6)  # its tables are float32


@pytest.mark.parametrize("grid", [(6, 6), (3, 7)])
def test_rope_depends_on_differences_of_places(grid):
    rope = Rotation(Site(3, 8, grid[0] * grid[1], grid))
    q, k = (x[:, :, :1].expand(-1, -1, grid[0] * grid[1], -1) for x in inputs(head_dim=8)[:2])
    scores = (rope(q) @ rope(k).transpose(2, 3)).unflatten(3, grid).unflatten(2, grid)
    for rows, columns in ((1, 0), (0, 1), (2, 2)):
        (up, left), (down, right) = (slice(None, -rows or None), slice(None, -columns or None)), (rows, columns)
        shifted = scores[:, :, down:, right:, down:, right:]
        torch.testing.assert_close(scores[:, :, up, left, up, left], shifted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(scores[..., 0, 0], scores[..., 2, 0])
    torch.testing.assert_close(rope(q).norm(dim=-1), q.norm(dim=-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("spec", "site", "message"),
    [
        ("softmax:rope=2d", {}, "rope=2d needs a head_dim that is a multiple of 4, not 7"),
        ("softmax:rope=2d", {"head_dim": 8, "grid": None}, "rope=2d rotates by the place on a grid"),
        ("softmax:rope=2d", {"head_dim": 8, "causal": True}, "rope=2d is for bidirectional"),
        ("uniform:rope=2d", {"head_dim": 8}, "rope=2d has no effect"),
        ("softmax:rope=3d", {}, "rope=3d must be"),
        ("softmax:gate=silu", {}, "gate=silu works on tokens"),
        ("softmax:cpe=3", {}, "cpe=3 works on tokens"),
        ("softmax:gate=relu", {}, "gate=relu must be"),
        ("softmax:qk_norm=true", {}, "qk_norm=true must be"),
    ],
)
def test_impossible_options(spec, site, message):
    with pytest.raises(ValueError, match=message):
        build(spec, **{"grid": (1, 13), **site})


@every_name
def test_gate_and_cpe(name):
    """MultiHead multiplies by its gate before the output projection, and adds the convolution of tokens to them."""
    site = {"heads": 3, "head_dim": 7, "tokens": TOKENS, "grid": GRID, "prefix": PREFIX}
    x = torch.randn(2, TOKENS, 23)
    for kind, activation in (("linear", nn.Identity()), ("silu", nn.SiLU())):
        gated = MultiHead(23, **site, attention=cases.spec_of(name, gate=kind, cpe=3))
        inner = gated.attention(*gated.split(x)).transpose(1, 2).flatten(2)
        torch.testing.assert_close(gated(x), gated.proj(inner * activation(gated.gate(x))))
    image = x[:, PREFIX:].transpose(1, 2).unflatten(2, GRID)
    expected = x.clone()
    expected[:, PREFIX:] += F.conv2d(image, gated.cpe.weight, padding=1, groups=23).flatten(2).transpose(1, 2)
    torch.testing.assert_close(gated.positioned(x), expected)
    gated.near_softmax()
    assert torch.equal(gated.positioned(x), x)
    torch.testing.assert_close(activation(gated.gate(x)), torch.ones(2, TOKENS, 21))


EXTRAS = {"dwc": 3, "gate": "silu", "cpe": 3, "qk_norm": "all", "rope": "2d"}
MODEL = {"image_size": 16, "patch_size": 4, "dim": 24, "depth": 2, "heads": 3, "mlp_dim": 48}


@pytest.mark.parametrize("pool", ["mean", "cls"])
@pytest.mark.parametrize("name", ["softmax", "performer-relu", "agent", "mala"])
def test_a_model_with_every_option(name, pool):
    """What it costs; gradients of all weights; the same weights as without, where there are any; larger images."""
    bare, full = (
        linvit.create_model(**MODEL, pool=pool, attention=cases.spec_of(name, **more)) for more in ({}, EXTRAS)
    )
    for model in (bare, full):
        assert estimate(model.config).parameters == model.parameter_count()
    tokens, image = full.tokens, 16
    assert tokens - image == (pool == "cls")
    assert full.macs() - bare.macs() == 2 * (tokens * 24 * 24 + 2 * image * 9 * 24)
    full(torch.randn(2, 3, 16, 16)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in full.parameters())
    own = full.state_dict()
    assert all(torch.equal(value, own[key]) for key, value in bare.state_dict().items())
    added = {key.partition(".attn.")[2] for key in set(own) - set(bare.state_dict())}
    norms = {"attention.q_norm", "attention.k_norm"}
    assert added == norms | {"attention.dwc.weight", "gate.weight", "gate.bias", "cpe.weight"}
    larger = full.config.model_copy(update={"image_size": 24})
    moved = linvit.models.VisionTransformer(larger)
    moved.load_state_dict(resized(own, full.config, 24))
    assert moved(torch.randn(2, 3, 24, 24)).isfinite().all()


@pytest.mark.parametrize("name", ["softmax", "performer-relu"])
def test_a_gate_decodes_token_by_token(name):
    layer = MultiHead(24, heads=3, tokens=7, causal=True, attention=cases.spec_of(name, gate="silu", qk_norm="all"))
    x, state, outs = torch.randn(2, 7, 24), None, []
    for token in x.split(1, 1):
        out, state = layer.step(token, state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), layer(x))


@pytest.mark.parametrize("switch", ["cpe=3", "dwc=3", "rope=2d"])
def test_places_on_a_grid_are_not_causal(switch):
    with pytest.raises(ValueError, match=rf"{switch} (looks at later tokens|is for bidirectional)[^\n]+$"):
        MultiHead(24, heads=3, tokens=15, grid=GRID, causal=True, attention=f"softmax:{switch}")


@every_name
def test_dwc(name):
    """A depthwise convolution of v's image is added; prefix tokens are passed by."""
    q, k, v = inputs(tokens=TOKENS)
    attention = switched(name, "dwc=3").double()
    weight = dict(attention.named_parameters())["dwc.weight"]
    assert weight.shape == (21, 1, 3, 3)
    image = v[:, :, PREFIX:].transpose(2, 3).reshape(2, 21, *GRID)
    local = F.conv2d(image, weight, padding=1, groups=21).reshape(2, 3, 7, 15).transpose(2, 3)
    inner = plain(name).double()
    expected = inner(q, k, v).clone()
    expected[:, :, PREFIX:] += local
    assert (attention(q, k, v) - expected).abs().max() <= rounding(attention, q, k, v)
    if not attention.no_matrix:
        assert torch.equal(attention.attention_matrix(q, k), inner.attention_matrix(q, k))


@every_with("qk_norm", "rope", "exact_cls")
def test_switches_together(name):
    """Masks and gradients with everything on; exact rows are softmax of the normalised and rotated q and k."""
    attention = build(cases.spec_of(name, dwc=3, qk_norm="all", rope="2d", exact_cls=True), **ROPED).double()
    q, k, v = inputs(tokens=TOKENS, head_dim=8)
    first = build("softmax", **ROPED)(*attention.normalised(q, k), v)[:, :, :PREFIX]
    torch.testing.assert_close(attention(q, k, v)[:, :, :PREFIX], first)
    mask = torch.arange(TOKENS) < torch.tensor([[13], [TOKENS]])
    padded = [x.masked_fill(~mask[:, None, :, None], float("nan")) for x in (q, k, v)]
    short = attention(*(x[:1, :, :13] for x in (q, k, v)))
    tolerance = rounding(attention, *(x[:1, :, :13] for x in (q, k, v)))
    assert (attention(*padded, mask)[:1, :, :13] - short).abs().max() <= tolerance
    names, values = zip(*attention.named_parameters(), strict=True)
    tensors = *inputs(3, tokens=TOKENS, head_dim=8, grad=True), *(p.detach().clone().requires_grad_() for p in values)

    def run(q, k, v, *parameters):
        return functional_call(attention, dict(zip(names, parameters, strict=True)), (q, k, v))

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("switch", "site", "message"),
    [
        ("dwc=4", {"grid": (1, 13)}, "dwc=4 must be an odd size"),
        ("dwc=-3", {"grid": (1, 13)}, "dwc=-3"),
        ("dwc=9", {"grid": (4, 3), "prefix": 1}, "dwc=9 is more than 7"),
        ("dwc=3", {}, "dwc=3.*grid"),
        ("dwc=3", {"grid": (1, 13), "causal": True}, "dwc=3.*later tokens"),
    ],
)
def test_impossible_convolutions(switch, site, message):
    with pytest.raises(ValueError, match=message):
        build(f"softmax:{switch}", **site)


def test_more_tokens_than_the_grid():
    with pytest.raises(ValueError, match=r"19 tokens do not fit grid=\(3, 5\)"):
        switched("softmax", "dwc=3")(*inputs(tokens=19))


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_debug_names_the_input_that_is_not_finite(which, value, word):
    tensors = dict(zip("qkv", inputs(), strict=True))
    tensors[which][1, 2, 5, 3] = value
    with pytest.raises(ValueError, match=rf"^{which} holds {word} \(layer 4\)"):
        build("performer-exp:m=11,debug=true", layer=4)(**tensors)
    build("performer-exp:m=11")(**tensors)
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[1, 5] = False  # what padding holds does not matter
    assert build("performer-exp:m=11,debug=true")(**tensors, mask=mask).isfinite().all()


# MultiHead


@every_name
def test_multihead_has_the_same_names_for_every_attention(name):
    torch.manual_seed(0)
    module = MultiHead(23, heads=3, head_dim=7, tokens=13, attention=cases.spec_of(name), grid=(1, 13))
    shared = {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}
    assert {key for key in module.state_dict() if not key.startswith("attention.")} == shared
    assert module.qkv.weight.shape == (63, 23)
    x = torch.randn(2, 13, 23)
    out = module(x)
    assert out.shape == x.shape
    q, k, v = (y.view(2, 13, 3, 7).transpose(1, 2) for y in (x @ module.qkv.weight.t() + module.qkv.bias).chunk(3, -1))
    expected = module.proj(module.attention(q, k, v).transpose(1, 2).reshape(2, 13, 21))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    mask = torch.arange(13) < torch.tensor([[11], [7]])
    torch.testing.assert_close(module(x, mask)[:1, :11], module(x[:1, :11]), rtol=1e-3, atol=1e-4)


def test_fused_and_separate_projections_are_the_same_layer():
    """Weights of one form are those of the other, wherever the layer lies in a model, and back again to the bit."""
    torch.manual_seed(0)
    options = {"heads": 3, "head_dim": 7, "tokens": 13, "attention": "performer-theta:m=11", "layer": 2}
    fused = nn.ModuleList([nn.Linear(5, 5), MultiHead(23, **options)]).double()
    apart = nn.ModuleList([nn.Linear(5, 5), MultiHead(23, **options, fused=False)]).double()
    apart.load_state_dict(separate(fused.state_dict()))
    assert {"1.q_proj.weight", "1.k_proj.bias", "1.v_proj.weight"} <= set(apart.state_dict())
    x = torch.randn(2, 13, 23, dtype=torch.float64)
    torch.testing.assert_close(apart[1](x), fused[1](x), rtol=1e-12, atol=1e-12)
    back = fuse(apart.state_dict())
    assert all(torch.equal(back[key], value) for key, value in fused.state_dict().items())
    assert set(back) == set(fused.state_dict())


def test_attentions_of_a_module_in_order():
    layers = [build(spec) for spec in ("softmax", "performer-relu", "linformer")]
    inside = nn.Sequential(nn.ReLU(), layers[0], nn.ModuleDict({"a": nn.Sequential(layers[1]), "b": layers[2]}))
    assert attentions(inside) == layers
    assert attentions(nn.ReLU()) == []
    assert attentions(layers[1]) == [layers[1]]


def test_multihead_takes_a_module_and_drops_out():
    attention = build("softmax")
    module = MultiHead(21, heads=3, tokens=13, attention=attention, dropout=0.5, qkv_bias=False)
    assert module.attention is attention
    assert module.qkv.bias is None
    x = torch.randn(2, 13, 21)
    assert not torch.equal(module(x), module(x))
    assert torch.equal(module.eval()(x), module(x))
    assert linvit.MultiHead is MultiHead
    assert isinstance(module, nn.Module)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 22, "heads": 3}, "dim=22 is not a multiple of heads=3"),
        ({"dim": 21, "heads": 0}, "heads=0"),
        ({"dim": 0, "heads": 3}, "dim=0"),
        ({"dim": 21, "heads": 3, "head_dim": 0}, "head_dim=0"),
        ({"dim": 21, "heads": 3, "attention": "sofmax"}, "did you mean 'softmax'"),
    ],
)
def test_impossible_multiheads(options, message):
    with pytest.raises(ValueError, match=message):
        MultiHead(options.pop("dim"), tokens=13, **options)


def test_multihead_refuses_other_shapes():
    module = MultiHead(21, heads=3, tokens=13)
    for shape in ((13, 21), (2, 13, 19), (2, 3, 13, 21)):
        with pytest.raises(ValueError, match=r"x has shape .* must be \(batch, tokens, 21\)"):
            module(torch.zeros(shape))
