"""Models from elsewhere give the same logits here; what linvit cannot compute is refused in one line."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from linvit import data
from linvit.attention import attentions
from linvit.conversion.linearize import linearize
from linvit.models import VisionTransformer, foreign
from linvit.models.resize import resized
from linvit.schemas.experiment import DatasetRef, Experiment
from linvit.schemas.recipe import Recipe
from linvit.training.checkpoint import load, read_model
from linvit.training.evaluate import evaluate_folder
from linvit.training.predict import predict
from linvit.training.start import start_from, started

DEIT_TINY = Path(os.environ.get("LINVIT_MODELS", "nowhere")) / "deit-tiny"
SIZE = {"hidden_size": 33, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 35, "patch_size": 7}
KINDS = ["ViT", "DeiT", "Dinov2", "Dinov2WithRegisters"]


def louder(model: torch.nn.Module) -> torch.nn.Module:
    """Weights so large that every part of the model matters to the logits."""
    source = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source) * (0.3 if parameter.ndim > 1 else 0.7))
    return model.eval()


def hugging_face(kind: str, suffix: str = "ForImageClassification", image_size=35, **options):
    transformers = pytest.importorskip("transformers")
    own = {} if kind.startswith("Dinov2") else {"intermediate_size": 53}
    own |= {"num_register_tokens": 4} if kind.endswith("Registers") else {}
    config = getattr(transformers, f"{kind}Config")(**SIZE | {"image_size": image_size}, **own, num_labels=5, **options)
    return louder(getattr(transformers, kind + suffix)(config))


def images(size: int = 35, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def assert_same(folder: Path, model, x: Tensor | None = None):
    x = images() if x is None else x
    ours, theirs = load(folder)(x), model(x).logits
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


MODERN = {  # by what is special: the class and its options
    "dinov3": ("DINOv3ViTModel", {"num_register_tokens": 4}),
    "dinov3-gated": ("DINOv3ViTModel", {"use_gated_mlp": True, "hidden_act": "silu", "query_bias": False}),
    "dinov3-geglu": ("DINOv3ViTModel", {"use_gated_mlp": True, "key_bias": True}),
    "dinov2-swiglu": ("Dinov2Model", {"use_swiglu_ffn": True}),
    "registers-swiglu": ("Dinov2WithRegistersModel", {"use_swiglu_ffn": True, "num_register_tokens": 4}),
    "siglip": ("SiglipVisionModel", {}),
    "siglip-classes": ("SiglipForImageClassification", {}),
    "siglip-both": ("SiglipModel", {}),
}


def modern(name: str, image_size=35) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    kind, options = MODERN[name]
    width = {"mlp_ratio": 2} if "Dinov2" in kind else {"intermediate_size": 53}
    options = SIZE | width | {"hidden_size": 36, "image_size": image_size} | options
    if kind in ("SiglipForImageClassification", "SiglipModel"):
        text = {"hidden_size": 12, "intermediate_size": 7, "num_hidden_layers": 1, "num_attention_heads": 2}
        options = {"vision_config": options, "text_config": text | {"vocab_size": 11}}
        config = transformers.SiglipConfig(**options, num_labels=5)
    else:
        config = getattr(transformers, getattr(transformers, kind).config_class.__name__)(**options)
    return louder(getattr(transformers, kind)(config))


@torch.no_grad()
def outputs(model: torch.nn.Module, x: Tensor, **options) -> Tensor:
    """Logits, or features."""
    if hasattr(model, "get_image_features"):
        return model.get_image_features(pixel_values=x, **options).pooler_output
    out = model(x, **options)
    return out.logits if hasattr(out, "logits") else out.pooler_output


@pytest.mark.parametrize("keys", ["old", "new"])
@pytest.mark.parametrize("name", MODERN)
def test_modern_layouts(name, keys, tmp_path):
    model = modern(name)
    if keys == "new":
        saved(tmp_path, model)
    else:
        model.save_pretrained(tmp_path)
    ours = load(tmp_path)
    with torch.no_grad():
        wanted = outputs(model, images())
        assert wanted.std() > 0.1
        torch.testing.assert_close(ours(images()), wanted, atol=1e-5, rtol=1e-5)
    assert len(ours.about["classes"]) == (5 if name == "siglip-classes" else 0)


@pytest.mark.parametrize("name", ["dinov3-gated", "siglip-classes"])
def test_another_attention_keeps_what_else_they_compute(name, tmp_path):
    modern(name).save_pretrained(tmp_path)
    model = load(tmp_path)
    with torch.no_grad():
        before = model(images())
        assert torch.equal(linearize(model, "softmax")[0](images()), before)
        after = linearize(model, "performer-hyp:m=11")[0](images())
    assert (model.config.rope, model.config.attention) == (
        "dinov3" if name == "dinov3-gated" else None,
        "performer-hyp:m=11",
    )
    assert torch.isfinite(after).all()
    assert (after - before).abs().max() > 1e-2


def test_a_training_starts_from_dinov3(tmp_path):
    modern("dinov3").save_pretrained(tmp_path)
    ours = load(tmp_path)
    dataset = data.load_data("synthetic:classes=3,images=60,size=49,channels=3")
    model = ours.config.model_copy(update={"classes": 3, "image_size": 49, "attention": "performer-relu:m=11"})
    reference = DatasetRef(name=dataset.name, identity=dataset.identity)
    experiment = Experiment(data=reference, model=model, recipe=Recipe(), start=start_from(tmp_path))
    begun, _ = started(experiment, dataset)
    assert (begun.config.rope, begun.config.grid, begun.head.weight.shape) == ("dinov3", (7, 7), (3, 36))
    assert torch.equal(begun.blocks[1].attn.qkv.weight, ours.blocks[1].attn.qkv.weight)


def test_a_dinov3_takes_larger_images(tmp_path):
    """Its positions are those of any grid: nothing is interpolated."""
    theirs = modern("dinov3")
    theirs.save_pretrained(tmp_path)
    stored = read_model(tmp_path)
    config = stored.config.model_copy(update={"image_size": 49})
    ours = VisionTransformer(config).eval()
    ours.load_state_dict(resized(stored.tensors, stored.config, 49))
    with torch.no_grad():
        torch.testing.assert_close(ours(images(49)), outputs(theirs, images(49)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("dinov3", {"rope_theta": 10.0}, "rope_theta=10.0 is not supported by linvit: 100.0"),
        ("dinov3", {"hidden_act": "silu"}, "hidden_act='silu' is not supported by linvit"),
        ("dinov3", {"use_gated_mlp": True}, "use_gated_mlp=True, but the weights have False"),
        ("dinov3", {"key_bias": True}, r"there is no layer.0.attention.k_proj.bias \(36,\)"),
        ("dinov3", {"image_size": None}, "image_size=None must be a side in pixels"),
        ("dinov3", {"image_size": [35, 70, 7]}, r"image_size=\[35, 70, 7\] must be a side in pixels"),
        (
            "siglip",
            {"image_size": 42},
            "image_size=42, but 25 positions of patches of 7 px are for images of another size",
        ),
        ("siglip", {"num_hidden_layers": 3}, "num_hidden_layers=3, but the weights have 2"),
    ],
)
def test_what_modern_models_say_must_be_so(name, changes, words, tmp_path):
    modern(name).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | changes))
    with pytest.raises(ValueError, match=words):
        load(tmp_path)


WIDE = 21, 56  # 3 × 8 patches


def wide_images() -> Tensor:
    return torch.randn(2, 3, *WIDE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [*KINDS, *MODERN])
def test_images_that_are_not_square(name, tmp_path):
    """Positions are interpolated as transformers does it; rotary ones are those of any grid."""
    theirs = modern(name) if name in MODERN else hugging_face(name)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path, image_size=WIDE)
    assert (ours.config.image_size, ours.config.grid) == ("21x56", (3, 8))
    with torch.no_grad():
        asked = {"interpolate_pos_encoding": True} if name.startswith(("ViT", "DeiT", "siglip")) else {}
        out = outputs(theirs, wide_images(), **asked)  # the others always do so
        torch.testing.assert_close(ours(wide_images()), out, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["ViT", "DeiT", "dinov3"])  # the others need squares
def test_a_configuration_states_height_and_width(name, tmp_path):
    theirs = modern(name, image_size=WIDE) if name == "dinov3" else hugging_face(name, image_size=WIDE)
    theirs.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["image_size"] == [*WIDE]
    ours = load(tmp_path)
    assert (ours.config.image_size, ours.config.grid) == ("21x56", (3, 8))
    with torch.no_grad():
        torch.testing.assert_close(ours(wide_images()), outputs(theirs, wide_images()), atol=1e-5, rtol=1e-5)
    other = load(tmp_path, image_size="28x35")
    assert other(torch.randn(2, 3, 28, 35)).isfinite().all()


@pytest.mark.parametrize("name", ["ViT", "DeiT", "dinov3"])
def test_linearize_takes_the_grid_of_height_and_width(name):
    theirs = modern(name, image_size=WIDE) if name == "dinov3" else hugging_face(name, image_size=WIDE)
    with torch.no_grad():
        before = outputs(theirs, wide_images())
        linearize(theirs, "uniform")
        assert {a.site.grid for a in attentions(theirs)} == {(3, 8)}
        tokens = attentions(theirs)[0].site.tokens
        linearize(theirs, f"linformer:k={tokens},init=identity")
        torch.testing.assert_close(outputs(theirs, wide_images()), before, atol=1e-4, rtol=1e-4)
        assert outputs(linearize(theirs, "twoscale:cell=2")[0], wide_images()).isfinite().all()


def saved(folder: Path, model) -> Path:
    """The keys as the model has them in memory, which are the newer ones."""
    folder.mkdir(exist_ok=True)
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    model.config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", ["old", "new", "sharded", "half"])
def test_the_logits_of_hugging_face(kind, keys, tmp_path):
    model = hugging_face(kind, qkv_bias=keys != "sharded")
    if keys == "new":
        saved(tmp_path, model)
    elif keys == "half":
        model.bfloat16().save_pretrained(tmp_path)
        model.float()
    else:
        model.save_pretrained(tmp_path, max_shard_size="20KB" if keys == "sharded" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (keys == "sharded")
    names = "".join(load_file(next(iter(sorted(tmp_path.glob("*.safetensors"))))))
    assert ("q_proj" in names) == (keys == "new")
    assert_same(tmp_path, model)


def test_class_names_and_normalisation_are_kept(tmp_path):
    model = hugging_face("ViT")
    model.config.id2label = {0: "crane", 1: "tench", 2: "crane", 3: "ox", 4: "yak"}
    model.save_pretrained(tmp_path)
    about = load(tmp_path).about
    assert about == {
        "name": tmp_path.name,
        "classes": ["crane", "tench", "crane (2)", "ox", "yak"],
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "resize": "crop",
    }
    pixels = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pixels))
    about = load(tmp_path).about
    assert (about["mean"], about["std"]) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pixels | {"do_normalize": False}))
    about = load(tmp_path).about
    assert (about["mean"], about["std"]) == ([0.0] * 3, [1.0] * 3)


@pytest.mark.parametrize(
    ("said", "resize"),
    [
        ({"size": {"height": 35, "width": 35}}, "squeeze"),
        ({"size": {"height": 40, "width": 40}, "do_center_crop": True}, "crop"),
        ({"size": {"shortest_edge": 35}}, "crop"),
        ({"size": 35}, "crop"),
    ],
)
def test_a_processor_says_whether_images_keep_their_shape(said, resize, tmp_path):
    hugging_face("ViT").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    assert load(tmp_path).about["resize"] == resize


@pytest.mark.parametrize(
    ("said", "scale"),
    [
        ({"rescale_factor": 1 / 255}, 1.0),
        ({"rescale_factor": 0.003921568859368563}, 1.0),
        ({"rescale_factor": 1 / 127.5}, 2.0),
        ({"do_rescale": False}, 255.0),
    ],
)
@pytest.mark.parametrize("normalise", [True, False])
def test_pixels_of_another_scale_are_normalised_the_same(said, scale, normalise, tmp_path):
    hugging_face("ViT").save_pretrained(tmp_path)
    pixels = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "do_normalize": normalise} | said
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pixels))
    about = load(tmp_path).about
    x = torch.rand(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean, std = (torch.tensor(pixels[f"image_{k}"], dtype=torch.float64) for k in ("mean", "std"))
    wanted = (scale * x - mean) / std if normalise else scale * x
    found = (x - torch.tensor(about["mean"], dtype=torch.float64)) / torch.tensor(about["std"], dtype=torch.float64)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("factor", [0, -1, "1/255", None])
def test_a_scale_that_is_none_is_refused(factor, tmp_path):
    hugging_face("ViT").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"rescale_factor": factor}))
    with pytest.raises(ValueError, match=f"rescale_factor={factor!r} must be a number above 0"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["ViT", "Dinov2"])
def test_without_a_head_there_are_features_and_a_new_head_is_learned(kind, tmp_path):
    model = hugging_face(kind, "Model")
    model.save_pretrained(tmp_path / "features")
    ours = load(tmp_path / "features")
    assert (ours.about["classes"], ours.config.classes) == ([], 0)
    with torch.no_grad():
        torch.testing.assert_close(ours(images()), model(images()).last_hidden_state[:, 0], atol=1e-5, rtol=1e-5)
    for use in (lambda: list(predict(ours, ["x.png"])), lambda: evaluate_folder(tmp_path / "features", "digits")):
        with pytest.raises(ValueError, match="features has no head, only features"):
            use()
    dataset = data.load_data("synthetic:classes=3,images=60,size=35,channels=3")
    model = ours.config.model_copy(update={"classes": 3, "attention": "performer-relu:m=11"})
    reference = DatasetRef(name=dataset.name, identity=dataset.identity)
    start = start_from(tmp_path / "features")
    experiment = Experiment(data=reference, model=model, recipe=Recipe(), start=start)
    begun, _ = started(experiment, dataset)
    assert begun.head.weight.shape == (3, 33)
    torch.testing.assert_close(begun.blocks[1].attn.qkv.weight, ours.blocks[1].attn.qkv.weight)


# timm and torchvision: a forward pass of each in a few lines, on weights with its keys


def random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(3)
    return {
        key: torch.randn(shape, generator=source) * (0.3 if len(shape) > 1 else 0.7) for key, shape in shapes.items()
    }


def attended(x: Tensor, w: dict[str, Tensor], qkv: str, proj: str, heads: int, joint: str = ".") -> Tensor:
    b, n, _ = x.shape
    q, k, v = F.linear(x, w[f"{qkv}{joint}weight"], w.get(f"{qkv}{joint}bias")).view(b, n, 3, heads, -1).unbind(2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(b, n, -1)
    return F.linear(out, w[f"{proj}.weight"], w[f"{proj}.bias"])


def mlp(x: Tensor, w: dict[str, Tensor], one: str, two: str) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w[f"{one}.weight"], w[f"{one}.bias"])), w[f"{two}.weight"], w[f"{two}.bias"])


def norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)


def timm_logits(w: dict[str, Tensor], x: Tensor, heads: int, pool: str = "token") -> Tensor:
    x = F.conv2d(x, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], w["patch_embed.proj.weight"].shape[-1])
    x = x.flatten(2).transpose(1, 2)
    prefix = torch.cat([w[key] for key in ("cls_token", "reg_token") if key in w], 1)
    everywhere = w["pos_embed"].shape[1] > x.shape[1]
    x = torch.cat([prefix.expand(len(x), -1, -1), x if everywhere else x + w["pos_embed"]], 1)
    x = x + w["pos_embed"] if everywhere else x
    for i in range(sum(key.endswith("norm1.bias") for key in w)):
        b = f"blocks.{i}."
        branch = attended(norm(x, w, f"{b}norm1"), w, f"{b}attn.qkv", f"{b}attn.proj", heads)
        x = x + branch * w.get(f"{b}ls1.gamma", torch.ones(()))
        branch = mlp(norm(x, w, f"{b}norm2"), w, f"{b}mlp.fc1", f"{b}mlp.fc2")
        x = x + branch * w.get(f"{b}ls2.gamma", torch.ones(()))
    x = norm(x[:, 0], w, "norm") if pool == "token" else norm(x[:, prefix.shape[1] :].mean(1), w, "fc_norm")
    return F.linear(x, w["head.weight"], w["head.bias"])


def timm_folder(folder: Path, pool: str = "token", registers: int = 0, everywhere: bool = True, scale: bool = False):
    d, positions = 33, 25 + (1 + registers) * everywhere
    final = "norm" if pool == "token" else "fc_norm"
    shapes = {
        "cls_token": (1, 1, d),
        "pos_embed": (1, positions, d),
        "patch_embed.proj.weight": (d, 3, 7, 7),
        "patch_embed.proj.bias": (d,),
        f"{final}.weight": (d,),
        f"{final}.bias": (d,),
        "head.weight": (5, d),
        "head.bias": (5,),
    }
    shapes |= {"reg_token": (1, registers, d)} if registers else {}
    for i in range(2):
        block = {
            "norm1": (d,),
            "norm2": (d,),
            "attn.qkv": (3 * d, d),
            "attn.proj": (d, d),
            "mlp.fc1": (53, d),
            "mlp.fc2": (d, 53),
        }
        for name, shape in block.items():
            shapes |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
        shapes |= {f"blocks.{i}.ls{j}.gamma": (d,) for j in (1, 2)} if scale else {}
    weights = random_weights(shapes)
    save_file(weights, folder / "model.safetensors")
    config = {
        "architecture": "deit_tiny_patch7_35",
        "global_pool": pool,
        "pretrained_cfg": {"mean": [0.1, 0.2, 0.3]},
        "model_args": {"embed_dim": d, "depth": 2},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def turned(x: Tensor, side: int) -> Tensor:
    """EVA-02's rotary positions as complex numbers: neighbouring channels by rows, then by columns, as if of 16."""
    first, (b, heads, n, d) = x[:, :, :1], x.shape
    frequency = 10_000.0 ** (-torch.arange(d // 4, dtype=torch.float64) / (d // 4))
    place = torch.cartesian_prod(*[torch.arange(side, dtype=torch.float64) * 16 / side] * 2)  # (rows·columns, 2)
    angle = (place[:, :, None] * frequency).flatten(1)
    z = torch.view_as_complex(x[:, :, 1:].double().reshape(b, heads, n - 1, d // 2, 2).contiguous())
    z = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(3)
    return torch.cat([first, z.to(x)], 2)


def eva_logits(w: dict[str, Tensor], x: Tensor, heads: int) -> Tensor:
    x = F.conv2d(x, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], 7).flatten(2).transpose(1, 2)
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), x], 1) + w["pos_embed"]
    for i in range(2):
        a, m = f"blocks.{i}.attn.", f"blocks.{i}.mlp."
        y = norm(x, w, f"blocks.{i}.norm1")
        weights = w[f"{a}qkv.weight"].chunk(3) if f"{a}qkv.weight" in w else [w[f"{a}{c}_proj.weight"] for c in "qkv"]
        biases = [w.get(f"{a}{c}_bias", w.get(f"{a}{c}_proj.bias")) for c in "qkv"]
        parts = (
            F.linear(y, *pair).unflatten(-1, (heads, -1)).transpose(1, 2) for pair in zip(weights, biases, strict=True)
        )
        q, k, v = parts
        out = F.scaled_dot_product_attention(turned(q, 5), turned(k, 5), v).transpose(1, 2).flatten(2)
        x = x + F.linear(out, w[f"{a}proj.weight"], w[f"{a}proj.bias"])
        y = norm(x, w, f"blocks.{i}.norm2")
        if f"{m}fc1.weight" in w:
            gates, values = F.linear(y, w[f"{m}fc1.weight"], w[f"{m}fc1.bias"]).chunk(2, -1)
            y = F.silu(gates) * values
        else:
            gates, values = (F.linear(y, w[f"{m}fc1_{c}.weight"], w[f"{m}fc1_{c}.bias"]) for c in "gx")
            y = norm(F.silu(gates) * values, w, f"{m}norm")
        x = x + F.linear(y, w[f"{m}fc2.weight"], w[f"{m}fc2.bias"])
    return F.linear(norm(x[:, 1:].mean(1), w, "fc_norm"), w["head.weight"], w["head.bias"])


