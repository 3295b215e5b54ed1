"""linvit: compare, train, convert and measure attentions for vision transformers.

Importing linvit imports no torch; the names below load what they need on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOMES = {
    "MultiHead": "linvit.attention.multihead",
    "compare": "linvit.study",
    "convert": "linvit.pipeline.convert",
    "create_attention": "linvit.attention",
    "create_kernel": "linvit.kernels",
    "create_model": "linvit.models",
    "export": "linvit.conversion.export",
    "linearize": "linvit.conversion.linearize",
    "load": "linvit.training.checkpoint",
    "register_transformers": "linvit.conversion.registries",
    "sample": "linvit.models.sampling",
    "timm_attention": "linvit.conversion.registries",
    "train": "linvit.pipeline.train",
    "tune": "linvit.tuning",
}
__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    __version__: str
    from linvit.attention import create_attention as create_attention
    from linvit.attention.multihead import MultiHead as MultiHead
    from linvit.conversion.export import export as export
    from linvit.conversion.linearize import linearize as linearize
    from linvit.conversion.registries import register_transformers as register_transformers
    from linvit.conversion.registries import timm_attention as timm_attention
    from linvit.kernels import create_kernel as create_kernel
    from linvit.models import create_model as create_model
    from linvit.models.sampling import sample as sample
    from linvit.pipeline.convert import convert as convert
    from linvit.pipeline.train import train as train
    from linvit.study import compare as compare
    from linvit.training.checkpoint import load as load
    from linvit.tuning import tune as tune


def __getattr__(name: str):
    if name == "__version__":  # the tag's, as installed
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("linvit")
        except PackageNotFoundError:
            return "0+unknown"
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'linvit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
