"""Exports: the same logits in onnxruntime, in torch.export and in transformers, or nothing at all."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import numpy as np
import pytest
import torch

import linvit
from linvit import cli
from linvit.attention import attention_names
from linvit.convert import export as exporting
from linvit.convert.export import FromPixels, export
from linvit.data import normalise
from linvit.models import VisionTransformer
from linvit.train.checkpoint import save_config, save_model

SMALL = {"image_size": 15, "patch_size": 5, "channels": 3, "classes": 7, "dim": 22, "depth": 1, "heads": 2,
         "mlp_dim": 13, "pool": "cls"}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_race(monkeypatch):
    """Timing is of no interest here, and takes seconds."""
    monkeypatch.setattr(exporting, "_speed", lambda *args: {})


def stored(folder: Path, attention: str = "softmax", **options: Any) -> VisionTransformer:
    """A model with weights as large as trained ones have, in a folder."""
    chosen: dict[str, Any] = SMALL | options
    model = linvit.create_model(**chosen, attention=attention)
    source = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=source) * (p.abs().mean() + 0.1 * (".attention." not in name)))
        if chosen["classes"]:
            model.head.weight.mul_(10)  # type: ignore[operator, union-attr]
    channels, classes = chosen["channels"], [f"kind {i}" for i in range(chosen["classes"])]
    about = {
        "name": "noise",
        "classes": classes,
        "mean": [0.3, 0.5, 0.6][:channels],
        "std": [0.2, 0.25, 0.3][:channels],
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_config(folder, model.config, SimpleNamespace(**about))  # type: ignore[arg-type]
    save_model(folder, model)
    return linvit.load(folder)


def pixels(model: VisionTransformer, batch: int, seed: int = 3) -> torch.Tensor:
    c = model.config
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, c.channels, c.image_size, c.image_size), generator=source, dtype=torch.uint8)


def expected(model: VisionTransformer, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(normalise(images, model.about["mean"], model.about["std"]))


def onnx_logits(path: Path, images: torch.Tensor) -> torch.Tensor:
    session = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"pixels": images.numpy()})[0])


def check_onnx(tmp_path: Path, attention: str, **options: Any) -> None:
    pytest.importorskip("onnxscript")
    model = stored(tmp_path, attention, **options)
    done = export(tmp_path, "onnx")
    assert done.difference <= 1e-4
    for batch in (1, 5):
        images = pixels(model, batch)
        wanted = expected(model, images)
        assert batch == 1 or wanted.std(0).max() > 1e-2  # images make a difference
        torch.testing.assert_close(onnx_logits(done.path, images), wanted, rtol=0, atol=1e-4)


# one of each family: exact, projected, local; pointwise, exponential, tilted, learned for each head
FAMILIES = ["softmax:qk_norm=true", "linformer:k=5", "window:size=3", "performer-relu:m=11,dwc=3",
            "performer-hyp:m=11,exact_cls=true", "performer-oprf:m=11", "performer-hedgehog"]  # fmt: skip


def test_onnx_of_every_family_in_one_model(tmp_path):
    check_onnx(tmp_path, "+".join(FAMILIES), depth=len(FAMILIES))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*cases.defaults(), "window:size=1", "linformer:k=5,kind=conv"])
def test_onnx_of_every_attention(tmp_path, spec):
    assert len(cases.defaults()) == len(attention_names())
    check_onnx(tmp_path, spec, pool="mean", prefix=1)  # with `identity` a CLS token sees no image


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["conv", "resnet", "pixel"])
def test_onnx_of_every_stem(tmp_path, stem):
    trunk = {} if stem == "pixel" else {"trunk": (3, 5)}
    small = {"image_size": 11, "patch_size": None, "channels": 1}
    check_onnx(tmp_path, "performer-relu:m=11", stem=stem, pool="mean", **small, **trunk)


def test_an_onnx_file_says_what_it_takes(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model = stored(tmp_path)
    path = export(tmp_path, "onnx", tmp_path / "new" / "mine.onnx").path
    there = onnx.load(path)
    facts = {entry.key: json.loads(entry.value) for entry in there.metadata_props}
    assert facts["classes"] == model.about["classes"]
    assert facts["mean"] == model.about["mean"]
    assert facts["image_size"] == 15
    (taken,) = there.graph.input
    assert taken.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert [d.dim_param or d.dim_value for d in taken.type.tensor_type.shape.dim] == ["batch", 3, 15, 15]
    assert [path.name for path in path.parent.iterdir()] == ["mine.onnx"]


@pytest.mark.parametrize("attention", ["performer-exp:m=11", "window:size=3"])
def test_a_pt2_runs_without_linvit(tmp_path, attention):
    model = stored(tmp_path, attention)
    path = export(tmp_path, "torch").path
    extra = {"linvit.json": ""}
    program = torch.export.load(path, extra_files=extra).module()
    assert json.loads(extra["linvit.json"])["classes"] == model.about["classes"]
    for batch in (1, 5):
        images = pixels(model, batch)
        torch.testing.assert_close(program(images), expected(model, images), rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [
    {}, {"positions": "sincos", "dim": 28, "channels": 1}, {"positions": "none"},
    {"qkv_bias": False, "norm_eps": 1e-3, "heads": 11, "depth": 3},
], ids=str)  # fmt: skip
def test_a_folder_of_transformers_has_the_same_logits(tmp_path, options):
    transformers = pytest.importorskip("transformers")
    model = stored(tmp_path, **options)
    done = export(tmp_path, "hf")
    theirs = transformers.ViTForImageClassification.from_pretrained(done.path)
    images = pixels(model, 3)
    wanted = expected(model, images)
    with torch.no_grad():
        found = theirs(normalise(images, model.about["mean"], model.about["std"])).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert theirs.config.id2label[6] == "kind 6"
    prepared = json.loads((done.path / "preprocessor_config.json").read_text())
    scaled = (images[0].double() * prepared["rescale_factor"]).numpy()
    mean, std = (np.array(prepared[key])[:, None, None] for key in ("image_mean", "image_std"))
    np.testing.assert_allclose((scaled - mean) / std, normalise(images[:1], **_statistics(model))[0], atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "hf", "model.safetensors"]


def _statistics(model: VisionTransformer) -> dict[str, Any]:
    return {key: model.about[key] for key in ("mean", "std")}


@pytest.mark.parametrize("spec", [
    "performer-relu:projection=none", "window:size=3", "performer-relu:projection=none,exact_cls=true", "efficient",
])  # fmt: skip
def test_a_folder_of_transformers_computes_with_the_attention_that_its_card_names(tmp_path, spec):
    """The card is run as it stands."""
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
    with torch.no_grad():
        found = made["model"](normalise(images, **_statistics(model))).logits
    torch.testing.assert_close(found, expected(model, images), rtol=1e-5, atol=1e-5)
    assert (found - softmax_logits(model, images)).abs().max() > 1e-3
    torch.testing.assert_close(expected(linvit.load(done.path), images), expected(model, images), rtol=1e-5, atol=1e-5)


def softmax_logits(model: VisionTransformer, images: torch.Tensor) -> torch.Tensor:
    twin = VisionTransformer(model.config.model_copy(update={"attention": "softmax"})).eval()
    twin.load_state_dict(model.state_dict())
    twin.about = model.about
    return expected(twin, images)


def test_what_transformers_makes_of_a_folder_is_compared(tmp_path, monkeypatch):
    """Not softmax's twin: an attention by that name that is another one does not get through."""
    pytest.importorskip("transformers")
    stored(tmp_path, "window:size=3", depth=2)
    monkeypatch.setattr(exporting, "register_transformers", lambda spec: "sdpa")
    with pytest.raises(ValueError, match="format=hf: logits differ"):
        export(tmp_path, "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("attention", "options", "said"), [
    ("softmax", {"pool": "mean"}, "pool=mean"), ("softmax", {"prefix": 2}, "prefix=2"),
    ("softmax", {"stem": "conv", "trunk": (3, 5), "patch_size": None}, "stem=conv"),
    ("softmax", {"classes": 0}, "classes=0, only features"),
    ("softmax", {"layer_scale": 0.5}, "layer_scale=0.5"), ("softmax", {"head_dim": 7}, "heads=2 × head_dim=7"),
    ("softmax+efficient", {"depth": 2}, "differs between layers"),
    ("linformer:k=5", {}, "blocks.0.attn.attention.projection"),
    ("performer-exp:m=11", {}, "blocks.0.attn.attention.kernel.omega.rows"),
    ("softmax:qk_norm=true", {}, "blocks.0.attn.attention.q_norm"),
    ("performer-relu:projection=none,dwc=3", {}, "blocks.0.attn.attention.dwc.weight"),
])  # fmt: skip
def test_what_transformers_cannot_have_is_refused(tmp_path, attention, options, said, capsys):
    pytest.importorskip("transformers")
    stored(tmp_path, attention, **options)
    assert cli.main(["export", str(tmp_path), "--format", "hf"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_other_logits_are_refused_and_nothing_is_left(tmp_path, monkeypatch):
    stored(tmp_path)
    seen = FromPixels.forward
    monkeypatch.setattr(FromPixels, "forward", lambda self, x: seen(self, x) + 2e-4 * torch.compiler.is_compiling())
    before = sorted(tmp_path.iterdir())
    for format in ("torch", "onnx"):
        with pytest.raises(ValueError, match=r"logits differ by 2.0e-04, more than 1e-04"):
            export(tmp_path, format)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("off", "fine"), [(5e-7, True), (5e-6, False)])
def test_large_logits_may_differ_by_their_rounding(tmp_path, monkeypatch, off, fine):
    model = stored(tmp_path)
    with torch.no_grad():
        model.head.weight *= 1e5  # type: ignore[operator, union-attr]
    save_model(tmp_path, model)
    seen = FromPixels.forward
    monkeypatch.setattr(
        FromPixels, "forward", lambda self, x: seen(self, x) * (1 + off * torch.compiler.is_compiling())
    )
    if fine:
        assert export(tmp_path, "torch").difference > 1e-4
    else:
        with pytest.raises(ValueError, match="logits differ by"):
            export(tmp_path, "torch")


def test_a_model_without_a_head_gives_features(tmp_path):
    stored(tmp_path, classes=0)
    assert "→ features (batch, " in export(tmp_path, "torch").note


@pytest.mark.parametrize("format", ["onnx", "torch", "hf"])
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


@pytest.mark.parametrize(("words", "said"), [
    (["--format", "onxx"], "onxx"), (["--out", "model.bin"], "out=model.bin must end in .onnx"),
    (["--format", "torch", "--out", "model"], "must end in .pt2"),
])  # fmt: skip
def test_bad_words_are_one_line(tmp_path, capsys, words, said):
    assert cli.main(["export", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_bad_places_are_one_line(tmp_path, capsys):
    assert cli.main(["export", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err
    stored(tmp_path)
    (tmp_path / "model.onnx").write_text("mine")
    assert cli.main(["export", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "model.onnx").read_text() == "mine"


def test_a_model_of_the_hub_is_not_hidden_by_its_export(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    stored(tmp_path / "cache")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    path = export("org/some-vit", "torch").path
    assert path == Path("org-some-vit/model.pt2")
    assert path.exists()
    assert not (tmp_path / "org").exists()
    assert linvit.load("org/some-vit").config.classes == 7  # found as before


def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch):
    stored(tmp_path)
    monkeypatch.setattr(exporting.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["export", str(tmp_path)]) == 2
    assert "needs onnx, which is not installed: pip install 'linvit[onnx]'" in capsys.readouterr().err


def test_the_verb_says_where_and_how_fast(tmp_path, capsys, monkeypatch):
    pytest.importorskip("onnxscript")
    stored(tmp_path)
    monkeypatch.setattr(exporting, "_speed", lambda *args: {1: [1.5, 2.0, 2.5], 32: [0.5, 0.75, 1.0]})
    assert cli.main(["export", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == str(tmp_path / "model.onnx")
    assert "uint8 (batch, 3, 15, 15)" in out[1]
    assert out[-2:] == ["onnxruntime is 2.00× as fast as PyTorch [1.50, 2.50] on one image",
                        "onnxruntime is 0.75× as fast as PyTorch [0.50, 1.00] on 32 images"]  # fmt: skip
    other = tmp_path / "other.onnx"
    assert cli.main(["export", str(tmp_path), "--out", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(other)
    assert found["speed_vs_eager"][1] == {"batch": 32, "low": 0.5, "median": 0.75, "high": 1.0}


def test_times_come_from_one_race(tmp_path, monkeypatch):
    monkeypatch.undo()
    model = stored(tmp_path)
    monkeypatch.setattr(exporting, "PATIENCE", 0.0)
    eager = FromPixels(model)
    ratios = exporting._speed(model, eager, eager, lambda *_: None)
    assert list(ratios) == [1, 32]
    assert all(0.2 < middle < 5 for _, middle, _ in ratios.values())  # the same thing twice
