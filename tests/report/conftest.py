from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import synthetic

from linvit import report
from linvit.requests import CompareRequest, TuneRequest

HOSTILE = ("<script>alert(1)</script>", "=cmd()", "</script><b>x", "a|b`c`", "", "ünï\u2028code", "@ink")
NAME = '=cmd()|"<img src=x onerror=alert(1)>'
REMOTE = "<img src=//evil.example/x onerror=alert(1)>"


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> report.Result:
    """A full study with its report, to read only."""
    folder = synthetic.study(
        tmp_path_factory.mktemp("report") / "full",
        (*synthetic.ATTENTIONS, "uniform"),
        channels=3,
        side=32,
        seeds=(0, 1, 2, 3, 4),
        diverged=[("performer-theta:m=32", 2)],
        truth={"uniform": 0.91},
        warnings=["Training was cut short."],
    )
    return report.build(folder, figures=False)


@pytest.fixture(scope="session")
def hostile(tmp_path_factory) -> Path:
    """Everything that a user may name is an attack or an accident."""
    request = CompareRequest.of(data="</script><script>alert(3)</script>\n```\n# head")
    folder = synthetic.study(
        tmp_path_factory.mktemp("report") / "hostile",
        ("softmax", NAME),
        classes=HOSTILE,
        name=REMOTE,
        warnings=["<b>bold</b> & <script>alert(2)</script>"],
        requests=[request.stored()],
    )
    report.build(folder, figures=False)
    return folder


@pytest.fixture(scope="session")
def searched(tmp_path_factory) -> report.SearchResult:
    """A search with its report."""
    folder = synthetic.search(
        tmp_path_factory.mktemp("tuned") / "</script><b>x",
        {NAME: [0.9, 0.95, 0.93], "softmax": [0.89, 0.94, None]},
        dataset=synthetic.dataset(REMOTE),
        requests=[TuneRequest.of(data="</script><script>alert(3)</script>").stored()],
    )
    return report.build(folder, figures=False)


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> report.ConversionResult:
    """A conversion with its report."""
    return report.build(synthetic.conversion(tmp_path_factory.mktemp("converted") / "x"), figures=False)


@pytest.fixture
def copy(built, tmp_path) -> Path:
    """The full study, to break; without its report."""
    folder = tmp_path / "study"
    shutil.copytree(built.page.parent, folder, ignore=shutil.ignore_patterns("report.*", "results.csv", "figures"))
    return folder
