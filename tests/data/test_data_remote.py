"""Copies of what addresses name: resumed, refreshed, and limited by disk space."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from linvit.data import remote

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")


@pytest.fixture
def bucket():
    system = fsspec.filesystem("memory")
    for i in range(5):
        system.pipe_file(f"/copies/set/{i}.bin", bytes([i]) * 7)
    yield system
    system.store.clear()


@pytest.fixture
def opened(monkeypatch):
    """Names of the files that were copied; opening `fail` is interrupted."""
    names, fail, plain = [], [], remote._copy_file

    def copy(system, name, target):
        if name in fail:
            raise KeyboardInterrupt
        names.append(name)
        plain(system, name, target)

    monkeypatch.setattr(remote, "_copy_file", copy)
    return names, fail


def test_an_interrupted_copy_resumes(bucket, opened, tmp_path):
    names, fail = opened
    fail.append("/copies/set/3.bin")
    with pytest.raises(KeyboardInterrupt):
        remote.local("memory://copies/set", tmp_path)
    assert len(names) == 3
    fail.clear()
    home = remote.local("memory://copies/set", tmp_path)
    assert names == [f"/copies/set/{i}.bin" for i in range(5)]
    assert [(home / f"{i}.bin").read_bytes()[0] for i in range(5)] == [0, 1, 2, 3, 4]


def test_the_list_of_copies_is_saved_after_a_large_file(bucket, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "UNSAVED", 7)
    counts, plain = [], remote.write_atomically

    def write(path, text):
        counts.append(len(json.loads(text)))
        plain(path, text)

    monkeypatch.setattr(remote, "write_atomically", write)
    remote.local("memory://copies/set", tmp_path)
    assert counts == [1, 2, 3, 4, 5]


def test_a_copy_needs_free_space(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=38))
    with pytest.raises(ValueError, match=r"memory://copies/set: cannot be read \(its copy takes .* GB free"):
        remote.local("memory://copies/set", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=40))
    remote.local("memory://copies/set", tmp_path)


def test_a_file_without_size_or_version_is_copied_again(bucket, opened, tmp_path, monkeypatch):
    place = "/copies/set/0.bin"
    monkeypatch.setattr(type(bucket), "info", lambda *_, **__: {"name": place, "size": None, "type": "file"})
    copy = remote.local("memory:/" + place, tmp_path)
    before = copy.stat().st_mtime_ns
    assert remote.local("memory:/" + place, tmp_path).stat().st_mtime_ns == before  # nothing is decoded again
    bucket.pipe_file(place, b"changed")
    assert remote.local("memory:/" + place, tmp_path).read_bytes() == b"changed"
    assert opened[0] == [place] * 3