def eva_folder(folder: Path, fused: bool) -> dict[str, Tensor]:
    d, hidden = 36, 53
    shapes = {"cls_token": (1, 1, d), "pos_embed": (1, 26, d), "patch_embed.proj.weight": (d, 3, 7, 7)}
    linear = {"head": (5, d)}
    norms = {"fc_norm": d}
    for i in range(2):
        a, m = f"blocks.{i}.attn.", f"blocks.{i}.mlp."
        norms |= {f"blocks.{i}.norm1": d, f"blocks.{i}.norm2": d}
        linear |= {f"{a}proj": (d, d), f"{m}fc2": (d, hidden)}
        if fused:  # the smaller ones
            shapes |= {f"{a}qkv.weight": (3 * d, d), f"{a}q_bias": (d,), f"{a}v_bias": (d,)}
            linear |= {f"{m}fc1": (2 * hidden, d)}
        else:  # the larger ones
            shapes |= {f"{a}k_proj.weight": (d, d)}
            linear |= {f"{a}q_proj": (d, d), f"{a}v_proj": (d, d), f"{m}fc1_g": (hidden, d), f"{m}fc1_x": (hidden, d)}
            norms |= {f"{m}norm": hidden}
    shapes |= {f"{name}.weight": shape for name, shape in linear.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linear.items()} | {"patch_embed.proj.bias": (d,)}
    shapes |= {f"{name}.{kind}": (width,) for name, width in norms.items() for kind in ("weight", "bias")}
    weights = random_weights(shapes)
    save_file(weights, folder / "model.safetensors")
    said = {"architecture": "eva02_tiny_patch7_35", "num_classes": 5, "pretrained_cfg": {"mean": [0.1, 0.2, 0.3]}}
    (folder / "config.json").write_text(json.dumps(said))
    return weights


