"""What a trained model's attention does: its error against softmax on its own q and k, and maps of where it looks."""

from __future__ import annotations

import torch
from torch import Tensor

from linvit.attention import create_attention
from linvit.attention.base import Attention
from linvit.measure.error import attention_error
from linvit.models import VisionTransformer


@torch.no_grad()
def captured(model: VisionTransformer, x: Tensor) -> list[tuple[Attention, Tensor, Tensor, Tensor]]:
    """(attention, q, k, v) of every layer, as it sees them, for images x."""
    found: list[tuple[Attention, Tensor, Tensor, Tensor]] = []

    def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, Attention)
        found.append((module, *(part.detach() for part in inputs[:3])))  # type: ignore[arg-type]

    handles = [attention.register_forward_pre_hook(hook) for attention in model.attentions()]
    model.eval()(x)
    for handle in handles:
        handle.remove()
    return found


def trained_error(model: VisionTransformer, x: Tensor) -> dict[str, float]:
    """Means over layers and images: attention_error, attention_entropy, and the error uniform attention would make."""
    sums: dict[str, float] = dict.fromkeys(("attention_error", "attention_entropy", "attention_error_uniform"), 0.0)
    parts = x.split(_images(model))
    count = 0
    for part in parts:
        for attention, q, k, v in captured(model, part):
            site = attention.site
            uniform = create_attention("uniform", heads=site.heads, head_dim=site.head_dim, tokens=q.shape[2])
            row = attention_error(attention, q, k, v)
            control = attention_error(uniform, *attention.normalised(q.float(), k.float()), v)
            row["attention_error_uniform"] = control["attention_error"]
            sums = {name: total + row[name] * len(part) for name, total in sums.items()}
            count += len(part)
    return {name: total / count for name, total in sums.items()} if count else {}


def _images(model: VisionTransformer) -> int:
    """How many images at once: a matrix of tokens by tokens for each head is kept to some 100 MB."""
    return max(1, 2**24 // (model.config.heads * model.tokens**2))


@torch.no_grad()
def attention_maps(model: VisionTransformer, x: Tensor) -> Tensor | None:
    """(B, rows, columns): how much the last layer's attention looks at each place, from CLS or from all tokens."""
    found = [maps for part in x.split(_images(model)) if (maps := _maps(model, part)) is not None]
    return torch.cat(found) if found else None


def _maps(model: VisionTransformer, x: Tensor) -> Tensor | None:
    layers = captured(model, x)
    if not layers:
        return None
    attention, q, k, _ = layers[-1]
    matrix = attention.attention_matrix(q, k).abs().mean(1)  # over heads
    prefix, grid = attention.site.prefix, attention.site.grid
    assert grid is not None
    looked = matrix[:, 0] if prefix else matrix.mean(1)
    looked = looked[:, prefix:].unflatten(1, grid)
    return looked / looked.sum((1, 2), keepdim=True).clamp_min(1e-12)
