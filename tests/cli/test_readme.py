"""What the README shows, runs."""

from __future__ import annotations

import re
from pathlib import Path

from linvit import cli
from linvit.kernels import KERNELS

README = Path(__file__).parents[2] / "README.md"
PYTHON = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


def test_use_an_attention():
    found: dict = {}
    exec(PYTHON[0], found)
    assert found["out"].shape == (2, 8, 196, 64)
    assert found["matrix"].shape == (2, 8, 196, 196)


def test_add_a_kernel(tmp_path, monkeypatch, capsys):
    (tmp_path / "softplus.py").write_text(PYTHON[1])
    monkeypatch.setenv("LINVIT_PLUGINS", str(tmp_path / "softplus.py"))
    monkeypatch.setattr(KERNELS, "_entries", dict(KERNELS._entries))
    words = "bench error -a performer-softplus:m=16 --sigma 1 --tokens 17 --heads 2 --head-dim 8 --draws 1"
    assert cli.main(words.split()) == 0
    assert "performer-softplus:m=16" in capsys.readouterr().out