@pytest.mark.parametrize("fused", [True, False])
def test_the_logits_of_eva02(fused, tmp_path):
    weights = eva_folder(tmp_path, fused)
    ours, wanted = load(tmp_path), eva_logits(weights, images(), 3)
    assert (ours.config.mlp, wanted.std() > 0.1) == ("swiglu" if fused else "swiglu-norm", True)
    with torch.no_grad():
        torch.testing.assert_close(ours(images()), wanted, atol=1e-5, rtol=1e-5)
    assert ours.about["std"] == foreign.CLIP[1]


@pytest.mark.parametrize(
    "options",
    [{}, {"pool": "avg"}, {"registers": 2}, {"everywhere": False, "registers": 4, "scale": True}],
    ids=["token", "avg", "registers", "bare-prefix"],
)
def test_the_logits_of_timm(options, tmp_path):
    weights = timm_folder(tmp_path, **options)
    ours, wanted = load(tmp_path), timm_logits(weights, images(), 3, options.get("pool", "token"))
    assert wanted.std() > 0.1
    with torch.no_grad():
        torch.testing.assert_close(ours(images()), wanted, atol=1e-5, rtol=1e-5)
    assert (ours.about["classes"], ours.about["mean"]) == (list("01234"), [0.1, 0.2, 0.3])


