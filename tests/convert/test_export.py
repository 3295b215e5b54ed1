"""Exports: the same logits in onnxruntime, in torch.export and in transformers, or no file at all."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from linvit import cli, data
from linvit.conversion import export as exporting
from linvit.conversion.export import FromPixels, export
from linvit.data import normalise
from linvit.models import VisionTransformer, create_model
from linvit.training.checkpoint import load, save_config, save_model

SMALL = {
    "image_size": 15,
    "patch_size": 5,
    "channels": 3,
    "classes": 7,
    "dim": 22,
    "depth": 1,
    "heads": 2,
    "mlp_dim": 13,
    "pool": "cls",
}


@pytest.fixture(autouse=True)
def _no_timing(monkeypatch):
    monkeypatch.setattr(exporting, "_speed", lambda *args: {1: [1.5, 2.0, 2.5], 32: [0.5, 0.75, 1.0]})


def stored(folder: Path, attention: str = "softmax", **options: Any) -> VisionTransformer:
    """A model with weights as large as trained ones, in a folder."""
    chosen: dict[str, Any] = SMALL | options
    model = create_model(**chosen, attention=attention)
    source = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=source) * (p.abs().mean() + 0.1 * (".attention." not in name)))
        if chosen["classes"]:
            model.head.weight.mul_(10)  # type: ignore[operator, union-attr]
    mean, std = ([*values][: chosen["channels"]] for values in ((0.3, 0.5, 0.6), (0.2, 0.25, 0.3)))
    classes = [f"kind {i}" for i in range(chosen["classes"])]
    about = SimpleNamespace(name="noise", classes=classes, mean=mean, std=std, resize="crop")
    folder.mkdir(parents=True, exist_ok=True)
    save_config(folder, model.config, about)  # type: ignore[arg-type]
    save_model(folder, model)
    return load(folder)


def pixels(model: VisionTransformer, batch: int, seed: int = 3) -> torch.Tensor:
    c = model.config
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, c.channels, c.image_size, c.image_size), generator=source, dtype=torch.uint8)


def statistics(model: VisionTransformer) -> dict[str, Any]:
    return {key: model.about[key] for key in ("mean", "std")}


def expected(model: VisionTransformer, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(normalise(images, **statistics(model)))


def check_onnx(path: Path, model: VisionTransformer) -> None:
    session = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        images = pixels(model, batch)
        logits = expected(model, images)
        assert batch == 1 or logits.std(0).max() > 1e-2  # images make a difference
        found = torch.from_numpy(session.run(["logits"], {"pixels": images.numpy()})[0])
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-4)


# one of each family: exact, projected, local; pointwise, exponential, tilted, learned for each head
FAMILIES = [
    "softmax:qk_norm=head",
    "linformer:k=5",
    "window:size=3",
    "twoscale:cell=2",
    "performer-relu:m=11,dwc=3",
    "performer-hyp:m=11,exact_cls=true",
    "performer-oprf:m=11",
    "performer-hedgehog",
]


@pytest.mark.slow
def test_onnx(tmp_path, capsys):
    """Every family of attentions in one model, from the command line."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model = stored(tmp_path, "+".join(FAMILIES), depth=len(FAMILIES))
    path = tmp_path / "new" / "mine.onnx"
    assert cli.main(["export", str(tmp_path), "--out", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [str(path), "pixels uint8 (batch, 3, 15, 15), not normalised → logits (batch, 7)"]
    assert lines[-2:] == [
        "onnxruntime is 2.00× as fast as PyTorch [1.50, 2.50] on one image",
        "onnxruntime is 0.75× as fast as PyTorch [0.50, 1.00] on 32 images",
    ]
    check_onnx(path, model)
    written = onnx.load(path)
    facts = {entry.key: json.loads(entry.value) for entry in written.metadata_props}
    assert (facts["classes"], facts["mean"], facts["image_size"]) == (model.about["classes"], model.about["mean"], 15)
    (taken,) = written.graph.input
    assert taken.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert [d.dim_param or d.dim_value for d in taken.type.tensor_type.shape.dim] == ["batch", 3, 15, 15]
    assert [path.name for path in path.parent.iterdir()] == ["mine.onnx"]


INNER = ["mhla:normaliser=released", "vit3:conv=true"]


@pytest.mark.slow
def test_onnx_of_every_attention(tmp_path):
    import cases

    for i, spec in enumerate(
        [*cases.defaults(), "window:size=1", "linformer:k=5,kind=conv", "agent:n=4,bias=learned", *INNER]
    ):
        model = stored(tmp_path / f"{i}", spec, pool="mean", prefix=1)  # with `identity` a CLS token sees no image
        check_onnx(export(tmp_path / f"{i}", "onnx").path, model)


@pytest.mark.slow
def test_onnx_of_shared_options(tmp_path):
    extras = "dwc=3,gate=silu,cpe=3,qk_norm=all,rope=2d"
    model = stored(tmp_path, f"softmax:{extras}+agent:n=4,{extras}+mala:{extras},exact_cls=true", dim=24, depth=3)
    check_onnx(export(tmp_path, "onnx").path, model)


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["conv", "resnet", "pixel"])
def test_onnx_of_every_stem(tmp_path, stem):
    trunk = {} if stem == "pixel" else {"trunk": (3, 5)}
    small = {"image_size": 11, "patch_size": None, "channels": 1}
    model = stored(tmp_path, "performer-relu:m=11", stem=stem, pool="mean", **small, **trunk)
    check_onnx(export(tmp_path, "onnx").path, model)


def test_a_pt2_file_runs_without_linvit(tmp_path, capsys):
    model = stored(tmp_path, "performer-exp:m=11+window:size=3", depth=2)
    assert cli.main(["export", str(tmp_path), "--format", "torch", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(tmp_path / "model.pt2")
    extra = {"linvit.json": ""}
    program = torch.export.load(found["path"], extra_files=extra).module()
    assert json.loads(extra["linvit.json"])["classes"] == model.about["classes"]
    for batch in (1, 5):
        images = pixels(model, batch)
        torch.testing.assert_close(program(images), expected(model, images), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"positions": "sincos", "dim": 28, "channels": 1},
        {"positions": "none", "qkv_bias": False, "norm_eps": 1e-3, "heads": 11, "depth": 3},
    ],
    ids=str,
)
def test_a_folder_of_transformers_has_the_same_logits(tmp_path, options):
    transformers = pytest.importorskip("transformers")
    model = stored(tmp_path, **options)
    done = export(tmp_path, "hf")
    theirs, images = transformers.ViTForImageClassification.from_pretrained(done.path), pixels(model, 3)
    with torch.no_grad():
        found = theirs(normalise(images, **statistics(model))).logits
    torch.testing.assert_close(found, expected(model, images), rtol=1e-5, atol=1e-5)
    assert theirs.config.id2label[6] == "kind 6"
    prepared = json.loads((done.path / "preprocessor_config.json").read_text())
    scaled = (images[0].double() * prepared["rescale_factor"]).numpy()
    mean, std = (np.array(prepared[key])[:, None, None] for key in ("image_mean", "image_std"))
    np.testing.assert_allclose((scaled - mean) / std, normalise(images[:1], **statistics(model))[0], atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "hf", "model.safetensors"]
    assert load(done.path).about["resize"] == model.about["resize"] == "crop"


@pytest.mark.parametrize("spec", ["window:size=3", "performer-relu:projection=none,exact_cls=true"])
def test_a_folder_of_transformers_computes_with_the_attention_that_its_card_names(tmp_path, spec):
    """The code of the card is run."""
    pytest.importorskip("transformers")
    model = stored(tmp_path, f"{spec}@3", depth=3)
    done = export(tmp_path, "hf")
    card = (done.path / "README.md").read_text()
    assert f'attn_implementation="linvit-{spec}"' in done.note
    assert done.note.partition("path")[2] in card
    code = card.split("```python")[1].split("```")[0].replace("path/to/this/folder", str(done.path))
    made: dict[str, Any] = {}
    exec(code, made)
    images = pixels(model, 3)
    logits = expected(model, images)
    with torch.no_grad():
        found = made["model"](normalise(images, **statistics(model))).logits
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
    twin = VisionTransformer(model.config.model_copy(update={"attention": "softmax"})).eval()
    twin.load_state_dict(model.state_dict())
    twin.about = model.about
    assert (found - expected(twin, images)).abs().max() > 1e-3
    torch.testing.assert_close(expected(load(done.path), images), logits, rtol=1e-5, atol=1e-5)


def test_what_transformers_loads_is_compared(tmp_path, monkeypatch):
    """An attention by that name that is another one is refused."""
    pytest.importorskip("transformers")
    stored(tmp_path, "window:size=3", depth=2)
    monkeypatch.setattr(exporting, "register_transformers", lambda spec: "sdpa")
    with pytest.raises(ValueError, match="format=hf: logits differ"):
        export(tmp_path, "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ("softmax", {"pool": "mean"}, "pool=mean"),
        ("softmax", {"prefix": 2}, "prefix=2"),
        ("softmax", {"stem": "conv", "trunk": (3, 5), "patch_size": None}, "stem=conv"),
        ("softmax", {"classes": 0}, "classes=0, only features"),
        ("softmax", {"layer_scale": 0.5}, "layer_scale=0.5"),
        ("softmax", {"mlp": "swiglu"}, "mlp=swiglu"),
        ("softmax", {"rope": "dinov3", "dim": 24}, "rope=dinov3"),
        ("softmax", {"head_dim": 7}, "heads=2 × head_dim=7"),
        ("softmax+efficient", {"depth": 2}, "differs between layers"),
        ("linformer:k=5", {}, "blocks.0.attn.attention.projection"),
        ("performer-exp:m=11", {}, "blocks.0.attn.attention.kernel.omega.rows"),
        ("performer-relu:projection=none,dwc=3", {}, "blocks.0.attn.attention.dwc.weight"),
        ("softmax:gate=silu", {}, "blocks.0.attn.gate.weight"),
        ("softmax:cpe=3", {}, "blocks.0.attn.cpe.weight"),
    ],
)
def test_what_transformers_cannot_represent_is_refused(attention, options, message):
    with pytest.raises(ValueError, match="format=hf: a ViT of transformers cannot have") as caught:
        exporting._checked_for_hf(create_model(**SMALL | options, attention=attention))
    assert message in str(caught.value)


