"""Where trials are kept: any storage of Optuna's, opened so that a killed process leaves nothing that stops others."""

from __future__ import annotations

import logging
import os
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from linvit.records import drop_torn_line

PATIENCE = 60.0  # seconds for which a process waits for its turn at an SQLite file
CONNECTING = 10  # seconds for a server to answer
AT_ONCE = 5  # times that tables are looked for again, which several processes may be creating at once


@cache
def needed() -> Any:
    """Optuna, quiet."""
    try:
        import optuna
        import tomli_w  # noqa: F401 (writes best.toml, hours later)
    except ImportError as error:
        raise ValueError(f"a search needs {error.name}: pip install 'linvit[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


class DyingLock:
    """A journal's lock that dies with its process. Optuna's own is a file, which outlives a killed process for half a
    minute; and a line that was cut short would spoil the next one, so whoever gets the lock removes it."""

    def __init__(self, path: Path):
        self.path, self.lock = path, FileLock(f"{path}.lock")

    def acquire(self) -> bool:
        self.lock.acquire()
        with open(self.path, "a+b") as file:
            drop_torn_line(file)
        return True

    def release(self) -> None:
        self.lock.release()


def sqlite(folder: Path) -> str:
    """The storage of a result folder."""
    return f"sqlite:///{folder.resolve() / 'trials.db'}"


def hidden(where: str) -> str:
    """A storage as it may be shown: without its password."""
    if "://" not in where:
        return where
    before, _, rest = where.partition("://")
    user, at, host = rest.rpartition("@")
    host = re.sub(r"(?i)(pass\w*=)[^&]*", r"\1***", host)
    return f"{before}://{user.partition(':')[0]}{':***' * (':' in user)}{at}{host}"


def open_storage(where: str) -> Any:
    """An URL as Optuna takes them, or the path of a journal; a ValueError of one line if it cannot be reached."""
    optuna = needed()
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return _journal(where) if "://" not in where else optuna.storages.get_storage(_database(where))
    except (SQLAlchemyError, ImportError, OSError, RuntimeError, ValueError, optuna.exceptions.OptunaError) as error:
        raise ValueError(f"storage {hidden(where)} cannot be reached ({_why(error)})") from None


@contextmanager
def in_reach(where: str) -> Iterator[None]:
    """A storage that is lost on the way is one line, too."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, needed().exceptions.OptunaError) as error:
        raise ValueError(f"storage {hidden(where)} was lost ({_why(error)}): the same command goes on") from None


def _why(error: BaseException) -> str:
    """What the driver said."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0] or type(error).__name__


def _journal(where: str) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = Path(where).resolve()
    if path.is_dir() or not path.parent.is_dir():
        raise OSError(f"{where} is a folder" if path.is_dir() else f"there is no folder {path.parent}")
    return JournalStorage(JournalFileBackend(str(path), lock_obj=DyingLock(path)))  # type: ignore[arg-type]


def _database(where: str) -> Any:
    from optuna.storages import RDBStorage
    from sqlalchemy import make_url
    from sqlalchemy.exc import DatabaseError

    url, options = make_url(where), {}
    kind = url.get_backend_name()
    if kind == "sqlite":
        options = {"timeout": PATIENCE}
        if url.database and not os.access(Path(url.database).parent, os.W_OK):
            raise OSError(f"the folder {Path(url.database).parent} cannot be written to")
    elif kind == "postgresql":
        options = {"connect_timeout": CONNECTING}
        if url.drivername == "postgresql":  # SQLAlchemy would take the driver before psycopg
            url = url.set(drivername="postgresql+psycopg")
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")  # Optuna formats it
    for attempt in range(AT_ONCE):
        try:
            return RDBStorage(text, {"connect_args": options, "pool_pre_ping": True})
        except DatabaseError as error:
            if attempt == AT_ONCE - 1 or not any(word in str(error) for word in ("already exists", "UNIQUE", "unique")):
                raise
            time.sleep(0.5)
    raise AssertionError
