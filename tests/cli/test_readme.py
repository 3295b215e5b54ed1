"""What the README shows, runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
PYTHON = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


def test_use_an_attention():
    found: dict = {}
    exec(PYTHON[0], found)
    assert found["out"].shape == (2, 8, 196, 64)
    assert found["matrix"].shape == (2, 8, 196, 196)


def test_add_a_kernel(tmp_path):
    (tmp_path / "softplus.py").write_text(PYTHON[1])
    words = shlex.split("bench error -a performer-softplus:m=16 --sigma 1 --tokens 17 --heads 2 --head-dim 8 --draws 1")
    done = subprocess.run(
        [sys.executable, "-m", "linvit", *words], capture_output=True, text=True, timeout=120,
        env=os.environ | {"LINVIT_PLUGINS": str(tmp_path / "softplus.py")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "performer-softplus:m=16" in done.stdout
