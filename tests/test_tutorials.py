"""The tutorials as a reader follows them: their Python runs, and so do their commands, in order, with less time."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pages
import pytest
import sklearn.datasets
from test_docs import blocks, commands

from linvit import cli

TUTORIALS = pages.DOCS / "tutorials"
# What the tutorials say to write for the digits, and less time than they allow.
PHOTOS = {
    "--budget 15m": "--epochs 1 --limit 200",
    "photos/cat/001.jpg": "photos/digit-3/3.png",
}
CONVERT = {
    "vit": "runs/teacher",
    "--budget 30m": "--budget 20s",
    "linformer:k=64": "performer-relu:m=16",
    "--max-drop 2%": "--max-drop 5% --budget 20s",
    "--data photos --out runs/chosen": "--data photos --max-drop 5% --out runs/chosen",
    "photos/cat/001.jpg": "photos/digit-3/3.png",
}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("name", ["index.md", "tutorials/photos.md", "tutorials/convert.md"])
def test_code_runs(name, workplace, monkeypatch, capsys):
    few = sklearn.datasets.load_digits()
    monkeypatch.setattr(
        sklearn.datasets, "load_digits", lambda: SimpleNamespace(images=few.images[:40], target=few.target[:40])
    )
    for text in blocks(pages.DOCS / name):
        exec(text, {})
    if "photos" in name:
        assert len([*workplace.glob("photos/digit-*/*.png")]) == 40
        assert len([*workplace.glob("photos/*")]) == 10
    if "convert" in name:
        copied, created = capsys.readouterr().out.split("] [")
        assert "blocks.0.attn.qkv.weight" in copied
        assert "attention" in created  # Ω


def follow(name: str, instead: dict[str, str]) -> None:
    for command in commands((TUTORIALS / name).read_text(encoding="utf-8")):
        for text, other in instead.items():
            command = command.replace(f" {text}", f" {other}")
        words = shlex.split(command, comments=True)
        if len(words) > 1 and "--image-size" not in words:
            assert cli.main(words) == 0, command


def write_digits() -> None:
    exec(blocks(TUTORIALS / "photos.md")[0], {})


@pytest.mark.slow
def test_photos(workplace, capsys):
    write_digits()
    follow("photos.md", PHOTOS)
    out = capsys.readouterr().out
    assert "plan for 5m00s" in out
    assert (workplace / "runs/photos/report.html").exists()
    assert "digit-3" in out
    assert (workplace / "runs/model/model.onnx").exists()


@pytest.mark.slow
def test_convert(workplace, capsys):
    write_digits()
    follow("convert.md", CONVERT)
    out = capsys.readouterr().out
    assert "Keep softmax" in out
    assert out.count("of 2 layers replaced") >= 2
    assert (workplace / "linear.onnx").exists()


@pytest.mark.slow
def test_attention(workplace, capsys, monkeypatch):
    plugin = workplace / "cosine.py"
    plugin.write_text(blocks(TUTORIALS / "attention.md")[0], encoding="utf-8")
    environment = os.environ | {"LINVIT_PLUGINS": str(plugin)}
    run = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/common", "-k", "cosine"]
    found = subprocess.run(run, cwd=pages.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:]
    broken = plugin.read_text(encoding="utf-8").replace("v = v.masked_fill(~mask[:, None, :, None], 0)", "pass")
    plugin.write_text(broken, encoding="utf-8")
    found = subprocess.run(run, cwd=pages.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "test_matrix_times_v_is_the_output" in found.stdout
    assert found.returncode == 1
