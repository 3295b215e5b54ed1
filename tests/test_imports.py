"""Imports go one way (docs/design.md), and importing the package loads no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import linvit

ROOT = Path(linvit.__file__).parent
BELOW: dict[str, set[str]] = {"registry": set(), "records": set()}
for name, more in [
    ("kernels", {"registry", "records"}),
    ("attention", {"kernels"}),
    ("data", {"registry", "records"}),
    ("models", {"attention"}),
    ("measure", {"models", "data"}),
    ("train", {"measure"}),
    ("convert", {"train"}),
    ("report", {"records"}),
    ("study", {"convert", "report"}),
    ("studies", {"study"}),
    ("tune", {"study"}),
    ("cli", {"studies", "tune", "registry"}),
]:
    BELOW[name] = more.union(*(BELOW[part] for part in more))


def imported(tree: ast.AST):
    """Names of modules, wherever they are imported but for type checking."""
    if isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING":
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    if isinstance(tree, ast.ImportFrom) and tree.module:
        yield tree.module
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    for child in ast.iter_child_nodes(tree):
        yield from imported(child)


FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem in BELOW)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert part in BELOW, f"say in docs/design.md and here where linvit.{part} belongs"
    found = {name.split(".")[1] for name in imported(ast.parse(path.read_text())) if name.startswith("linvit.")}
    assert not (found & set(BELOW)) - BELOW[part] - {part}


def test_import_loads_no_torch():
    code = "import sys, linvit, linvit.records, linvit.registry; dir(linvit); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
