"""Where trials are stored: any storage of Optuna's. A killed process leaves nothing that stops the next one."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from linvit.records import drop_torn_line
from linvit.requests.base import without_password

SQLITE_SECONDS = 60.0  # to wait for another process, such as a dashboard, to release the file
CONNECT_SECONDS = 10  # for a server to answer


@cache
def import_optuna() -> Any:
    """The module, without its log."""
    try:
        import optuna
        import tomli_w  # noqa: F401 (writes best.toml, hours later)
    except ImportError as error:
        raise ValueError(f"a search needs {error.name}: pip install 'linvit[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


class ProcessLock:
    """A journal's lock that ends with its process. Optuna's own is a file, which outlives a killed process for half a
    minute; and a line that was cut short would damage the next one, so that it is removed first."""

    def __init__(self, path: Path):
        self.path, self.lock = path, FileLock(f"{path}.lock")

    def acquire(self) -> bool:
        self.lock.acquire()
        with open(self.path, "a+b") as file:
            drop_torn_line(file)
        return True

    def release(self) -> None:
        self.lock.release()


def sqlite_url(folder: Path) -> str:
    """The storage in a result folder."""
    return f"sqlite:///{folder.resolve() / 'trials.db'}"


def open_storage(where: str) -> Any:
    """A URL as Optuna takes it, or the path of a journal file; a ValueError of one line if it cannot be opened."""
    optuna = import_optuna()
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return _database(where) if "://" in where else _journal(where)
    except (SQLAlchemyError, ImportError, OSError, RuntimeError, ValueError, optuna.exceptions.OptunaError) as error:
        raise ValueError(f"storage {without_password(where)} cannot be opened ({_reason(error)})") from None


@contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """A storage that is lost on the way is one line, too."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, import_optuna().exceptions.OptunaError) as error:
        what = f"storage {without_password(where)} was lost ({_reason(error)})"
        raise ValueError(f"{what}: the same command resumes the search") from None


def _reason(error: BaseException) -> str:
    """The driver's message."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0] or type(error).__name__


def _journal(where: str) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = Path(where).resolve()
    if path.is_dir() or not path.parent.is_dir():
        raise OSError(f"{where} is a folder" if path.is_dir() else f"there is no folder {path.parent}")
    return JournalStorage(JournalFileBackend(str(path), lock_obj=ProcessLock(path)))  # type: ignore[arg-type]


def _database(where: str) -> Any:
    from optuna.storages import RDBStorage
    from sqlalchemy import make_url

    url, options = make_url(where), {}
    if url.get_backend_name() == "sqlite":
        options = {"timeout": SQLITE_SECONDS}
        if url.database and not os.access(Path(url.database).parent, os.W_OK):
            raise OSError(f"the folder {Path(url.database).parent} cannot be written to")
    elif url.get_backend_name() == "postgresql":
        options = {"connect_timeout": CONNECT_SECONDS}
        if url.drivername == "postgresql":  # SQLAlchemy would take the driver before psycopg
            url = url.set(drivername="postgresql+psycopg")
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")  # Optuna formats it
    return RDBStorage(text, {"connect_args": options, "pool_pre_ping": True})
