"""Half precision and torch.compile train what plain float32 trains, as nearly as they promise."""

from __future__ import annotations

import json
import sys

import killable
import pytest

import linvit

DATA = "synthetic:images=72,size=8"


def losses(folder, **options) -> list[float]:
    linvit.train(DATA, out=folder, epochs=3, **killable.TINY | options)
    return [json.loads(line)["train_loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("attention", ["softmax", "performer-exp:m=8", "performer-relu:m=8,dwc=3", "linformer:k=2"])
def test_bfloat16(tmp_path, monkeypatch, attention):
    monkeypatch.setattr(
        sys.modules["linvit.train.run"], "check_amp", lambda amp, device: None
    )  # slow without hardware for it, but right
    plain = losses(tmp_path / "plain", attention=attention)
    half = losses(tmp_path / "half", attention=attention, amp="bf16")
    assert half != plain
    assert half == pytest.approx(plain, rel=0.03)


@pytest.mark.slow  # the compiler takes a minute
def test_compile(tmp_path):
    plain = losses(tmp_path / "plain", attention="performer-relu:m=8")
    assert losses(tmp_path / "compiled", attention="performer-relu:m=8", compile=True) == pytest.approx(plain, rel=1e-3)
