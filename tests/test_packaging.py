"""What the package says of itself is what is tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_oldest_versions_admitted_are_those_that_ci_runs():
    extras = PROJECT["optional-dependencies"]
    admitted = [*PROJECT["dependencies"], *extras["parquet"], *extras["onnx"]]
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    assert sorted(admitted) == sorted(line.replace("==", ">=") for line in lines if not line.startswith("#"))
    assert "make test-lowest" in (ROOT / ".ci" / "run").read_text()


def test_set_up_pins_the_same_torch():
    pins = [
        re.findall(r"^torch==(.*)$", (ROOT / name).read_text(), re.M)
        for name in ("constraints.txt", "constraints-lowest.txt")
    ]
    assert len({tuple(pin) for pin in pins}) == 1
    assert pins[0]
