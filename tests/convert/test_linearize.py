"""Another attention inside models of other libraries: what stays, what comes, and the way back."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linvit
from linvit.attention import attentions
from linvit.models import create_model

DIM, HEADS, DEPTH, SIZE, PATCH = 33, 3, 4, 35, 7


class TimmLike(nn.Module):
    """timm's names: blocks[i].attn with qkv, proj and what lies between."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_dim, self.scale = HEADS, DIM // HEADS, (DIM // HEADS) ** -0.5
            self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
            self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.Identity()
            self.attn_drop, self.proj_drop, self.norm = nn.Dropout(0.0), nn.Dropout(0.0), nn.LayerNorm(DIM)

        def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            b, n, _ = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
            out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, attn_mask, is_causal=is_causal)
            return self.proj_drop(self.proj(self.norm(out.transpose(1, 2).reshape(b, n, DIM))))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.attn = nn.LayerNorm(DIM), TimmLike.Attention()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attn(self.norm1(x))

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.proj, self.patch_embed.grid_size = nn.Conv2d(3, DIM, PATCH, PATCH), (SIZE // PATCH,) * 2
        self.cls_token, self.num_prefix_tokens = nn.Parameter(torch.randn(1, 1, DIM)), 1
        self.blocks, self.head = nn.Sequential(*(self.Block() for _ in range(DEPTH))), nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed.proj(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1))[:, 0])


class TorchvisionLike(nn.Module):
    """torchvision's names: nn.MultiheadAttention as self_attention, its first output taken."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1 = nn.LayerNorm(DIM)
            self.self_attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.ln_1(x)
            y, _ = self.self_attention(y, y, y, need_weights=False)
            return x + y

    def __init__(self):
        super().__init__()
        self.image_size, self.patch_size = SIZE, PATCH
        self.conv_proj, self.class_token = nn.Conv2d(3, DIM, PATCH, PATCH), nn.Parameter(torch.randn(1, 1, DIM))
        self.encoder = nn.Sequential(*(self.Block() for _ in range(DEPTH)))
        self.heads = nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        return self.heads(self.encoder(torch.cat([self.class_token.expand(len(x), -1, -1), x], 1))[:, 0])


def build(kind: str) -> nn.Module:
    torch.manual_seed(5)
    if kind == "linvit":
        shape = {"image_size": SIZE, "patch_size": PATCH, "dim": DIM, "heads": HEADS, "depth": DEPTH, "classes": 5}
        return create_model(**shape, pool="cls").eval()
    if kind in ("timm", "torchvision"):
        return (TimmLike if kind == "timm" else TorchvisionLike)().eval()
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": DIM, "num_attention_heads": HEADS, "num_hidden_layers": DEPTH, "image_size": SIZE}
    if kind in ("SiglipModel", *MODERN):
        size |= {"hidden_size": 36, "patch_size": PATCH, "intermediate_size": 53}
        if kind == "DINOv3ViT":  # without classes, and its usual weights are too small for the attention to matter
            config = transformers.DINOv3ViTConfig(**size, num_register_tokens=4, initializer_range=0.4)
            return transformers.DINOv3ViTModel(config).eval()
        config = transformers.SiglipConfig(vision_config=size, text_config=TEXT, num_labels=5)
        return getattr(transformers, kind)(config).eval()
    config = getattr(transformers, f"{kind}Config")(**size, patch_size=PATCH, num_labels=5, initializer_range=0.4)
    return getattr(transformers, f"{kind}ForImageClassification")(config).eval()


TEXT = {"hidden_size": 12, "intermediate_size": 7, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}
MODERN = ["DINOv3ViT", "SiglipForImageClassification"]
HUGGING_FACE = ["ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", *MODERN]
KINDS = ["linvit", "timm", "torchvision", *HUGGING_FACE]


@pytest.fixture(params=KINDS)
def model(request):
    return build(request.param)


def images(n: int = 2) -> Tensor:
    return torch.randn(n, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: nn.Module, x: Tensor | None = None) -> Tensor:
    x = images() if x is None else x
    if hasattr(model, "get_image_features"):
        return model.get_image_features(pixel_values=x).pooler_output
    return first_of(model(x))


def first_of(out) -> Tensor:
    """Logits, or features."""
    return out if isinstance(out, Tensor) else out.logits if hasattr(out, "logits") else out.pooler_output


def test_there_and_back_changes_no_bit(model):
    before, weights = logits(model), {key: value.clone() for key, value in model.state_dict().items()}
    same, report = linvit.linearize(model, "performer-exp:m=11")
    assert same is model
    away = logits(model)
    assert (away - before).abs().max() > 1e-3
    assert report.copied == list(weights)
    assert len(report.created) == DEPTH
    assert all(key.endswith("kernel.omega.rows") for key in report.created)
    assert not report.dropped
    assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items())
    _, report = linvit.linearize(model, "softmax")
    assert len(report.dropped) == DEPTH
    assert list(model.state_dict()) == list(weights)
    assert torch.equal(logits(model), before)


def test_a_linformer_that_leaves_out_nothing_is_softmax(model):
    """Identity projections: the same numbers by another way, so that q, k and v are those of the module itself."""
    before = logits(model)
    kind = getattr(getattr(model, "config", None), "model_type", "")
    tokens = 26 + {"deit": 1, "dinov2_with_registers": 4, "dinov3_vit": 4, "siglip": -1}.get(kind, 0)
    linvit.linearize(model, f"linformer:k={tokens},init=identity")
    torch.testing.assert_close(logits(model), before, atol=1e-4, rtol=1e-4)
    assert {a.site.tokens for a in attentions(model)} == {tokens}
    assert {a.site.grid for a in attentions(model)} == {(5, 5)}


def test_some_layers(model):
    _, report = linvit.linearize(model, "performer-relu:m=11", layers="0-1,3")
    assert [a.site.layer for a in attentions(model) if type(a).__name__ == "Performer"] == [0, 1, 3]
    assert report.attention == "performer-relu:m=11@2+softmax@1+performer-relu:m=11@1"
    _, report = linvit.linearize(model, "softmax@1+uniform@1", layers=[1, 2])
    assert report.attention == "performer-relu:m=11@1+softmax@1+uniform@1+performer-relu:m=11@1"
    for layers, part in (("0-4", "0-4"), ("a", "a"), ([7], "7"), ("2-1", "2-1"), ([-1], "-1")):
        with pytest.raises(ValueError, match=f"'{part}' is not among layers 0 to 3"):
            linvit.linearize(model, "uniform", layers=layers)
    with pytest.raises(ValueError, match=r"describes 3 layers, but the model has depth=4"):
        linvit.linearize(model, "softmax@2+uniform@1")


def test_distance_is_of_each_layer_alone(model):
    """A layer's distance is on the q, k, v that the original gives, whatever the other layers became."""
    _, alone = linvit.linearize(model, "performer-exp:m=11", layers=[2], images=images(3))
    linvit.linearize(model, "softmax")
    _, all_of_them = linvit.linearize(model, "performer-exp:m=11", images=images(3))
    assert sorted(all_of_them.distance) == [0, 1, 2, 3]
    for name in ("attention_error", "output_error"):
        assert all_of_them.distance[2][name] == pytest.approx(alone.distance[2][name], rel=1e-3)
        assert all_of_them.distance[2][name] > 0.01


