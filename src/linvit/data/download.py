"""Find a named set's original files; fetch and verify them if they are missing.

A download is written under a temporary name, checked against its published checksum and renamed, so a file with its
right name is a whole file. Without a network there is one message that says which files to put where.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

TIMEOUT = 20  # seconds without a byte


class Missing(ValueError):
    """A set's files are not there and cannot be fetched; the text says which to put where."""


@dataclass(frozen=True)
class Remote:
    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def homes(root: Path, *names: str) -> list[Path]:
    """Where a set's files may lie: in a folder of its name below the root, or in the root if it has that name."""
    return [root / name for name in names] + ([root] if root.name in names else [])


def fetch(dataset: str, folder: Path, remotes: Sequence[Remote], alternatives: str = "") -> None:
    """Download what `folder` lacks; if that cannot be, `Missing` says what to do by hand."""
    missing = [remote for remote in remotes if not (folder / remote.name).exists()]
    try:
        for remote in missing:
            download(remote, folder)
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        files = ", ".join(remote.name for remote in missing) + f" from {missing[0].url.rpartition('/')[0]}/"
        raise Missing(
            f"{dataset}: its files are not in {folder} and could not be downloaded ({reason}): put {files} there"
            + alternatives
        ) from None


def download(remote: Remote, folder: Path) -> Path:
    """Under a lock: a second process waits, and a killed one's part file is overwritten by the next."""
    target, part = folder / remote.name, folder / f"{remote.name}.part"
    with urllib.request.urlopen(remote.url, timeout=TIMEOUT) as answer, FileLock(folder / f".{remote.name}.lock"):
        if target.exists():
            return target
        try:
            with open(part, "wb+") as file:
                shutil.copyfileobj(answer, file)
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
                md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            if md5 != remote.md5:
                raise ValueError(
                    f"{remote.url}: the download has MD5 {md5} instead of {remote.md5}: try again, or put the right "
                    f"file into {folder}"
                )
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    return target
