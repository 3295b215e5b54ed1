"""One tiny study, finished once and shared: `finished` is to look at, `study` is a copy to extend."""

import shutil
from pathlib import Path

import pytest
from studying import DATA, QUICK, shortened

from linvit import data
from linvit.report import page
from linvit.study import compare


@pytest.fixture(autouse=True)
def short(tmp_path_factory: pytest.TempPathFactory):
    with shortened() as patch:
        patch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield patch


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result is computed, but not drawn."""
    monkeypatch.setattr(page, "write", lambda result, figures=True: None)


@pytest.fixture(scope="session")
def dataset() -> data.Dataset:
    return data.load_data(DATA)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "study"
    with shortened() as patch:
        patch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        return compare(DATA, attentions=["softmax", "performer-relu:m=8"], seeds=2, epochs=2, out=out, **QUICK)


@pytest.fixture
def study(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "study")
