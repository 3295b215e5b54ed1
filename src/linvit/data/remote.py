"""Addresses such as s3://bucket/photos, hf://datasets/org/name or https://…/photos.csv, read with fsspec.

What an address names, a file or a folder, is copied once into the cache and read there. A file is copied again when its
size or its version changes, or if the server states neither. Files that were only partly copied are not used.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from linvit.data.cache import check_space
from linvit.files import parse_json, slug, write_atomically

CHUNK = 2**20  # bytes
UNSAVED = 16 * 2**20  # bytes that are copied before the list of copies is saved again; a file counts as 64 KiB more
UNKNOWN = [None]  # the version of a file whose server states neither size nor version
VERSIONS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created", "sha", "blob_id")


def is_remote(source: object) -> bool:
    return isinstance(source, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::[^/]*)?://", source) is not None


def local(address: str, store: Path) -> Path:
    """The copy of what the address names, below `store`."""
    try:
        import fsspec
    except ImportError:
        raise ValueError(f"{address}: reading addresses needs fsspec: pip install 'linvit[remote]'") from None
    place = address.rstrip("/")
    name = PurePosixPath(place.partition("?")[0]).name or "data"
    home = store / "remote" / hashlib.sha256(place.encode()).hexdigest()[:24]
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / ".lock"):
        try:
            system, root = fsspec.url_to_fs(place)
            files = {"": system.info(root)} if system.isfile(root) else _below(system, root)
            if not files:
                raise FileNotFoundError("there is nothing")
            _copy(system, files, home, slug(name, 120))
        except Exception as error:  # every file system has exceptions of its own
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{address}: cannot be read ({why})") from None
    return home / slug(name, 120)


def _below(system: Any, root: str) -> dict[str, dict[str, Any]]:
    """Files below a folder, by their path there."""
    found = system.find(root, detail=True)
    start = str(root).rstrip("/") + "/"
    return {path.removeprefix(start): info for path, info in sorted(found.items()) if path.startswith(start)}


def _version(info: dict[str, Any]) -> list[Any]:
    return [info.get("size"), *(str(info[key]) for key in VERSIONS if info.get(key) is not None)]


def _copy(system: Any, files: dict[str, dict[str, Any]], home: Path, name: str) -> None:
    notes = home / "copied.json"
    saved = parse_json(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    done, missing, unsaved = dict(saved), dict[str, Path](), 0
    for path, info in files.items():
        parts = PurePosixPath(path).parts
        if ".." in parts or PurePosixPath(path).is_absolute():
            raise ValueError(f"its file '{path}' is outside of it")
        target, version = home.joinpath(name, *parts), _version(info)
        if version == UNKNOWN or done.get(path) != version or not target.exists():
            missing[path] = target
    needed = sum(files[path].get("size") or 0 for path in missing)
    check_space("its copy", home, needed, "choose another cache (LINVIT_CACHE) or make room")
    try:
        for path, target in missing.items():
            _copy_file(system, files[path]["name"], target)
            done[path] = _version(files[path])
            unsaved += target.stat().st_size + UNSAVED // 256
            if unsaved >= UNSAVED:
                write_atomically(notes, json.dumps(done))
                saved, unsaved = dict(done), 0
        for path in set(done) - set(files):  # deleted there
            home.joinpath(name, *PurePosixPath(path).parts).unlink(missing_ok=True)
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
