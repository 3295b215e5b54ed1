"""Addresses such as s3://bucket/photos, hf://datasets/org/name or https://…/photos.csv, read with fsspec.

What an address names, a file or a folder, is copied once into the cache and read there. A file is copied again when its
size or its version changes; one that was copied half is not seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from linvit.files import below, parse_json, slug, write_atomically

CHUNK = 2**20  # bytes
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


def _copy(system: Any, files: dict[str, dict[str, Any]], home: Path, name: str) -> None:
    notes = home / "copied.json"
    done = parse_json(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    for path, info in files.items():
        target = below(home / name, path)
        if target is None:
            raise ValueError(f"its file '{path}' is outside of it, or its name has a backslash or a colon")
        version = [info.get("size"), *(str(info[key]) for key in VERSIONS if info.get(key) is not None)]
        if done.get(path) == version and target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        with system.open(info["name"], "rb") as source, open(part, "wb") as file:
            while chunk := source.read(CHUNK):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
        done[path] = version
        if len(done) % 256 == 0:
            write_atomically(notes, json.dumps(done))
    for path in set(done) - set(files):  # it has gone there
        home.joinpath(name, *PurePosixPath(path).parts).unlink(missing_ok=True)
        del done[path]
    write_atomically(notes, json.dumps(done))