def test_timm_classes_by_file_or_label(tmp_path):
    timm_folder(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"label_names": list("vwxyz")}))
    assert load(tmp_path).about["classes"] == list("vwxyz")
    (tmp_path / "classes.txt").write_text("".join(f"n0144076{i} a thing, another\n" for i in range(5)))  # ImageNet's
    assert load(tmp_path).about["classes"] == [f"n0144076{i}" for i in range(5)]
    whole = ["golden retriever", "golden eagle", "n01440764 tench", "n0", "Straße, nachts"]
    (tmp_path / "classes.txt").write_text("".join(f" {name} \n\n" for name in whole), encoding="utf-8")
    assert load(tmp_path).about["classes"] == whole
    (tmp_path / "classes.txt").write_text("n0\nn1\n")
    with pytest.raises(ValueError, match=r"classes.txt: there are 2 names of classes, but the head has 5 outputs"):
        load(tmp_path)


def test_timm_of_an_older_flat_configuration(tmp_path):
    timm_folder(tmp_path)
    said = {"architecture": "vit_xsmall_patch7_35", "num_heads": 3, "mean": [0.5, 0.4, 0.3], "std": [0.1, 0.2, 0.3]}
    (tmp_path / "config.json").write_text(json.dumps(said | {"labels": list("vwxyz"), "num_classes": 5}))
    ours = load(tmp_path)
    assert ours.config.heads == 3
    assert ours.about == {
        "name": tmp_path.name,
        "classes": list("vwxyz"),
        "mean": said["mean"],
        "std": said["std"],
        "resize": "crop",
    }


