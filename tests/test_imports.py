"""Imports go one way; `import linvit` is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import linvit

ROOT = Path(linvit.__file__).parent

# What each part may import, besides itself. One line through it:
# registry, records ← kernels ← attention ← models, data ← measure ← train ← convert ← study ← studies, tune ← cli
BASE = {"registry", "records", "metrics", "files", "locks", "randomness", "ranks", "toml", "errors", "progress"}
CORE = BASE | {"kernels", "attention"}
MODELS = CORE | {"models"}
MEASURE = MODELS | {"data", "measure"}
TRAIN = MEASURE | {"train"}
CONVERT = TRAIN | {"convert"}
STUDY = CONVERT | {"study", "report"}
MAY = {
    "files": set(),
    "errors": set(),
    "progress": set(),
    "randomness": set(),
    "ranks": set(),
    "toml": set(),
    "locks": {"files"},
    "registry": {"errors"},
    "metrics": {"records"},
    "records": {"files", "locks"},
    "kernels": BASE,
    "attention": BASE | {"kernels"},
    "models": CORE,
    "data": BASE,  # knows no model
    "measure": MODELS | {"data"},
    "train": MEASURE,
    "convert": TRAIN | {"report"},
    "report": {"records", "metrics", "files", "progress"},
    "study": CONVERT | {"report"},
    "studies": STUDY,
    "tune": STUDY,
    "cli": STUDY | {"studies", "tune"},
}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.AST, package: tuple[str, ...]) -> set[str]:
    """Dotted names of linvit's own modules that are imported anywhere in the file, in functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module or ""]))
            found |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            found |= {str(word.value) for word in node.args if isinstance(word, ast.Constant)}
    return {name for name in found if name.split(".")[0] == "linvit"}


def parts(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if "." in name} - {"__version__"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_direction(path):
    if path == ROOT / "__init__.py" or path == ROOT / "__main__.py":
        return
    part = part_of(path)
    assert part in MAY, f"{part} has no place in the order of imports: give it one here and in the design"
    package = ("linvit", *path.relative_to(ROOT).parts[:-1])
    names = imported(ast.parse(path.read_text(encoding="utf-8")), package)
    beyond = parts(names) - MAY[part] - {part}
    public = beyond & set(linvit.__all__)  # `from linvit import create_attention` is an import of attention
    assert not beyond - public, f"{path.relative_to(ROOT)} imports {sorted(beyond)}, may import {sorted(MAY[part])}"
    homes = {linvit._HOMES[name].split(".")[1] for name in public if name in linvit._HOMES}
    assert homes <= MAY[part] | {part}


@pytest.mark.parametrize("path", [*modules(), *(ROOT.parents[1] / "benchmarks").glob("*.py")], ids=lambda p: p.name)
def test_nothing_private_is_imported_from_another_file(path):
    """The verbs' own helpers (`cli/_output.py`) are private to the package, not to a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        home = getattr(node, "module", None) or ""
        if isinstance(node, ast.ImportFrom) and home.startswith("linvit") and home != "linvit.cli":
            private = [alias.name for alias in node.names if alias.name.startswith("_") and alias.name != "__version__"]
            assert not private, f"{path.name} imports {private} from {home}"


def test_the_order_has_no_circle():
    left = {part: set(may) for part, may in MAY.items()}
    while left:
        free = [part for part, may in left.items() if not may & set(left)]
        assert free, f"a circle among {sorted(left)}"
        for part in free:
            del left[part]


@pytest.mark.parametrize(("code", "package", "expected"), [
    ("import linvit.models.vit", ("linvit", "kernels"), {"models"}),
    ("from linvit import models", ("linvit", "kernels"), {"models"}),
    ("from linvit.models import create_model", ("linvit", "kernels"), {"models"}),
    ("def f():\n    from linvit.train import loop", ("linvit", "kernels"), {"train"}),
    ("from ..models import vit", ("linvit", "kernels"), {"models"}),
    ("from . import base", ("linvit", "kernels"), {"kernels"}),
    ("import importlib\nimportlib.import_module('linvit.cli')", ("linvit", "kernels"), {"cli"}),
    ("import torch, numpy.linvit", ("linvit", "kernels"), set()),
])  # fmt: skip
def test_the_reader_of_imports_sees_them_all(code, package, expected):
    assert parts(imported(ast.parse(code), package)) == expected


@pytest.mark.parametrize(
    "code",
    ["import linvit", "import linvit; linvit.__version__; dir(linvit)", "import linvit.registry, linvit.records"],
)
def test_importing_linvit_imports_no_torch(code):
    heavy = "{'torch', 'numpy', 'scipy', 'sklearn', 'altair'}"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(sorted({heavy} & set(sys.modules)))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_public_names_load_on_first_use():
    for name in linvit.__all__:
        assert getattr(linvit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        linvit.nothing  # noqa: B018
