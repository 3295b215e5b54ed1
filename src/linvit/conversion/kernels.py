"""What a student's attention takes from the teacher's q, k and v before any stage: the number of its features, and
learned kernels (`theta`, `hedgehog`, …).

Learned kernels are fitted to the attention that they replace, layer by layer: with A the student's and T the teacher's
matrix on the same q and k of a few images, Adam lowers the mean total variation ½ Σ_j |A_ij − T_ij| of their rows. Only
the kernel's own weights change, no label is read, and a fit that does not help is undone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linvit.attention import Attention, attention_options, build_attention
from linvit.measure.error import attention_error
from linvit.measure.trained import captured
from linvit.models import VisionTransformer
from linvit.progress import Progress
from linvit.randomness import generator
from linvit.registry import Spec

COUNT_IMAGES = 16  # whose q, k and v choose the number of features
SMALL_ERROR, SIMILAR = 0.05, 1.1  # an output error that is small enough, and a ratio of errors that are about the same
FIT_IMAGES, STEPS, RATE = 32, 120, 0.05  # the rate falls to zero along half a cosine
BATCH = 4  # images per step
MAX_TOKENS = 256  # per layer, whose matrix is computed; a kernel does not depend on their number


def feature_counts(teacher: VisionTransformer, spec: Spec, x: Tensor) -> list[Spec]:
    """The spec for every layer. Where it leaves the number of features m open, m is the smallest of d/2, d, 2d and 4d
    (d: head_dim) whose output for normalised images x (B, C, H, W) is close to softmax's, or about as close as that of
    4d features."""
    if "m" not in attention_options(spec.name) or "m" in spec.options or spec.options.get("projection") == "none":
        return [spec] * teacher.config.depth
    layers = next(captured(teacher, x))
    d = layers[0][0].site.head_dim
    choices = [Spec(spec.name, {**spec.options, "m": m}) for m in sorted({max(1, d // 2), d, 2 * d, 4 * d})]
    chosen = []
    for attention, q, k, v in layers:
        made = (build_attention(choice, attention.site, inside=True).to(q.device) for choice in choices)
        errors = [attention_error(one, q, k, v)["output_error"] for one in made]
        errors = [error if math.isfinite(error) else math.inf for error in errors]
        enough = max(SMALL_ERROR, SIMILAR * errors[-1])
        chosen.append(next(choice for choice, error in zip(choices, errors, strict=True) if error <= enough))
    return chosen


def fit_kernels(student: VisionTransformer, teacher: VisionTransformer, x: Tensor, progress: Progress) -> None:
    """Fit the student's learned kernels to the teacher's attention on normalised images x (B, C, H, W)."""
    learned = {a.site.layer: a for a in student.attentions() if a.kernel_parameters()}
    if not learned:
        return
    samples: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {layer: [] for layer in learned}
    for layers in captured(teacher, x):
        for attention, q, k, _ in layers:
            if (layer := attention.site.layer) in learned and not attention.no_matrix:
                samples[layer].append(_sampled(attention, q, k))
    samples = {layer: parts for layer, parts in samples.items() if parts}
    for i, (layer, parts) in enumerate(samples.items()):
        progress(i, len(samples), f"fitting the kernel of layer {layer + 1}")
        q, k, target = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        _fit(learned[layer], q, k, target)


@torch.no_grad()
def _sampled(attention: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (B, H, n, D) of at most MAX_TOKENS tokens, and the teacher's attention between them."""
    if (tokens := q.shape[2]) > MAX_TOKENS:
        order = torch.randperm(tokens, generator=generator("kernels", attention.site.layer))
        chosen = order[:MAX_TOKENS].sort().values.to(q.device)
        q, k = q[:, :, chosen], k[:, :, chosen]
    return q, k, attention.attention_matrix(q, k)


def _fit(attention: Attention, q: Tensor, k: Tensor, target: Tensor) -> None:
    weights = attention.kernel_parameters()
    before, error = [p.detach().clone() for p in weights], _error(attention, q, k, target)
    optimizer = torch.optim.Adam(weights, RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        some = torch.arange(step * BATCH, (step + 1) * BATCH) % len(q)
        optimizer.zero_grad(set_to_none=True)
        _variation(attention, q[some], k[some], target[some]).backward()
        optimizer.step()
        schedule.step()
    for p in weights:
        p.grad = None
    if not _error(attention, q, k, target) < error:  # NaN included
        with torch.no_grad():
            for p, old in zip(weights, before, strict=True):
                p.copy_(old)


def _variation(attention: Attention, q: Tensor, k: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (attention.attention_matrix(q, k) - target).abs().sum(-1).mean()


@torch.no_grad()
def _error(attention: Attention, q: Tensor, k: Tensor, target: Tensor) -> float:
    parts = zip(*(part.split(BATCH) for part in (q, k, target)), strict=True)
    return sum(len(some[0]) * _variation(attention, *some).item() for some in parts) / len(q)