def torchvision_logits(w: dict[str, Tensor], x: Tensor, heads: int) -> Tensor:
    x = F.conv2d(x, w["conv_proj.weight"], w["conv_proj.bias"], 7).flatten(2).transpose(1, 2)
    x = torch.cat([w["class_token"].expand(len(x), -1, -1), x], 1) + w["encoder.pos_embedding"]
    for i in range(2):
        b = f"encoder.layers.encoder_layer_{i}."
        a = f"{b}self_attention."
        x = x + attended(norm(x, w, f"{b}ln_1"), w, f"{a}in_proj", f"{a}out_proj", heads, "_")
        x = x + mlp(norm(x, w, f"{b}ln_2"), w, f"{b}mlp.0", f"{b}mlp.3")
    return F.linear(norm(x, w, "encoder.ln")[:, 0], w["heads.head.weight"], w["heads.head.bias"])


def torchvision_folder(folder: Path, **said) -> dict[str, Tensor]:
    d = 36
    shapes = {
        "class_token": (1, 1, d),
        "encoder.pos_embedding": (1, 26, d),
        "conv_proj.weight": (d, 3, 7, 7),
        "conv_proj.bias": (d,),
        "encoder.ln.weight": (d,),
        "encoder.ln.bias": (d,),
        "heads.head.weight": (5, d),
        "heads.head.bias": (5,),
    }
    for i in range(2):
        b = f"encoder.layers.encoder_layer_{i}."
        shapes |= {f"{b}self_attention.in_proj_weight": (3 * d, d), f"{b}self_attention.in_proj_bias": (3 * d,)}
        block = {"ln_1": (d,), "ln_2": (d,), "self_attention.out_proj": (d, d), "mlp.0": (53, d), "mlp.3": (d, 53)}
        for name, shape in block.items():
            shapes |= {f"{b}{name}.weight": shape, f"{b}{name}.bias": shape[:1]}
    weights = random_weights(shapes)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(said))
    return weights


