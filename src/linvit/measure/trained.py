"""What a trained model's attention does: its error against softmax on its own q and k, maps of where it looks, and how
much of its accuracy is chance in drawing its random features."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from linvit.attention import Attention, create_attention
from linvit.data import Split
from linvit.measure.accuracy import evaluate
from linvit.measure.error import attention_error
from linvit.models import VisionTransformer

PAIRS = 2**24  # of tokens, over all heads, whose matrices are made at once: some 100 MB
DRAWS = 5


@torch.no_grad()
def captured(model: nn.Module, x: Tensor) -> Iterator[list[tuple[Attention, Tensor, Tensor, Tensor]]]:
    """(attention, q, k, v) of every layer for images x in evaluation mode, for few images at a time."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    found = []
    hooks = [a.register_forward_pre_hook(lambda module, inputs: found.append((module, *inputs[:3]))) for a in layers]
    was_training = model.training
    try:
        for part in x.split(max(1, PAIRS // max((a.site.heads * a.site.tokens**2 for a in layers), default=1))):
            found.clear()
            model.eval()(part)
            yield list(found)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()


def trained_error(model: nn.Module, x: Tensor) -> dict[str, float]:
    """Means over layers and images: attention_error, attention_entropy, and the error uniform attention would make."""
    sums: dict[str, float] = dict.fromkeys(("attention_error", "attention_entropy", "attention_error_uniform"), 0.0)
    count = 0
    for attention, q, k, v in (layer for layers in captured(model, x) for layer in layers):
        site = {"heads": q.shape[1], "head_dim": q.shape[3], "tokens": q.shape[2], "causal": attention.site.causal}
        uniform = create_attention("uniform", **site)
        row = attention_error(attention, q, k, v)
        control = attention_error(uniform, *attention.normalised(q.float(), k.float()), v)
        row["attention_error_uniform"] = control["attention_error"]
        sums = {name: total + row[name] * len(q) for name, total in sums.items()}
        count += len(q)
    return {name: total / count for name, total in sums.items()} if count else {}


@torch.no_grad()
def attention_maps(model: nn.Module, x: Tensor) -> Tensor | None:
    """(B, rows, columns): how much the last layer's attention looks at each place, from CLS or from all tokens."""
    found = []
    for attention, q, k, _ in (layers[-1] for layers in captured(model, x) if layers):
        matrix = attention.attention_matrix(q, k).abs().mean(1)  # over heads
        prefix, grid = attention.site.prefix, attention.site.grid
        assert grid is not None
        looked = (matrix[:, 0] if prefix else matrix.mean(1))[:, prefix:].unflatten(1, grid)
        found.append(looked / looked.sum((1, 2), keepdim=True).clamp_min(1e-12))
    return torch.cat(found) if found else None


def redraws(attention: Attention) -> bool:
    """Whether it has random features: a redraw then changes what it holds."""
    before = {name: value.clone() for name, value in attention.state_dict().items()}
    attention.redraw(-1)
    return any(not torch.equal(value, before[name]) for name, value in attention.state_dict().items())


def redrawn(
    model: VisionTransformer, split: Split, classes: list[str], mean, std, device: torch.device | str = "cpu",
    draws: int = DRAWS,
) -> list[float]:  # fmt: skip
    """The accuracy with each of so many fresh draws of the random features, the last of which the model keeps.

    A draw is a function of the model's seed and a step. Training's steps count from 0: those below are nobody else's.
    """
    found = []
    for draw in range(draws):
        model.redraw(-1 - draw)
        found.append(evaluate(model, split, classes, mean, std, device).accuracy)
    return found
