import pytest

from linvit.records import Record
from linvit.report import page
from linvit.study import measuring


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured beside accuracy takes no time."""
    monkeypatch.setattr(measuring, "LENGTHS", (16,))
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    monkeypatch.setattr(page, "draw_files", lambda specs, folder: None)
    monkeypatch.setattr(measuring, "peak_memory", lambda *_: Record("peak_memory", 7, "bytes", tags={"batch": 16}))