@pytest.mark.parametrize(
    "said", [{"num_heads": 3}, {"heads": 3}, {"architecture": "vit_b_16"}], ids=["given", "heads", "by-name"]
)
def test_the_logits_of_torchvision(said, tmp_path, monkeypatch):
    monkeypatch.setitem(foreign.SIZES, "b", (36, 2))
    weights = torchvision_folder(tmp_path, **said, **({} if "heads" in said else {"image_size": 35}))
    with torch.no_grad():
        wanted = torchvision_logits(weights, images(), 12 if "architecture" in said else 3)
        torch.testing.assert_close(load(tmp_path)(images()), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not DEIT_TINY.exists(), reason="LINVIT_MODELS has no deit-tiny")
def test_the_logits_of_the_real_deit_tiny():
    ours, x = load(DEIT_TINY), images(224)
    with torch.no_grad():
        wanted = timm_logits(load_file(DEIT_TINY / "model.safetensors"), x, heads=3)
        torch.testing.assert_close(ours(x), wanted, atol=1e-5, rtol=1e-5)
    assert ours.parameter_count() == 5_717_416
    assert (ours.about["classes"][:2], len(ours.about["classes"])) == (["n01440764", "n01443537"], 1000)


# what is refused


def edited(folder: Path, drop: str = "^$", rename: dict[str, str] | None = None, **changes) -> Path:
    """A timm folder with some of its configuration or weights changed. `drop` is a pattern; None takes a field away."""
    timm_folder(folder)
    said = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in said.items() if v is not None}))
    weights = load_file(folder / "model.safetensors")
    weights = {(rename or {}).get(key, key): value for key, value in weights.items() if not re.match(drop, key)}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "swin_tiny_patch4"}, "architecture='swin_tiny_patch4' is not a plain vision transformer"),
        ({"architecture": "vit_base_patch16_rope_224"}, "architecture='vit_base_patch16_rope_224' is not"),
        ({"architecture": "vit_base_patch16_rpn_224"}, "architecture='vit_base_patch16_rpn_224' is not a plain"),
        ({"architecture": "vit_wide_patch7"}, "architecture='vit_wide_patch7': the number of heads is unknown"),
        ({"model_args": {"num_heads": 4}}, "4 heads do not divide a width of 33"),
        ({"model_args": {"act_layer": "relu"}}, "act_layer='relu' is not supported by linvit"),
        ({"global_pool": "map"}, "global_pool='map' is not supported"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=\{'bits': 4\}: quantised"),
        ({"pretrained_cfg": {"mean": [0.5]}}, r"mean=\[0.5\] must be 3 numbers"),
        ({"pretrained_cfg": {"std": [0.5, 0.5, 0]}}, r"std=\[0.5, 0.5, 0\] must be 3 numbers"),
        ({"pretrained_cfg": "none"}, "pretrained_cfg='none' must be an object"),
        ({"model_args": {"depth": 12}}, "model_args.depth=12, but the weights have 2"),
        ({"model_args": {"embed_dim": 192}}, "model_args.embed_dim=192, but the weights have 33"),
        ({"model_args": {"img_size": [35, 42]}}, r"image_size=\[35, 42\], but 26 positions"),
        ({"model_args": {"reg_tokens": 4}}, "model_args.reg_tokens=4, but the weights have 0"),
        (
            {"model_args": {"depth": 2}},
            "architecture='deit_tiny_patch7_35' without model_args: embed_dim=192, but the weights have 33",
        ),
        (
            {"model_args": {"embed_dim": 33}},
            "architecture='deit_tiny_patch7_35' without model_args: depth=12, but the weights have 2",
        ),
        ({"num_features": 192}, "num_features=192, but the weights have 33"),
        ({"num_classes": 7}, "num_classes=7, but the weights have 5"),
        ({"label_names": "cat"}, "label_names='cat' must be the names of classes"),
        ({"labels": ["cat", "dog"]}, "labels: there are 2 names of classes, but the head has 5 outputs"),
        ({"architecture": None}, "architecture=None is not a plain vision transformer"),
        ({"drop": r"blocks\.0\."}, "blocks.1.* is of layer 1, but there is no layer 0"),
        ({"drop": r"blocks\.1\.norm2\.bias"}, r"there is no blocks.1.norm2.bias \(33,\)"),
        ({"drop": r"blocks\.1\.mlp\.fc1\.weight"}, r"there is no blocks.1.mlp.fc1.weight \(53, 33\)"),
        ({"drop": r"blocks\.0\.attn\.qkv\.weight"}, r"there is no blocks.0.attn.qkv.weight \(99, 33\)"),
        ({"drop": r"blocks\.\d\.mlp\.fc1\.weight"}, r"there is no blocks.0.mlp.fc1.weight"),
        ({"drop": r"norm\.bias"}, r"there is no norm.bias \(33,\)"),
        ({"drop": r"norm\."}, r"there is no tensor for linvit's norm.weight \(33,\)"),
        ({"drop": "pos_embed"}, "there is no pos_embed"),
        ({"rename": {"norm.bias": "norm_pre.bias"}}, r"norm_pre.bias \(33,\) has no counterpart"),
        ({"rename": {"head.weight": "head_dist.weight"}}, r"head_dist.weight \(5, 33\) has no counterpart"),
        (
            {"rename": {"norm.bias": "fc_norm.weight"}},
            "norm.weight and fc_norm.weight are both linvit's norm.weight|"
            "fc_norm.weight and norm.weight are both linvit's norm.weight",
        ),
        (
            {
                "rename": {
                    "blocks.1.mlp.fc1.bias": "blocks.1.norm2.bias",
                    "blocks.1.norm2.bias": "blocks.1.mlp.fc1.bias",
                }
            },
            r"blocks.1.\S+ has shape \(\d+,\), but the rest of the model requires \(\d+,\)",
        ),
        (
            {"rename": {"blocks.1.norm1.bias": "blocks.9999999999.norm1.bias"}},
            "blocks.9999999999.norm1.bias is of layer 9999999999, but there is no layer 2",
        ),
    ],
)
def test_what_timm_has_and_linvit_has_not(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words) as caught:
        load(edited(tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "swin"}, "model_type='swin' is not supported; .*choose from: vit, deit"),
        ({"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu' is not supported by linvit; .*choose from: gelu, "),
        ({"use_swiglu_ffn": True}, "use_swiglu_ffn=True, but the weights have False"),
        ({"num_attention_heads": "many"}, "num_attention_heads='many' must be an integer"),
        ({"linvit_attention": "performer-nothing"}, "unknown attention 'performer-nothing'"),
        ({"image_size": 42}, "image_size=42, but 26 positions of patches of 7 px are for images of another size"),
        ({"image_size": [35, 70]}, r"image_size=\[35, 70\], but"),
        ({"num_hidden_layers": 12}, "num_hidden_layers=12, but the weights have 2"),
        ({"hidden_size": 48}, "hidden_size=48, but the weights have 33"),
        ({"intermediate_size": 132}, "intermediate_size=132, but the weights have 53"),
        ({"num_channels": 1}, "num_channels=1, but the weights have 3"),
        ({"patch_size": [7, 8]}, r"patch_size=\[7, 8\], but the weights have 7"),
        ({"qkv_bias": False}, "qkv_bias=False, but the weights have True"),
        (
            {"id2label": {str(i): f"c{i}" for i in range(7)}},
            "id2label: there are 7 names of classes, but the head has 5 outputs",
        ),
        ({"id2label": {"0": "one"}}, "id2label: there are 1 names of classes, but the head has 5 outputs"),
        ({"id2label": {str(i): f"c{i}" for i in range(1, 6)}}, "id2label names 5 classes, but not 0, which is one of"),
    ],
)
def test_what_hugging_face_has_and_linvit_has_not(changes, words, tmp_path):
    hugging_face("ViT").save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | changes))
    with pytest.raises(ValueError, match=words):
        load(tmp_path)


