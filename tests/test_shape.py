"""The shape of the code: no function over 60 lines or 10 parameters, and few places where ruff's format is switched
off."""

import ast
from pathlib import Path

import linvit

ROOT = Path(linvit.__file__).parent
MAX_LINES, MAX_PARAMETERS, MAX_SKIPS = 60, 10, 30
PUBLIC = {  # public functions and constructors whose keywords are an interface, most of them somebody else's
    "attention/multihead.py:__init__",
    "attention/__init__.py:create_attention",
    "conversion/registries.py:__init__",
    "data/dataset.py:load_data",
}
DEVICE = ("triton.jit", "torch.library.triton_op")  # decorators of code that gets all it needs as arguments


def functions():
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if any(ast.unparse(decorator).startswith(DEVICE) for decorator in node.decorator_list):
                    continue
                yield f"{path.relative_to(ROOT)}:{node.name}", node


def test_functions_are_short_and_take_few_parameters():
    wrong = []
    for name, node in functions():
        lines = (node.end_lineno or 0) - node.lineno + 1
        parameters = len(node.args.args) + len(node.args.kwonlyargs) + len(node.args.posonlyargs)
        parameters -= bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
        if name not in PUBLIC and (lines > MAX_LINES or parameters > MAX_PARAMETERS):
            wrong.append(f"{name}: {lines} lines, {parameters} parameters")
    assert not wrong, "\n".join(wrong)


def test_public_exceptions_exist():
    assert {name for name, _ in functions()} >= PUBLIC


def test_few_tables_have_a_layout_of_their_own():
    skips = [path for path in ROOT.rglob("*.py") for line in path.read_text().splitlines() if "# fmt: " in line]
    assert len(skips) < MAX_SKIPS
