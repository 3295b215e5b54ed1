"""MALA: linear attention with φ = elu + 1, plus the centred scores of the same φ.

Linear attention's rows are s_ij/(n z_i) = 1/n + (s_ij − z_i)/(n z_i): the sum of both has the factor c = 1 + 1/z.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from linvit.attention.base import register
from linvit.attention.centred import Centred


@register("mala")
class Mala(Centred):
    """Longer queries give sharper attention; plain linear attention does not depend on their length."""

    formula = "mean v + (1 + 1/z) φ(q) [(φ(k) − mean φ(k))ᵀv] / (n√d), z = φ(q)·mean φ(k)/√d, φ = elu + 1"
    estimates = "itself"
    origin = "Magnitude-aware linear attention (ICCV 2025), arXiv:2507.00698"
    invariants = "rows sum to one and may be negative; rank at most d + 1; longer queries give sharper rows"
    sharpened = True

    def phi(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1
