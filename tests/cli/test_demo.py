"""The command line of `make demo`, without its trainings."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from linvit import cli

FILE = Path(__file__).parents[2] / "benchmarks" / "demo.py"


def demo_command() -> list[str]:
    """As the script reads it that repeats the demo with other seeds."""
    spec = importlib.util.spec_from_file_location("demo", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.demo_command()


def test_the_demo_tests_every_image_with_a_linear_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*demo_command(), "--seed", "7", "--out", str(tmp_path / "x")]
    assert cli.main([*words, "--dry-run"]) == 0
    jobs = capsys.readouterr().out.splitlines()
    names = [line.split(": ")[1] for line in jobs]
    for attention in ("softmax", "performer-relu:m=16", "uniform"):
        runs = [f"{attention}, seed 7, fold {fold}" for fold in range(5)]
        assert [name for name in names if name.startswith(attention)] == [*runs, f"{runs[0]}, half of the steps"]
    assert not (tmp_path / "x").exists()
