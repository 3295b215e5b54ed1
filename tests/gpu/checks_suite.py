"""The suite for real GPUs runs on the fake one, where its times mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import suite
import torch
from fakegpu import gpu

from linvit import cli


@pytest.fixture(autouse=True)
def device():
    with gpu() as made:
        yield made


def check_device():
    assert suite.device()["capability"]


def check_softmax_against_sdpa():
    found = suite.softmax_against_sdpa(tokens=(17,), batch=1)
    low, middle, high = found[17]
    assert 0 < low <= middle <= high


def check_wrong_attentions(monkeypatch):
    monkeypatch.setattr(suite, "defaults", lambda: ["softmax", "performer-relu:m=11"])
    assert suite.wrong_attentions(dtypes=(torch.bfloat16,)) == {}


def check_wrong_paths():
    """Errors become reasons: there is no Triton on the fake device."""
    found = suite.wrong_paths(paths=("eager", "triton"), dtypes=(torch.bfloat16,))
    assert {name.split()[0] for name in found} == {"triton"}
    assert len(found) == 5


@pytest.mark.slow
def check_break_even(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("linvit.measure.advice.POINTS", 14)
    monkeypatch.setattr("linvit.measure.advice.filling", lambda load, device: load)
    found = suite.break_even(tmp_path, tokens=(17, 50), batch=1, model_tokens=49)
    assert set(found["swept"]) == {"forward", "both"}
    assert len(found["advised"]) == 3


@pytest.mark.slow
def check_advise_says_that_the_device_is_simulated(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path))
    monkeypatch.setattr("linvit.measure.advice.POINTS", 14)
    monkeypatch.setattr("linvit.measure.advice.filling", lambda load, device: load)
    assert cli.main(["advise", "49", "--device", "cuda", "-a", "performer-relu:m=8"]) == 0
    assert "tested on a simulated device only" in capsys.readouterr().out


def check_synchronisations(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    found = suite.synchronisations(tmp_path / "run", "softmax", "off", steps=2)
    assert found["waits"] == 0
    assert 0 <= found["accuracy"] <= 1
