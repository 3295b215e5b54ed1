"""Imports go one way; `import linvit`, what is stored, what is asked and what is reported need no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import linvit

ROOT = Path(linvit.__file__).parent

# What each part may import, besides itself. One line through it: base → kernels → attention → models, data → measure →
# training → conversion, execute → pipeline → study, tuning → studies → cli. Reports are made from base modules alone.
BASE = {"registry", "records", "ledger", "metrics", "files", "locks", "errors", "progress", "durations", "signals"}
BASE |= {"toml", "site", "machine", "randomness", "ranks", "devices", "schemas", "requests"}
ENGINE = BASE - {"requests"}  # engines know experiments, not requests
MODELS = ENGINE | {"kernels", "attention", "models"}
TRAINING = MODELS | {"data", "measure", "training"}
PIPELINE = BASE | TRAINING | {"conversion", "execute", "pipeline", "report"}
MAY: dict[str, set[str]] = {
    **{name: set() for name in ("files", "site", "errors", "progress", "durations", "signals", "toml", "machine")},
    "randomness": set(),
    "ranks": set(),
    "devices": {"machine"},
    "locks": {"files"},
    "registry": {"errors"},
    "records": {"files", "locks"},
    "metrics": {"records"},
    "ledger": {"files", "locks", "records", "metrics"},
    "schemas": {"errors", "files", "metrics", "registry", "site", "toml"},
    "requests": {"errors", "durations", "schemas"},
    "kernels": ENGINE,
    "attention": ENGINE | {"kernels"},
    "models": MODELS,
    "data": ENGINE,  # knows no model
    "measure": MODELS | {"data"},
    "training": TRAINING,
    "conversion": TRAINING,
    "execute": TRAINING,
    "report": BASE - {"randomness", "ranks", "devices"},
    "pipeline": PIPELINE,
    "study": PIPELINE,
    "tuning": PIPELINE,
    "studies": PIPELINE | {"study"},
    "cli": PIPELINE | {"study", "studies", "tuning"},
}
NO_TORCH = (BASE - {"randomness", "ranks", "devices"}) | {"report"}
HEAVY = {"torch", "numpy", "scipy", "sklearn", "altair"}


@cache
def modules() -> dict[Path, ast.Module]:
    """Of all parts, with their syntax trees."""
    paths = [path for path in sorted(ROOT.rglob("*.py")) if path not in (ROOT / "__init__.py", ROOT / "__main__.py")]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.AST, package: tuple[str, ...]) -> set[str]:
    """Dotted names of everything that is imported anywhere in the file, in functions too."""
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
    return found


def imports_of(path: Path) -> set[str]:
    return imported(modules()[path], ("linvit", *path.relative_to(ROOT).parts[:-1]))


def parts(names: set[str]) -> set[str]:
    """Linvit's own."""
    split = [name.split(".") for name in names]
    return {name[1] for name in split if name[0] == "linvit" and len(name) > 1} - {"__version__"}


def test_every_part_has_a_place_in_the_order():
    assert {part_of(path) for path in modules()} == set(MAY)


def test_imports_go_one_way():
    wrong = []
    for path in modules():
        part = part_of(path)
        found = parts(imports_of(path))
        public = found & set(linvit._HOMES) - set(MAY)  # `from linvit import create_attention` imports attention
        found = found - public | {linvit._HOMES[name].split(".")[1] for name in public}
        if beyond := found - MAY[part] - {part}:
            wrong.append(f"{path.relative_to(ROOT)} imports {sorted(beyond)}")
    assert not wrong


def test_the_order_has_no_circle():
    left = {part: set(may) - {part} for part, may in MAY.items()}
    while left:
        free = [part for part, may in left.items() if not may & set(left)]
        assert free, f"a circle among {sorted(left)}"
        for part in free:
            del left[part]


def test_nothing_private_is_imported_from_another_file():
    """The verbs' own helpers (`cli/_output.py`) are private to the package, not to a file."""
    wrong = []
    for path in [*modules(), *(ROOT.parents[1] / "benchmarks").glob("*.py")]:
        tree = modules().get(path) or ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            home = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and home.startswith("linvit") and home != "linvit.cli":
                names = [alias.name for alias in node.names]
                private = [name for name in names if name.startswith("_") and name != "__version__"]
                wrong += [f"{path.name} imports {name} from {home}" for name in private]
    assert not wrong


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import linvit.models.vit", {"models"}),
        ("from linvit import models", {"models"}),
        ("from linvit.models import create_model", {"models"}),
        ("def f():\n    from linvit.data import cache", {"data"}),
        ("from ..models import vit", {"models"}),
        ("from . import base", {"kernels"}),
        ("import importlib\nimportlib.import_module('linvit.cli')", {"cli"}),
        ("import torch, numpy.linvit", set()),
    ],
)
def test_every_kind_of_import_is_recognised(code, expected):
    assert parts(imported(ast.parse(code), ("linvit", "kernels"))) == expected


def test_base_modules_requests_schemas_and_reports_import_no_torch():
    files = [path for path in modules() if part_of(path) in NO_TORCH]
    assert not [path for path in files if any(name.split(".")[0] == "torch" for name in imports_of(path))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]
    code = f"""
import sys
import linvit
linvit.__version__, dir(linvit)
light = sorted({HEAVY!r} & set(sys.modules))
for name in {names!r}:
    __import__(f"linvit.{{name}}")
print(light, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


def test_public_names_load_on_first_use():
    assert [name for name in linvit.__all__ if name != "__version__" and not callable(getattr(linvit, name))] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        linvit.nothing  # noqa: B018