def test_registers_that_are_not_there_are_missed(tmp_path):
    hugging_face("Dinov2WithRegisters").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "register_tokens" not in k}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="num_register_tokens=4, but the weights have 0"):
        load(tmp_path)


def test_a_missing_tensor_has_the_name_that_hugging_face_gives_it(tmp_path):
    hugging_face("ViT").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = "vit.encoder.layer.1.intermediate.dense.weight"
    weights.pop(lost)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"there is no {lost} \(53, 33\)"):
        load(tmp_path)


def test_a_name_of_torchvision_tells_width_and_depth(tmp_path, monkeypatch):
    torchvision_folder(tmp_path, architecture="vit_b_16")
    with pytest.raises(ValueError, match="architecture='vit_b_16' without heads: dim=768, but the weights have 36"):
        load(tmp_path)
    monkeypatch.setitem(foreign.SIZES, "b", (36, 12))
    with pytest.raises(ValueError, match="architecture='vit_b_16' without heads: depth=12, but the weights have 2"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_36x1_224", "vit_base_patch16_plus_240", "vit_medium_patch16_gap_240"]
)
def test_of_other_names_only_the_heads_are_known(name):
    assert (
        foreign._timm({"architecture": name}, {}).stated.keys()
        == foreign._timm({"architecture": "vit_base_x"}, {}).stated.keys()
    )


