"""Storages: what cannot be opened is one line; what a kill leaves does no harm."""

from __future__ import annotations

import json
import socket

import pytest

optuna = pytest.importorskip("optuna")

from linvit.tuning.storage import open_storage, sqlite_url  # noqa: E402


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    "where",
    [
        "postgresql://me:secret@127.0.0.1:{port}/db",
        "sqlite:////no/such/folder/trials.db",
        "nosuchkind://x/y",
        "no/such/folder/trials.journal",
        "postgresql://",
        "://",
    ],
)
def test_a_storage_that_cannot_be_reached_is_one_line(where):
    with pytest.raises(ValueError, match="cannot be opened") as error:
        open_storage(where.format(port=closed_port()))
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_with_braces_is_a_folder(tmp_path):
    (tmp_path / "{x}").mkdir()
    open_storage(sqlite_url(tmp_path / "{x}"))
    assert (tmp_path / "{x}" / "trials.db").exists()


def test_a_journal_cut_short_goes_on(tmp_path):
    """A killed writer leaves half a line; Optuna's own journal would be lost with the next one."""
    path = tmp_path / "trials.journal"
    first = open_storage(str(path))
    study = optuna.create_study(storage=first, study_name="x")
    study.set_user_attr("a", 1)
    with open(path, "ab") as file:
        file.write(b'{"op_code": 2, "worker_id": "x", "stud')
    second = open_storage(str(path))
    again = optuna.load_study(study_name="x", storage=second)
    again.set_user_attr("b", 2)
    study.set_user_attr("c", 3)
    assert optuna.load_study(study_name="x", storage=open_storage(str(path))).user_attrs == {"a": 1, "b": 2, "c": 3}
    for line in path.read_text().splitlines():
        json.loads(line)
