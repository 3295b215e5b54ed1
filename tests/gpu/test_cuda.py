"""On a CUDA device: `make test-gpu` runs this in about five minutes and prints its report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import suite
import torch

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.fixture(scope="module")
def report() -> Iterator[dict[str, Any]]:
    """Written even if a test fails."""
    found: dict[str, Any] = {"device": suite.device()}
    yield found
    path = Path(os.environ.get("LINVIT_GPU_REPORT", "runs/gpu.json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")


def test_every_attention_is_right(report: dict[str, Any]) -> None:
    report["wrong"] = suite.wrong_attentions()
    assert not report["wrong"]


def test_every_path_of_linear_attention_is_right(report: dict[str, Any]) -> None:
    report["wrong_paths"] = suite.wrong_paths()
    assert not report["wrong_paths"]


@pytest.mark.parametrize("amp", ["off", "auto"])
@pytest.mark.parametrize("attention", ["softmax", "performer-relu:m=64", "performer-exp:m=64", "linformer:k=16"])
def test_trainings_do_not_wait_in_their_steps(report: dict[str, Any], tmp_path: Path, attention: str, amp: str) -> None:
    found = suite.synchronisations(tmp_path / "run", attention, amp)
    report.setdefault("trainings", {})[f"{attention} amp={amp}"] = found
    assert found["waits"] < found["steps"], "more than one a step"


def test_speed_of_softmax(report: dict[str, Any]) -> None:
    report["softmax_over_sdpa"] = suite.softmax_against_sdpa()


def test_break_even(report: dict[str, Any], tmp_path: Path) -> None:
    report["break_even"] = suite.break_even(tmp_path)
