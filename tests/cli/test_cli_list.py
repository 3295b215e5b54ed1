from __future__ import annotations

import json

import pytest

from linvit import cli
from linvit.attention import attention_names, attention_options
from linvit.kernels import KERNELS


def lines(capsys, what: str) -> dict[str, str]:
    """First word → line of the plain table."""
    assert cli.main(["list", what]) == 0
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}


def rows(capsys, what: str) -> dict[str, dict]:
    assert cli.main(["list", what, "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_attentions(capsys):
    found = rows(capsys, "attentions")
    assert list(found) == attention_names()
    for name, row in found.items():
        assert row["formula"]
        assert row["estimates"]
        assert row["MACs/head"], f"{name}: no formula for its MACs"
        assert set(row["options"]) <= set(attention_options(name))
    assert found["softmax"]["MACs"] == 2 * 1024**2 * 64 * 8
    assert found["softmax"]["break-even"] is None
    assert found["performer-exp"]["MACs/head"] == "4Nmd"
    assert found["performer-exp"]["break-even"] == 128  # 2m
    assert found["linformer"]["MACs/head"] == "4Nkd"


def test_plain_table_has_every_name_once(capsys):
    found = lines(capsys, "attentions")
    assert set(attention_names()) <= set(found)
    assert "134.2 M" in found["performer-exp"]
    assert "m=64" in found["performer-exp"]
    assert not any("─" in line or "\x1b" in line for line in found.values())


def test_kernels(capsys):
    found = rows(capsys, "kernels")
    assert list(found) == KERNELS.names()
    assert found["hyp"]["features"] == 128


def test_a_kernel_of_a_plugin_is_listed(capsys, tmp_path, monkeypatch):
    (tmp_path / "square.py").write_text(
        "from linvit.kernels.base import register\n"
        "from linvit.kernels.pointwise import Pointwise\n"
        "@register('square-of-a-plugin')\n"
        "class Square(Pointwise):\n"
        "    formula, estimates = 'm^-½ ((Ωx)² + ε)', '‖x‖²‖y‖² + 2(x·y)²'\n"
        "    def f(self, u):\n"
        "        return u * u\n"
    )
    monkeypatch.setenv("LINVIT_PLUGINS", str(tmp_path))
    monkeypatch.setattr(KERNELS, "_entries", dict(KERNELS._entries))
    assert rows(capsys, "attentions")["performer-square-of-a-plugin"]["MACs/head"] == "4Nmd"


@pytest.mark.parametrize(
    ("what", "name"), [("datasets", "digits"), ("formats", "folder"), ("sizes", "001-I"), ("metrics", "macs")]
)
def test_data(capsys, what, name):
    found = rows(capsys, what)
    assert name in found
    assert all(row["what"] for row in found.values())
