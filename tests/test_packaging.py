"""What the package says of itself is what is tested."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_oldest_versions_admitted_are_those_that_ci_runs():
    extras = PROJECT["optional-dependencies"]
    admitted = [line.partition(";")[0] for line in [*PROJECT["dependencies"], *extras["parquet"], *extras["onnx"]]]
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    assert sorted(admitted) == sorted(line.replace("==", ">=") for line in lines if not line.startswith("#"))
    assert "make test-lowest" in (ROOT / ".ci" / "run").read_text()


def test_no_range_excludes_a_version_to_come():
    """A cap makes `uvx linvit` fail on the day of a release; the one pin is of a peer whose figures are quoted."""
    extras = PROJECT["optional-dependencies"].items()
    named = [("core", PROJECT["dependencies"]), *extras]
    capped = [(name, line) for name, lines in named for line in lines if re.search(r"[<~]|==\s*\d", line)]
    assert capped == [("peers", "performer-pytorch==1.1.4")]


def test_set_up_pins_the_same_torch():
    pins = [
        re.findall(r"^torch==(.*)$", (ROOT / name).read_text(), re.M)
        for name in ("constraints.txt", "constraints-lowest.txt")
    ]
    assert len({tuple(pin) for pin in pins}) == 1
    assert pins[0]


def run(*words: object, cwd: Path) -> str:
    """Nothing of this environment is seen there."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "LINVIT_PLUGINS", "SETUPTOOLS_SCM_PRETEND_VERSION")
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "XDG_CACHE_HOME": str(cwd / "cache")}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout.strip()


def new_environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "Scripts/python.exe" if os.name == "nt" else folder / "bin/python"


def copied(folder: Path) -> Path:
    """The sources alone, as a repository of their own with a tag."""
    left_out = shutil.ignore_patterns(
        ".git", ".venv*", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, folder, ignore=left_out)
    run("git", "init", "--quiet", cwd=folder)
    run("git", "add", "--all", cwd=folder)
    author = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")
    run("git", *author, "commit", "--quiet", "--message", "all", cwd=folder)
    run("git", *author, "tag", "v1.2.3", cwd=folder)
    return folder


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_environment(tmp_path):
    source = copied(tmp_path / "source")
    tools = new_environment(tmp_path / "tools")
    run(tools, "-m", "pip", "install", "--quiet", "build", "setuptools-scm>=8.1", cwd=tmp_path)
    run(tools, "-m", "build", "--outdir", tmp_path / "dist", cwd=source)  # the wheel is made from the sdist
    sdist, wheel = tmp_path / "dist/linvit-1.2.3.tar.gz", tmp_path / "dist/linvit-1.2.3-py3-none-any.whl"

    tracked = run("git", "ls-files", "src/linvit", cwd=source).splitlines()
    inside = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert sorted(inside) == sorted(name.removeprefix("src/") for name in tracked)
    for name in ("backbones/softmax/model.safetensors", "report/page.css", "tuning/spaces/default.toml", "py.typed"):
        assert f"linvit/{name}" in inside
    with tarfile.open(sdist) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    assert {*tracked, "tests/conftest.py", "constraints.txt", "LICENSE"} <= packed

    run("git", "tag", "--delete", "v1.2.3", cwd=source)
    assert run(tools, "-m", "setuptools_scm", cwd=source).startswith("0.1.1.dev1+g")  # a clone without tags
    shutil.rmtree(source / ".git")
    assert run(tools, "-m", "setuptools_scm", cwd=source) == "0.1.0"

    python = new_environment(tmp_path / "empty")
    linvit = python.with_name("linvit.exe" if os.name == "nt" else "linvit")
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    assert run(linvit, "--version", cwd=tmp_path) == "linvit 1.2.3"
    tiny = ["--limit", "60", "--epochs", "0.2", "--seeds", "1", "--no-controls", "--quiet", "--out", "tiny"]
    run(linvit, "compare", "digits", "-a", "softmax", "-a", "performer-relu:m=8", *tiny, cwd=tmp_path)
    assert "linvit 1.2.3" in (tmp_path / "tiny/records.jsonl").read_text()
    assert (tmp_path / "tiny/report.html").stat().st_size > 100_000
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "linvit", cwd=tmp_path)
    assert not linvit.exists()
    assert run(python, "-c", "import importlib.util as u; print(u.find_spec('linvit'))", cwd=tmp_path) == "None"
