"""Kernels that are learned (`theta`, `hedgehog`, …) start from the teacher's q and k.

Each layer's is fitted for a moment to the attention that it replaces, before any stage: with A the student's and T the
teacher's matrix on the same q and k of a few images, Adam lowers the mean total variation ½ Σ_j |A_ij − T_ij| of their
rows by the kernel's own weights alone. No label is read, nothing else changes, and a fit that does not help is undone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linvit.attention import Attention
from linvit.attention.performer import Performer
from linvit.measure.trained import captured
from linvit.models import VisionTransformer
from linvit.progress import Progress
from linvit.randomness import generator

IMAGES, STEPS, RATE = 32, 120, 0.05  # the rate falls to nothing, as half a cosine
BATCH = 4  # images of one step
TOKENS = 256  # of a layer, at most, whose matrix is made: a kernel does not care how many there are


def learn_kernels(student: VisionTransformer, teacher: VisionTransformer, x: Tensor, progress: Progress) -> None:
    """Fit the student's learned kernels to the teacher's attention on normalised images x (B, C, H, W)."""
    mine = {a.site.layer: a for a in student.attentions() if isinstance(a, Performer) and _weights(a)}
    if not mine:
        return
    seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {layer: [] for layer in mine}
    for layers in captured(teacher, x):
        for attention, q, k, _ in layers:
            if (layer := attention.site.layer) in mine:
                seen[layer].append(_sampled(attention, q, k))
    for i, (layer, found) in enumerate(seen.items()):
        progress(i, len(seen), f"fitting the kernel of layer {layer + 1}")
        q, k, wanted = (torch.cat(parts) for parts in zip(*found, strict=True))
        _fit(mine[layer], q, k, wanted)


def _weights(attention: Performer) -> list[nn.Parameter]:
    return list(attention.kernel.parameters())


@torch.no_grad()
def _sampled(attention: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (B, H, n, D) of at most so many tokens, and the teacher's attention between these."""
    if (tokens := q.shape[2]) > TOKENS:
        chosen = torch.randperm(tokens, generator=generator("kernels", attention.site.layer))[:TOKENS].sort().values
        q, k = (part[:, :, chosen.to(part.device)] for part in (q, k))
    return q, k, attention.attention_matrix(q, k)


def _fit(attention: Performer, q: Tensor, k: Tensor, wanted: Tensor) -> None:
    weights = _weights(attention)
    before, first = [p.detach().clone() for p in weights], _error(attention, q, k, wanted)
    optimizer = torch.optim.Adam(weights, RATE)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        some = torch.arange(step * BATCH, (step + 1) * BATCH) % len(q)
        optimizer.zero_grad(set_to_none=True)
        _variation(attention, q[some], k[some], wanted[some]).backward()
        optimizer.step()
        falling.step()
    for p in weights:
        p.grad = None
    if not _error(attention, q, k, wanted) < first:  # also where it is no number
        with torch.no_grad():
            for p, old in zip(weights, before, strict=True):
                p.copy_(old)


def _variation(attention: Performer, q: Tensor, k: Tensor, wanted: Tensor) -> Tensor:
    return 0.5 * (attention.attention_matrix(q, k) - wanted).abs().sum(-1).mean()


@torch.no_grad()
def _error(attention: Performer, q: Tensor, k: Tensor, wanted: Tensor) -> float:
    parts = zip(*(part.split(BATCH) for part in (q, k, wanted)), strict=True)
    return sum(len(some[0]) * _variation(attention, *some).item() for some in parts) / len(q)
