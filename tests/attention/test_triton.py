"""Linear attention in Triton: its numbers in Triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed (the extra `triton`)")

from linvit.attention import fused  # noqa: E402

HERE = Path(__file__).parent
SIZES = {"D": 64, "E": 64, "M": 64, "DP": 64, "EP": 64, "MP": 64, "BLOCK": fused.BLOCK}
HALF = {"Q", "K", "V", "X", "OUT", "DO", "DQ", "DK", "DV"}
SINGLE = {"W", "WEIGHT", "S", "L", "DS", "DL", "U"}
KERNELS = "project", "keys", "queries", "query_gradients", "key_gradients"


def interpreted(which: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    own = ["-p", "no:cacheprovider", "-o", "python_files=checks_*.py", "-o", "python_functions=check_*"]
    command = [sys.executable, "-m", "pytest", "-n", "0", *own, "-m", which, str(HERE / "checks_triton.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_outputs_and_gradients_are_the_oracles() -> None:
    interpreted("not slow")


@pytest.mark.slow
def test_larger_sizes() -> None:
    interpreted("slow")


def compiled(kernel: Any, capability: int, kind: str, sizes: dict[str, int], weight: bool) -> Any:
    """For bfloat16 inputs."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {
        **sizes,
        "KIND": kind,
        "FLOOR": 1e-3,
        "NORM": -0.5,
        "HAS_WEIGHT": weight,
        "MB": min(fused.MOST_FEATURES, sizes["MP"]),
        "WIDE": triton.language.bfloat16,
    }
    names = kernel.arg_names
    types = {name: "*bf16" if name in HALF else "*fp32" if name in SINGLE else "i32" for name in names}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    chosen = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    source = ASTSource(kernel, signature, constexprs=chosen)
    options = {} if kernel is fused.project else {"num_warps": fused.warps(sizes["DP"], sizes["EP"], sizes["MP"])}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kind", ["exp", pytest.param("relu", marks=pytest.mark.slow)])
def test_it_compiles_for_gpus(name: str, capability: int, kind: str) -> None:
    made = compiled(getattr(fused, name), capability, kind, SIZES, kind == "exp")
    assert f".target sm_{capability}" in made.asm["ptx"]
    assert "mma" in made.asm["ptx"], "products use tensor cores"
    assert made.metadata.shared <= 163 * 1024, "more shared memory than a program has on sm_80"


@pytest.mark.slow
@pytest.mark.parametrize("kind", fused.FUSED)
@pytest.mark.parametrize("name", KERNELS)
def test_the_largest_sizes_compile(name: str, kind: str) -> None:
    sizes = SIZES | {"D": 128, "E": 128, "M": 256, "DP": 128, "EP": 128, "MP": 256}
    assert compiled(getattr(fused, name), 80, kind, sizes, True).asm["ptx"]