@pytest.mark.skipif(not DEIT_TINY.exists(), reason="LINVIT_MODELS has no deit-tiny")
def test_the_real_deit_tiny_cut_short_is_refused(tmp_path):
    (tmp_path / "config.json").write_bytes((DEIT_TINY / "config.json").read_bytes())
    weights = load_file(DEIT_TINY / "model.safetensors")
    weights = {k: v for k, v in weights.items() if not re.match(r"blocks\.1[01]\.", k)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match="'deit_tiny_patch16_224' without model_args: depth=12, but the weights have 10"
    ):
        load(tmp_path)


@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers_are_refused(strange, tmp_path):
    weights = timm_folder(tmp_path)
    weights["blocks.1.mlp.fc1.weight"][5, 7] = strange
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"blocks.1.mlp.fc1.weight holds {strange}: weights must be finite"):
        load(tmp_path)


@pytest.mark.parametrize("said", [{}, {"classes": list("abcde")}])
def test_a_configuration_that_says_nothing(said, tmp_path):
    hugging_face("ViT").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"says neither model_type \(Hugging Face\) nor architecture") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    torchvision_folder(tmp_path, **said)
    with pytest.raises(ValueError, match=r"the number of heads is unknown: add num_heads to config.json"):
        load(tmp_path)


def test_two_heads_of_a_distilled_deit_are_refused(tmp_path):
    hugging_face("DeiT", "ForImageClassificationWithTeacher").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"(cls|distillation)_classifier\.\w+ \(5.*\) has no counterpart"):
        load(tmp_path)


def test_files_that_are_not_what_they_should_be(tmp_path):
    timm_folder(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="a file of weights is damaged"):
        load(tmp_path)
    save_file({k: v.to(torch.int8) for k, v in load_file_of(whole, tmp_path).items()}, weights)
    with pytest.raises(ValueError, match=r"holds I8: quantised weights are not supported"):
        load(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no model.safetensors; pytorch_model.bin is a pickle, which is never read"):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for names, words in (
        ({"a": "../a.safetensors"}, "'../a.safetensors', which is not in the same folder"),
        ({}, "has no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(ValueError, match=words):
            load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="is not a linvit model's configuration"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json is missing"):
        load(tmp_path)


def load_file_of(content: bytes, folder: Path) -> dict[str, Tensor]:
    (folder / "whole").write_bytes(content)
    return load_file(folder / "whole")


def test_a_model_of_the_hub(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    timm_folder(tmp_path)
    asked: dict = {}
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **kw: asked.update(kw, name=name) or str(tmp_path))
    assert load("org/some-vit").about["name"] == "org/some-vit"
    assert asked["name"] == "org/some-vit"
    assert not any(re.search("bin|pt|\\*$", pattern) for pattern in asked["allow_patterns"])

    def offline(name, **options):
        raise hub.errors.LocalEntryNotFoundError("no network\nat all")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(
        ValueError, match=r"^org/some-vit does not exist here, and could not be downloaded from the hub \(no network\)"
    ):
        load("org/some-vit")
    for path in ("tests/nothing", "nothing", "./a/b", "a/b/c"):  # none of these is an id
        with pytest.raises(ValueError, match="does not exist: give the folder"):
            load(path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install 'linvit\[hf\]'"):
        load("org/some-vit")


def test_evaluate_reads_them_too(tmp_path):
    timm_folder(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(said | {"label_names": ["class 0", "class 1", "class 2", "x", "y"]})
    )
    dataset = data.load_data("synthetic:classes=3,images=60,size=35,channels=3")
    (tmp_path / "config.json").write_text(json.dumps(said | {"label_names": [*dataset.classes, "x", "y"]}))
    done = evaluate_folder(tmp_path, dataset)
    assert done.folder == tmp_path
    assert len(done.result.labels) == len(dataset.test.labels)
    with pytest.raises(ValueError, match="the data that the model was trained on are not stored"):
        evaluate_folder(tmp_path)
