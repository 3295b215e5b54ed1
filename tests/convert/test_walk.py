"""The walk of docs/convert.md, command by command: from a folder of Hugging Face's to an ONNX file."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from linvit import data
from linvit.cli import main
from linvit.convert import export as exporting
from linvit.report import conversion

SIZE = {"hidden_size": 22, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 29, "image_size": 8,
        "patch_size": 2, "num_channels": 1}  # fmt: skip


def test_from_hugging_face_to_onnx(tmp_path, capsys, monkeypatch):
    transformers = pytest.importorskip("transformers")
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(exporting, "_speed", lambda *args: {1: [1.0, 2.0, 3.0]})
    monkeypatch.setattr(conversion, "draw_files", lambda specs, folder: None)
    labels = {i: str(i) for i in range(10)}
    config = transformers.ViTConfig(**SIZE, id2label=labels, label2id={v: k for k, v in labels.items()})
    torch.manual_seed(5)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    vit, linear, file = (str(tmp_path / name) for name in ("vit", "linear", "linear.onnx"))
    assert main(["evaluate", vit, "digits", "--limit", "60", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["accuracy"]
    words = ["--to", "linformer:k=5", "--data", "digits", "--stages", "1,2", "--steps", "4", "--limit", "60"]
    assert main(["convert", vit, *words, "--out", linear, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["model", "teacher", "zero-shot"]
    assert lines[-4].startswith("3 of 3 layers linear, ")
    assert lines[-3].startswith("Of 60 test images: ")
    assert lines[-2:] == [f"Model: {linear}/best", f"Report: {linear}/report.html"]
    assert main(["evaluate", linear, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert main(["export", linear, "--out", file]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        file, "pixels uint8 (batch, 1, 8, 8), not normalised → logits (batch, 10)",
    ]  # fmt: skip
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    images, truth = data.load_data("digits", limit=60).test.batch(slice(0, 60))
    (logits,) = session.run(None, {"pixels": images.numpy()})
    names = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
    said = [names[i] for i in logits.argmax(1)]
    assert np.mean([name == str(int(label)) for name, label in zip(said, truth, strict=True)]) == after["accuracy"]
    assert conversion.read(linear).teacher.value == pytest.approx(before)