def test_the_distance_of_an_attention_that_is_exact_is_none():
    _, report = linvit.linearize(build("timm"), "linformer:k=26,init=identity@1+uniform@3", images=images(3))
    assert report.distance[0]["attention_error"] < 1e-6
    assert report.distance[0]["output_error"] < 1e-6
    assert min(report.distance[layer]["attention_error"] for layer in (1, 2, 3)) > 0.01


def test_what_is_kept(model):
    """Signature, copies, pickles, autocast, gradients."""
    wanted = inspect.signature(model.forward)
    linvit.linearize(model, "performer-theta:m=11")
    assert inspect.signature(model.forward) == wanted
    out = logits(model)
    other = copy.deepcopy(model)
    assert torch.equal(logits(other), out)
    with torch.no_grad():
        for attention in attentions(model):
            attention.kernel.omega.mul_(3)
    assert torch.equal(logits(other), out)  # a copy has its own
    assert not torch.equal(logits(model), out)
    if not isinstance(model, (TimmLike, TorchvisionLike)):
        assert torch.equal(logits(pickle.loads(pickle.dumps(other))), out)
    with torch.autocast("cpu", torch.bfloat16):
        assert (logits(other).float() - out).abs().max() < 0.1 * out.abs().max() + 0.1
    other.train()
    first_of(other(images())).square().sum().backward()
    assert all(p.grad is not None for a in attentions(other) for p in a.parameters())


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_saved_as_pretrained_and_loaded_by_linvit(kind, tmp_path):
    model, _ = linvit.linearize(build(kind), "softmax@1+performer-theta:m=11@2+performer-exp:m=13@1", seed=17)
    with torch.no_grad():
        for attention in attentions(model):
            for parameter in attention.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    model.save_pretrained(tmp_path)
    ours = linvit.load(tmp_path)
    assert ours.config.attention == "softmax@1+performer-theta:m=11@2+performer-exp:m=13@1"
    torch.testing.assert_close(logits(ours), logits(model), atol=1e-4, rtol=1e-4)
    plain = type(model).from_pretrained(tmp_path)  # transformers alone knows the softmax it came from
    assert not attentions(plain)


