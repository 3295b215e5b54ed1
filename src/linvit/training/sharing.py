"""What ranks do together in a training: gradients, batch statistics, evaluation.

Gradients go into one vector and are summed when all of them are there. PyTorch's DistributedDataParallel would send
parts of them while others are still computed; on models of a few megabytes there is little to hide, and it would wrap
the model that tasks look into. FSDP, which splits weights and optimizer, is for models that do not fit on one device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit import ranks


def share_gradients(model: nn.Module, *numbers: Tensor) -> list[Tensor]:
    """Sum the gradients over ranks, and these numbers with them."""
    if ranks.count() == 1:
        return list(numbers)
    held = [weight for weight in model.parameters() if weight.grad is not None]
    parts = [weight.grad.flatten() for weight in held] + [value.detach().view(1) for value in numbers]  # type: ignore[union-attr]
    *gradients, last = ranks.summed(torch.cat(parts)).split([weight.numel() for weight in held] + [len(numbers)])
    for weight, gradient in zip(held, gradients, strict=True):
        weight.grad = gradient.view_as(weight)
    return list(last.unbind())


class Shared(nn.Module):
    """A model that all ranks evaluate together: each is given the whole batch, does its part, and has all outputs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, x: Tensor) -> Tensor:
        mine = ranks.part(len(x))
        part = x[mine]
        out = self.model(part if len(part) else x[:1])  # a model need not take no images at all
        whole = out.new_zeros(len(x), *out.shape[1:])
        whole[mine] = out[: len(part)]
        return ranks.summed(whole)


class SharedNorm(nn.BatchNorm2d):
    """Batch norm with the statistics of the whole batch, of which each rank has a part. (PyTorch's SyncBatchNorm is for
    GPUs alone.) Otherwise it is what it was: `share_norms` changes the class of the modules that a model has."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        out, mean, variance, n = _Normalised.apply(x, self.weight, self.bias, self.eps)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
            self.running_mean.lerp_(mean, self.momentum)  # type: ignore[union-attr,arg-type]
            self.running_var.lerp_(variance * (n / (n - 1)), self.momentum)  # type: ignore[union-attr,arg-type]
        return out


def share_norms(model: nn.Module) -> None:
    for module in model.modules() if ranks.count() > 1 else ():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SharedNorm


class _Normalised(torch.autograd.Function):
    """y = γ x̂ + β with x̂ = (x − μ)/σ per channel, where μ and σ² are over the n pixels that all ranks have:

        n = Σ n_r,  μ = Σ n_r μ_r / n,  σ² = Σ n_r (σ_r² + (μ_r − μ)²) / n  over ranks r.

    With g = ∂L/∂y, a = Σ g and b = Σ g x̂ over all pixels: ∂L/∂x = γ/σ (g − a/n − x̂ b/n). The gradients of γ and β are
    of this rank's pixels, since all gradients are summed over ranks later. PyTorch's own kernels do what is not shared:
    statistics, and batch norm that is given its statistics.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        own = torch.cat([mean, variance, mean.new_tensor([x.numel() // x.shape[1]])])
        means, variances, counts = ranks.gathered(own).split([len(mean), len(mean), 1], 1)
        n = counts.sum()
        share = counts / n
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)
        ctx.save_for_backward(x, weight, mean, variance, n)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance, n)
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps), mean, variance, n

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *unused: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, mean, variance, n = ctx.saved_tensors
        direct, b, a = torch.ops.aten.native_batch_norm_backward(  # as if mean and variance were constants
            gradient, x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        every_b, every_a = ranks.summed(torch.stack([b, a])) / n
        scale = (variance + ctx.eps).rsqrt()
        slope = weight * scale * scale * every_b
        level = weight * scale * every_a - slope * mean
        out = direct.sub_(level.view(1, -1, 1, 1)).addcmul_(x, slope.view(1, -1, 1, 1), value=-1)
        return out, b, a, None
