"""linvit: which attention should my vision transformer use, and can I have it now?

Importing linvit imports no torch; the names below load what they need on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "compare": "linvit.study",
    "convert": "linvit.convert",  # the package itself, which can be called
    "create_attention": "linvit.attention",
    "create_kernel": "linvit.kernels",
    "create_model": "linvit.models",
    "export": "linvit.convert.export",
    "linearize": "linvit.convert",
    "load": "linvit.train",
    "register_transformers": "linvit.convert",
    "sample": "linvit.models.sampling",
    "timm_attention": "linvit.convert",
    "train": "linvit.train",  # the package itself, which can be called
    "tune": "linvit.tune",  # likewise
    "MultiHead": "linvit.attention.multihead",
}
__all__ = [
    "MultiHead", "__version__", "compare", "convert", "create_attention", "create_kernel", "create_model", "export",
    "linearize", "load", "register_transformers", "sample", "timm_attention", "train", "tune",
]  # fmt: skip

if TYPE_CHECKING:
    from linvit.attention import create_attention
    from linvit.attention.multihead import MultiHead
    from linvit.convert import convert, linearize, register_transformers, timm_attention
    from linvit.convert.export import export
    from linvit.kernels import create_kernel
    from linvit.models import create_model
    from linvit.models.sampling import sample
    from linvit.study import compare
    from linvit.train import load, train
    from linvit.tune import tune


def __getattr__(name: str):
    if name in _HOMES:
        home = importlib.import_module(_HOMES[name])
        return home if home.__name__ == f"linvit.{name}" else getattr(home, name)
    raise AttributeError(f"module 'linvit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