def test_rotary_positions_come_once():
    own = create_model(image_size=8, patch_size=2, dim=24, depth=1, heads=3, rope="dinov3")
    for model in (build("DINOv3ViT"), own):
        with pytest.raises(ValueError, match="spec 'softmax:rope=2d': the model already has rotary positions"):
            linvit.linearize(model, "softmax:rope=2d")


def test_of_a_model_with_texts_the_vision_tower_is_changed(tmp_path):
    model = build("SiglipModel")
    with pytest.raises(ValueError, match="SiglipModel is not called with images alone: pass its vision_model"):
        linvit.linearize(model, "performer-hyp:m=11", images=images())
    _, report = linvit.linearize(model, "performer-hyp:m=11")
    assert len(report.created) == DEPTH
    assert all(key.startswith("vision_model.encoder.layers.") for key in report.created)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(linvit.load(tmp_path)), logits(model), atol=1e-4, rtol=1e-4)
    _, report = linvit.linearize(model.vision_model, "performer-exp:m=11", images=images())
    assert sorted(report.distance) == [0, 1, 2, 3]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks_of_transformers(implementation):
    """What lies under masked tokens does not reach the logits."""
    model = build("ViT")
    model.set_attn_implementation(implementation)
    linvit.linearize(model, "performer-exp:m=11")
    mask, other = torch.ones(2, 26, dtype=torch.long), images()
    with torch.no_grad():
        torch.testing.assert_close(model(images(), attention_mask=mask).logits, logits(model))
        mask[:, 21:] = 0  # the last row of patches
        other[:, :, 28:] = 9.0
        masked, changed = (model(x, attention_mask=mask).logits for x in (images(), other))
    torch.testing.assert_close(masked, changed)
    assert (masked - logits(model)).abs().max() > 1e-3


def test_a_mask_that_linear_attention_cannot_keep():
    model = build("timm")
    linvit.linearize(model, "performer-exp:m=11")
    attn, x = model.blocks[0].attn, torch.randn(2, 26, DIM)
    keep = torch.ones(2, 26, dtype=torch.bool)
    keep[:, 19:] = False
    out = attn(x, attn_mask=keep[:, None, None])
    torch.testing.assert_close(out[:, :19], attn(x[:, :19]), atol=1e-5, rtol=1e-4)
    added = torch.zeros(2, 1, 26, 26).masked_fill(~keep[:, None, None], -torch.inf)
    torch.testing.assert_close(attn(x, attn_mask=added), out)
    for mask, words in (
        (torch.ones(26, 26).tril().bool(), "the same for all queries"),
        (torch.rand(26, 26), "no scores"),
    ):
        with pytest.raises(ValueError, match=words):
            attn(x, attn_mask=mask)
    with pytest.raises(ValueError, match="is_causal=True"):
        attn(x, is_causal=True)


def test_padding_of_torchs_own_module():
    model = build("torchvision")
    linvit.linearize(model, "performer-exp:m=11")
    attn, x = model.encoder[0].self_attention, torch.randn(2, 26, DIM)
    drop = torch.zeros(2, 26, dtype=torch.bool)
    drop[:, 19:] = True
    out, weights = attn(x, x, x, key_padding_mask=drop)
    assert weights is None
    short = x[:, :19]
    torch.testing.assert_close(out[:, :19], attn(short, short, short)[0], atol=1e-5, rtol=1e-4)
    square = torch.randn(26, 26, DIM)  # as many images as tokens
    drop = torch.rand(26, 26) < 0.5
    direct = torch.cat([attn(*[x[:, ~gone]] * 3)[0][:, 0] for x, gone in zip(square.split(1), drop, strict=True)])
    out = attn(square, square, square, key_padding_mask=drop.float())[0]
    first = torch.stack([row[~gone][0] for row, gone in zip(out, drop, strict=True)])
    torch.testing.assert_close(first, direct, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="not the same: only self-attention"):
        attn(x, x + 1, x)


