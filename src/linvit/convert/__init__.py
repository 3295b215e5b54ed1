"""Conversion: `linvit.convert("runs/teacher", to="performer-hyp", data="cifar10")`, a trained model made linear."""

import inspect
import sys
import types

from linvit.convert.convert import convert
from linvit.convert.linearize import Linearized, linearize
from linvit.convert.plan import Conversion
from linvit.convert.registries import register_transformers, timm_attention
from linvit.convert.work import Converted, Row

__all__ = [
    "Conversion", "Converted", "Linearized", "Row", "convert", "linearize", "register_transformers", "timm_attention",
]  # fmt: skip


class _Callable(types.ModuleType):
    """`linvit.convert` is this package, as `linvit.train` is one; calling it is `convert`."""

    __call__ = staticmethod(convert)
    __signature__ = inspect.signature(convert)


sys.modules[__name__].__class__ = _Callable
