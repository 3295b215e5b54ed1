"""Muon for matrices and filters, AdamW for all else, as one optimizer.

PyTorch has a Muon of its own, but it takes 2-D weights alone, one after the other, and orthogonalises in bfloat16,
which a CPU without native bfloat16 emulates about a hundred times slower. This one works on all matrices of a shape at
a time, in bfloat16 on CUDA and in the weights' own precision elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)  # steepest at 0: singular values land near 1 in five rounds, not exactly on it
LIKE_ADAM = 0.2  # root mean square of an update of Adam's, so that one learning rate serves both
ROUNDS, FRESH = 5, 3  # of the iteration, and the one before which the Gram matrix of a wide matrix is made anew
WIDE = 2  # times as many columns as rows, from which on rounds on the Gram matrix are faster
LARGE = 128  # rows from which on a CPU is faster with one matrix at a time, which stays in its cache


class Muon(torch.optim.AdamW):
    """Groups with `orthogonal=True` get momentum whose singular values are all made about 1; the others get AdamW."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float = 0.95, **options: Any):
        super().__init__(groups, lr=lr, **options)
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = getattr(self, "found_inf", None)  # 1 where this step must not be taken
        skip = None if found is None else found.bool()
        for group in self.param_groups:
            if group.get("orthogonal") and (weights := [w for w in group["params"] if w.grad is not None]):
                self._step(weights, group["lr"], group["weight_decay"], skip)
        return super().step(closure)

    def _step(self, weights: list[Tensor], lr: float, decay: float, skip: Tensor | None) -> None:
        """One step of all matrices, with one launch for as many as possible; AdamW then passes over them, since they
        have no gradient any more."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
                self.state[weight]["step"] = torch.zeros(())  # AdamW looks for one when it loads
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        before = [self.state[weight]["momentum"] for weight in weights]
        slow = torch._foreach_lerp(before, gradients, 1 - self.momentum)
        ahead = torch._foreach_lerp(gradients, slow, self.momentum)
        new = torch._foreach_mul(weights, 1 - lr * decay)
        for same in by_shape(ahead):
            updates = orthogonalised(torch.stack([wide(ahead[i]) for i in same]))
            scale = LIKE_ADAM * math.sqrt(updates.shape[2])  # an orthogonal matrix has elements of 1/√larger
            chosen = [new[i] for i in same]
            torch._foreach_add_(chosen, laid_out(updates, chosen), alpha=-lr * scale)
        replace(weights, new, skip)
        replace(before, slow, skip)
        for weight in weights:
            weight.grad = None


def replace(old: list[Tensor], new: list[Tensor] | tuple[Tensor, ...], skip: Tensor | None) -> None:
    """Write the new values into the old tensors, unless `skip`."""
    if skip is not None and skip.is_cpu:  # where launches are cheap and copies are not
        for there, computed in zip(old, new, strict=True):
            torch.where(skip, there, computed, out=there)
        return
    if skip is not None:
        flat = torch.where(skip, *(torch.cat([x.flatten() for x in each]) for each in (old, new)))
        new = [part.view_as(x) for part, x in zip(flat.split([x.numel() for x in old]), old, strict=True)]
    torch._foreach_copy_(old, new)


def wide(weight: Tensor) -> Tensor:
    """A view of a matrix, or of filters, with no more rows than columns."""
    matrix = weight.flatten(1)
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def by_shape(weights: Sequence[Tensor]) -> list[list[int]]:
    """Places of those whose `wide` views have the same shape, dtype and device; transposed ones come first."""
    groups: dict[tuple, list[int]] = {}
    for i, weight in sorted(enumerate(weights), key=lambda pair: not is_tall(pair[1])):
        groups.setdefault((wide(weight).shape, weight.dtype, weight.device), []).append(i)
    return list(groups.values())


def is_tall(weight: Tensor) -> bool:
    rows, columns = weight.flatten(1).shape
    return rows > columns


def laid_out(updates: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Each update in the shape, dtype and layout of its weight, as one kernel for many tensors needs it. Transposed
    ones come first."""
    tall = sum(map(is_tall, weights))
    parts = updates[:tall].mT, updates[tall:]
    dtype = weights[0].dtype
    found = [x for part in parts if len(part) for x in part.to(dtype, memory_format=torch.contiguous_format)]
    return [x.view(weight.shape) for x, weight in zip(found, weights, strict=True)]


def orthogonalised(matrices: Tensor) -> Tensor:
    """UVᵀ of each matrix's UΣVᵀ, approximately, (n, rows, columns) with no more rows than columns; bfloat16 on CUDA."""
    at_once = 1 if matrices.is_cpu and matrices.shape[1] >= LARGE else len(matrices)
    parts = [_newton_schulz(part) for part in matrices.split(at_once)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _newton_schulz(matrices: Tensor) -> Tensor:
    """Rounds of X ← P X with P = a + bG + cG² and G = XXᵀ."""
    a, b, c = QUINTIC
    dtype = torch.bfloat16 if matrices.is_cuda and matrices.dtype == torch.float32 else matrices.dtype
    length = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True) + 1e-7
    x = torch.div(matrices, length, out=torch.empty_like(matrices, dtype=dtype))
    if dtype == torch.bfloat16 or matrices.shape[2] < WIDE * matrices.shape[1]:
        for _ in range(ROUNDS):
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x
    for rounds in (FRESH, ROUNDS - FRESH):
        x = torch.bmm(_product(torch.bmm(x, x.mT), rounds), x)
    return x


def _product(gram: Tensor, rounds: int) -> Tensor:
    """P of all rounds in one, from the Gram matrix alone: G ← P G P, since all of these are polynomials of the first G.
    The small singular values' squares drown in rounding errors, which three rounds do not yet make visible."""
    a, b, c = QUINTIC
    found = None
    for left in reversed(range(rounds)):
        p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        p.diagonal(dim1=1, dim2=2).add_(a)
        found = p if found is None else torch.bmm(p, found)
        if left:
            gram = torch.bmm(torch.bmm(p, gram), p)
    assert found is not None
    return found