def test_what_is_refused():
    with pytest.raises(ValueError, match="Linear has no attention that linvit can replace"):
        linvit.linearize(nn.Linear(2, 3), "uniform")
    with pytest.raises(ValueError, match="Block is not a whole vision transformer"):
        linvit.linearize(TimmLike.Block(), "uniform")
    with pytest.raises(ValueError, match="has a fast path that bypasses its attention"):
        linvit.linearize(nn.Sequential(nn.TransformerEncoderLayer(4, 2)), "uniform")
    model = build("timm")
    model.blocks[1].attn.scale = 1.0
    with pytest.raises(ValueError, match=r"blocks.1.attn: scores are scaled by 1, not by head_dim\^-½"):
        linvit.linearize(model, "uniform")
    model = build("timm")
    before = logits(model)
    with pytest.raises(ValueError, match="k=99 is more than tokens=26"):
        linvit.linearize(model, "softmax@3+linformer:k=99@1")
    assert torch.equal(logits(model), before)  # nothing was changed
    linvit.linearize(model, "linformer:k=7,sharing=layerwise")
    with pytest.raises(ValueError, match="layer 1 shares its projections with a layer that is replaced"):
        linvit.linearize(model, "softmax", layers=[0])


def test_what_both_have_is_kept_and_what_is_new_is_said():
    model = create_model(image_size=8, patch_size=2, channels=3, dim=16, depth=1, heads=2, attention="softmax:dwc=3")
    key, rows = "blocks.0.attn.attention.dwc.weight", "blocks.0.attn.attention.kernel.omega.rows"
    with torch.no_grad():
        model.get_parameter(key).normal_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, found = linvit.linearize(model, "performer-relu:m=16,dwc=3")
    assert torch.equal(model.state_dict()[key], before[key])
    assert key in found.copied
    assert found.created == [rows]
    _, found = linvit.linearize(model, "performer-relu:m=8,dwc=3")
    assert (found.created, found.dropped) == ([rows], [rows])
    linvit.linearize(model, "softmax:dwc=3")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_gate_and_positions_by_cpe_stay_with_the_layer():
    extras = "gate=silu,cpe=3"
    model = create_model(image_size=8, patch_size=2, dim=16, depth=1, heads=2, attention=f"softmax:{extras}").eval()
    x = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for spec, message in (
        ("softmax", r"spec 'softmax' has gate=none, but layer 0 has gate=silu, which linearize keeps$"),
        ("uniform:gate=linear,cpe=3", "has gate=linear, but layer 0 has gate=silu"),
        ("uniform:gate=silu", "has cpe=none, but layer 0 has cpe=3"),
    ):
        with pytest.raises(ValueError, match=message):
            linvit.linearize(model, spec)
    expected = model(x)
    linvit.linearize(model, f"linformer:k=16,{extras}")  # as many keys as tokens
    torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)
    create_model(**model.config.model_dump(exclude_defaults=True)).load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match=r"^spec 'softmax:gate=silu': gate=silu works on tokens, which [^\n]+$"):
        linvit.linearize(TimmLike(), "softmax:gate=silu")
    with pytest.raises(ValueError, match=r"cpe=3 works on tokens"):
        linvit.linearize(TimmLike(), "uniform:cpe=3")


def test_attentions_that_only_look_alike_are_left_alone():
    model = build("timm")
    model.blocks[0].attn.forward = lambda x, rope=None, attn_mask=None: x
    with pytest.raises(ValueError, match="describes 4 layers, but"):  # one of them has no place for it
        linvit.linearize(model, "softmax@3+uniform@1")
    old = type("ViTAttention", (nn.Module,), {})
    with pytest.raises(ValueError, match="0: attention of transformers 4 is not supported"):
        linvit.linearize(nn.Sequential(old()), "uniform")


def test_what_is_new_begins_near_softmax():
    """As many keys as tokens, and a convolution that adds nothing: the answer is the model's own."""
    model = create_model(image_size=8, patch_size=2, channels=3, dim=22, depth=2, heads=2, mlp_dim=13, classes=5).eval()
    x = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(x)
        found = linvit.linearize(model, "linformer:k=16,dwc=3")[0](x)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_bad_images_are_refused_before_anything_is_changed():
    model = TimmLike().eval()
    x = torch.randn(2, 3, SIZE, SIZE)
    before = model(x)
    for bad, words in ((x[0], "is not a batch"), (x.to(torch.uint8), "torch.uint8"), (x[:, :2], "channels")):
        with pytest.raises((ValueError, RuntimeError), match=words):
            linvit.linearize(model, "uniform", images=bad)
        assert torch.equal(model(x), before)


def test_one_layer_by_its_number():
    model, report = linvit.linearize(TimmLike(), "uniform", layers=2)
    assert report.attention == "softmax@2+uniform@1+softmax@1"
    assert [name for name, module in model.named_modules() if name.endswith(".linvit")] == ["blocks.2.attn.linvit"]


def test_a_note_that_outlived_its_attention_is_not_believed():
    """transformers loads softmax from a folder whose config.json still names what was there."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    config.linvit_attention = "efficient"
    _, report = linvit.linearize(transformers.ViTForImageClassification(config), "uniform", layers="0")
    assert report.attention == "uniform@1+softmax@2"
