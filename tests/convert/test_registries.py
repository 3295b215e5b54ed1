"""linvit's attentions by name in transformers, and as a class for timm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import linvit
from linvit.attention import attentions, create_attention

SIZE = {"hidden_size": 33, "num_attention_heads": 3, "num_hidden_layers": 2, "image_size": 35, "patch_size": 7}


def vit(implementation: str):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.ViTConfig(**SIZE, num_labels=5, initializer_range=0.4)
    return transformers.AutoModelForImageClassification.from_config(config, attn_implementation=implementation).eval()


def images(n: int = 2):
    return torch.randn(n, 3, 35, 35, generator=torch.Generator().manual_seed(3))


def test_a_name_for_transformers_is_the_spec(tmp_path):
    pytest.importorskip("transformers")
    name = linvit.register_transformers("performer-exp:m=11")
    assert name == "linvit-performer-exp:m=11"
    model, exact = vit(name), vit("sdpa")
    with torch.no_grad():
        out = model(images()).logits
        assert (out - exact(images()).logits).abs().max() > 1e-3
        # the same as the attention itself inside, its features drawn for layer 0 in every layer
        attention = create_attention("performer-exp:m=11", heads=3, head_dim=11, tokens=26)
        linvit.linearize(exact, "performer-exp:m=11")
        for layer in exact.vit.layers:
            layer.attention.linvit = attention
        torch.testing.assert_close(exact(images()).logits, out)
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path, attn_implementation=name)
        assert torch.equal(again(images()).logits, out)


def test_softmax_by_that_way_is_softmax():
    pytest.importorskip("transformers")
    model, exact = vit(linvit.register_transformers("softmax")), vit("eager")
    mask = torch.ones(2, 26, dtype=torch.long)
    mask[0, 17:] = 0
    with torch.no_grad():
        for keep in (None, mask):
            wanted, found = (m(images(), attention_mask=keep).logits for m in (exact, model))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def modern(kind: str, implementation: str):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    size = SIZE | {"hidden_size": 36, "intermediate_size": 53}
    if kind == "DINOv3ViT":
        size |= {"num_register_tokens": 4, "initializer_range": 0.4}
    config = getattr(transformers, f"{kind}Config")(**size)
    return transformers.AutoModel.from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("kind", ["DINOv3ViT", "SiglipVision"])
def test_names_in_newer_models(kind):
    """Positions are rotated before the attention is called by its name."""
    pytest.importorskip("transformers")
    softmax, linear = (linvit.register_transformers(spec) for spec in ("softmax", "performer-hyp:m=11"))
    with torch.no_grad():
        wanted, same, other = (modern(kind, name)(images()).pooler_output for name in ("eager", softmax, linear))
        torch.testing.assert_close(same, wanted, atol=1e-5, rtol=1e-5)
        assert torch.isfinite(other).all()
        assert (other - wanted).abs().max() > 1e-3
        linearized, _ = linvit.linearize(modern(kind, "eager"), "linformer:k=5,kind=pool")
        name = linvit.register_transformers("linformer:k=5,kind=pool")
        torch.testing.assert_close(modern(kind, name)(images()).pooler_output, linearized(images()).pooler_output)


def test_masks_reach_a_linear_attention():
    pytest.importorskip("transformers")
    model, mask, other = vit(linvit.register_transformers("performer-relu:m=11")), torch.ones(2, 26), images()
    mask[:, 21:] = 0
    other[:, :, 28:] = 9.0
    with torch.no_grad():
        masked, changed = (model(x, attention_mask=mask.long()).logits for x in (images(), other))
        torch.testing.assert_close(masked, changed)
        assert (masked - model(images()).logits).abs().max() > 1e-3


def test_other_scales_and_numbers_of_tokens():
    transformers = pytest.importorskip("transformers")
    name = linvit.register_transformers("linformer:k=5,kind=pool")
    attend = transformers.AttentionInterface()[name]
    q, k, v = torch.randn(3, 2, 3, 13, 7)
    out, weights = attend(nn.Module(), q, k, v, None, scaling=0.1)
    assert (out.shape, weights) == ((2, 13, 3, 7), None)
    direct = create_attention("linformer:k=5,kind=pool", heads=3, head_dim=7, tokens=13)
    torch.testing.assert_close(out, direct(q * 0.1 * 7**0.5, k, v).transpose(1, 2))
    assert attend(nn.Module(), *torch.randn(3, 2, 3, 17, 7), None)[0].shape == (2, 17, 3, 7)
    causal = nn.Module()
    causal.is_causal = True
    with pytest.raises(ValueError, match="is_causal=True"):
        attend(causal, q, k, v, None)


@pytest.mark.parametrize("spec", ["window:size=3", "twoscale:cell=2", "performer-relu:m=11,exact_cls=true"])
def test_the_grid_and_cls_come_from_the_configuration(spec):
    transformers = pytest.importorskip("transformers")
    name = linvit.register_transformers(spec)
    model, exact = vit(name), vit("sdpa")
    attention = create_attention(spec, heads=3, head_dim=11, tokens=26, grid=(5, 5), prefix=1)
    linvit.linearize(exact, spec)
    for layer in exact.vit.layers:
        layer.attention.linvit = attention
    with torch.no_grad():
        torch.testing.assert_close(model(images()).logits, exact(images()).logits)
    attend = transformers.AttentionInterface()[name]
    q, k, v = torch.randn(3, 2, 3, 10, 11)  # of an image of another size
    if spec.startswith(("window", "twoscale")):
        with pytest.raises(ValueError, match=r"give grid=\(rows, columns\)"):
            attend(model.vit.layers[0].attention, q, k, v, None)
    else:
        assert attend(model.vit.layers[0].attention, q, k, v, None)[0].shape == (2, 10, 3, 11)


@pytest.mark.parametrize("spec", ["performer-theta", "linformer:k=5", "performer-exp:qk_norm=head"])
def test_what_is_learned_has_no_place_in_that_registry(spec):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="cannot store: use linearize"):
        linvit.register_transformers(spec)


def test_a_class_for_timm():
    """As timm calls it: all by keyword but dim."""
    made = linvit.timm_attention("performer-exp:m=11")
    assert isinstance(made, type)
    assert issubclass(made, nn.Module)
    options = {"qkv_bias": True, "qk_norm": True, "scale_norm": True, "proj_bias": True, "attn_drop": 0.0}
    first, second = (made(33, num_heads=3, proj_drop=0.0, norm_layer=nn.LayerNorm, **options).eval() for _ in "12")
    assert sorted(key for key, _ in first.named_parameters()) == sorted(
        f"{part}.{name}" for part in ("qkv", "q_norm", "k_norm", "norm", "proj") for name in ("weight", "bias")
    )
    assert not torch.equal(first.linvit.kernel.omega.rows, second.linvit.kernel.omega.rows)  # two layers
    x = torch.randn(2, 13, 33)
    b, n, d = x.shape
    q, k, v = first.qkv(x).view(b, n, 3, 3, 11).permute(2, 0, 3, 1, 4)
    out = create_attention("performer-exp:m=11", heads=3, head_dim=11, tokens=13)(first.q_norm(q), first.k_norm(k), v)
    torch.testing.assert_close(first(x), first.proj(first.norm(out.transpose(1, 2).reshape(b, n, d))))
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[:, 7:] = False
    torch.testing.assert_close(first(x, attn_mask=mask[:, None, None])[:, :7], first(x[:, :7]), atol=1e-5, rtol=1e-4)
    assert made(33, num_heads=3, attn_head_dim=5, dim_out=7)(x).shape == (2, 13, 7)
    for options, words in (
        ({"num_heads": 4}, "dim=33 is not a multiple of num_heads=4"),
        ({"num_heads": 3, "qk_norm": True}, "need a norm_layer"),
    ):
        with pytest.raises(ValueError, match=words):
            made(33, **options)


def test_a_class_for_timm_that_needs_tokens():
    for spec, words in (
        ("linformer:k=5", "is made for a number of tokens: give grid"),
        ("performer-relu:dwc=3", "give grid"),
    ):
        with pytest.raises(ValueError, match=words):
            linvit.timm_attention(spec)
        module = linvit.timm_attention(spec, grid=(5, 5))(33, num_heads=3)
        assert module(torch.randn(2, 26, 33)).shape == (2, 26, 33)
        assert attentions(module)[0].site.tokens == 26
