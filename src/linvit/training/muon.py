"""Muon for matrices and filters, AdamW for all else, as one optimizer.

PyTorch has a Muon of its own, but it takes 2-D weights alone and orthogonalises in bfloat16, which a CPU without native
bfloat16 emulates about a hundred times slower. This one works in the weights' own precision.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)  # steepest at 0: singular values land near 1 in five rounds, not exactly on it
LIKE_ADAM = 0.2  # root mean square of an update of Adam's, so that one learning rate serves both


class Muon(torch.optim.AdamW):
    """Groups with `orthogonal=True` get momentum whose singular values are all made about 1; the others get AdamW."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float = 0.95, **options: Any):
        super().__init__(groups, lr=lr, **options)
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = getattr(self, "found_inf", None)  # 1 where this step must not be taken; never read here, but obeyed
        skip = None if found is None else found.bool()
        for group in self.param_groups:
            if not group.get("orthogonal"):
                continue
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                    state["step"] = torch.zeros(())  # AdamW looks for one when it loads
                slow = state["momentum"].lerp(weight.grad, 1 - self.momentum)
                update = orthogonalised(weight.grad.lerp(slow, self.momentum).flatten(1)).view_as(weight)
                scale = LIKE_ADAM * math.sqrt(
                    max(update.flatten(1).shape)
                )  # an orthogonal matrix: elements of 1/√larger
                new = (weight * (1 - group["lr"] * group["weight_decay"])).sub_(update, alpha=group["lr"] * scale)
                weight.copy_(new if skip is None else torch.where(skip, weight, new))
                state["momentum"].copy_(slow if skip is None else torch.where(skip, state["momentum"], slow))
                weight.grad = None  # AdamW passes over a weight without gradient
        return super().step(closure)


def orthogonalised(matrix: Tensor, rounds: int = 5) -> Tensor:
    """UVᵀ of the matrix's UΣVᵀ, approximately: Newton–Schulz iterations, all of them matrix products."""
    a, b, c = QUINTIC
    x = matrix / (matrix.norm() + 1e-7)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    for _ in range(rounds):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T
