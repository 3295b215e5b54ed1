"""Muon for matrices and filters, AdamW for all else, as one optimizer.

PyTorch has a Muon of its own, but it takes 2-D weights alone, one after the other, and orthogonalises in bfloat16,
which a CPU without native bfloat16 emulates about a hundred times slower. This one works on all matrices of a shape at
a time, in bfloat16 on CUDA and in the weights' own precision elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)  # steepest at 0: singular values land near 1 in five rounds, not exactly on it
LIKE_ADAM = 0.2  # root mean square of an update of Adam's, so that one learning rate serves both
LARGE = 128  # rows from which on a CPU is faster with one matrix at a time, which stays in its cache


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
            if group.get("orthogonal"):
                for weights in by_shape(weight for weight in group["params"] if weight.grad is not None):
                    self._step(weights, group["lr"], group["weight_decay"], skip)
        return super().step(closure)

    def _step(self, weights: list[Tensor], lr: float, decay: float, skip: Tensor | None) -> None:
        """One step of matrices of one shape; AdamW then passes over them, since they have no gradient any more."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
                self.state[weight]["step"] = torch.zeros(())  # AdamW looks for one when it loads
        old, before = stacked(weights), stacked([self.state[weight]["momentum"] for weight in weights])
        gradient = stacked([weight.grad for weight in weights if weight.grad is not None])
        slow = before.lerp(gradient, 1 - self.momentum)
        update = orthogonalised(gradient.lerp(slow, self.momentum))
        scale = LIKE_ADAM * math.sqrt(old.shape[2])  # an orthogonal matrix has elements of 1/√larger
        new = (old * (1 - lr * decay)).sub_(update, alpha=lr * scale)
        if skip is not None:
            new, slow = torch.where(skip, old, new), torch.where(skip, before, slow)
        torch._foreach_copy_([wide(weight) for weight in weights], list(new))
        torch._foreach_copy_([wide(self.state[weight]["momentum"]) for weight in weights], list(slow))
        for weight in weights:
            weight.grad = None


def wide(weight: Tensor) -> Tensor:
    """A view of a matrix, or of filters, with no more rows than columns."""
    matrix = weight.flatten(1)
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def by_shape(weights: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those whose `wide` views have the same shape, dtype and device, together."""
    groups: dict[tuple, list[Tensor]] = {}
    for weight in weights:
        groups.setdefault((wide(weight).shape, weight.dtype, weight.device), []).append(weight)
    return list(groups.values())


def stacked(weights: list[Tensor]) -> Tensor:
    """(n, rows, columns)."""
    return torch.stack([wide(weight) for weight in weights])


def orthogonalised(matrices: Tensor) -> Tensor:
    """UVᵀ of each matrix's UΣVᵀ, approximately, (n, rows, columns) with no more rows than columns; bfloat16 on CUDA."""
    at_once = 1 if matrices.is_cpu and matrices.shape[1] >= LARGE else len(matrices)
    parts = [_newton_schulz(part) for part in matrices.split(at_once)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _newton_schulz(matrices: Tensor, rounds: int = 5) -> Tensor:
    a, b, c = QUINTIC
    x = matrices / (torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True) + 1e-7)
    if x.is_cuda and x.dtype == torch.float32:
        x = x.bfloat16()
    for _ in range(rounds):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
