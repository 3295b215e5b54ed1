"""InLine attention: 1/n plus centred scores, the first order of softmax in its scores."""

from __future__ import annotations

from torch import Tensor

from linvit.attention.base import register
from linvit.attention.centred import Centred


@register("inline")
class Inline(Centred):
    """Invariant to adding one vector to all keys, like softmax; linear in q, unlike softmax."""

    formula = "mean v + q [(k − mean k)ᵀv] / (n√d)"
    estimates = "softmax, first order in its scores"
    origin = "InLine attention (NeurIPS 2024), arXiv:2412.06590"
    invariants = (
        "rows sum to one and may be negative; rank at most d + 1; adding one vector to all keys changes nothing"
    )

    def phi(self, x: Tensor) -> Tensor:
        return x
