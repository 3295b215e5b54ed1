"""Addresses such as s3://bucket/photos, hf://datasets/org/name or https://…/photos.csv, read with fsspec.

What an address names, a file or a folder, is copied once into the cache and read there. A file is copied again when its
size or its version changes, or if the server states neither. Files that were only partly copied are not used.
"""

from __future__ import annotations

import errno
import filecmp
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from linvit.data.cache import NoSpace, check_space, ordered_map
from linvit.data.decode import BadImage
from linvit.files import below, parse_json, slug, write_atomically

CHUNK = 2**20  # bytes
UNSAVED = 16 * 2**20  # bytes that are copied before the list of copies is saved again; a file counts as 64 KiB more
CONNECTIONS = 16  # at a time
UNKNOWN = [None]  # the version of a file whose server states neither size nor version
VERSIONS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created", "sha", "blob_id")


def is_remote(source: object) -> bool:
    return isinstance(source, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::[^/]*)?://", source) is not None


def local(address: str, store: Path) -> Path:
    """The copy of what the address names, below `store`."""
    require_fsspec(address)
    place = address.rstrip("/")
    with _locked(place, store) as target:
        try:
            system, root = _opened(place)
            files = {"": system.info(root)} if system.isfile(root) else _below(system, root)
            if not files:
                raise FileNotFoundError("there is nothing")
            _copy(system, files, target)
        except Exception as error:  # every file system has exceptions of its own
            raise ValueError(f"{address}: cannot be read ({_why(error)})") from None
    return target


class RemoteImages:
    """Images at addresses. Each address is looked up once, at construction, and copied below `store` when first read.
    One that cannot be read is a BadImage."""

    def __init__(self, addresses: Iterable[str], store: Path):
        self.store, self._copies = store, dict[str, Path | BadImage]()
        unique = list(dict.fromkeys(addresses))
        if unique:
            require_fsspec(unique[0])
        self._found = dict(zip(unique, ordered_map(self._look_up, unique, CONNECTIONS), strict=True))

    def __len__(self) -> int:
        return len(self._found)

    def state(self, address: str) -> str:
        """Changes when the image does."""
        found = self._found[address]
        if isinstance(found, BadImage):
            return "unreadable"
        if (version := _version(found[1])) != UNKNOWN:
            return repr(version)
        copy = self.local(address)
        return "unreadable" if isinstance(copy, BadImage) else repr(copy.stat().st_mtime_ns)

    def local(self, address: str) -> Path | BadImage:
        if address not in self._copies:
            self._copies[address] = self._copied(address)
        return self._copies[address]

    def _look_up(self, address: str) -> tuple[Any, dict[str, Any]] | BadImage:
        try:
            system, root = _opened(address)
            info = system.info(root)
            if info.get("type") == "directory":
                raise IsADirectoryError("it is a folder")
            return system, info
        except Exception as error:
            return _bad(address, error)

    def _copied(self, address: str) -> Path | BadImage:
        found = self._found[address]
        if isinstance(found, BadImage):
            return found
        system, info = found
        with _locked(address, self.store) as target:
            try:
                _copy(system, {"": info}, target)
            except NoSpace:  # no fault of the image, which must not be skipped
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                return _bad(address, error)
        return target


def beside(table: str, path: str) -> str:
    """The address of a path that is relative to the folder of a table's address."""
    scheme, _, rest = table.partition("://")
    inner, chain, outer = rest.partition("::")  # zip://labels.csv::s3://bucket/all.zip
    folder, slash, _ = inner.partition("?")[0].rpartition("/")
    return f"{scheme}://{folder}{slash}{path}{chain}{outer}"


def require_fsspec(address: str) -> None:
    if find_spec("fsspec") is None:
        raise ValueError(f"{address}: reading addresses needs fsspec: pip install 'linvit[remote]'")


def _opened(address: str) -> tuple[Any, str]:
    """The file system and the path there."""
    import fsspec

    return fsspec.url_to_fs(address)


@contextmanager
def _locked(place: str, store: Path) -> Iterator[Path]:
    """Where the copy of an address is, or will be, in a folder that no other process is writing to."""
    name = slug(PurePosixPath(place.partition("?")[0]).name or "data", 120)
    home = store / "remote" / hashlib.sha256(place.encode()).hexdigest()[:24]
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / ".lock"):
        yield home / name


def _why(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _bad(address: str, error: Exception) -> BadImage:
    hint = "replace or remove it, or skip such images with skip_bad"
    return BadImage(f"{address}: cannot be read ({_why(error)}): {hint}")


def _below(system: Any, root: str) -> dict[str, dict[str, Any]]:
    """Files below a folder, by their path there."""
    found = system.find(root, detail=True)
    start = str(root).rstrip("/") + "/"
    return {path.removeprefix(start): info for path, info in sorted(found.items()) if path.startswith(start)}


def _version(info: dict[str, Any]) -> list[Any]:
    return [info.get("size"), *(str(info[key]) for key in VERSIONS if info.get(key) is not None)]


def _copy(system: Any, files: dict[str, dict[str, Any]], home: Path) -> None:
    notes = home.with_name("copied.json")
    saved = parse_json(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    done, missing, unsaved = dict(saved), dict[str, Path](), 0
    for path, info in files.items():
        target, version = below(home, path), _version(info)
        if target is None:
            raise ValueError(f"its file '{path}' is outside of it, or its name has a backslash or a colon")
        if version == UNKNOWN or done.get(path) != version or not target.exists():
            missing[path] = target
    needed = sum(files[path].get("size") or 0 for path in missing)
    check_space("its copy", home.parent, needed, "choose another cache (LINVIT_CACHE) or make room")
    try:
        for path, target in missing.items():
            _copy_file(system, files[path]["name"], target)
            done[path] = _version(files[path])
            unsaved += target.stat().st_size + UNSAVED // 256
            if unsaved >= UNSAVED:
                write_atomically(notes, json.dumps(done))
                saved, unsaved = dict(done), 0
        for path in set(done) - set(files):  # deleted there
            home.joinpath(*PurePosixPath(path).parts).unlink(missing_ok=True)
            del done[path]
    finally:  # an interrupted copy resumes with the next file
        if done != saved:
            write_atomically(notes, json.dumps(done))


def _copy_file(system: Any, name: str, target: Path) -> None:
    """A file that is unchanged keeps its modification time, and with it what was decoded from it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    with system.open(name, "rb") as source, open(part, "wb") as file:
        while chunk := source.read(CHUNK):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if target.exists() and filecmp.cmp(part, target, shallow=False):
        part.unlink()
    else:
        os.replace(part, target)