@pytest.mark.parametrize(("scale", "off", "fine"), [(1, 2e-4, False), (1e5, 5e-7, True), (1e5, 5e-6, False)])
def test_logits_may_differ_by_their_rounding(tmp_path, scale, off, fine):
    model = stored(tmp_path)
    eager = FromPixels(model)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return eager(x) * scale

    def other(x: torch.Tensor) -> torch.Tensor:
        return scaled(x) * (1 + off) if scale > 1 else scaled(x) + off

    if fine:
        assert exporting._compared("torch", model, other, scaled) > 1e-4
    else:
        with pytest.raises(ValueError, match="logits differ by"):
            exporting._compared("torch", model, other, scaled)


@pytest.mark.parametrize("format", ["torch", "hf"])
def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch, format):
    pytest.importorskip("transformers")
    stored(tmp_path)
    before = sorted(tmp_path.iterdir())

    def stop(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "_compared", stop)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path, format)
    assert sorted(tmp_path.iterdir()) == before


def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch):
    model = tmp_path / "model"
    stored(model)
    (model / "model.pt2").write_text("mine")
    for words, message in (
        (["export", str(model), "--format", "onxx"], "onxx"),
        (["export", str(model), "--out", "model.bin"], "out=model.bin must end in .onnx"),
        (["export", str(model), "--format", "torch", "--out", "model"], "must end in .pt2"),
        (["export", str(tmp_path / "nothing")], "does not exist"),
        (["export", str(model), "--format", "torch"], "model.pt2 exists: delete it, or choose another --out"),
    ):
        assert cli.main(words) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
    assert (model / "model.pt2").read_text() == "mine"
    monkeypatch.setattr(exporting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs onnx, which is not installed: pip install 'linvit\[onnx\]'"):
        export(model)


def test_a_model_of_the_hub_is_not_hidden_by_its_export(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    stored(tmp_path / "cache", classes=0)
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    done = export("org/some-vit", "torch")
    assert "→ features (batch, " in done.note
    assert done.path == Path("org-some-vit/model.pt2")
    assert done.path.exists()
    assert not (tmp_path / "org").exists()
    assert load("org/some-vit").config.dim == 22  # found as before


def test_times_come_from_one_race(tmp_path, monkeypatch):
    monkeypatch.undo()
    eager = FromPixels(stored(tmp_path))
    monkeypatch.setattr(exporting, "TIMING_SECONDS", 0.0)
    ratios = exporting._speed(eager.model, eager, eager, lambda *_: None)
    assert list(ratios) == [1, 32]
    assert all(0.2 < middle < 5 for _, middle, _ in ratios.values())  # both are the same model


def test_from_a_folder_of_hugging_face_to_an_export(tmp_path, capsys):
    """The commands of docs/how-to/export.md."""
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 22, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 29}
    labels = {i: str(i) for i in range(10)}
    names = {"id2label": labels, "label2id": {name: i for i, name in labels.items()}}
    config = transformers.ViTConfig(**size, image_size=8, patch_size=2, num_channels=1, **names)
    torch.manual_seed(5)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    vit, linear, file = (str(tmp_path / name) for name in ("vit", "linear", "linear.pt2"))
    assert cli.main(["evaluate", vit, "digits", "--limit", "60", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["accuracy"]
    words = ["--to", "linformer:k=5", "--data", "digits", "--stages", "1,2", "--steps", "4", "--limit", "60", "--json"]
    assert cli.main(["convert", vit, *words, "--out", linear, "--device", "cpu"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["teacher_accuracy"] == before
    assert result["headline"].startswith("3 of 3 layers replaced, ")
    assert [row["model"] for row in result["rows"]] == ["teacher", "zero-shot", "stage 1", "stage 2"]
    assert (tmp_path / "linear/report.html").exists()
    assert cli.main(["evaluate", linear, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)["accuracy"]
    assert after == result["test_accuracy"]
    assert cli.main(["export", linear, "--format", "torch", "--out", file]) == 0
    images, truth = data.load_data("digits", limit=60).test.batch(slice(0, 60))
    logits = torch.export.load(file).module()(images)
    assert (logits.argmax(1) == truth).double().mean().item() == pytest.approx(after)
