"""Tuning: `linvit.tune("digits", attentions=["softmax", "performer-relu:m=32"])`, the same search for every variant."""

import inspect
import sys
import types

from linvit.tune.best import Best, Winner
from linvit.tune.design import Search
from linvit.tune.search import tune
from linvit.tune.space import Range, Space

__all__ = ["Best", "Range", "Search", "Space", "Winner", "tune"]


class _Callable(types.ModuleType):
    """`linvit.tune` is this package, as `linvit.train` is one; calling it is `tune`."""

    __call__ = staticmethod(tune)
    __signature__ = inspect.signature(tune)


sys.modules[__name__].__class__ = _Callable
