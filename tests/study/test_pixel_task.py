"""Long Range Arena's pixel task: grey CIFAR-10, a token for each of 1,024 pixels."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from linvit.ledger import open_ledger
from linvit.study import compare


@pytest.mark.data
def test_grey_pixels_are_compared(tmp_path, monkeypatch):
    root = os.environ.get("LINVIT_DATA", "")
    if not any((Path(root) / name).exists() for name in ("cifar10", "cifar-10-batches-bin") if root):
        pytest.skip("LINVIT_DATA has no cifar10")
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))
    small = {"stem": "pixel", "dim": 8, "depth": 1, "heads": 2, "mlp_dim": 16, "batch_size": 8, "steps": 2}
    words = small | {"controls": False, "seeds": 1, "limit": 40, "threads": 1, "out": tmp_path / "run"}
    out = compare("cifar10:grey=true", attentions=["softmax", "performer-relu:m=8"], **words)
    layers = json.loads((out / "models.json").read_text())["performer-relu:m=8"]
    assert layers[0]["shape"] == [1024, 8]
    assert len(open_ledger(out).find("test_accuracy", selection="best")) == 2
    assert "values, one token each" in (out / "report.html").read_text()
