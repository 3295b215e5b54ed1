from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import synthetic

from linvit import report

HOSTILE = ("<script>alert(1)</script>", "=cmd()", "</script><b>x", "a|b`c`", "", "ünï\u2028code", "@ink")


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """A full study with its report, to look at only."""
    folder = synthetic.study(tmp_path_factory.mktemp("report") / "full", channels=3, side=32, seeds=(0, 1, 2, 3, 4),
                             diverged=[("performer-theta:m=32", 2)], warnings=["Training was cut short."])  # fmt: skip
    report.build(folder)
    return folder


@pytest.fixture(scope="session")
def hostile(tmp_path_factory) -> Path:
    """Everything a user may name is an attack or an accident."""
    folder = synthetic.study(
        tmp_path_factory.mktemp("report") / "hostile", attentions=("softmax", '=cmd()|"<img src=x onerror=alert(1)>'),
        classes=HOSTILE, name="<img src=//evil.example/x onerror=alert(1)>",
        warnings=["<b>bold</b> & <script>alert(2)</script>"],
        command="linvit compare '</script><script>alert(3)</script>'\n```\n# head",
    )  # fmt: skip
    report.build(folder)
    return folder


@pytest.fixture
def copy(built, tmp_path) -> Path:
    """The full study, to break; without its report."""
    folder = tmp_path / "study"
    shutil.copytree(built, folder, ignore=shutil.ignore_patterns("report.*", "results.csv", "figures"))
    return folder
